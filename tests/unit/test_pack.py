"""`stormproof pack`: what is in an archive, that its bytes are the same each time, and that one must import."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from support.command_line import CommandLine

from stormproof.core.base.errors import UsageError
from stormproof.core.engine import archive
from stormproof.core.engine.archive import distributions, pack_environment, pack_package
from stormproof.core.start.preflight import package_fingerprint


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No interpreter is started, and an environment has two small packages."""
    few = {name: one for name, one in distributions().items() if name in ("stormproof", "tenacity", "annotated-types")}
    monkeypatch.setattr(archive, "import_in", lambda *_, **__: None)
    monkeypatch.setattr(archive, "distributions", lambda _: few)


def test_the_package_alone_imports_from_its_archive_with_the_drivers_fingerprint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = CommandLine(capsys)("pack", "--output", str(tmp_path / "own.zip"))
    assert made["settings"] == {"spark.submit.pyFiles": str(tmp_path / "own.zip")}
    assert list(made["distributions"]) == ["stormproof"]
    code = (
        "import importlib.metadata, stormproof; from stormproof.core.start.preflight import package_fingerprint;"
        "print(stormproof.__file__, stormproof.Topology.__name__, package_fingerprint(),"
        " importlib.metadata.version('stormproof'))"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "own.zip")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    file, topology, fingerprint, version = done.stdout.split()
    assert file.startswith(str(tmp_path / "own.zip"))
    assert (topology, fingerprint, version) == ("Topology", package_fingerprint(), archive.version())


@pytest.mark.usefixtures("unchecked")
def test_the_same_files_make_the_same_bytes(tmp_path: Path) -> None:
    made = [pack_package(tmp_path / f"{number}.zip") for number in range(2)]
    assert len({one.sha256 for one in made}) == 1
    environments = [pack_environment(tmp_path / f"{number}.tar.gz", None) for number in range(2)]
    assert len({one.sha256 for one in environments}) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"0.zip", "1.zip", "0.tar.gz", "1.tar.gz"}


@pytest.mark.usefixtures("unchecked")
def test_an_environment_has_a_launcher_and_nothing_of_this_machine(tmp_path: Path) -> None:
    made = pack_environment(tmp_path / "all.tar.gz", sys.executable)
    assert set(made.distributions) == {"stormproof", "tenacity", "annotated-types"}
    folder = tmp_path / "unpacked"
    with tarfile.open(made.file) as packed:
        members = packed.getmembers()
        packed.extractall(folder, filter="data")
    names = {member.name for member in members}
    assert {(m.mtime, m.uid, m.gid, m.uname) for m in members} == {(0, 0, 0, "")}
    assert {"bin/python", "lib/stormproof/core/start/preflight.py", "lib/tenacity/__init__.py"} <= names
    assert not [n for n in names if n.endswith((".pyc", "/RECORD", "direct_url.json")) or "__pycache__" in n]
    launched = [str(folder / "bin" / "python"), "-c", "import tenacity; print(tenacity.__file__)"]
    done = subprocess.run(launched, capture_output=True, text=True, check=True, env={"PATH": os.defpath})
    assert done.stdout.strip() == str(folder / "lib" / "tenacity" / "__init__.py")


def test_an_archive_that_does_not_import_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = archive.own_files

    def without_a_module() -> list[tuple[str, bytes]]:
        return [(name, data) for name, data in whole() if name != "stormproof/core/base/errors.py"]

    monkeypatch.setattr(archive, "own_files", without_a_module)
    (tmp_path / "own.zip").write_text("the one before")
    with pytest.raises(UsageError, match=r"does not import with .*: No module named 'stormproof.core.base.errors'"):
        pack_package(tmp_path / "own.zip")
    assert (tmp_path / "own.zip").read_text() == "the one before"
    assert len(list(tmp_path.iterdir())) == 1


def test_what_comes_from_elsewhere_is_no_proof(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "empty.zip", "w"):
        pass
    paths = [str(Path(__file__).resolve().parents[2] / "src"), *(p for p in sys.path if "site-packages" in p)]
    with pytest.raises(UsageError, match="stormproof came from"):
        archive.import_in([sys.executable], str(tmp_path / "empty.zip"), paths)


def test_what_cannot_be_packed_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = CommandLine(capsys)
    for arguments, text in [
        (("--environment", "--with", "no-such-package"), "no-such-package is not installed here"),
        (("--with", "numpy"), "add --environment"),
        (("--output", "a.whl"), "has to be .zip"),
        (("--environment", "--python", "a b"), "no name or path of a Python"),
        (("--output", str(tmp_path)), "has to be .zip"),
    ]:
        assert text in command("pack", *arguments, status=2)["error"]["message"]
    assert not list(tmp_path.iterdir())


def test_what_tasks_need_is_found_by_the_metadata() -> None:
    chosen = set(distributions())
    assert {"stormproof", "pyarrow", "pandas", "numpy", "psycopg", "psycopg-binary", "deltalake", "obstore"} <= chosen
    assert not chosen & {"pyspark", "py4j", "delta-spark", "pytest", "mypy", "ruff", "mkdocs"}
    assert "ruff" in distributions(["ruff"])
