"""Settings: which place wins, and that nothing mistyped is silently without effect."""

from __future__ import annotations

import re
import runpy
import traceback
from pathlib import Path

import pytest
from pydantic import SecretStr

from stormproof import secret
from stormproof.core.base.errors import SettingsError
from stormproof.core.postgres.database import Database
from stormproof.core.start.settings import NOT_SETTINGS, Settings, secret_settings


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
    tool = Path(__file__).parents[2] / "tools" / "settings_doc.py"
    assert runpy.run_path(str(tool))["descriptions"]().keys() == Settings.model_fields.keys()


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


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("spark.speculation = true\nspark.speculation.quantile = 0.9\n", "spark.speculation.quantile"),
        ("spark.speculation.quantile = 0.9\nspark.speculation = 'hunter2'", "spark.speculation"),
        ("[spark.speculation]\nquantile = 0.9\n[spark]\nspeculation = true", "speculation"),
    ],
)
def test_two_of_sparks_names_of_which_one_begins_with_the_other_are_named_with_how_they_are_written(
    folder: Path, text: str, name: str
) -> None:
    (folder / "stormproof.toml").write_text(text)
    with pytest.raises(SettingsError, match=rf": {re.escape(name)} is there twice, or .* as in (.*)") as error:
        Settings()
    assert "hunter2" not in str(error.value)
    quoted = str(error.value).rpartition(" as in ")[2]
    (folder / "stormproof.toml").write_text(f"spark.speculation = true\n{quoted}")
    assert Settings().spark == {"spark.speculation": "true", "spark.speculation.quantile": "0.9"}


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


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("database_url", "postgresql://me:hunter2@there/db", SecretStr("postgresql://me:hunter2@there/db")),
        ("lineage_url", "http://me:hunter2@there", SecretStr("http://me:hunter2@there")),
        ("lineage_api_key", "hunter2", SecretStr("hunter2")),
        ("storage_options", '{"aws_secret_access_key": "hunter2"}', {"aws_secret_access_key": "hunter2"}),
        ("spark", '{"spark.ssl.keyPassword": "hunter2"}', {"spark.ssl.keyPassword": "hunter2"}),
    ],
)
def test_each_secret_setting_may_be_in_a_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, value: object
) -> None:
    (folder / "mounted").write_text(f"{text}\n")
    monkeypatch.setenv(f"STORMPROOF_{name.upper()}_FILE", "mounted")
    assert getattr(Settings(), name) == value
    assert "hunter2" not in repr(Settings())
    (folder / "stormproof.toml").write_text("log_level = 'debug'\n")
    assert getattr(Settings(), name) == value
    monkeypatch.setenv(f"STORMPROOF_{name.upper()}", text)
    with pytest.raises(
        SettingsError, match=f"both STORMPROOF_{name.upper()} and STORMPROOF_{name.upper()}_FILE are set"
    ):
        Settings()


def test_every_secret_setting_is_known() -> None:
    assert set(secret_settings()) == {"database_url", "storage_options", "spark", "lineage_url", "lineage_api_key"}


def test_a_setting_that_is_no_secret_has_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORMPROOF_MASTER_FILE", "mounted")
    with pytest.raises(SettingsError, match="unknown variable STORMPROOF_MASTER_FILE; known: "):
        Settings()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "No such file"),
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b"hunter2\xff", "not UTF-8"),
        ("folder", "Is a dir"),
    ],
)
def test_a_file_without_a_secret_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | str | None, says: str
) -> None:
    """It is no unset setting: that would start another, empty database."""
    path = folder / "mounted"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.mkdir()
    monkeypatch.setenv("STORMPROOF_DATABASE_URL_FILE", str(path))
    with pytest.raises(SettingsError, match=f"{path}, which STORMPROOF_DATABASE_URL_FILE names, .*{says}") as refused:
        Settings()
    assert "hunter2" not in "".join(traceback.format_exception(refused.value))


def test_a_file_with_a_wrong_value_is_named_and_not_shown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in (("STORAGE_OPTIONS_FILE", "mounted"), ("STORAGE_OPTIONS", "hunter2"), ("SPARK", "[hunter2")):
        (folder / "mounted").write_text("hunter2")
        with monkeypatch.context() as patch:
            patch.setenv(f"STORMPROOF_{variable}", value)
            with pytest.raises(SettingsError, match=f"variable STORMPROOF_{variable} is no JSON object") as refused:
                Settings()
        assert "hunter2" not in "".join(traceback.format_exception(refused.value))


def test_a_secret_of_a_program_is_in_a_variable_or_in_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=r"set the variable ORDERS_URL, or ORDERS_URL_FILE to a file"):
        secret("ORDERS_URL")
    monkeypatch.setenv("ORDERS_URL", "amqp://me:hunter2@there/")
    assert secret("ORDERS_URL") == "amqp://me:hunter2@there/"
    monkeypatch.delenv("ORDERS_URL")
    (folder / "mounted").write_text("amqp://me:other@there/\n")
    monkeypatch.setenv("ORDERS_URL_FILE", "mounted")
    assert secret("ORDERS_URL") == "amqp://me:other@there/"
