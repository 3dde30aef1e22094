"""What executors say of themselves, and what a start makes of it, without Spark."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from stormproof.core.base.clock import ManualClock
from stormproof.core.base.errors import MachineUnavailable, MachineUnfit, StormproofError, UsageError
from stormproof.core.engine import executor_look, executors
from stormproof.core.engine.executors import ExecutorAnswer, ExecutorAnswers, first_fault_of, own_answer
from stormproof.core.engine.spark_error import raised_by_job
from stormproof.core.start.preflight import PackageProbe
from stormproof.trident.cli.doctor import MachineFacts, checks_of
from stormproof.trident.cli.options import spark_options


@dataclass(frozen=True)
class Broken:
    """A probe that fails."""

    error: StormproofError

    def probe(self) -> None:
        raise self.error


def test_a_look_needs_the_standard_library_alone_and_says_what_is_missing() -> None:
    code = (
        "import importlib.util, sys; spec = importlib.util.spec_from_file_location('look', sys.argv[1]);"
        "look = importlib.util.module_from_spec(spec); spec.loader.exec_module(look); print(look.looked(b'', 0.0))"
    )
    command = [sys.executable, "-I", "-S", "-c", code, executor_look.__file__]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    answer = executors.answer_of(json.loads(done.stdout), 0.0, float("inf"))
    (fault,) = answer.faults
    assert isinstance(fault, MachineUnfit)
    assert fault.details["modules"] == [*executor_look.PACKAGES, "stormproof"]
    assert sys.executable in fault.message
    assert own_answer().faults == ()  # the control: this Python has everything


def test_each_probe_that_fails_is_told() -> None:
    probes = (Broken(MachineUnavailable("a full disk")), Broken(MachineUnfit("no right")), PackageProbe("0" * 64))
    told = json.loads(executor_look.looked(pickle.dumps(probes), 0.0))
    answer = executors.answer_of(told, 0.0, float("inf"))
    assert [type(fault) for fault in answer.faults] == [MachineUnavailable, MachineUnfit, MachineUnfit]
    first = first_fault_of(ExecutorAnswers((replace(answer, faults=()), answer), 2))
    assert first is not None
    assert first.message == "no right"
    assert first_fault_of(ExecutorAnswers((replace(answer, faults=()),), 1)) is None


@pytest.mark.parametrize(("time_s", "skew_s"), [(10.0, 0.0), (12.0, 0.0), (15.5, 3.5), (8.0, -2.0)])
def test_a_clock_is_wrong_by_as_much_as_it_lies_outside_of_the_question(time_s: float, skew_s: float) -> None:
    told = json.loads(executor_look.looked(pickle.dumps(()), 0.0)) | {"time_s": time_s}
    assert executors.answer_of(told, 10.0, 12.0).skew_s == skew_s


def session_with(executors: list[str], **conf: str) -> Any:
    """As much of a session as is asked for its executors."""
    infos = [SimpleNamespace(host=lambda host=host: host) for host in ["driver1", *executors]]
    tracker = SimpleNamespace(getExecutorInfos=lambda: infos)
    scala = SimpleNamespace(statusTracker=lambda: tracker)
    settings = {"spark.master": "spark://m:7077", "spark.driver.host": "driver1"} | conf
    context = SimpleNamespace(_jsc=SimpleNamespace(sc=lambda: scala), getConf=lambda: settings)
    return SimpleNamespace(sparkContext=context)


def test_a_start_waits_for_an_executor_within_a_bound() -> None:
    clock = ManualClock()
    with pytest.raises(MachineUnavailable, match=r"no executor of spark://m:7077 has come to the driver \(driver1\)"):
        executors.wait_for_executors(session_with([]), clock, 60.0)
    assert 60.0 <= clock.monotonic_s() < 61.0
    assert executors.wait_for_executors(session_with(["a", "driver1"]), clock, 0.0) == ["a", "driver1"]
    on_demand = session_with([], **{"spark.dynamicAllocation.enabled": "true"})
    assert executors.wait_for_executors(on_demand, clock, 0.0) == []  # the job itself has them started


def test_the_doctor_names_the_host_and_what_differs() -> None:
    here = own_answer()
    well = replace(here, host="a", skew_s=3.0, packages=here.packages | {"pyarrow": "1.0"})
    sick = replace(here, host="b", faults=(MachineUnfit("b cannot import pyarrow"),))
    checks = list(checks_of(MachineFacts(here, ExecutorAnswers((well, sick), 3), "4.2.0", "spark://m:7077")))
    assert [(check.name.split("/")[0], check.ok) for check in checks] == [
        ("executor a", True),
        ("executor b", False),
        ("executors that were not asked", True),
    ]
    assert "pyarrow is 1.0 there" in str(checks[0].advice)
    assert "3.0 s ahead" in str(checks[0].advice)
    same = ExecutorAnswer("c", 1, here.python, here.executable, here.packages, 0.2, ())
    (check,) = checks_of(MachineFacts(here, ExecutorAnswers((same,), 1), "4.2.0", "spark://m:7077"))
    assert check.advice is None


def test_a_fault_that_spark_reports_names_its_host() -> None:
    text = (
        "Job aborted due to stage failure: Task 0 in stage 0.0 failed 4 times, most recent failure: Lost task 0.3 in stage "
        '0.0 (TID 4) (10.0.0.7 executor 1): java.io.IOException: Cannot run program "/no/python": error=2'
    )
    fault = raised_by_job(OSError(text))
    assert isinstance(fault, MachineUnfit)
    assert fault.details["host"] == "10.0.0.7"
    hostless = raised_by_job(OSError("[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.12"))
    assert executors.with_hosts(["b", "a", "a"], hostless).details["host"] == "a, b"
    assert executors.with_hosts(["b"], fault) is fault


def test_a_wrong_option_of_sparks_is_refused_without_its_value() -> None:
    assert spark_options(["spark.a=1", "spark.a=2", "spark.b="]) == {"spark.a": "2", "spark.b": ""}
    for text in ("hadoop.fs.s3a.secret.key=hush", " spark.a=hush", "spark.a"):
        with pytest.raises(UsageError, match="write NAME=VALUE") as error:
            spark_options([text])
        assert "hush" not in str(error.value)
