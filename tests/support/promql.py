"""What a PromQL expression asks for: checked against the exported metrics, with their labels and those labels' values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import promql_parser

from stormproof.trident.telemetry import catalogue as m

SUFFIXES: Final = {m.Kind.HISTOGRAM: ("_bucket", "_sum", "_count")}
GRAFANA: Final = {"$__rate_interval": "5m", "$topology": "words"}
"""What Grafana puts in the place of its variables."""


def faults(expression: str) -> list[str]:
    """What is wrong with an expression: it cannot be parsed, or asks for what is not exported; for people."""
    for variable, value in GRAFANA.items():
        expression = expression.replace(variable, value)
    try:
        parsed = promql_parser.parse(expression)
    except ValueError as error:
        return [f"{expression}: {error}"]
    return [fault for node in nodes(parsed) for fault in _faults_of(node)]


def nodes(parsed: Any) -> Iterator[Any]:
    """All parts of an expression."""
    yield parsed
    below = [getattr(parsed, name, None) for name in ("lhs", "rhs", "expr", "param", "vector_selector")]
    for one in [*below, *(getattr(parsed, "args", None) or [])]:
        if one is not None and not isinstance(one, str | float):
            yield from nodes(one)


def _exported() -> dict[str, m.Metric]:
    found: dict[str, m.Metric] = {}
    for metric in m.METRICS:
        for suffix in SUFFIXES.get(metric.kind, ("",)):
            found[metric.exported + suffix] = metric
    return found


def _faults_of(node: Any) -> Iterator[str]:
    match node:
        case promql_parser.VectorSelector():
            metric = _exported().get(str(node.name))
            if metric is None:
                yield f"no metric {node.name}"
                return
            for matcher in node.matchers.matchers:
                yield from _faults_of_matcher(metric, matcher)
        case promql_parser.AggregateExpr() | promql_parser.BinaryExpr() if node.modifier is not None:
            known = {label for metric in m.METRICS for label in metric.label_names} | {"le"}
            for label in re.findall(r"\w+", re.sub(r".*?\((.*)\).*", r"\1", _modifier_text(node))):
                if label not in known:
                    yield f"no label {label}"
        case _:
            pass


def _modifier_text(node: Any) -> str:
    found = re.search(r"\b(?:by|without|on|ignoring) ?\(([^)]*)\)", str(node.prettify()))
    return "" if found is None else f"({found[1]})"


def _faults_of_matcher(metric: m.Metric, matcher: Any) -> Iterator[str]:
    name, value = str(matcher.name), str(matcher.value)
    if name not in metric.label_names:
        yield f"{metric.name} has no label {name}"
        return
    known = m.STATES.get(metric.name) if name == "state" else m.LABEL_VALUES.get(name)
    if known is None:
        return
    for one in value.split("|") if matcher.op in (promql_parser.MatchOp.Re, promql_parser.MatchOp.NotRe) else [value]:
        if one not in known:
            yield f"{metric.name}: {name} is never {one!r}"
