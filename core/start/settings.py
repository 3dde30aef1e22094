"""The settings: `STORMPROOF_*` variables, then `stormproof.toml`, then arguments; the later one wins.

A secret may also be in a file that a variable names.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, cast

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)
from pydantic_settings import SettingsError as UnparsedSettings

from stormproof.core.base import failpoint
from stormproof.core.base.arguments import shown
from stormproof.core.base.errors import SettingsError
from stormproof.core.base.trusted_paths import require_trusted
from stormproof.core.postgres.database import Database
from stormproof.core.postgres.embedded import embedded_database
from stormproof.core.storage.protocol import absolute, default_storage, is_url, refusal_of_url, shown_url

# ---- secrets from the environment: the value of a variable, or the content of the file that `NAME_FILE` names

FILE: Final = "_FILE"
"""Ends the name of a variable that names a file with the value, as containers' secrets are mounted."""


def secret(name: str) -> str:
    """A password, key or URL, as `secret("ORDERS_URL")`: a variable's value, or what is in the file that `NAME_FILE` names.

    The line's end after the last line of the file is no part of it. The file is read at each call, so that a value that is
    changed holds from the next start on.

    Raises:
        SettingsError: neither variable is set, or both are; the file cannot be read, is empty, or is not UTF-8. No part of
            a value is in an error's text.
    """
    text = secret_in_file(name)
    if text is None:
        text = os.environ.get(name)
    if not text:
        raise SettingsError(f"no secret: set the variable {name}, or {name}{FILE} to a file that has it", setting=name)
    return text


def secret_in_file(name: str) -> str | None:
    """The content of the file that `NAME_FILE` names; None where that is not set, or empty.

    Raises:
        SettingsError: as `secret`.
    """
    path = os.environ.get(name + FILE)
    if not path:
        return None
    if os.environ.get(name):
        raise SettingsError(f"both {name} and {name}{FILE} are set: take one of them away", setting=name)
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror or "no such file") if isinstance(error, OSError) else "it is not UTF-8"
        raise SettingsError(
            f"the file {path}, which {name}{FILE} names, cannot be read: {reason}; mend the file or the variable",
            setting=name,
            path=path,
        ) from None  # a decoder's error has the bytes
    if not text:
        raise SettingsError(f"the file {path}, which {name}{FILE} names, is empty", setting=name, path=path)
    return text


PREFIX: Final = "STORMPROOF_"
TOML_FILE: Final = "stormproof.toml"
NOT_SETTINGS: Final = frozenset({failpoint.ENV, failpoint.ENV_LOG, failpoint.ENV_DRIVER_PID})
"""Variables with the prefix that are read elsewhere."""
_PG_NAMES: Final = ("PGHOST", "PGDATABASE", "PGSERVICE")


class Settings(BaseSettings):
    """Everything that can be set, with its default and what it is for.

    Raises:
        SettingsError: an unknown name (the known ones are listed), or an invalid value (with the place where it was set).

    Threads: any number. Forks: allowed; each starts or joins the embedded Postgres for itself.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_ignore_empty=True,
        toml_file=TOML_FILE,
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
    )

    database_url: SecretStr | None = None
    """Postgres of ledger and queues: postgresql://USER:PASSWORD@HOST:PORT/DATABASE"""
    embedded: bool = True
    """start a Postgres under `home` if none is named"""
    home: Path = Path(".stormproof")
    """folder for the embedded Postgres and staged files"""
    staging_dir: str | None = Field(default=None, min_length=1)
    """folder of prepared files for driver and executors: a path, or a URL such as `s3://BUCKET/KEY`; default:
    `home`/staging"""
    storage_options: dict[str, str] = Field(default={}, repr=False)
    """options of delta-rs and obstore, for addresses of object stores without options of their own: a table in
    `stormproof.toml`, or a JSON object"""
    master: str = Field(default="local[*]", min_length=1)
    """Spark's master"""
    spark: dict[str, str] = Field(default={}, repr=False)
    """Spark's settings: `spark.executor.memory = "4g"` in `stormproof.toml`, or a JSON object with whole names; those
    that exactly-once needs cannot be changed"""
    parallelism: int | None = Field(default=None, ge=1)
    """source tasks of a batch's job; default: one for each of Spark's cores"""
    small_job_ms: float = Field(default=100.0, ge=0)
    """a batch that is expected to take less work is run as one Spark task; 0: never"""
    delta_jars_dir: Path | None = None
    """folder with Delta's jars; default: `.jars` of the working folder or clone, else that of `stormproof jars`"""
    batch_messages: int = Field(default=10_000, ge=1)
    """most messages in one batch; times `max_batches_in_flight`, the most pending ones"""
    batch_bytes: int = Field(default=64 * 2**20, ge=1)
    """most bytes of payload in one batch"""
    max_batches_in_flight: int | None = Field(default=None, ge=1)
    """most batches in flight; default: 1, with `latency_target_s` 4"""
    latency_target_s: float | None = Field(default=None, gt=0)
    """tune batch size and batches in flight, up to the limits above, to commit nine batches of ten in this time"""
    rejects_max_share: float = Field(default=0.1, ge=0, le=1)
    """share of the newest 1,000 or more messages whose rows a sink's table may refuse, and always 10 messages, before
    the batch is blocked; 0: every refused row blocks its batch"""
    message_timeout_s: float = Field(default=30.0, gt=0)
    """how long a batch's job may show no progress before the message at fault is searched: one call of a function must
    end, or reset the time, within it"""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """how long a batch's job may wait for its first task, or between two stages, before the run ends"""
    worker_memory_mb: int | None = Field(default=None, ge=64)
    """megabytes that a Spark worker may allocate beyond its start; default: as Spark grants (see limits.md), else half
    of the machine's memory per core, at least 1024"""
    heartbeat_port: int = Field(default=0, ge=0, le=65535)
    """port of `spark.driver.bindAddress` where the driver hears its tasks' progress; 0: a free one"""
    outage_s: float = Field(default=60.0, gt=0)
    """how long a store may be away before the run ends with an error"""
    poll_interval_s: float = Field(default=0.1, gt=0)
    """wait before an empty source is asked again"""
    lease_s: float = Field(default=30.0, gt=0)
    """how long opened messages stay with a driver that gives no sign of life"""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """port where a driver serves its metrics to Prometheus, at /metrics; 0: a free one, which it prints"""
    metrics_host: str = Field(default="127.0.0.1", min_length=1)
    """address of `metrics_port`; `0.0.0.0` serves everybody, without a password"""
    metrics_opentelemetry: bool = False
    """pass metrics, and a span per batch, to OpenTelemetry's API; needs the extra `otel`"""
    lineage_url: SecretStr | None = None
    """OpenLineage server; needs the extra `openlineage`"""
    lineage_api_key: SecretStr | None = None
    """key for `lineage_url`"""
    lineage_file: Path | None = None
    """file for OpenLineage events, one per line, instead of a server"""
    lineage_namespace: str = Field(default="stormproof", min_length=1)
    """OpenLineage namespace of the topologies"""
    lineage_interval_s: float = Field(default=30.0, ge=0)
    """least seconds between two committed batches that are reported"""
    lineage_error_texts: bool = False
    """report error texts, which may quote a message, beside their kind"""
    plugins: str = ""
    """modules or FILE.py, separated by commas, that commands import first: they register your own kinds of sinks"""
    log_format: Literal["text", "json"] = "text"
    """`text`: a short line per batch; `json`: one object per line"""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """lowest logged level"""

    def __init__(self, **arguments: Any) -> None:
        _check_variables(os.environ)
        path = Path(TOML_FILE).absolute()
        try:
            if path.exists():
                require_trusted(
                    path,
                    "its settings name the programs that run as you and where your data goes",
                    "or move it away, and set variables",
                )
            super().__init__(**arguments)
        except UnicodeDecodeError as error:
            raise SettingsError(f"{path} is not UTF-8: {error}; save it as UTF-8", setting=TOML_FILE) from error
        except OSError as error:
            raise SettingsError(
                f"{path} cannot be read: {error.strerror or error}; make it readable, or move it away",
                setting=TOML_FILE,
            ) from error
        except tomllib.TOMLDecodeError as error:
            raise SettingsError(f"{path} is not TOML: {error}{_overwritten(path, error)}", setting=TOML_FILE) from error
        except UnparsedSettings as error:
            name = str(error).split('"')[1]
            raise SettingsError(
                f'variable {_variable(name)} is no JSON object, as {{"name": "value"}}', setting=name
            ) from None  # the cause has the value
        except ValidationError as error:
            problems = "; ".join(_problem(e, arguments) for e in error.errors(include_input=False, include_url=False))
        else:
            return
        raise SettingsError(problems)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments, then the file, then variables: the first that has a name wins."""
        files = EnvSettingsSource(settings_cls)
        variables = ((name, secret_in_file(f"{PREFIX}{name}".upper())) for name in secret_settings())
        files.env_vars = {f"{PREFIX}{name}".lower(): text for name, text in variables if text is not None}
        return init_settings, TomlConfigSettingsSource(settings_cls), files, env_settings

    @field_validator("spark", mode="before")
    @classmethod
    def _with_whole_names(cls, value: object) -> object:
        """A table of tables, as `spark.executor.memory = "4g"` is in TOML, by whole names."""
        return spark_names(value) if isinstance(value, Mapping) else value

    @field_validator("staging_dir", mode="before")
    @classmethod
    def _as_text(cls, value: object) -> object:
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    @field_validator("staging_dir")
    @classmethod
    def _served(cls, value: str | None) -> str | None:
        """A URL that names a folder in a store that is served."""
        if value is not None and is_url(value) and (refusal := refusal_of_url(value)) is not None:
            raise ValueError(f"{shown_url(value)}: {refusal}")
        return value

    def with_spark(self, more: Mapping[str, str]) -> Settings:
        """The same, with further settings of Spark's, which go before those that are there."""
        return self.model_copy(update={"spark": {**self.spark, **spark_names(more)}})

    def with_metrics(self, port: int | None) -> Settings:
        """The same, with another port for metrics where one is given.

        Raises:
            SettingsError: no such port.
        """
        if port is None:
            return self
        if type(port) is not int or not 0 <= port <= 65535:
            raise SettingsError(f"argument metrics_port: {shown(port)} is no port: 0 to 65535", setting="metrics_port")
        return self.model_copy(update={"metrics_port": port})

    @property
    def staging_address(self) -> str:
        """Where prepared files go, an absolute path or a URL: executors have another working folder."""
        return absolute(self.staging_dir or self.home / "staging")

    @property
    def heartbeat_path(self) -> Path:
        """The folder of the driver's notes: with the prepared files, or in `home` where those are in an object store."""
        return Path(absolute(self.home) if is_url(self.staging_address) else self.staging_address, "heartbeat")

    @property
    def uses_embedded(self) -> bool:
        """Whether `resolve_database` gives the embedded Postgres: no other one is named."""
        return self.database_url is None and not any(os.environ.get(name) for name in _PG_NAMES)

    def resolve_database(self, environment: Mapping[str, str] | None = None) -> Database:
        """The Postgres to use: `database_url`, else PG* variables, else the embedded one, started or joined.

        An embedded one is held until this process ends.

        Raises:
            SettingsError: none is named and `embedded` is off, or there is none to start.
            StoreUnavailable: the embedded one did not start.
        """
        environment = os.environ if environment is None else environment
        if self.database_url is not None:
            return Database.from_url(self.database_url.get_secret_value(), setting=f"{PREFIX}DATABASE_URL")
        if any(environment.get(name) for name in _PG_NAMES):
            return Database.from_environment(environment)
        if not self.embedded:
            raise SettingsError(
                f"no Postgres is named and the embedded one is off; set {PREFIX}DATABASE_URL, database_url in "
                f"{TOML_FILE}, or PGHOST, or set {PREFIX}EMBEDDED=true",
                setting="database_url",
            )
        return embedded_database(self.home)


def secret_settings() -> tuple[str, ...]:
    """Settings that hold secrets. Each may be in a file that a variable names, as STORMPROOF_DATABASE_URL_FILE."""
    fields = Settings.model_fields.items()
    return tuple(name for name, field in fields if not field.repr or field.annotation == SecretStr | None)


def _overwritten(path: Path, error: tomllib.TOMLDecodeError) -> str:
    """The name that a line of the file gives once more, and how two names are written of which one begins with the other, as
    Spark has them; empty for other errors.
    """
    found = re.search(r"overwrite a value \(at (?:line (\d+)|end of document)", str(error))
    if found is None:
        return ""
    lines = path.read_text(encoding="utf-8").split("\n")
    name = lines[int(found[1] or len(lines)) - 1].partition("=")[0].strip()
    return (
        f": {name} is there twice, or of two names one begins with the other; then write the longer one as in "
        'spark."speculation.quantile" = 0.9'
    )


def _known() -> str:
    return ", ".join(sorted(Settings.model_fields))


def spark_names(table: Mapping[Any, object], prefix: str = "spark") -> dict[str, str]:
    """Spark's settings by their whole names, out of tables inside tables; a boolean as Spark writes it.

    Raises:
        ValueError: a value is a list, a time or nothing.
    """
    found: dict[str, str] = {}
    for key, value in table.items():
        name = str(key) if str(key).startswith("spark.") else f"{prefix}.{key}"
        match value:
            case Mapping():
                found |= spark_names(cast("Mapping[Any, object]", value), name)
            case bool():
                found[name] = str(value).lower()
            case str() | int() | float():
                found[name] = str(value)
            case _:
                raise ValueError(f"{name} is neither text nor a number nor true or false")
    return found


def _check_variables(environment: Mapping[str, str]) -> None:
    """Raise SettingsError for a mistyped variable, which would otherwise have no effect."""
    known = {f"{PREFIX}{name}".upper() for name in Settings.model_fields} | NOT_SETTINGS
    known |= {f"{PREFIX}{name}{FILE}".upper() for name in secret_settings()}
    unknown = sorted(name for name in environment if name.upper().startswith(PREFIX) and name.upper() not in known)
    if unknown:
        raise SettingsError(
            f"unknown variable {', '.join(unknown)}; known: {', '.join(sorted(known))}", variables=list(unknown)
        )


def _problem(error: ErrorDetails, arguments: Mapping[str, object]) -> str:
    """One error of pydantic's in a line, with the place where the value was set; never the value."""
    message = error["msg"]
    name = str(error["loc"][0])
    if error["type"] == "extra_forbidden":
        place = "argument" if name in arguments else f"key in {Path(TOML_FILE).absolute()}:"
        return f"unknown {place} {name!r}; known: {_known()}"
    if name in arguments:
        place = f"argument {name}"
    elif _in_file(name):
        place = f"{name} in {Path(TOML_FILE).absolute()}"
    else:
        place = f"variable {_variable(name)}"
    return f"{place}: {message}"


def _variable(name: str) -> str:
    """The variable that has a setting, or names the file with it."""
    variable = f"{PREFIX}{name.upper()}"
    return variable + FILE if os.environ.get(variable + FILE) else variable


def _in_file(name: str) -> bool:
    path = Path(TOML_FILE)
    return path.exists() and name in tomllib.loads(path.read_text(encoding="utf-8"))


default_storage(lambda: Settings().storage_options)
