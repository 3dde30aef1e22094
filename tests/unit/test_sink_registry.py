"""Kinds of sinks: one that is registered is opened by its description alone; a mode that a sink lacks is refused by name."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from support.sink_harness import APPEND, FOLD

from stormproof.core.base.errors import CannotTell, Json, TopologyError, UsageError
from stormproof.core.contract.fold import AnyFold, ByOrder, End, Fold, SetUnion
from stormproof.core.contract.sink import SinkInput, SinkMode, require_mode
from stormproof.core.postgres.database import Database
from stormproof.sinks.contract import registry
from stormproof.sinks.contract.protocol import OTHER, describe_sink
from stormproof.sinks.contract.registry import SinkAddress, described_sink, register_sink
from stormproof.sinks.stores.memory import MemorySink
from stormproof.trident.cli.loading import import_plugins

LEDGER = Database.from_url("postgresql://me:secret@here/ledger")
SCHEMA = pa.schema([("word", pa.string()), ("n", pa.int64())])


class Kept(MemorySink):
    """A sink of one's own, which says what it is."""

    def description(self, input_: SinkInput) -> dict[str, Json]:
        return {"kind": "kept", "shelf": self.name, "mode of rows": input_.mode.value}


@pytest.fixture(autouse=True)
def kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_KINDS", dict(registry._KINDS))  # pyright: ignore[reportPrivateUsage]


def opened(address: SinkAddress) -> Kept:
    return Kept(address.text("shelf"))


def test_a_registered_kind_is_opened_by_its_description() -> None:
    register_sink("kept", opened)
    register_sink("kept", opened)
    description = describe_sink(Kept("left"), FOLD, files="/staged")
    sink, input_ = described_sink("words", "memory:left", description, LEDGER)
    assert (sink.target, input_) == ("memory:left", FOLD)
    assert described_sink("words", "memory:left", describe_sink(Kept("left"), APPEND), LEDGER)[1] == APPEND


def test_an_upsert_comes_back_as_one() -> None:
    register_sink("kept", opened)
    upsert = SinkInput.for_upsert(SCHEMA, ("word",))
    assert described_sink("words", "x", describe_sink(Kept("left"), upsert), LEDGER)[1] == upsert


@pytest.mark.parametrize("kind", ["delta", "kept", OTHER])
def test_a_kind_has_one_opener(kind: str) -> None:
    register_sink("kept", opened)
    with pytest.raises(UsageError, match="registered already"):
        register_sink(kind, lambda address: Kept(address.name))


def test_what_nobody_registered_cannot_be_opened() -> None:
    with pytest.raises(CannotTell, match=r"of kind 'kept', which is not registered.*STORMPROOF_PLUGINS"):
        described_sink("words", "memory:left", describe_sink(Kept("left"), FOLD), LEDGER)
    for description in (None, describe_sink(MemorySink("left"), FOLD)):
        with pytest.raises(CannotTell, match="by its name alone"):
            described_sink("words", "memory:left", description, LEDGER)


def test_a_description_that_cannot_be_read_says_whose_it_is() -> None:
    register_sink("kept", opened)
    torn: dict[str, Json] = {**describe_sink(Kept("left"), APPEND), "shelf": None}
    with pytest.raises(CannotTell, match="description of sink 'words' cannot be read"):
        described_sink("words", "memory:left", torn, LEDGER)


def test_a_plugin_registers_its_kind(tmp_path: Path) -> None:
    plugin = tmp_path / "kept_on_a_shelf.py"
    plugin.write_text(
        "from stormproof.sinks.stores.memory import MemorySink\n"
        "from stormproof.sinks.contract.registry import register_sink\n"
        "register_sink('kept', lambda address: MemorySink(address.text('shelf')))\n"
    )
    import_plugins(f" {plugin}, json ,")
    import_plugins(str(plugin))
    assert described_sink("words", "x", describe_sink(Kept("left"), APPEND), LEDGER)[0].name == "left"


@pytest.mark.parametrize(("plugins", "said"), [("gone.py", "no such file"), ("no_such_module", "no_such_module")])
def test_a_plugin_that_cannot_be_imported_is_named(plugins: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        import_plugins(plugins)


class AppendOnly(Kept):
    """Serves what a sink serves that says nothing of it."""

    @property
    def modes(self) -> frozenset[SinkMode]:
        return frozenset({SinkMode.APPEND})


def test_a_mode_that_a_sink_lacks_is_refused_by_name() -> None:
    require_mode(AppendOnly("a"), APPEND)
    for sink, input_, said in (
        (AppendOnly("a"), FOLD, r"sink 'a' \(memory:a\) cannot fold rows; it serves append"),
        (AppendOnly("a"), SinkInput.for_upsert(SCHEMA, ("word",)), "sink 'a'.*cannot upsert rows; it serves append"),
    ):
        with pytest.raises(TopologyError, match=said):
            require_mode(sink, input_)


class SumsAlone(Kept):
    """Folds, and says nothing of how."""

    @property
    def fold_kinds(self) -> frozenset[type[AnyFold]]:
        return frozenset({Fold})


def test_a_fold_that_a_sink_does_not_know_is_refused_by_name() -> None:
    require_mode(SumsAlone("a"), FOLD)
    for fold, said in ((SetUnion(3), "union of sets of at most 3"), (ByOrder(End.LAST, ("n",)), "last by n")):
        folds = SinkInput.for_fold(SCHEMA, ("word",), {"n": fold})
        require_mode(Kept("a"), folds)
        with pytest.raises(
            TopologyError, match=rf"sink 'a' \(memory:a\) cannot fold column 'n' \({said}\); it serves sums"
        ):
            require_mode(SumsAlone("a"), folds)


def test_only_a_fold_has_folds() -> None:
    with pytest.raises(ValueError, match="only a fold has any"):
        SinkInput(SCHEMA, ("word",), {"n": Fold.SUM})
    with pytest.raises(ValueError, match="mode fold has 0 folds"):
        SinkInput(SCHEMA, ("word",), mode=SinkMode.FOLD)
