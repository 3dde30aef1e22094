"""Database URLs: every form is read, every driver's form is written, no secret is ever shown."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

from stormproof.core.base.errors import SettingsError, StoreUnavailable
from stormproof.core.postgres.database import Database, connect
from stormproof.trident.ledger.database import ledger_engine, require_schema

SECRET = "hunter2/ä@?"  # noqa: S105 - a made-up one
QUOTED = "hunter2%2F%C3%A4%40%3F"


def alchemy(database: Database) -> dict[str, str]:
    dialect: Any = PGDialect_psycopg
    _, arguments = dialect().create_connect_args(database.sqlalchemy_url)
    return {name: str(value) for name, value in arguments.items() if name != "context"}


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        (f"me:{QUOTED}@h:1/d", {"user": "me", "password": SECRET, "host": "h", "port": "1", "dbname": "d"}),
        ("me@h/d?sslmode=require", {"user": "me", "host": "h", "dbname": "d", "sslmode": "require"}),
        ("me@/d?host=%2Frun%2Fa%20b&port=7", {"user": "me", "dbname": "d", "host": "/run/a b", "port": "7"}),
        ("%2Frun%2Fpg/d", {"host": "/run/pg", "dbname": "d"}),
        ("[::1]:5/d", {"host": "::1", "port": "5", "dbname": "d"}),
        (f"h/d?user=me&password={QUOTED}", {"host": "h", "dbname": "d", "user": "me", "password": SECRET}),
        ("/d", {"dbname": "d"}),
        ("", {}),
    ],
)
def test_every_form_reaches_every_driver(scheme: str, rest: str, expected: dict[str, str]) -> None:
    database = Database.from_url(f"{scheme}://{rest}")
    assert dict(database.parameters) == expected
    assert conninfo_to_dict(database.conninfo) == expected
    assert conninfo_to_dict(database.adbc_uri) == expected
    assert alchemy(database) == expected
    assert database.sqlalchemy_url.drivername == "postgresql+psycopg"


def test_several_hosts() -> None:
    database = Database.from_url("postgresql://a:1,b:2/d")
    assert dict(database.parameters) == {"host": "a,b", "port": "1,2", "dbname": "d"}
    assert alchemy(database) == {"host": "a,b", "port": "1,2", "dbname": "d"}
    one_port = Database.of({"host": "a,b", "port": "1", "dbname": "d"})
    assert alchemy(one_port) == {"host": "a,b", "port": "1,1", "dbname": "d"}


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://me:{QUOTED}@h:1/d",
        f"postgres://h/d?user=me&password={QUOTED}&sslpassword={QUOTED}",
        f"postgresql+psycopg://me:{QUOTED}@/d?host=/run/pg",
    ],
)
def test_no_text_form_has_a_secret(url: str) -> None:
    database = Database.from_url(url)
    assert database.redacted.startswith("postgresql://me@")
    for text in (database.redacted, str(database), repr(database), f"{database}", repr([database])):
        assert "hunter2" not in text
    assert database.without_secrets(f"it is {SECRET} or {QUOTED}") == "it is *** or ***"


@pytest.mark.parametrize(
    "url",
    [
        "hunter2",
        "mysql://me:hunter2@h/d",
        "postgresql://me:hunt@er2@h/d",
        "postgresql://me:hunt/er2@h/d",
        "postgresql://me:hunt?er2@h/d",
        "postgresql://me:hunter2%zz@h/d",
        "postgresql://me@h:hunter2/d",
        "postgresql://me@h/d?hunter2=1",
    ],
)
def test_an_unreadable_url_is_refused_without_repeating_any_of_it(url: str) -> None:
    with pytest.raises(SettingsError, match=r"STORMPROOF_DATABASE_URL.*postgresql://USER:PASSWORD@") as caught:
        Database.from_url(url)
    for piece in ("hunter2", "er2", "hunt/", "hunt@"):
        assert piece not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def test_it_is_picklable_hashable_and_renamed() -> None:
    database = Database.from_url(f"postgresql://me:{QUOTED}@h/d")
    assert pickle.loads(pickle.dumps(database)) == database  # noqa: S301 - our own
    assert len({database, Database.from_url(f"postgresql+psycopg://me:{QUOTED}@h/d")}) == 1
    assert dict(database.with_name("e").parameters) == {**dict(database.parameters), "dbname": "e"}


def test_no_connection_is_an_error_without_secrets() -> None:
    database = Database.from_url(f"postgresql://me:{QUOTED}@/d?host=/nowhere")
    with pytest.raises(StoreUnavailable, match=r"(?s)no connection to Postgres at .*STORMPROOF_DATABASE_URL") as caught:
        connect(database, application_name="test")
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    assert "password" not in str(caught.value.details)


def test_a_ledger_that_cannot_be_reached_is_named_with_what_to_do() -> None:
    database = Database.from_url("postgresql://me:hunter2@127.0.0.1:1/d")
    engine = ledger_engine(database)
    with pytest.raises(
        StoreUnavailable, match=r"no connection to Postgres at postgresql://me@127\.0\.0\.1:1/d: .*stormproof doctor"
    ) as raised:
        require_schema(engine, database, own=False)
    assert "hunter2" not in str(raised.value)
