"""Writes docs/settings.md from the settings in the code: `.venv/bin/python tools/settings_doc.py`."""

from __future__ import annotations

import ast
import types
import typing
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from stormproof.core.base import failpoint
from stormproof.core.start import settings as module
from stormproof.core.start.settings import NOT_SETTINGS, PREFIX, TOML_FILE, Settings, secret_settings

PATH: Final = Path(__file__).resolve().parents[1] / "docs" / "settings.md"
HEAD: Final = f"""# Settings

Made by `tools/settings_doc.py` from `core/start/settings.py`: do not edit.

A setting is looked for in three places; the later one wins:

1. A variable: `{PREFIX}` and the name in capitals, such as `{PREFIX}BATCH_MESSAGES=5000`. An empty one counts as unset.
2. `{TOML_FILE}` in the working folder: `batch_messages = 5000`.
3. In code: `topology.run(settings=Settings(batch_messages=5000))`, and [options of `stormproof run`](cli.md#stormproof-run).

An unknown name is an error that lists the known ones. `stormproof doctor` shows the folder and database in use.

Each has its default, or else its type, in parentheses.

"""
TAIL: Final = f"""
## Secrets

{", ".join(f"`{name}`" for name in secret_settings())} may be in a file each: the variable with `_FILE` at its end names
it, as `{PREFIX}DATABASE_URL_FILE=/run/secrets/database-url`. An unreadable or empty file is an error, and so are both
variables at once. A file is read when a run starts.

`secret` finds what your own code needs in the same two ways:

```python
from stormproof import KafkaSource, RabbitMQSource, secret

orders = RabbitMQSource("orders", url=secret("ORDERS_URL"))  # ORDERS_URL, or the file that ORDERS_URL_FILE names
sasl = {{"sasl.username": "shop", "sasl.password": secret("KAFKA_PASSWORD")}}
paid = KafkaSource("paid", servers="kafka:9093", client=sasl)
```

Without `storage_options` a store's client uses the platform's credentials (role of machine or pod, workload identity,
the cloud's variables and files); libpq reads `PGPASSFILE`. All users of the machine can see `--conf` and `--param`.

## Which Postgres

1. `database_url`.
2. libpq's variables, if `PGHOST`, `PGDATABASE` or `PGSERVICE` is set; then all of them count (`PGUSER`, `PGPASSFILE`,
   `PGSSLMODE`, ...).
3. The embedded one under `home`; with `embedded = false`, as production should have it, an error.

## Other variables

"""
OTHERS: Final = {
    failpoint.ENV: "kills, pauses or fails a run at a named place, for tests: [failpoints.md](failpoints.md)",
    failpoint.ENV_DRIVER_PID: "set by a driver for its workers; do not set it",
    failpoint.ENV_LOG: "file for the names of failpoints that are reached",
}
"""What each variable of `NOT_SETTINGS` is for."""


def text() -> str:
    """The page."""
    told = descriptions()
    rows = "".join(_row(name, field, told[name]) for name, field in Settings.model_fields.items())
    others = "".join(f"- `{name}`: {OTHERS[name]}\n" for name in sorted(NOT_SETTINGS))
    return HEAD + rows + TAIL + others


def descriptions() -> dict[str, str]:
    """What each setting is for: the text below it in its class."""
    source = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    (settings,) = (node for node in source.body if isinstance(node, ast.ClassDef) and node.name == "Settings")
    return {
        setting.target.id: " ".join(text.value.value.split())
        for setting, text in pairwise(settings.body)
        if isinstance(setting, ast.AnnAssign) and isinstance(setting.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


def _row(name: str, field: FieldInfo, told: str) -> str:
    default = _default(field) or _type_name(field.annotation)
    if typing.get_origin(field.annotation) is typing.Literal:
        default += f"; {_type_name(field.annotation)}"
    return f"- `{name}` ({', '.join((default, *_bounds(field)))}): {told}\n"


def _bounds(field: FieldInfo) -> list[str]:
    return [
        f"{sign} {bound}"
        for entry in field.metadata
        for sign, attribute in ((">=", "ge"), (">", "gt"), ("<=", "le"), ("<", "lt"))
        if (bound := getattr(entry, attribute, None)) is not None
    ]


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
    if value is None or value in ({}, ""):
        return ""
    shown = str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
    return f"`{shown}`"


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
