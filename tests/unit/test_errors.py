"""The errors: the tree, the stable kinds, and that each survives pickling."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest

from stormproof.core.base import errors
from stormproof.core.base.errors import ErrorKind, StormproofError

TREE = {
    "StormproofError": "Exception",
    "TransientError": "StormproofError",
    "JobFailed": "TransientError",
    "StoreUnavailable": "TransientError",
    "BoltUnavailable": "TransientError",
    "MachineUnavailable": "TransientError",
    "Fenced": "StormproofError",
    "FatalError": "StormproofError",
    "PositionMismatch": "FatalError",
    "SinkRefused": "FatalError",
    "CannotTell": "FatalError",
    "BatchUnverified": "FatalError",
    "MissingRight": "FatalError",
    "MachineUnfit": "FatalError",
    "TasksBroken": "FatalError",
    "UsageError": "StormproofError",
    "TopologyError": "UsageError",
    "SettingsError": "UsageError",
    "RoutingError": "UsageError",
}
KINDS = {
    "stormproof", "transient", "job_failed", "store_unavailable", "fenced", "fatal", "position_mismatch",
    "sink_refused", "bolt_unavailable", "cannot_tell", "batch_unverified", "usage", "topology", "settings", "routing",
    "machine_unavailable", "machine_unfit", "tasks_broken",
}  # fmt: skip


def name_of(cls: type[StormproofError]) -> str:
    return cls.__name__


def defined() -> Iterator[type[StormproofError]]:
    waiting: list[type[StormproofError]] = [StormproofError]
    while waiting:
        cls = waiting.pop()
        if vars(errors).get(cls.__name__) is cls:
            yield cls
        waiting.extend(cls.__subclasses__())


def test_the_tree_stands() -> None:
    assert {cls.__name__: cls.__bases__[0].__name__ for cls in defined()} == TREE


def test_usage_errors_are_value_errors() -> None:
    assert all(issubclass(cls, ValueError) == issubclass(cls, errors.UsageError) for cls in defined())


def test_no_kind_was_renamed_or_removed() -> None:
    assert KINDS - {kind.value for kind in ErrorKind} == set()


def test_each_error_has_a_kind_of_its_own() -> None:
    kinds = [cls.kind for cls in defined()]
    assert len(kinds) == len(set(kinds)) == len(ErrorKind)


ALL: list[type[StormproofError]] = sorted(defined(), key=name_of)


@pytest.mark.parametrize("cls", ALL, ids=name_of)
def test_it_survives_pickling(cls: type[StormproofError]) -> None:
    error = cls("sink 'a' is gone", txid=7, files=["x", None])
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    assert type(again) is cls
    assert (str(again), again.message, again.kind) == ("sink 'a' is gone", "sink 'a' is gone", cls.kind)
    assert dict(again.details) == {"txid": 7, "files": ["x", None]}
