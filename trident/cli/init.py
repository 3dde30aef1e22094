"""`init`: writes a first topology with its test, its settings and a unit for a supervisor."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from stormproof.core.base.errors import SettingsError, UsageError
from stormproof.trident.cli.output import emit, say

TEMPLATES: Final = Path(__file__).parent / "first_topology"
SUFFIX: Final = ".txt"
"""Keeps tools from treating a template as code of the package."""
FILES: Final = ("orders.py", "test_orders.py", "orders.jsonl", "stormproof.toml", "orders.service")


def write_project(folder: str, *, as_json: bool) -> None:
    """Write the files into a folder, which is created if it is missing.

    Raises:
        UsageError: one of the files exists already; then none is written.
        SettingsError: the folder cannot be written.
    """
    place = Path(folder)
    present = [name for name in FILES if (place / name).exists() or (place / name).is_symlink()]
    if present:
        raise UsageError(
            f"{place} has {', '.join(present)} already, and nothing is overwritten; name another folder, or move them away",
            files=[*present],
        )
    try:
        place.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            with (place / name).open("x", encoding="utf-8") as file:
                file.write((TEMPLATES / f"{name}{SUFFIX}").read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(
            f"{place} cannot be written: {error.strerror or error}; name a folder that this user may write",
            path=str(place),
        ) from error
    report = {"folder": str(place.absolute()), "files": list(FILES)}
    emit(report, as_json=as_json, text=lambda: _text(place))


def _text(place: Path) -> None:
    say(f"wrote {', '.join(FILES)} into {place}; next:")
    steps = [
        f"cd {place}",
        "stormproof queue put orders --lines orders.jsonl",
        "stormproof run orders.py:topology --engine inline --until-idle",
        "stormproof psql -c 'select * from spent'",
        "stormproof dead-letters list orders",
        "pytest test_orders.py                                    # pip install pytest",
    ]
    for step in steps:
        say(f"  {step}")
    say("without --engine inline it runs on Spark; stormproof doctor says what that needs")
