"""The checks of `doctor --cluster`: what each of Spark's executors says of itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from stormproof.core.clock import SystemClock
from stormproof.core.engine.executor_look import PACKAGES
from stormproof.core.engine.executors import (
    SKEW_MAX_S,
    ExecutorAnswer,
    ExecutorAnswers,
    ask_executors,
    own_answer,
)
from stormproof.core.engine.spark import spark_session
from stormproof.core.object_probe import marked_places
from stormproof.core.preflight import DatabaseProbe, PackageProbe, Probe, package_fingerprint
from stormproof.core.settings import Settings

START_S: Final = 60.0
"""How long `doctor` waits for a first executor; a run waits for `start_timeout_s`."""

ANSWER_S: Final = 180.0
"""How long it waits for answers: an executor unpacks an environment of half a gigabyte before its first one."""

CheckParts: TypeAlias = tuple[str, bool, str, str | None]
"""The name, whether it is well, what was found, and what to do."""


@dataclass(frozen=True, slots=True)
class ExecutorReport:
    """One executor, for machines."""

    host: str
    executor: int
    python: str
    executable: str
    packages: dict[str, str]
    clock_ahead_s: float
    faults: list[str]


@dataclass(frozen=True, slots=True)
class Found:
    """The executors' answers beside the driver's own facts."""

    driver: ExecutorAnswer
    cluster: ExecutorAnswers
    spark: str
    master: str

    def __str__(self) -> str:
        asked = len(self.cluster.answers)
        return f"Spark {self.spark} on {self.master}; {asked} of {self.cluster.known} executors have answered"


def ask_cluster(settings: Settings, *, with_database: bool) -> Found:
    """Start Spark, ask every executor, and stop it.

    Raises:
        StormproofError: Spark, or a worker, does not start.
    """
    session = spark_session(settings)
    try:
        with marked_places([("the staging folder", settings.staging_address)]) as folders:
            probes: list[Probe] = [PackageProbe(package_fingerprint()), *folders]
            if with_database:
                probes.append(DatabaseProbe("the ledger's database", settings.resolve_database()))
            answers = ask_executors(session, probes, SystemClock(), start_s=START_S, answer_s=ANSWER_S)
        return Found(own_answer(), answers, session.version, str(session.sparkContext.master))
    finally:
        session.stop()


def checks_of(found: Found) -> Iterator[CheckParts]:
    """A check for each executor, and what else is worth a warning."""
    for answer in found.cluster.answers:
        name = f"executor {answer.host}/{answer.executor}"
        if answer.faults:
            yield name, False, "; ".join(fault.message for fault in answer.faults), None
            continue
        packages = ", ".join(f"{package} {version}" for package, version in answer.packages.items())
        notes = list(_notes(found.driver, answer))
        yield name, True, f"Python {answer.python} at {answer.executable}; {packages}", "; ".join(notes) or None
    silent = found.cluster.known - len(found.cluster.answers)
    if silent > 0:
        yield (
            "executors that were not asked",
            True,
            str(silent),
            "they are busy with other work, or have just come: ask again",
        )


def _notes(driver: ExecutorAnswer, answer: ExecutorAnswer) -> Iterator[str]:
    for package in PACKAGES:
        mine, theirs = driver.packages.get(package), answer.packages.get(package)
        if theirs != mine:
            yield f"{package} is {theirs} there and {mine} here: install the same version"
    if abs(answer.skew_s) > SKEW_MAX_S:
        way = "ahead of" if answer.skew_s > 0 else "behind"
        yield f"its clock is at least {abs(answer.skew_s):.1f} s {way} the driver's: synchronise both (NTP)"


def reports_of(found: Found) -> list[ExecutorReport]:
    """The executors, for machines."""
    return [
        ExecutorReport(
            answer.host,
            answer.executor,
            answer.python,
            answer.executable,
            answer.packages,
            round(answer.skew_s, 3),
            [fault.message for fault in answer.faults],
        )
        for answer in found.cluster.answers
    ]
