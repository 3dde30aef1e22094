"""Hooks of the site's builder (`make docs`, mkdocs.yml): pages made from files outside docs/, and no foreign hosts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).resolve().parents[1]
PAGES: Final = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "LICENSE": "license.md",
}
"""Files beside docs/ that are pages of the site, too."""
_EXAMPLE: Final = re.compile(r"examples/([\w/]+)\.py")
_LINK: Final = re.compile(r"\]\((?P<up>(?:\.\./)*)(?P<target>[^)#:\s]+)(?P<rest>#[^)]*)?\)")
_LOADED: Final = re.compile(
    r"""<(?:script|img|iframe|source|video|audio)\b[^>]*\ssrc=["']?(?:https?:)?//[^\s"'>]+"""
    r"""|<link\b[^>]*rel=["']?(?:stylesheet|preload|preconnect|icon)[^>]*href=["']?(?:https?:)?//[^\s"'>]+"""
    r"""|url\(["']?(?:https?:)?//[^)]+|@import\s+["'](?:https?:)?//[^"']+"""
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made from files outside docs/."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(
            File.generated(config, page, content=f"# License\n\n```text\n{text}```\n" if page == "license.md" else text)
        )
    folder = ROOT / "examples"
    examples = [*sorted(folder.glob("*.py")), *sorted(folder.glob("*/*.py"))]
    names = [path.relative_to(folder).with_suffix("") for path in examples]
    listed = "".join(
        f"- [{name}.py](examples/{name}.md): {first_line(path)}\n" for name, path in zip(names, examples, strict=True)
    )
    files.append(File.generated(config, "examples.md", content=f"# Examples\n\n{listed}"))
    for name, path in zip(names, examples, strict=True):
        text = f"# {name}.py\n\n```python\n{path.read_text(encoding='utf-8')}```\n"
        files.append(File.generated(config, f"examples/{name}.md", content=text))
    return files


def first_line(path: Path) -> str:
    """The first line of a file's docstring."""
    return path.read_text(encoding="utf-8").partition('"""')[2].partition("\n")[0].rstrip('"')


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links that leave docs/, or enter it from outside, to the site's own pages."""
    outside = page.file.src_uri in PAGES.values()
    depth = page.file.src_uri.count("/")
    return _LINK.sub(lambda found: _led(found, depth, outside=outside), markdown)


def _led(found: re.Match[str], depth: int, *, outside: bool) -> str:
    target, rest = found["target"], found["rest"] or ""
    ups = found["up"].count("../")
    if outside:
        inside = target.startswith("docs/")
        name = target.removeprefix("docs/") if inside else _page_of(target)
    elif ups == depth + 1:
        name = _page_of(target)
    else:
        return found[0]
    return f"]({'../' * depth}{name}{rest})"


def _page_of(target: str) -> str:
    return PAGES.get(target) or _EXAMPLE.sub(r"examples/\1.md", target)


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse a site that makes its reader's browser ask another host.

    Raises:
        PluginError: names the files and what they would load.
    """
    site = Path(config.site_dir)
    found = [
        f"{path.relative_to(site)}: {match[0]}"
        for path in sorted(site.rglob("*"))
        if path.suffix in (".html", ".css")
        for match in _LOADED.finditer(path.read_text(encoding="utf-8"))
    ]
    if found:
        raise PluginError("the site loads from other hosts:\n" + "\n".join(found))
