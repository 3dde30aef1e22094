"""The embedded Postgres: shared, adopted, stopped by its last user, and none of it loses what was committed."""

from __future__ import annotations

import itertools
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.processes import Child

from stormproof.core.base.errors import SettingsError, StoreUnavailable
from stormproof.core.postgres.database import Database, connect
from stormproof.core.postgres.embedded import EmbeddedPostgres
from stormproof.sinks.postgres.connection import backend_identity, terminate_backends

pytestmark = pytest.mark.postgres

USER = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
from pathlib import Path
from stormproof.core.postgres.embedded import EmbeddedPostgres
server = EmbeddedPostgres(Path(sys.argv[1]))
server.acquire()
print("ready", server.pid, flush=True)
sys.stdin.readline()
server.release()
print("released", server.pid, flush=True)
"""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "home"
    server = EmbeddedPostgres(tmp_path / "home")
    if server.pid is not None:
        server.stop("immediate")


def insert(database: Database, value: int) -> None:
    with connect(database, application_name="test") as connection:
        connection.execute("create table if not exists kept (n int)")
        connection.execute("insert into kept values (%s)", (value,))


def kept(database: Database) -> list[int]:
    with connect(database, application_name="test") as connection:
        return [row[0] for row in connection.execute("select n from kept order by n")]


def test_the_last_user_stops_it(home: Path) -> None:
    first, second = EmbeddedPostgres(home), EmbeddedPostgres(home)
    first.acquire()
    pid = first.pid
    second.acquire()
    assert pid is not None
    assert second.pid == pid
    first.release()
    assert second.pid == pid
    assert psutil.pid_exists(pid)
    second.release()
    assert not psutil.pid_exists(pid)
    assert second.pid is None


def test_it_outlives_a_killed_starter_and_is_adopted_and_then_stopped(home: Path) -> None:
    with Child([sys.executable, "-c", USER, str(home)]) as starter:
        _, pid = starter.line().split()
        starter.kill(signal.SIGKILL)
    server = EmbeddedPostgres(home)
    assert server.pid == int(pid)
    with server as database:
        insert(database, 1)
        assert server.pid == int(pid)
    assert server.pid is None


def test_a_signal_to_the_starters_process_group_does_not_reach_it(home: Path) -> None:
    with Child([sys.executable, "-c", USER, str(home)]) as starter:
        _, pid = starter.line().split()
        os.killpg(starter.pid, signal.SIGINT)  # what Ctrl-C does
        starter.wait()
    server = EmbeddedPostgres(home)
    assert server.pid == int(pid)
    assert os.getsid(int(pid)) == int(pid)


def test_users_in_other_processes_share_it(home: Path) -> None:
    command = [sys.executable, "-c", USER, str(home)]
    with Child(command) as one, Child(command) as two:
        pids = {one.line().split()[1], two.line().split()[1]}
        assert len(pids) == 1
        one.say("go")
        assert one.line() == f"released {pids.pop()}"
        two.say("go")
        assert two.line() == "released None"


def test_a_fork_that_releases_leaves_its_parents_lock(home: Path) -> None:
    server = EmbeddedPostgres(home)
    server.acquire()
    child = os.fork()
    if child == 0:
        server.release()
        os._exit(0)
    os.waitpid(child, 0)
    other = EmbeddedPostgres(home)
    other.acquire()
    other.release()
    assert server.pid is not None
    server.release()
    assert server.pid is None


def test_a_fork_of_its_starter_sees_it_run_and_can_stop_it(home: Path) -> None:
    server = EmbeddedPostgres(home)
    server.acquire()
    pid = server.pid
    child = os.fork()
    if child == 0:
        seen = EmbeddedPostgres(home).pid == pid
        server.stop()
        os._exit(0 if seen else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert server.pid is None
    server.release()


def test_a_stopped_server_is_reaped_by_its_starter(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its end is seen, by its folder that is gone, before it can be reaped."""
    server = EmbeddedPostgres(home)
    server.acquire()
    pid = server.pid
    assert pid is not None
    seen = itertools.chain([True], itertools.repeat(False))
    monkeypatch.setattr("stormproof.core.postgres.embedded.serves", lambda *_: next(seen))
    server.stop()
    assert not psutil.pid_exists(pid)
    monkeypatch.undo()
    server.release()


def test_two_homes_at_once(tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path / "a") as one, EmbeddedPostgres(tmp_path / "b") as two:
        insert(one, 1)
        insert(two, 2)
        assert (kept(one), kept(two)) == ([1], [2])


def test_an_immediate_restart_keeps_what_was_committed_and_only_that(home: Path) -> None:
    server = EmbeddedPostgres(home)
    with server as database:
        insert(database, 1)
        hanging = connect(database, application_name="test")
        hanging.execute("insert into kept values (2)")
        before = server.pid
        assert server.restart(immediate=True) == database
        assert server.pid != before
        assert kept(database) == [1]
        hanging.close()
        assert "not properly shut down" in server.log_path.read_text()


def test_a_killed_server_is_started_again_with_its_data(home: Path) -> None:
    server = EmbeddedPostgres(home)
    with server as database:
        insert(database, 1)
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        with EmbeddedPostgres(home) as again:
            assert kept(again) == [1]


def test_a_pid_file_whose_number_belongs_to_another_process_does_not_stop_it(home: Path) -> None:
    server = EmbeddedPostgres(home)
    with server as database:
        insert(database, 1)
    (home / "postgres/data/postmaster.pid").write_text(f"{os.getppid()}\n{home}/postgres/data\n1\n5432\n/tmp\n\n")
    assert server.pid is None
    with server as database:
        assert kept(database) == [1]


def test_a_long_home_gets_a_short_socket_folder(tmp_path: Path) -> None:
    home = tmp_path / ("long, and with 'odd' signs " * 4)
    server = EmbeddedPostgres(home)
    with server as database:
        insert(database, 1)
        folder = Path(dict(database.parameters)["host"])
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        with EmbeddedPostgres(home) as adopted:
            assert adopted == database
    assert not folder.exists()


def test_it_listens_on_no_network_address(postgres: EmbeddedPostgres) -> None:
    assert postgres.pid is not None
    assert [c for c in psutil.Process(postgres.pid).net_connections() if c.status == psutil.CONN_LISTEN] == []
    folder = Path(dict(postgres.database.parameters)["host"])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_data_of_another_major_version_is_refused_by_name(home: Path) -> None:
    (home / "postgres/data").mkdir(parents=True)
    (home / "postgres/data/PG_VERSION").write_text("9\n")
    with pytest.raises(SettingsError, match=r"Postgres 9 .*STORMPROOF_DATABASE_URL"):
        EmbeddedPostgres(home).acquire()


def test_a_folder_that_is_no_data_folder_is_refused_and_left_alone(home: Path) -> None:
    (home / "postgres/data").mkdir(parents=True)
    (home / "postgres/data/mine").write_text("x")
    with pytest.raises(SettingsError, match="not a Postgres data folder"):
        EmbeddedPostgres(home).acquire()
    assert (home / "postgres/data/mine").exists()


def test_a_server_that_cannot_start_says_why(home: Path) -> None:
    server = EmbeddedPostgres(home)
    with server:
        pass
    (home / "postgres/data/postgresql.auto.conf").write_text("shared_buffers = 'a lot'\n")
    with pytest.raises(StoreUnavailable, match=r'invalid value for parameter "shared_buffers"'):
        server.acquire()
    assert server.pid is None


def test_every_driver_reaches_it(database: Database) -> None:
    import sqlalchemy
    from adbc_driver_postgresql import dbapi

    with connect(database, application_name="test") as connection:
        assert connection.execute("select current_database()").fetchone() == (dict(database.parameters)["dbname"],)
        assert connection.info.parameter_status("client_encoding") == "UTF8"
    with dbapi.connect(database.adbc_uri) as adbc, adbc.cursor() as cursor:
        cursor.execute("select 1::int8 as one")
        assert cursor.fetch_arrow_table().to_pylist() == [{"one": 1}]
    engine = sqlalchemy.create_engine(database.sqlalchemy_url)
    with engine.connect() as alchemy:
        assert alchemy.scalar(sqlalchemy.text("select 2")) == 2
    engine.dispose()


def test_a_terminated_backend_is_gone_and_a_reused_pid_is_left_alone(database: Database) -> None:
    mine = connect(database, application_name="mine")
    old = connect(database, application_name="old")
    other = connect(database, application_name="other")
    old_backend, other_backend, my_backend = (backend_identity(c) for c in (old, other, mine))
    old.execute("select 1")  # a transaction is open
    reused = (other_backend.pid, old_backend.backend_start)
    assert terminate_backends(mine, [old_backend, reused, my_backend]) == 1
    with pytest.raises(Exception, match="terminating connection"):
        old.execute("select 1")
    assert other.execute("select 1").fetchone() == (1,)
    assert terminate_backends(mine, [old_backend]) == 0
    for connection in (mine, old, other):
        connection.close()


def test_the_tests_ignore_the_shells_postgres() -> None:
    assert not [name for name in os.environ if name.startswith("PG")]
    assert subprocess.run(["true"], check=True).returncode == 0
