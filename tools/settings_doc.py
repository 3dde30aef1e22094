"""Writes docs/settings.md from the settings in the code: `.venv/bin/python tools/settings_doc.py`."""

from __future__ import annotations

import types
import typing
from pathlib import Path
from typing import Any, Final

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from stormproof.core import failpoint
from stormproof.core.settings import NOT_SETTINGS, PREFIX, TOML_FILE, Settings, secret_settings

PATH: Final = Path(__file__).resolve().parents[1] / "docs" / "settings.md"
HEAD: Final = f"""# Settings

Every setting, its default, and what it does. Made by `tools/settings_doc.py` from `core/settings.py`: do not edit.

A setting is looked for in three places. The later one wins.

1. A variable: `{PREFIX}` and the name in capitals, such as `{PREFIX}BATCH_MESSAGES=5000`. An empty variable counts as unset.
2. A line of `{TOML_FILE}` in the working folder, such as `batch_messages = 5000`.
3. An argument, in code: `Settings(batch_messages=5000)`, given as `topology.run(settings=...)`. Some options of
   `stormproof run` stand for such an argument: `--max-messages`, `--max-bytes`, `--interval`, `--in-flight`,
   `--latency-target`, `--metrics-port`, `--metrics-file`.

An unknown name is an error in all three places, and the error lists the known ones. `stormproof doctor` shows which folder
and which database the settings lead to.

| setting | type | default | what it is |
| --- | --- | --- | --- |
"""
TAIL: Final = f"""
## Secrets

{", ".join(f"`{name}`" for name in secret_settings())} may be in a file each, as a container's secrets are mounted: the variable with `_FILE` at
its end names it, as `{PREFIX}DATABASE_URL_FILE=/run/secrets/database-url`. The file holds what the variable would; the end of its last line
does not count. One that cannot be read or is empty is an error, and so are both variables at once.

What your own code passes, as a broker's URL or a store's key, `secret` finds in the same two ways:

```python
from stormproof import KafkaSource, RabbitMQSource, secret

orders = RabbitMQSource("orders", url=secret("ORDERS_URL"))  # ORDERS_URL, or the file that ORDERS_URL_FILE names
paid = KafkaSource("paid", servers="kafka:9093", client={{"sasl.username": "shop", "sasl.password": secret("KAFKA_PASSWORD")}})
```

Better than a key is none: without `storage_options` the store's client takes the platform's own credentials (the machine's or the pod's role,
workload identity, the cloud's variables and files), and libpq reads `PGPASSFILE`. A file is read when a run starts: after a change start it anew.

Pass none by `--conf` or `--param`: every user of the machine sees a command's arguments.

## Which Postgres

1. `database_url`, where it is set.
2. Else libpq's variables, where one of `PGHOST`, `PGDATABASE` or `PGSERVICE` is set. The others (`PGPORT`, `PGUSER`,
   `PGPASSWORD`, `PGPASSFILE`, `PGSSLMODE`, ...) are then honoured, too.
3. Else the embedded one, started under `home`. With `embedded = false` this is an error instead: use it in production, so
   that a lost variable does not start an empty database.

## Variables that are no settings

| variable | what it is |
| --- | --- |
"""
OTHERS: Final = {
    failpoint.ENV: "makes a run die, stand still or fail at a named place, for tests: [failpoints.md](failpoints.md)",
    failpoint.ENV_DRIVER_PID: "set by a driver for its own workers; leave it alone",
    failpoint.ENV_LOG: "a file that gets the name of each failpoint that is reached",
}
"""What each variable of `NOT_SETTINGS` is for."""


def text() -> str:
    """The page."""
    rows = "".join(_row(name, field) for name, field in Settings.model_fields.items())
    others = "".join(f"| `{name}` | {OTHERS[name]} |\n" for name in sorted(NOT_SETTINGS))
    return HEAD + rows + TAIL + others


def _row(name: str, field: FieldInfo) -> str:
    about = (field.description or "").replace("|", "\\|")
    return f"| `{name}` | {_type(field)} | {_default(field)} | {about} |\n"


def _type(field: FieldInfo) -> str:
    """The type in a user's words, with its bounds."""
    bounds = [
        f"{sign} {bound}"
        for entry in field.metadata
        for sign, attribute in ((">=", "ge"), (">", "gt"), ("<=", "le"), ("<", "lt"))
        if (bound := getattr(entry, attribute, None)) is not None
    ]
    return ", ".join((_type_name(field.annotation), *bounds))


def _type_name(kind: Any) -> str:
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return " or ".join(_type_name(part) for part in typing.get_args(kind) if part is not types.NoneType)
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(f"`{value}`" for value in typing.get_args(kind))
    names = {
        str: "text",
        SecretStr: "text",
        int: "whole number",
        float: "number",
        bool: "`true` or `false`",
        Path: "folder",
    }
    return "table of text" if typing.get_origin(kind) is dict else names[kind]


def _default(field: FieldInfo) -> str:
    value = field.default
    if value is None or value == {}:
        return "-"
    shown = str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
    return f"`{shown}`"


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
