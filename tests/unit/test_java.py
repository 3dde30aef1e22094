"""What Spark needs beside Python: which Java is taken, the wheel's wrapped, and Delta's jars checked before use."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from stormproof.core.engine import java
from stormproof.core.errors import SettingsError

FAKE = """#!/bin/sh
if [ "$1" = -XshowSettings:properties ]; then
    echo "    java.home = {home}" >&2
    echo "    java.specification.version = {version}" >&2
else
    for a in "$@"; do echo "<$a>"; done
fi
"""


def fake_java(home: Path, version: str) -> Path:
    (home / "bin").mkdir(parents=True)
    (home / "lib").mkdir()
    program = home / "bin" / "java"
    program.write_text(FAKE.format(home=home, version=version))
    program.chmod(0o755)
    return home


@pytest.fixture(autouse=True)
def no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(java, "_CLONE", tmp_path / "clone")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    (tmp_path / "clone").mkdir()
    (tmp_path / "clone" / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)


def test_java_home_comes_first_then_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_path, named = fake_java(tmp_path / "a", "21"), fake_java(tmp_path / "b", "17")
    monkeypatch.setenv("PATH", f"{on_path}/bin:/bin")
    assert java.find_java() == java.Java(on_path, 21)
    monkeypatch.setenv("JAVA_HOME", str(named))
    assert java.find_java() == java.Java(named, 17)


def test_one_that_spark_does_not_run_on_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_path, old = fake_java(tmp_path / "a", "17"), fake_java(tmp_path / "b", "1.8")
    monkeypatch.setenv("PATH", f"{on_path}/bin:/bin")
    monkeypatch.setenv("JAVA_HOME", str(old))
    assert java.java_home() == on_path


def test_none_at_all_says_what_was_seen_and_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "a", "11")))
    with pytest.raises(SettingsError, match=r"JAVA_HOME: .*/a/bin/java is Java 11; install .*stormproof\[java\]"):
        java.find_java()


def test_the_wheels_java_is_wrapped_so_that_spark_starts_on_it(tmp_path: Path) -> None:
    real = fake_java(tmp_path / "it's real", "21")
    home = java.wrapped_home(real)
    assert java.wrapped_home(real) == home
    assert [p.name for p in home.parent.iterdir()] == [home.name]
    assert (home / "lib").resolve() == real / "lib"
    arguments = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "a b", "", "--add-modules=x"]
    command = [str(home / "bin/java"), *arguments]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PATH": "/bin"})
    assert answer.stdout.splitlines() == ["<-Xmx1g>", "<a b>", "<>", "<--add-modules=x>"]


def jars(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"jar")
    return folder


def test_jars_are_looked_for_here_and_in_the_clone(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"\.jars: no such folder; .*clone/\.jars: no such folder.*make setup"):
        java.delta_jars()
    clone = jars(tmp_path / "clone/.jars", "delta-spark_4.2.jar", "delta-storage.jar")
    assert java.delta_jars() == [clone / "delta-spark_4.2.jar", clone / "delta-storage.jar"]
    here = jars(tmp_path / ".jars", "a.delta-spark.jar", "b.delta-storage.jar")
    assert java.delta_jars() == [here / "a.delta-spark.jar", here / "b.delta-storage.jar"]


def test_a_folder_that_was_filled_is_checked_against_its_list(tmp_path: Path) -> None:
    folder = jars(tmp_path / "jars", "delta-spark.jar", "delta-storage.jar")
    (folder / java.MANIFEST).write_text(json.dumps({"jars": {"delta-spark.jar": 3, "delta-storage.jar": 3}}))
    assert len(java.delta_jars(folder)) == 2
    (folder / "delta-spark.jar").write_bytes(b"ja")
    with pytest.raises(SettingsError, match=r"missing or cut off: delta-spark\.jar.*fetch_jars"):
        java.delta_jars(folder)


def test_a_folder_of_ones_own_needs_the_main_jars(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no jar of delta-storage"):
        java.delta_jars(jars(tmp_path / "jars", "delta-spark.jar"))
