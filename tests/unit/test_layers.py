"""Imports point down, and never in a circle: read from the product's own text, nothing of it is run.

A name that is needed for a type only counts, too (`TYPE_CHECKING`), and so does an import inside a function: whoever
reads the one module has to read the other.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Final, TypeAlias

import pytest

ROOT: Final = Path(__file__).parents[2]

LAYERS: Final = (
    ("stormproof", "stormproof.__main__", "stormproof.testing"),
    ("stormproof.trident",),
    ("stormproof.sinks",),
    ("stormproof.core.engine",),
    ("stormproof.core.task",),
    ("stormproof.core.graph",),
    ("stormproof.core.bolt",),
    ("stormproof.core.source", "stormproof.core.pending"),
    ("stormproof.core.tracking",),
    ("stormproof.core.contract",),
    ("stormproof.core.start",),
    ("stormproof.core.postgres", "stormproof.core.storage", "stormproof.core.heartbeat", "stormproof.core.user_code"),
    ("stormproof.core",),
)
"""From the top down; a module belongs to the longest prefix of its name. A line imports from itself and from below."""

Imports: TypeAlias = Mapping[str, set[str]]
"""What each module imports, by name."""


@cache
def _texts() -> Mapping[str, str]:
    found: dict[str, str] = {}
    package = ROOT / "src" / "stormproof"
    for base, folder in ((ROOT, "core"), (ROOT, "sinks"), (ROOT, "trident"), (package, "testing")):
        for path in (base / folder).rglob("*.py"):
            parts = path.relative_to(base).with_suffix("").parts
            found[".".join(("stormproof", *(p for p in parts if p != "__init__")))] = path.read_text()
    found["stormproof"] = (package / "__init__.py").read_text()
    found["stormproof.__main__"] = (package / "__main__.py").read_text()
    return found


def product() -> dict[str, str]:
    """The text of each module."""
    return dict(_texts())


def imports_of(modules: Mapping[str, str]) -> Imports:
    """All imports of modules among these, wherever in a module's text they stand."""
    found: dict[str, set[str]] = {}
    for name, text in modules.items():
        named = (whole if whole in modules else package for whole, package in _asked(text))
        found[name] = {one for one in named if one in modules and one != name}
    return found


@cache
def _asked(text: str) -> tuple[tuple[str, str], ...]:
    """What a module's text imports: each name in full, and the module or package that it is imported from."""
    found: list[tuple[str, str]] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [(alias.name, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found += [(f"{node.module}.{alias.name}", node.module) for alias in node.names]
    return tuple(found)


def layer_of(name: str) -> int:
    """The number of a module's layer, from the top."""
    of = {prefix: number for number, layer in enumerate(LAYERS) for prefix in layer}
    while name not in of:
        name = name.rpartition(".")[0]
    return of[name]


def pointing_up(imports: Imports) -> list[str]:
    """The imports that point up, for people."""
    return sorted(f"{a} imports {b}" for a, names in imports.items() for b in names if layer_of(b) < layer_of(a))


def circle(imports: Imports) -> list[str]:
    """The modules of one circle; none where there is no circle."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_import_points_up() -> None:
    assert pointing_up(imports_of(product())) == []


def test_no_imports_go_in_a_circle() -> None:
    assert circle(imports_of(product())) == []


def folders_of(imports: Imports, part: str) -> Imports:
    """Which folders of a part each of them imports from."""
    found: dict[str, set[str]] = {}
    for name, names in imports.items():
        if name.startswith(f"{part}."):
            mine = folder_in(name, part)
            found.setdefault(mine, set()).update(
                folder_in(one, part) for one in names if one.startswith(f"{part}.") and folder_in(one, part) != mine
            )
    return found


def folder_in(name: str, part: str) -> str:
    """The folder of a part that a module is in."""
    return name.removeprefix(f"{part}.").partition(".")[0]


@pytest.mark.parametrize("part", ["stormproof.core", "stormproof.sinks", "stormproof.trident"])
def test_no_folders_of_a_part_import_one_another(part: str) -> None:
    assert circle(folders_of(imports_of(product()), part)) == []


@pytest.mark.parametrize("part", ["core", "sinks", "trident"])
def test_no_module_of_a_part_lies_loose(part: str) -> None:
    assert [path.name for path in (ROOT / part).glob("*.py")] == ["__init__.py"]


def test_folders_that_import_one_another_are_seen() -> None:
    """Negative control: neither module imports one that imports it."""
    modules = product()
    modules["stormproof.trident.terms.wording"] += "\nfrom stormproof.trident.declarations import decisions\n"
    imports = imports_of(modules)
    assert circle(imports) == []
    assert {"terms", "declarations"} <= set(circle(folders_of(imports, "stormproof.trident")))


def test_an_import_that_points_up_is_seen() -> None:
    """Negative control."""
    modules = product()
    modules["stormproof.core.base.message"] += "\ndef late() -> None:\n    from stormproof.core.graph import plan\n"
    assert pointing_up(imports_of(modules)) == ["stormproof.core.base.message imports stormproof.core.graph.plan"]


def test_a_circle_is_seen_though_only_types_go_round_in_it() -> None:
    """Negative control."""
    modules = product()
    modules["stormproof.core.base.message"] += (
        "\nif TYPE_CHECKING:\n    from stormproof.core.base.machine_faults import OUTSIDE\n"
    )
    assert set(circle(imports_of(modules))) == {"stormproof.core.base.machine_faults", "stormproof.core.base.message"}


def test_every_module_of_the_product_is_read() -> None:
    names = product()
    assert len(names) > 200
    assert imports_of(names)["stormproof.core.task.job"] >= {
        "stormproof.core.graph.plan",
        "stormproof.core.contract.sink",
    }
