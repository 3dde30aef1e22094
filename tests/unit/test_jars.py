"""Delta's jars: where they are looked for, whose they must be, whether they are whole, and what a failed fetch leaves."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import zipfile
from pathlib import Path

import pytest
from support.command_line import CommandLine

from stormproof.core.base.errors import SettingsError, StoreUnavailable
from stormproof.core.engine import delta_jars, java, spark_lines
from stormproof.core.engine.spark_lines import SparkLine, spark_line
from stormproof.core.start.settings import Settings
from stormproof.trident.driver.run import make_engine

LINE = SparkLine("4.2", "4.4.0", "delta-spark_4.2_2.13", 7, sees_repeated_tasks=True)


@pytest.fixture(autouse=True)
def places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(delta_jars, "spark_line", lambda: LINE)
    monkeypatch.setattr(java, "_CLONE", tmp_path / "clone")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "clone").mkdir()
    (tmp_path / "clone" / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)


def filled(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        with zipfile.ZipFile(folder / name, "w") as archive:
            archive.writestr("content", name)
    return folder


def listed(folder: Path) -> Path:
    """As `fetch` leaves a folder."""
    marks = {jar.name: hashlib.sha256(jar.read_bytes()).hexdigest() for jar in folder.glob("*.jar")}
    (folder / delta_jars.MANIFEST).write_text(json.dumps({"jars": marks}))
    return folder


MAIN = ("delta-spark_4.2_2.13.jar", "delta-storage.jar")


def test_they_are_looked_for_here_in_the_clone_and_in_the_users_own_folder(tmp_path: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"\.jars: no such folder; .*clone/\.jars: .*cache/.*fetch .*: stormproof jars"
    ):
        delta_jars.delta_jars()
    for place in (delta_jars.user_jars_folder(), tmp_path / "clone/.jars", tmp_path / ".jars"):
        filled(place, *MAIN)
        assert delta_jars.delta_jars() == [place / name for name in MAIN]


def test_a_folder_that_was_filled_is_checked_against_its_list(tmp_path: Path) -> None:
    folder = listed(filled(tmp_path / "jars", *MAIN))
    assert len(delta_jars.delta_jars(folder)) == 2
    content = bytearray((folder / MAIN[0]).read_bytes())
    content[-30] ^= 1  # its size stays
    (folder / MAIN[0]).write_bytes(content)
    with pytest.raises(SettingsError, match=rf"missing or cut off: {MAIN[0]}.*stormproof jars {folder}"):
        delta_jars.delta_jars(folder)


def test_a_folder_of_ones_own_needs_the_main_jars(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no jar of delta-storage"):
        delta_jars.delta_jars(filled(tmp_path / "jars", MAIN[0]))


def test_jars_for_another_line_of_spark_are_refused_by_name_and_replaced_by_a_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = "io.delta_delta-spark_4.1_2.13-4.4.0.jar"
    folder = listed(filled(tmp_path / "mine", old, MAIN[1]))
    with pytest.raises(
        SettingsError, match=rf"no jar of delta-spark_4\.2_2\.13\); fetch them with: stormproof jars {folder}"
    ):
        delta_jars.delta_jars(folder)
    monkeypatch.setattr(delta_jars, "_submit", lambda ivy, *_: answer(ivy, 7))
    monkeypatch.setattr("shutil.which", lambda _: "/bin/bash")
    assert delta_jars.fetch(folder).fetched
    assert not (folder / old).exists()


@pytest.mark.parametrize("what", [".jars", f".jars/{MAIN[0]}"])
def test_jars_that_others_may_write_are_refused_here_and_taken_where_they_are_named(tmp_path: Path, what: str) -> None:
    folder = filled(tmp_path / ".jars", *MAIN)
    (tmp_path / what).chmod(0o777)
    with pytest.raises(SettingsError, match=r"every user may write it.*STORMPROOF_DELTA_JARS_DIR"):
        delta_jars.delta_jars()
    assert len(delta_jars.delta_jars(folder)) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder away")
@pytest.mark.parametrize("linked", [False, True])
def test_jars_of_another_user_are_refused(tmp_path: Path, linked: bool) -> None:
    folder = filled(tmp_path / ("elsewhere" if linked else ".jars"), *MAIN)
    if linked:
        (tmp_path / ".jars").symlink_to(folder)
    os.chown(folder, 4711, 4711)
    with pytest.raises(SettingsError, match=r"\.jars is not used: it belongs to user 4711"):
        delta_jars.delta_jars()


def test_what_is_there_and_whole_is_not_fetched(
    tmp_path: Path, command: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # neither Java nor bash
    monkeypatch.delenv("JAVA_HOME", raising=False)
    folder = listed(filled(tmp_path / "mine", *MAIN))
    report = command("jars", str(folder))
    assert (report["folder"], report["fetched"], report["jars"]) == (str(folder), False, list(MAIN))
    (folder / MAIN[0]).unlink()
    assert "bash" in command("jars", str(folder), status=2)["error"]["message"]


def answer(folder: Path, number: int, *, torn: bool = False) -> subprocess.CompletedProcess[str]:
    filled(folder / "jars", *(f"{i}-delta-{'spark_4.2_2.13' if i else 'storage'}.jar" for i in range(number)))
    if torn:
        jar = folder / "jars" / "0-delta-storage.jar"
        jar.write_bytes(jar.read_bytes()[:-20])
    said = "resolving\nServer access error: Connection refused\n" if number == 0 else "done"
    return subprocess.CompletedProcess([], int(number == 0), said)


@pytest.mark.parametrize(("number", "torn"), [(0, False), (7, True)])
def test_a_fetch_that_fails_leaves_the_folder_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, torn: bool
) -> None:
    monkeypatch.setattr(delta_jars, "_submit", lambda ivy, *_: answer(ivy, number, torn=torn))
    folder = tmp_path / "mine"
    said = "Connection refused" if number == 0 else "6 of 7 jars are whole"
    with pytest.raises(StoreUnavailable, match=rf"{said}.*registry is reached"):
        delta_jars.fetch(folder)
    assert [path.name for path in folder.iterdir() if path.name != ".lock"] == []


def test_a_damaged_folder_is_filled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_jars, "_submit", lambda ivy, *_: answer(ivy, 7))
    monkeypatch.setattr("shutil.which", lambda _: "/bin/bash")
    assert delta_jars.fetch().folder == delta_jars.user_jars_folder()
    damaged = next(delta_jars.user_jars_folder().glob("*.jar"))
    damaged.write_bytes(b"")
    again = delta_jars.fetch()
    assert (again.fetched, len(again.jars), delta_jars.fetch().fetched) == (True, 7, False)
    assert zipfile.is_zipfile(damaged)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, command: CommandLine) -> None:
    (tmp_path / "file").touch()
    assert "Not a directory" in command("jars", str(tmp_path / "file/jars"), status=2)["error"]["message"]


def test_an_option_is_no_folder(tmp_path: Path, command: CommandLine) -> None:
    assert "Download Delta's jars" in command.text("jars", "--help")
    assert not (tmp_path / "--help").exists()


def test_the_client_of_spark_connect_alone_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_lines, "find_spec", lambda name: None if name == "py4j" else name)
    with pytest.raises(SettingsError, match=r"pyspark-client is a client of Spark Connect.*pip install pyspark"):
        make_engine("spark", Settings())


def test_a_spark_without_jars_that_were_tried_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspark.__version__", "4.9.1")
    with pytest.raises(
        SettingsError, match=r"PySpark 4\.9\.1 is not served.* Served are 3\.5, .*pip install 'pyspark=="
    ):
        spark_line()
