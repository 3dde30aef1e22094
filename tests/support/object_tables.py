"""Word rows and word counts in Delta tables of an object store, as one shape of a chain's topology."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

import obstore
from deltalake import DeltaTable

from stormproof import DeltaSink, Topology, count
from stormproof.core.postgres.database import Database
from stormproof.core.storage.object_files import NewObject, ObjectFiles, key_of, root_of
from stormproof.core.storage.protocol import use_storage
from stormproof.trident.audit.inspect import SinkOpener, opener_for
from stormproof.trident.driver.steps import Steps
from support.brokers.object_store import ObjectStore
from support.contents import counted
from support.crashes import Cell
from support.sabotage import replace_in
from support.shapes import Shape
from support.topologies import Split, source_of

APPEND, FOLD = SINKS = ("append", "fold")
_FILE: Final = "store.json"


def give_store(cell: Cell, server: ObjectStore, prefix: str, port: int | None = None) -> None:
    """Tell the drivers and this process where the cell's tables are; by `port` where a proxy stands before the server."""
    told = {"url": f"{server.url}/{prefix}", "options": server.options(port), "direct": server.options()}
    (cell.folder / _FILE).write_text(json.dumps(told))


def build(cell: Cell) -> Topology:
    """Both sinks."""
    told = json.loads((cell.folder / _FILE).read_text())
    t = Topology(cell.name)
    words = t.stream("lines", source_of(cell.queue, cell.database)).flat_map(
        Split(cell.folder), "line", schema="word string"
    )
    words.into(DeltaSink(f"{told['url']}/{APPEND}", name=APPEND, storage_options=told["options"]))
    words.group_by("word").persistent_aggregate(n=count()).into(
        DeltaSink(f"{told['url']}/{FOLD}", name=FOLD, storage_options=told["options"])
    )
    return t


def contents(cell: Cell, database: Database) -> Mapping[str, Counter[str]]:
    """How often each word stands in each table, read past any proxy by delta-rs alone."""
    told = json.loads((cell.folder / _FILE).read_text())
    found: dict[str, Counter[str]] = {}
    for name in SINKS:
        where, options = f"{told['url']}/{name}", told["direct"]
        rows: list[tuple[str, int]] = []
        if DeltaTable.is_deltatable(where, storage_options=options):
            table = DeltaTable(where, storage_options=options).to_pyarrow_table()
            ns = table.column("n").to_pylist() if name == FOLD else [1] * len(table)
            rows = list(zip(table.column("word").to_pylist(), ns, strict=True))
        found[name] = counted(rows, once=name if name == FOLD else None)
    return found


def opener(cell: Cell, database: Database) -> SinkOpener:
    """The audit reaches the store past any proxy."""
    told = json.loads((cell.folder / _FILE).read_text())
    use_storage(told["url"], told["direct"])
    return opener_for(database)


IN_OBJECT_STORE: Final = Shape(contents, {"delta": 2, "commit": 2}, build, opener)


def lose_a_file() -> None:
    """The store loses the first object that a task writes, after it answered."""
    _once(lambda files, path, _: files.remove(path))


def cut_a_file() -> None:
    """The first object that a task writes has lost its end."""

    def cut(files: ObjectFiles, path: str, content: bytes) -> None:
        obstore.put(files.store(path), key_of(path), content[:-8])

    _once(cut)


def look_at_no_file() -> None:
    """Content is fixed without a look at its files."""
    replace_in(Steps, "_require_reached", lambda *_: None)


def lose_a_file_unseen() -> None:
    """Both."""
    lose_a_file()
    look_at_no_file()


def _once(change: Callable[[ObjectFiles, str, bytes], None]) -> None:
    ended, done = NewObject.sync, list[str]()

    def sync(new: NewObject) -> None:
        ended(new)
        path = new.path
        if done or "stormproof-" not in path:
            return
        done.append(path)
        files = ObjectFiles(root_of(path))
        with files.open(path) as file:
            content = file.read()
        change(files, path, content)

    replace_in(NewObject, "sync", sync)
