"""The documents name what exists: failpoints, tests, files, commands."""

from __future__ import annotations

import re
import runpy
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from mkdocs.exceptions import PluginError

import stormproof
from stormproof.trident.cli.app import app

ROOT = Path(__file__).parents[2]
PUBLIC_SUITES = ROOT / "src" / "stormproof" / "testing"
TESTED = ROOT / "tests" / "guarantees.md"
BESIDE = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "tests/guarantees.md")
PAGES = sorted([*(ROOT / name for name in BESIDE), *(ROOT / "docs").rglob("*.md")])
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@pytest.mark.parametrize("name", ["audit", "failpoints", "settings", "cli", "delta", "source_matrix", "metrics"])
def test_a_page_made_from_the_code_is_current(name: str) -> None:
    made = runpy.run_path(str(ROOT / "tools" / f"{name}_doc.py"))["text"]()
    assert (ROOT / "docs" / f"{name}.md").read_text() == made, f"run: .venv/bin/python tools/{name}_doc.py"


MODULES = [stormproof, *(getattr(stormproof, name) for name in set(dir(stormproof)) - set(vars(stormproof)["__all__"]))]


def test_the_api_reference_has_every_public_name() -> None:
    assert {f"{module.__name__}.{name}" for module in MODULES for name in module.__all__} == listed_in_the_reference()


def listed_in_the_reference() -> set[str]:
    return set(re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE))


def test_every_failure_in_the_table_of_guarantees_has_a_test_that_exists() -> None:
    rows = [
        line
        for line in TESTED.read_text().splitlines()
        if line.startswith("|") and not line.startswith(("| ---", "| failure |"))
    ]
    assert len(rows) > 30
    assert "::test_" not in (ROOT / "docs" / "guarantees.md").read_text(), (
        "rows with tests belong into tests/guarantees.md"
    )
    for row in rows:
        cell = row.rstrip("| ").rpartition("|")[2]
        named = re.fullmatch(r" `(?P<file>[\w/]+\.py)(::(?P<test>test_\w+))?`", cell)
        assert named, f"no test in: {row}"
        assert_test(named["file"], named["test"])


def assert_test(file: str, test: str | None) -> None:
    path = ROOT / "tests" / file
    assert path.is_file(), f"there is no tests/{file}"
    text = path.read_text()
    for suite in ("source", "sink"):
        if f"({suite.capitalize()}Conformance)" in text:  # its tests are those of the public suite
            text += "".join(part.read_text() for part in (PUBLIC_SUITES / f"{suite}s").glob("*.py"))
    if test is not None:
        assert re.search(rf"^ *def {test}\(", text, re.MULTILINE), f"tests/{file} has no {test}"


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_picture_is_shown_and_all_of_them_are_small() -> None:
    pictures = set((ROOT / "docs" / "screens").iterdir())
    assert {picture.suffix for picture in pictures} == {".webp"}
    shown = re.findall(r"!\[[^\]]{20,}\]\((screens/[^)]+)\)", (ROOT / "docs" / "operating.md").read_text())
    assert {ROOT / "docs" / name for name in shown} == pictures, "run: .venv/bin/python tools/screens_doc.py"
    assert sum(picture.stat().st_size for picture in pictures) < 600_000
    kept = re.findall(r'kept\(screen, "([\w-]+)"', (ROOT / "tests/integration/test_web_faults_browser.py").read_text())
    assert {picture.stem for picture in pictures} == set(kept)


def test_the_readme_leads_to_every_page_and_example() -> None:
    readme = (ROOT / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f"(docs/{page.name})" in readme, f"README.md does not link to docs/{page.name}"
    for example in (ROOT / "examples").glob("*.py"):
        if not example.name.startswith("demo"):
            assert f"(examples/{example.name})" in readme, f"README.md does not link to examples/{example.name}"


@each_page
def test_files_that_are_named_exist(page: Path) -> None:
    for name in re.findall(r"`((?:tests|tools|core|trident|sinks|docs|examples)/[\w/.]+\.\w+)`", page.read_text()):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


@each_page
def test_commands_that_are_named_exist(page: Path) -> None:
    known = commands()
    for line in re.findall(r"(?<!from )stormproof (?:[a-z][a-z-]+)(?: [a-z][a-z-]*)?", page.read_text()):
        _, first, *rest = line.split()
        assert first in known, f"{page.name}: {line}"
        if (group := known[first]) is not None and rest:
            assert rest[0] in group, f"{page.name}: {line}"


def commands() -> dict[str, set[str] | None]:
    """Every command; of a group its commands."""
    groups = {str(info.name): names_in(info.typer_instance) for info in app.registered_groups if info.typer_instance}
    return {**dict.fromkeys(names_in(app)), **groups}


def names_in(of: typer.Typer) -> set[str]:
    return {info.name or info.callback.__name__ for info in of.registered_commands if info.callback is not None}


@pytest.mark.parametrize(
    ("html", "loads"),
    [
        ('<script src="assets/main.js"></script><a href="https://elsewhere.example/">a link is not loaded</a>', False),
        ('<script async src="https://elsewhere.example/main.js"></script>', True),
        ('<link rel="stylesheet" href="//elsewhere.example/font.css">', True),
        ("@font-face { src: url(https://elsewhere.example/font.woff2) }", True),
    ],
)
def test_the_site_is_refused_where_it_loads_from_another_host(html: str, loads: bool, tmp_path: Path) -> None:
    check = runpy.run_path(str(ROOT / "tools" / "site.py"))["on_post_build"]
    (tmp_path / "index.html").write_text(html)
    with pytest.raises(PluginError, match=r"index\.html: ") if loads else nullcontext():
        check(SimpleNamespace(site_dir=str(tmp_path)))
