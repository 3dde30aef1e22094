"""delta-rs: how it is given a table by its address, and rows: by adopting files, or by one MERGE that upserts or folds them;
whether an error of it comes from the machine and may pass or is the table's refusal; and whether an object store can hold a
table that is written exactly once.

delta-rs wraps the operating system's errors into errors of its own, of several classes: a MERGE on a full disk raises a
`DeltaError` about Parquet. The number of the system's error stays in the text, and it decides.

Two drivers must not both write one version of the log. In a store this rests on a PUT on the condition that its name is
free. A store that lacks that is refused by name, where it can be told.
"""

from __future__ import annotations

import errno
import os
import re
import uuid
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, QueryBuilder
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction

from stormproof.core.base.arrow import pc
from stormproof.core.base.errors import SinkRefused, TopologyError
from stormproof.core.contract.sink import SinkInput
from stormproof.core.storage.files import files_at
from stormproof.core.storage.protocol import is_url, refusal_of_url, shown_url, storage_options
from stormproof.core.task.router import hash_keys, is_hashable
from stormproof.sinks.delta.log import SUPERSEDED
from stormproof.sinks.delta.power_loss import written_for
from stormproof.sinks.rows.merge_sql import DATAFUSION, assignments, later_condition, quoted, same_key

_NUMBER: Final = re.compile(r"\(os error (\d+)\)")
_NO_MEMORY: Final = "Resources exhausted"
"""What DataFusion, which runs a MERGE, says where it gets no memory, or no disk space to spill to."""

_PANIC: Final = "PanicException"
"""What PyO3 raises for a panic in delta-rs, for example where no more files may be opened. Its class cannot be imported."""

_PANIC_NUMBER: Final = re.compile(r"Os \{ code: (\d+)")

_OF_A_STORE: Final = re.compile(
    r"Generic (?:S3|GCS|MicrosoftAzure|HTTP) error|error sending request|Error performing \w+ https?://"
)
"""How the client of an object store begins its errors: the network, the server, an expired credential."""

_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")

_OF_THE_TABLE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP})
"""A path that does not exist, or is of another kind: waiting brings no file back."""


def may_pass(error: Exception) -> bool:
    """Whether an error that left no log entry may be gone at the next try: a full or failing disk, a missing right, another
    writer's commit that came first. All other errors are the table's own answer, and stay.
    """
    if isinstance(error, CommitFailedError | OSError):
        return True
    text = str(error)
    if _OF_A_STORE.search(text):
        return True
    number = os_error(error)
    return _NO_MEMORY in text if number is None else number not in _OF_THE_TABLE


OTHERS_CHANGED: Final = "another writer changed the table meanwhile"
"""How an OSError begins that stands for such an error of Spark's."""


def is_conflict(error: BaseException | None) -> bool:
    """Whether another writer's commit came first."""
    return isinstance(error, CommitFailedError) or (
        isinstance(error, OSError) and str(error).startswith(OTHERS_CHANGED)
    )


@contextmanager
def panics_as_errors() -> Generator[None]:
    """Around a call of delta-rs: turn a panic, which `except Exception` does not catch, into an error that tells its cause.

    Raises:
        OSError: the operating system refused something, by the panic's text.
        DeltaError: any other panic.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != _PANIC:
            raise
        number = _PANIC_NUMBER.search(str(error))
        if number is None:
            raise DeltaError(f"delta-rs panicked: {error}") from error
        raise OSError(int(number[1]), f"delta-rs panicked: {error}") from error


def os_error(error: Exception) -> int | None:
    """The operating system's error number, which delta-rs has in its text; None where there is none."""
    numbers = _NUMBER.findall(str(error))
    if numbers:
        return int(numbers[-1])
    return error.errno if isinstance(error, OSError) else None


def shown(error: Exception) -> str:
    """An error's text in one line, without the colours that delta-rs puts into some of them."""
    return " ".join(_COLOURS.sub("", str(error)).split())


def load_table(address: str) -> DeltaTable:
    """The table at its newest version. Raises as delta-rs does."""
    return DeltaTable(address, storage_options=options_of(address))


def is_table(address: str) -> bool:
    """Whether there is a Delta table. Raises as delta-rs does."""
    return DeltaTable.is_deltatable(address, storage_options=options_of(address))


def options_of(address: str) -> dict[str, str] | None:
    """What delta-rs takes as `storage_options`; None for a local folder."""
    return dict(storage_options(address)) if is_url(address) else None


_LOCKING: Final = ("aws_s3_locking_provider", "s3_locking_provider")
_UNSAFE: Final = ("aws_s3_allow_unsafe_rename", "s3_allow_unsafe_rename", "allow_unsafe_rename")
_CONDITIONAL: Final = ("aws_conditional_put", "conditional_put", "aws_copy_if_not_exists", "copy_if_not_exists")
_OFF: Final = ("disabled", "none", "false")


def check_store(url: str, where: str) -> None:
    """Refuse a URL, or options, by which no table is written exactly once. Asks nothing of the store.

    Raises:
        TopologyError: names the option or what is wrong with the URL.
    """
    wrong = refusal_of_url(url)
    if wrong is not None:
        raise TopologyError(f"{where}: {shown_url(url)}: {wrong}")
    options = storage_options(url)
    if (options.get_option(*_LOCKING) or "").lower() not in ("", *_OFF):
        raise TopologyError(
            f"{where}: {_LOCKING[0]} is set: a lock elsewhere (DynamoDB, say) orders the commits of such a lake, and "
            "drivers that rely on the store's own conditional PUT would not see it. Have every writer of the table use "
            "conditional PUTs, and unset it"
        )
    if (options.get_option(*_UNSAFE) or "").lower() == "true":
        raise TopologyError(f"{where}: {_UNSAFE[0]} lets two drivers overwrite each other's commits; unset it")
    for name in _CONDITIONAL:
        if (found := options.get_option(name) or "").lower() in _OFF[:1] or "dynamo" in found.lower():
            raise TopologyError(
                f"{where}: {name} is {found.partition(':')[0]!r}; a table is written by the store's own "
                "conditional PUTs; unset it"
            )


def require_conditional_put(url: str, where: str) -> None:
    """Ask the store whether it refuses a second PUT on the condition that the name is free; nothing for a local folder.

    A store that refuses it here may let both of two PUTs at the same instant through: that cannot be told by asking.

    Raises:
        SinkRefused: it let the second one through.
        OSError: it does not answer, or takes no PUT.
    """
    if not is_url(url):
        return
    files, path = files_at(url), os.path.join(url, f"_stormproof-probe-{uuid.uuid4().hex}")
    files.put_new(path, b"1")
    try:
        files.put_new(path, b"2")
    except FileExistsError:
        return
    finally:
        files.remove(path)
    raise SinkRefused(
        f"{where}: this store overwrites an object although the PUT says that it must not exist: of two drivers that commit "
        "at once, one would lose its rows. Use a store with conditional PUTs (If-None-Match)"
    )


HOOKS: Final = PostCommitHookProperties(create_checkpoint=True, cleanup_expired_logs=False)
"""Old log entries must stay until the checkpoint that replaces them is synced, so we remove them ourselves."""


def read_rows(table: DeltaTable, schema: pa.Schema, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """These columns of all rows, in the types of the schema. No statistics are gone by."""
    asked = f"SELECT {', '.join(map(quoted, names))} FROM t"
    for batch in pa.RecordBatchReader.from_stream(QueryBuilder().register("t", table).execute(asked)):
        columns = [pc.cast(batch.column(at), schema.field(name).type) for at, name in enumerate(names)]
        yield pa.RecordBatch.from_arrays(columns, schema=pa.schema([schema.field(name) for name in names]))


def all_hashable(input_: SinkInput) -> bool:
    """Whether `rows_of_keys` can tell the keys apart."""
    return all(is_hashable(input_.schema.field(key).type) for key in input_.keys)


def rows_of_keys(table: DeltaTable, added: pa.Table, input_: SinkInput) -> pa.Table:
    """The rows whose keys `added` has; by an accident of 2^-64 others, too. The whole table is read, in bounded memory."""
    schema, keys, found = input_.schema, input_.keys, list[pa.RecordBatch]()
    wanted = np.unique(np.concatenate([hash_keys(batch, keys) for batch in added.to_batches()]))
    for batch in read_rows(table, schema, schema.names):
        hashes = hash_keys(batch, keys)
        at = np.minimum(np.searchsorted(wanted, hashes), len(wanted) - 1)
        found.append(batch.filter(pa.array(wanted[at] == hashes)))
    return pa.Table.from_batches(found, schema)


def adopt_files(table: DeltaTable, files: Sequence[AddAction], properties: CommitProperties) -> None:
    """Add files that are in the table's folder already. Without files the version holds its transaction identifier alone."""
    table.create_write_transaction(
        list(files),
        "append",
        table.schema(),
        table.metadata().partition_columns,
        commit_properties=properties,
        post_commithook_properties=HOOKS,
    )


def merge_rows(
    table: DeltaTable,
    rows: pa.Table | pa.RecordBatchReader,
    input_: SinkInput,
    properties: CommitProperties,
    *,
    streamed: bool = False,
) -> None:
    """MERGE rows by their keys: a column with a fold is folded, every other column is replaced; of an upsert, only where the
    added row is the later one. There must be at least one row.

    A MERGE that changes no row commits nothing, not even its transaction identifier. Then the identifier is committed by
    itself, and with it that all of the rows were superseded.
    """
    added, changed = {quoted(n): DATAFUSION.both(n)[1] for n in input_.schema.names}, assignments(input_, DATAFUSION)
    merge = table.merge(
        rows,
        same_key(input_, DATAFUSION),
        source_alias="s",
        target_alias="t",
        streamed_exec=streamed,
        writer_properties=written_for(table),
        commit_properties=properties,
        post_commithook_properties=HOOKS,
    ).when_not_matched_insert(added)
    if changed:
        merge = merge.when_matched_update(changed, predicate=later_condition(input_, DATAFUSION))
    metrics = merge.execute()
    if not metrics["num_target_rows_inserted"] + metrics["num_target_rows_updated"]:
        adopt_files(table, [], _with_superseded(properties, int(metrics["num_source_rows"])))


def _with_superseded(properties: CommitProperties, rows: int) -> CommitProperties:
    metadata = dict(properties.custom_metadata or {})
    before = int(metadata.get(SUPERSEDED, 0))
    return CommitProperties(
        custom_metadata={**metadata, SUPERSEDED: str(before + rows)},
        max_commit_retries=properties.max_commit_retries,
        app_transactions=properties.app_transactions,
    )
