"""Code that tests run in processes of their own stands in texts, where no checker reads it: what it imports is there."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def texts(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def imports(source: str) -> Iterator[tuple[str, str]]:
    """What is imported from modules of the product, each as (module, name)."""
    for text in texts(source):
        if "import " not in text:
            continue
        try:
            code = ast.parse(text.strip("\n"))
        except SyntaxError:
            continue  # prose, or a template
        for node in ast.walk(code):
            if (
                isinstance(node, ast.ImportFrom)
                and str(node.module).startswith("stormproof")
                and node.names[0].name != "*"
            ):
                yield from ((str(node.module), name.name) for name in node.names)


def is_there(module: str, name: str) -> bool:
    return hasattr(importlib.import_module(module), name) or find_spec(f"{module}.{name}") is not None


@pytest.mark.parametrize("folder", ["integration", "support", "unit", "property", "conformance"])
def test_what_code_in_texts_imports_is_there(folder: str) -> None:
    found = [(path.name, *one) for path in (TESTS / folder).glob("*.py") for one in imports(path.read_text())]
    assert [one for one in found if not is_there(*one[1:])] == []


def test_control_a_module_that_is_not_there_is_seen() -> None:
    (gone,) = imports('TEXT = """\nfrom stormproof.core.task import gone\n"""')
    assert not is_there(*gone)
