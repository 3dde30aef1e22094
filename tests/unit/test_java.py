"""Which Java Spark gets, and how the one that comes as a package is wrapped."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from stormproof.core.base.errors import SettingsError
from stormproof.core.engine import java

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
    assert java.find_java().home == on_path


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


def test_outside_a_clone_the_wrapper_is_in_the_users_own_place_and_not_in_the_working_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(java, "_CLONE", tmp_path / "site-packages")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / ".java").mkdir()
    home = java.wrapped_home(fake_java(tmp_path / "real", "21"))
    assert home.parent == tmp_path / "cache/stormproof/java"
    assert list((tmp_path / ".java").iterdir()) == []
