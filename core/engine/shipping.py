"""What travels to Spark's workers: pickled with the user's own modules, refused by name where it cannot be.

A function that holds something that cannot be sent to another process (a connection, a lock, an open file,
`random.SystemRandom()`) is refused when a run starts, on every engine, so that a test on the inline engine finds it, too.
"""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import inspect
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

from pyspark import cloudpickle

from stormproof.core.base.errors import StormproofError, TopologyError
from stormproof.core.base.message import storable_text
from stormproof.core.graph.aggregation import GroupBy, UserAggregation
from stormproof.core.graph.plan import BoltNode, CombineNode, GatherNode, OperationNode, Plan, SendNode
from stormproof.core.user_code.functions import name_of, place_of_function

DEPTH_MAX: Final = 12
"""How deep a culprit is searched for: a global of a function of an attribute of a bolt is at depth three."""

_cloudpickle: Final[Any] = cloudpickle  # it has no types
_FIELD: Final[Any] = vars(dataclasses)["_FIELD"]
copyreg.pickle(type(_FIELD), lambda kind: kind.name)
"""Marks of a dataclass's fields go by name, as newer cloudpickles send them: PySpark 3.5's copies them, and a dataclass that
was sent by value then has no fields.
"""
_ELSEWHERE_TOO: Final = ("stormproof", "pyspark", "py4j")
"""What each executor has, wherever it lies: a platform's Spark brings its Python packages in archives of its own."""
_INSTEAD: Final = (
    "Make it inside the function; or in `prepare` of a Bolt, which runs in each worker; or in a function with "
    "@functools.cache, which makes it once a worker"
)


class _UserModules:
    """Registers the loaded modules that are the user's own, once each, to be pickled by value: they are not installed."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._lock = threading.Lock()
        paths = {sysconfig.get_path(p) for p in ("stdlib", "platstdlib", "purelib", "platlib")}
        self._installed = tuple(f"{path}{os.sep}" for path in paths)

    def register(self) -> None:
        """Register those that were loaded since the last call."""
        with self._lock:
            for name in set(sys.modules) - self._seen:
                self._seen.add(name)
                file = getattr(sys.modules.get(name), "__file__", None)
                if name == "__main__" or name.partition(".")[0] in _ELSEWHERE_TOO or not isinstance(file, str):
                    continue
                if not os.path.abspath(file).startswith(self._installed):
                    _cloudpickle.register_pickle_by_value(sys.modules[name])


_by_value: Final = _UserModules()


def packed(value: object) -> bytes:
    """A value as bytes for a worker. The user's own modules are packed with it, since workers need not have them.

    Raises:
        Exception: whatever pickling a user's object raises.
    """
    _by_value.register()
    made: bytes = _cloudpickle.dumps(value)
    return made


def require_shippable(plan: Plan) -> bytes:
    """A topology's functions, packed as they are sent to workers.

    Raises:
        TopologyError: one cannot be sent; names the component, its function, the culprit in it, and what to do.
    """
    try:
        return packed((plan.stages, dict(plan.decoders)))
    except Exception as error:
        raise unshippable(plan, error) from error


def unshippable(plan: Plan, error: Exception) -> TopologyError:
    """The error for a plan that cannot be pickled."""
    for component, what, value in _code_of(plan):
        culprit = _refusal(value)
        if culprit is None:
            continue
        path, held, why = _culprit(value, culprit)
        function = name_of(value)
        kind = "" if held is value else f" ({type(held).__name__})"
        where = f": {', '.join(path)}" if path else ""
        return TopologyError(
            f"component {component!r}: {what} {function}{place_of_function(value)} can't be sent to Spark's workers{where}"
            f"{kind}: {type(why).__name__}: {storable_text(why)}. {_INSTEAD}",
            component=component,
            function=function,
            culprit=path[-1] if path else function,
        )
    return TopologyError(
        f"topology {plan.topology!r} can't be sent to Spark's workers: {type(error).__name__}: {storable_text(error)}. "
        f"Functions must not hold connections, locks, open files or sessions. {_INSTEAD}"
    )


def _code_of(plan: Plan) -> Iterator[tuple[str, str, object]]:
    """The user's code in a plan: the component, the code's role in it, and the code."""
    for stage in plan.stages:
        for node in stage.nodes.values():
            match node:
                case OperationNode():
                    yield node.component, "function", node.function
                case BoltNode():
                    yield node.component, "bolt", node.bolt
                case CombineNode() | GatherNode():
                    yield from _aggregates_of(node.group)
                case SendNode():
                    yield node.component, "grouping", node.grouping.function
                case _:
                    continue
        for entry in stage.entries:
            if entry.edge is not None and entry.edge.group is not None:
                yield from _aggregates_of(entry.edge.group)
    for spout, decoder in plan.decoders.items():
        yield spout, "decoder", decoder


def _aggregates_of(group: GroupBy) -> Iterator[tuple[str, str, object]]:
    return ((group.component, "aggregate", a.code) for a in group.aggregations if isinstance(a, UserAggregation))


def _refusal(value: object) -> Exception | None:
    """The error that pickling a value raises; None where it can be pickled."""
    try:
        packed(value)
    except StormproofError:
        raise
    except Exception as error:  # noqa: BLE001 - a user's object may raise anything where it is asked for its state
        return error
    return None


def _culprit(value: object, error: Exception) -> tuple[list[str], object, Exception]:
    """The innermost part that cannot be pickled: the path to it, the part, and the error."""
    path: list[str] = []
    seen = {id(value)}
    while len(path) < DEPTH_MAX:
        for label, part in _parts(value):
            refused = None if id(part) in seen else _refusal(part)
            if refused is not None:
                seen.add(id(part))
                path.append(label)
                value, error = part, refused
                break
        else:
            break
    return path, value, error


def _parts(value: Any) -> Iterator[tuple[str, object]]:
    """The parts that are pickled with a value, with a description for people of each."""
    if isinstance(value, functools.partial):
        yield "the function of a partial", value.func
        for number, argument in enumerate(value.args):
            yield f"argument {number} of a partial", argument
        for name, argument in value.keywords.items():
            yield f"argument {name!r} of a partial", argument
    elif isinstance(value, MethodType):
        yield "the object whose method it is", value.__self__
        yield f"its function {value.__func__.__name__!r}", value.__func__
    elif isinstance(value, FunctionType):
        for name in _names_in(value.__code__):
            if name in value.__globals__:
                yield f"its global {name!r}", value.__globals__[name]
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield f"{name!r} of the function around it", cell.cell_contents
            except ValueError:  # not bound yet
                continue
        for number, default in enumerate(value.__defaults__ or ()):
            yield f"default {number} of its parameters", default
        for name, default in (value.__kwdefaults__ or {}).items():
            yield f"the default of its parameter {name!r}", default
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield f"its item {storable_text(repr(key), 80)}", item
    elif isinstance(value, list | tuple | set | frozenset):
        for number, item in enumerate(value):
            yield f"its item {number}", item
    elif isinstance(value, type):
        for name, item in vars(value).items():
            if not name.startswith("__") or name in ("__init__", "__call__"):
                yield f"{name!r} of its class", item
    elif not isinstance(value, ModuleType):
        for name, item in _attributes(value):
            yield f"its attribute {name!r}", item
        if type(value).__module__ not in ("builtins", "_thread", "_io"):
            yield f"its class {type(value).__name__!r}", type(value)


def _names_in(code: CodeType) -> list[str]:
    """The globals that are named by a function's code, or by a function inside it."""
    names = list(code.co_names)
    for constant in code.co_consts:
        if inspect.iscode(constant):
            names += _names_in(constant)
    return list(dict.fromkeys(names))


def _attributes(value: object) -> list[tuple[str, object]]:
    found = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                found.setdefault(name, getattr(value, name))
    return list(found.items())
