"""One server on one data folder, whatever containers and names its users have; what cannot be shared is refused."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.containers import USER, does, kept, user
from support.namespaces import container, mounted
from support.processes import Child

from stormproof.core.base.errors import SettingsError, StoreUnavailable
from stormproof.core.postgres import embedded
from stormproof.core.postgres.binaries import RunAs, may_enter
from stormproof.core.postgres.database import connect
from stormproof.core.postgres.embedded import EmbeddedPostgres
from stormproof.core.postgres.server_folder import is_data_locked, take_data_lock

pytestmark = [pytest.mark.postgres, pytest.mark.sampled(0.25)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a data folder, stopped: copying it is quicker than initdb."""
    folder = tmp_path_factory.mktemp("prepared") / "home"
    with EmbeddedPostgres(folder):
        pass
    return folder


@pytest.fixture
def home(prepared: Path, tmp_path: Path) -> Iterator[Path]:
    shutil.copytree(prepared, tmp_path / "home")
    yield tmp_path / "home"
    server = EmbeddedPostgres(tmp_path / "home")
    if server.pid is not None:
        server.stop("immediate")


@pytest.fixture
def pair(home: Path) -> Iterator[tuple[Child, Child]]:
    """Users in two containers; the server runs in the first one's."""
    with user(home, *container()) as one:
        assert one.line().startswith("ready")
        with user(home, *container()) as two:
            assert two.line() == "ready None", "a second server was started on the same data"
            yield one, two


def test_two_containers_use_one_server_and_no_row_is_lost(home: Path, pair: tuple[Child, Child]) -> None:
    for number in range(100):
        does(pair[number % 2], f"put {number}")
    for child in pair:
        does(child, "release")
    with EmbeddedPostgres(home) as database:
        assert kept(database) == list(range(100))


def test_the_container_of_the_server_dies_and_another_one_goes_on(home: Path, pair: tuple[Child, Child]) -> None:
    one, two = pair
    does(one, "put 1")
    does(two, "put 2")
    one.kill(signal.SIGKILL)
    with (home / "postgres/data/PG_VERSION").open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # waits for the last process of the server
    does(two, "again")
    does(two, "put 3")
    with EmbeddedPostgres(home) as database:
        assert kept(database) == [1, 2, 3]


def test_the_last_user_stops_a_server_in_another_container(home: Path, pair: tuple[Child, Child]) -> None:
    one, two = pair
    does(one, "release")
    assert is_data_locked(home / "postgres/data")
    does(two, "release")
    assert not is_data_locked(home / "postgres/data")
    assert "database system is shut down" in (home / "postgres/log").read_text()


def test_a_server_in_another_container_that_cannot_be_reached_is_refused(home: Path, pair: tuple[Child, Child]) -> None:
    socket = home / "postgres/socket/.s.PGSQL.5432"
    socket.rename(socket.with_name("away"))
    with user(home, *container()) as three:
        refusal = three.line()
    assert refusal.startswith("StoreUnavailable")
    assert f"started on {os.uname().nodename}" in refusal
    assert "another container (PID namespace)" in refusal
    assert "STORMPROOF_HOME" in refusal
    socket.with_name("away").rename(socket)
    does(pair[1], "put 1")


def test_control_without_the_datas_lock_a_second_server_starts(home: Path) -> None:
    """What the tests above rest on: neither the pid file nor Postgres itself sees a server in another container."""
    blind = (
        "import os; from stormproof.core.postgres import embedded\n"
        "embedded.is_data_locked = lambda _: False\n"
        "embedded.take_data_lock = lambda _: os.open(os.devnull, os.O_RDONLY)\n"
    )
    before = (home / "postgres/log").read_text().count("LOG:  starting PostgreSQL")
    with user(home, *container()) as one:
        one.line()
        with Child([*container(), sys.executable, "-c", blind + USER, str(home)]) as two:
            assert two.line()
            until_s = time.monotonic() + 30
            while (home / "postgres/log").read_text().count("LOG:  starting PostgreSQL") < before + 2:
                assert time.monotonic() < until_s, "Postgres saw the other server by itself"


def test_what_a_dead_container_left_behind_does_not_stop_the_next_one(home: Path) -> None:
    data = home / "postgres/data"
    (home / "postgres/socket").mkdir(exist_ok=True)
    numbers = f"{os.getppid()}\n{data}\n1\n5432\n{home}/postgres/socket\n\n0\nready\n"  # taken by another one by now
    (data / "postmaster.pid").write_text(numbers)
    (home / "postgres/socket/.s.PGSQL.5432.lock").write_text(numbers)
    with EmbeddedPostgres(home) as database:
        assert database


def test_a_server_is_started_only_after_the_last_process_of_a_killed_one(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "STOP_TIMEOUT_S", 0.2)
    server = EmbeddedPostgres(home)
    database = server.acquire()
    hanging = connect(database, application_name="test")
    backend = psutil.Process(hanging.info.backend_pid)
    backend.suspend()
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    with pytest.raises(StoreUnavailable, match=rf"processes of a killed server still work .*{backend.pid}"):
        EmbeddedPostgres(home).acquire()
    assert take_data_lock(home / "postgres/data") is None
    backend.kill()
    hanging.close()
    with EmbeddedPostgres(home) as again:
        assert again == database
    server.release()


def test_every_name_of_a_folder_leads_to_one_server(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    server = EmbeddedPostgres(home)
    database = server.acquire()
    for name in (tmp_path / "link/home", Path("home"), Path("./home/../home"), Path(f"{home}//")):
        other = EmbeddedPostgres(name)
        assert other.acquire() == database
        assert other.pid == server.pid
        other.release()
    server.release()


def test_a_second_mount_of_the_folder_leads_to_the_same_server(home: Path, tmp_path: Path) -> None:
    (tmp_path / "mount").mkdir()
    server = EmbeddedPostgres(home)
    database = server.acquire()
    with connect(database, application_name="test") as connection:
        connection.execute("create table kept (n int)")
    command = mounted(f"mount --bind {home} {tmp_path}/mount", sys.executable, "-c", USER, f"{tmp_path}/mount")
    with Child(command) as there:
        assert there.line() == "ready None"
        does(there, "put 1")
        assert kept(database) == [1]
        server.release()
        assert server.pid is not None
        does(there, "release")
    assert server.pid is None


def test_a_folder_that_is_moved_while_its_server_runs_gets_a_server_with_its_rows(home: Path, tmp_path: Path) -> None:
    """Postgres writes its control file by the data's full path, so the old server would end at its next checkpoint."""
    with user(home) as starter:
        starter.line()
        does(starter, "put 1")
        home.rename(tmp_path / "moved")
        with EmbeddedPostgres(tmp_path / "moved") as database:
            assert kept(database) == [1]
            with connect(database, application_name="test", autocommit=True) as connection:
                connection.execute("checkpoint")


def test_a_copy_of_a_folder_gets_a_server_of_its_own(home: Path, tmp_path: Path) -> None:
    name = "long " * 20  # its socket's folder is a temporary one, which the copy names, too
    home.rename(tmp_path / name)
    one = EmbeddedPostgres(tmp_path / name)
    first = one.acquire()
    with connect(first, application_name="test") as connection:
        connection.execute("checkpoint")
    shutil.copytree(tmp_path / name, tmp_path / f"{name} copy", ignore=lambda *_: {".s.PGSQL.5432"}, symlinks=True)
    two = EmbeddedPostgres(tmp_path / f"{name} copy")
    assert two.acquire() != first
    assert one.pid != two.pid
    two.release()
    with connect(first, application_name="test") as connection:
        assert connection.execute("select 1").fetchone() == (1,)
    one.release()


def test_the_servers_of_one_process_are_told_by_folder(home: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    code = (
        "import sys; from pathlib import Path; from stormproof.core.postgres.embedded import embedded_database\n"
        "print(*{embedded_database(Path(p)) for p in sys.argv[1:]})"
    )
    command = [sys.executable, "-c", code, str(home), f"{tmp_path}/link/home"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr == ""
    assert done.stdout.count("postgresql://") == 1


# --- folders that cannot hold a server -----------------------------------------------------------------------------------


def test_a_full_disk_is_named_with_what_is_free(tmp_path: Path) -> None:
    command = mounted(f"mount -t tmpfs -o size=12m tmpfs {tmp_path}", sys.executable, "-c", USER, f"{tmp_path}/home")
    with Child(command) as child:
        refusal = child.line()
    assert refusal.startswith("StoreUnavailable")
    assert "MB are free on its file system, a new server needs some 100" in refusal


def test_a_read_only_folder_is_named_with_the_way_on(tmp_path: Path) -> None:
    command = mounted(f"mount -t tmpfs -o ro tmpfs {tmp_path}", sys.executable, "-c", USER, f"{tmp_path}/home")
    with Child(command) as child:
        refusal = child.line()
    assert refusal.startswith("SettingsError")
    assert f"Read-only file system: {tmp_path}/home" in refusal
    assert "STORMPROOF_HOME" in refusal


def test_a_file_system_without_locks_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(SettingsError, match=r"refuses file locks \(No locks available\).*STORMPROOF_DATABASE_URL"):
        EmbeddedPostgres(home).acquire()


def test_a_folder_that_others_may_write_is_refused(home: Path) -> None:
    (home / "postgres").chmod(0o777)
    with pytest.raises(SettingsError, match=r"every user may write it.*STORMPROOF_HOME"):
        EmbeddedPostgres(home).acquire()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder away")
def test_a_folder_of_another_user_is_refused(home: Path) -> None:
    os.chown(home / "postgres", 4711, 4711)
    with pytest.raises(SettingsError, match="it belongs to user 4711"):
        EmbeddedPostgres(home).acquire()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts Postgres as another user")
def test_a_folder_that_the_server_s_user_cannot_enter_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    monkeypatch.setattr("stormproof.core.postgres.embedded.run_as", lambda: RunAs(owner=(65534, 65534)))
    with pytest.raises(SettingsError, match=r"nobody.*may not enter .*STORMPROOF_DATABASE_URL"):
        EmbeddedPostgres(closed / ".stormproof").acquire()


def test_a_folder_is_entered_by_its_owner_s_group_s_or_others_right(tmp_path: Path) -> None:
    folder = tmp_path.resolve()
    ours = (os.geteuid(), os.getegid())
    for mode, entering, enters in (
        (0o100, ours, True),
        (0o011, ours, False),
        (0o010, (4711, ours[1]), True),
        (0o001, (4711, 4712), True),
    ):
        folder.chmod(mode)
        assert may_enter(folder.stat(), *entering) is enters
    folder.chmod(0o700)
