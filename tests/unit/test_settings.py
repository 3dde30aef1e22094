"""Settings: which place wins, and that nothing mistyped is silently without effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from stormproof.core.errors import SettingsError
from stormproof.core.postgres.database import Database
from stormproof.core.settings import NOT_SETTINGS, Settings


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_variables_then_file_then_arguments(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings().batch_messages == 10_000
    monkeypatch.setenv("STORMPROOF_BATCH_MESSAGES", "1")
    assert Settings().batch_messages == 1
    (folder / "stormproof.toml").write_text("batch_messages = 2\n")
    assert Settings().batch_messages == 2
    assert Settings(batch_messages=3).batch_messages == 3


def test_every_setting_is_described() -> None:
    assert [name for name, field in Settings.model_fields.items() if not field.description] == []


def test_an_unknown_variable_is_named_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORMPROOF_BATCH_MESAGES", "1")
    with pytest.raises(SettingsError, match=r"STORMPROOF_BATCH_MESAGES; known: .*STORMPROOF_BATCH_MESSAGES"):
        Settings()


def test_the_failpoints_variables_are_not_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NOT_SETTINGS:
        monkeypatch.setenv(name, "1")
    Settings()


def test_an_unknown_key_and_a_broken_file_are_named(folder: Path) -> None:
    (folder / "stormproof.toml").write_text("masters = 'local'\n")
    with pytest.raises(SettingsError, match=r"stormproof\.toml: 'masters'; known: .*master"):
        Settings()
    (folder / "stormproof.toml").write_text("master =\n")
    with pytest.raises(SettingsError, match=r"stormproof\.toml is not TOML"):
        Settings()


def test_an_unknown_argument_is_named() -> None:
    with pytest.raises(SettingsError, match="unknown argument 'masters'"):
        Settings(masters="local")


def test_a_wrong_value_is_named_by_its_place_and_never_shown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=r"argument batch_messages: .*greater than or equal to 1"):
        Settings(batch_messages=0)
    monkeypatch.setenv("STORMPROOF_BATCH_BYTES", "hunter2")
    with pytest.raises(SettingsError, match="variable STORMPROOF_BATCH_BYTES") as variable:
        Settings()
    assert "hunter2" not in str(variable.value)
    (folder / "stormproof.toml").write_text("batch_bytes = 'hunter2'\n")
    with pytest.raises(SettingsError, match=r"batch_bytes in .*stormproof\.toml") as file:
        Settings()
    assert "hunter2" not in str(file.value)


def test_the_url_comes_before_the_variables_and_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORMPROOF_DATABASE_URL", "postgresql://me:hunter2@there/db")
    settings = Settings()
    assert "hunter2" not in repr(settings)
    assert settings.resolve_database({"PGHOST": "elsewhere"}).redacted == "postgresql://me@there/db"


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({"PGHOST": "h", "PGPORT": "1", "PGUSER": "u", "PGPASSWORD": "hunter2"}, "postgresql://u@h:1/"),
        ({"PGDATABASE": "d"}, "postgresql:///d"),
        ({"PGSERVICE": "s", "PGPORT": "1"}, "postgresql:///?service=s"),
    ],
)
def test_libpqs_variables_are_taken(environment: dict[str, str], shown: str) -> None:
    assert Settings(embedded=False).resolve_database(environment).redacted == shown


def test_no_postgres_at_all_says_what_to_set() -> None:
    with pytest.raises(SettingsError, match=r"STORMPROOF_DATABASE_URL.*PGHOST.*STORMPROOF_EMBEDDED"):
        Settings(embedded=False).resolve_database({"PGUSER": "me"})


def test_the_staging_folder_is_absolute(folder: Path) -> None:
    assert Settings().staging_address == str(folder / ".stormproof/staging")
    assert Settings(staging_dir="x").staging_address == str(folder / "x")


def test_a_url_in_an_error_names_its_setting() -> None:
    with pytest.raises(SettingsError, match="STORMPROOF_DATABASE_URL"):
        Settings(database_url="mysql://me:hunter2@h/d").resolve_database()
    assert Database.of({}).redacted == "postgresql:///"
