"""The alerts and the dashboard ask for what is exported: names, labels, and the labels' values."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from support.promql import faults, nodes

ROOT: Final = Path(__file__).parents[2]
PROMETHEUS: Final = ROOT / "deploy" / "prometheus"
DASHBOARD: Final = ROOT / "deploy" / "grafana" / "dashboard.json"


def _alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    return list(group["rules"])


def _panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


@pytest.mark.parametrize("alert", _alerts(), ids=lambda alert: alert["alert"])
def test_an_alert_asks_for_what_is_exported(alert: dict[str, Any]) -> None:
    assert faults(alert["expr"]) == []
    for label in re.findall(r"\$labels\.(\w+)", str(alert["annotations"])):
        assert faults(f"sum by ({label}) (stormproof_driver_epoch)") == []


@pytest.mark.parametrize("panel", _panels(), ids=lambda panel: panel["title"])
def test_a_panel_asks_for_what_is_exported(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        assert faults(target["expr"]) == []
        for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
            assert f"{label}" in target["expr"] or label == "topology", f"the legend names {label}"


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("rate(stormproof_dead_letter_total[5m])", "no metric stormproof_dead_letter_total"),
        ("rate(stormproof_dead_letters[5m])", "no metric stormproof_dead_letters"),
        ("stormproof_lag_seconds{sink='a'}", "stormproof_lag_seconds has no label sink"),
        ("stormproof_ledger_driver{driver=~'dead|lost'}", "stormproof_ledger_driver: driver is never 'lost'"),
        ("stormproof_ledger_transactions{state='done'}", "stormproof_ledger_transactions: state is never 'done'"),
        ("sum by (topologie) (stormproof_lag_seconds)", "no label topologie"),
        ("stormproof_lag_seconds >", "stormproof_lag_seconds >: "),
    ],
)
def test_a_wrong_query_is_seen(expression: str, fault: str) -> None:
    """Negative control."""
    (found,) = faults(expression)
    assert found.startswith(fault)


def test_every_part_of_a_query_is_looked_at() -> None:
    import promql_parser

    parsed = promql_parser.parse("a > on (x) 2 * max by (y) (rate(b[5m])) or -c")
    names = [str(node.name) for node in nodes(parsed) if isinstance(node, promql_parser.VectorSelector)]
    assert names == ["a", "b", "c"]


def test_every_alert_has_a_part_in_the_runbook() -> None:
    runbook = (ROOT / "docs" / "runbook.md").read_text()
    for alert in _alerts():
        assert f"\n### {alert['alert']}\n" in runbook
        assert alert["annotations"]["runbook_url"] == f"docs/runbook.md#{alert['alert'].lower()}"
    for name in re.findall(r"^### (Stormproof\w+)$", runbook, re.MULTILINE):
        assert name in {alert["alert"] for alert in _alerts()}


def test_panels_have_numbers_of_their_own_and_do_not_overlap() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus' own checker is not installed")
@pytest.mark.parametrize(
    "words", [("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")], ids=" ".join
)
def test_prometheus_own_checker_takes_the_alerts(words: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *words], cwd=PROMETHEUS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
