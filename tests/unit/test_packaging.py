"""What is built is what is tracked: no file is forgotten in the wheel, none slips in."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FACE = {
    "src/stormproof/__main__.py",
    "src/stormproof/py.typed",
    *(
        f"src/stormproof/{name}.{ending}"
        for name in ("__init__", "errors", "sink", "source", "state", "topology", "web")
        for ending in ("py", "pyi")
    ),
}
TESTING = "src/stormproof/testing/"
FOLDERS = ("core/", "trident/", "sinks/", "migrations/")


def tracked() -> set[str]:
    """The files that git knows or would add, as they lie in the folder."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git clone")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return {name for name in names if (ROOT / name).is_file()}


def build(target: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.iterdir()
    return built


@pytest.mark.timeout(60)
def test_the_wheel_has_the_tracked_files_under_one_name(tmp_path: Path) -> None:
    expected = {name.removeprefix("src/") for name in tracked() & FACE}
    expected |= {name.removeprefix("src/") for name in tracked() if name.startswith(TESTING)}
    expected |= {f"stormproof/{name}" for name in tracked() if name.startswith(FOLDERS)}
    with zipfile.ZipFile(build("wheel", tmp_path)) as wheel:
        files = {name for name in wheel.namelist() if ".dist-info/" not in name}
        (license_,) = (name for name in wheel.namelist() if name.endswith(".dist-info/licenses/LICENSE"))
        text = wheel.read(license_)
        metadata = wheel.read(license_.replace("licenses/LICENSE", "METADATA")).decode()
    assert files == expected
    assert text == (ROOT / "LICENSE").read_bytes()
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert "\nKeywords: " in metadata
    for classifier in (
        "Typing :: Typed",
        "Programming Language :: Python :: 3.11",
        "Operating System :: POSIX :: Linux",
    ):
        assert f"\nClassifier: {classifier}\n" in metadata


@pytest.mark.timeout(60)
def test_the_sdist_has_the_tracked_files_where_they_lie(tmp_path: Path) -> None:
    inside = (*FOLDERS, TESTING, "tests/", "examples/")
    expected = {name for name in tracked() if name.startswith(inside)} | (tracked() & FACE)
    expected |= {"pyproject.toml", "README.md", "LICENSE", ".gitignore"}
    with tarfile.open(build("sdist", tmp_path)) as sdist:
        files = {name.partition("/")[2] for name in sdist.getnames()}
    assert files - {"PKG-INFO"} == expected


def test_no_registry_is_named_in_a_tracked_file() -> None:
    words = (("pypi", "org"), ("pythonhosted", "org"), ("maven", "org"), ("maven.apache", "org"), ("npmjs", "org"))
    hosts = [".".join(parts).encode() for parts in words]
    named = [(name, host) for name in sorted(tracked()) for host in hosts if host in (ROOT / name).read_bytes()]
    assert named == []
