"""Each folder of the package has a map in its `__init__`: it names every module of the folder, and nothing else as one."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
FOLDERS: Final = sorted(
    {
        path.parent.relative_to(ROOT).as_posix()
        for top in ("core", "sinks", "trident")
        for path in (ROOT / top).rglob("*.py")
    }
)


def modules_of(folder: Path) -> set[str]:
    """The modules and packages directly in a folder."""
    return {path.stem for path in folder.glob("*.py")} - {"__init__"} | {
        path.parent.name for path in folder.glob("*/__init__.py")
    }


def faults(text: str, modules: set[str]) -> list[str]:
    """Where a map and its folder disagree, for people."""
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", text, re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    said = set(re.findall(r"`(\w+)`", text))
    return [f"{m} is not on the map" for m in sorted(modules - said)] + [
        f"there is no {m}" for m in sorted(listed - modules)
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_map_of_a_folder_names_its_modules(folder: str) -> None:
    text = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text())) or ""
    assert faults(text, modules_of(ROOT / folder)) == []


def test_a_renamed_module_is_seen() -> None:
    """Negative control."""
    assert faults("| `old`, `kept` | what is it |", {"new", "kept"}) == ["new is not on the map", "there is no old"]
