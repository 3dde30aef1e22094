"""Which settings a Spark session gets: ours, the user's, and what was submitted.

A user's own settings go before ours: `spark.*` in `stormproof.toml`, ``--conf`` of `stormproof run`, and what `spark-submit`
set.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stormproof.core.base.errors import SettingsError

if TYPE_CHECKING:
    from stormproof.core.start.settings import Settings

CHECKSUMS: Final = {
    # User code need not be deterministic, and Spark assumes that it is. These checksums detect a repeated map task whose
    # output differs; everything that read the old output then runs again. A topology's own exchange detects that by itself.
    "spark.sql.shuffle.orderIndependentChecksum.enabled": "true",
    "spark.sql.shuffle.orderIndependentChecksum.enableFullRetryOnMismatch": "true",
    "spark.shuffle.push.enabled": "false",  # turns the checksums off
}
"""Spark has them from 4.1 on; see `spark_lines.SparkLine.sees_repeated_tasks`."""

REQUIRED_BY_QUERIES: Final = {**CHECKSUMS, "spark.speculation": "false"}
"""What Spark must have where a user's own query computes the rows, as in `once` and `exactly_once`."""

SETTINGS: Final = {
    **REQUIRED_BY_QUERIES,
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled": "false",
    "spark.python.worker.faulthandler.enabled": "true",
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.databricks.delta.snapshotPartitions": "2",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}

ON_ONE_MACHINE: Final = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.log.level": "OFF",  # the error that the driver raises says what failed
}
"""Where Spark runs inside the driver."""

ELSEWHERE: Final = {
    # Spark's defaults notice after 120 s that a driver and an executor do not hear each other, and look every 60 s: a batch
    # then waits for up to 3 minutes. After 20 s its tasks run again elsewhere.
    "spark.network.timeout": "20s",
    "spark.network.timeoutInterval": "5s",
    # Several heartbeats must fit into the time-out, so that one that is late gives nobody up.
    "spark.executor.heartbeatInterval": "3s",
    # By default an executor ends itself after 60 heartbeats that nobody answered. With these shorter ones that is 3 minutes,
    # in which tasks of a job that was given up hold cores and write files. 60 s is as long as a run waits for a store.
    "spark.executor.heartbeat.maxFailures": "20",
    # A driver that is busy answers late. Without this the time for an answer would follow the shorter network time-out.
    "spark.rpc.askTimeout": "60s",
    # How often a task may fail before its job does, as Spark's default: losing an executor twice ends no job.
    "spark.task.maxFailures": "4",
    # Executors that die in a loop show nowhere else.
    "spark.log.level": "WARN",
}
"""Where executors are other processes, on this or on other machines."""

LISTS: Final = ("spark.jars", "spark.jars.packages", "spark.sql.extensions")
"""A user's values of these are added to ours."""

HIDDEN_NAMES: Final = (
    r"secret|passw|passphrase|token|[._]sas[._]|(?:access|account|api|encryption|private|shared|storage)[._-]?key"
    r"|database_url|storage_options|stormproof_spark|connection[._]?string"
)
"""Settings with such names hold secrets: Spark's own default, what stores' keys are called, and variables of executors."""

HIDDEN_VALUES: Final = (
    r"(?<!abfss|wasbs)(?<!abfs|wasb)://[^\s/@]+@"  # before the @ of an address of Azure's stands a container
    r"|(?:password|passwd|pwd|sig|AccountKey|SharedAccessKey)="
)
"""Values with secrets: an address with a password or a token, a signed query, a connection string."""

REDACTION: Final = "spark.redaction.regex"
"""Spark's setting for what it hides in its page and its logs: where this is found, in a name or in a value."""

AT_START: Final = ("spark.driver.", "spark.jars", "spark.submit.")
"""What Spark reads while its JVM starts, from the command line alone: hidden there by their names, not by their values."""


def is_local(master: str) -> bool:
    """Whether a master's executors run inside the driver's own process."""
    return master == "local" or master.startswith("local[")


def session_settings(
    settings: Settings, jars: Sequence[Path], submitted: Mapping[str, str], environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """All settings of a new session.

    A user's value goes before ours; `submitted` are those that `spark-submit` gave the process, and `environment` are its
    variables (default: this process's).

    Raises:
        SettingsError: the master is given as a setting; they ask for Spark Connect, or for a driver elsewhere; or
            `spark.redaction.regex` is no regular expression.
    """
    environment = os.environ if environment is None else environment
    if "spark.master" in settings.spark:
        raise SettingsError(
            "spark.master is given as a setting of Spark's; name the master by STORMPROOF_MASTER, or by master in "
            "stormproof.toml",
            setting="spark.master",
        )
    master = submitted.get("spark.master", settings.master)
    ours = {
        **(ON_ONE_MACHINE if is_local(master) else ELSEWHERE),
        **SETTINGS,
        "spark.jars": ",".join(map(str, jars)),
        "spark.sql.warehouse.dir": str(settings.home.absolute() / "spark-warehouse"),
    }
    if settings.spark.get("spark.submit.deployMode", "client") != "client":
        raise SettingsError(
            "spark.submit.deployMode=cluster was set for Spark; this process is the driver: take it away, or have "
            "spark-submit start a program of yours in the cluster that calls topology.run()",
            setting="spark.submit.deployMode",
        )
    theirs = {**submitted, **settings.spark}
    _refuse_spark_connect(master, theirs, environment)
    for name in LISTS:
        parts = [part.strip() for part in (*ours.get(name, "").split(","), *theirs.get(name, "").split(","))]
        if name in theirs:
            theirs[name] = ",".join(dict.fromkeys(part for part in parts if part))
    return {**ours, **theirs, REDACTION: _redaction(theirs.get(REDACTION)), "spark.master": master}


def _redaction(theirs: str | None) -> str:
    """What Spark hides: what we know of, and what the user's own expression finds."""
    ours = f"(?i:{HIDDEN_NAMES}|{HIDDEN_VALUES})"
    try:
        return ours if theirs is None else re.compile(f"{re.compile(theirs).pattern}|{ours}").pattern
    except re.error as error:
        raise SettingsError(
            f"{REDACTION} is no regular expression that Python reads, too: {error}", setting=REDACTION
        ) from error


def without_secrets(settings: Mapping[str, str]) -> dict[str, str]:
    """The settings that may be on a command line, which everybody on a machine sees.

    Left out are those whose name `spark.redaction.regex` matches, and those whose value has a secret, but for what Spark
    reads from the command line alone (`AT_START`).
    """
    hidden = re.compile(settings[REDACTION])
    secret = re.compile(HIDDEN_VALUES, re.IGNORECASE)
    return {
        name: value
        for name, value in settings.items()
        if not hidden.search(name) and (name.startswith(AT_START) or not secret.search(value))
    }


def _refuse_spark_connect(master: str, theirs: Mapping[str, str], environment: Mapping[str, str]) -> None:
    """Refuse what would make a session of Spark Connect.

    Its client has no JVM and no RDDs, which jobs are made of; and Spark ends no job when such a client's process ends.
    """
    asked = {
        f"the master {master}": master.startswith("sc://"),
        "spark.remote": "spark.remote" in theirs,
        "spark.api.mode=connect": theirs.get("spark.api.mode", "").lower() == "connect",
        "the variable SPARK_REMOTE": bool(environment.get("SPARK_REMOTE")),
        "the variable SPARK_API_MODE": environment.get("SPARK_API_MODE", "").lower() == "connect",
        "the variable SPARK_CONNECT_MODE_ENABLED": "SPARK_CONNECT_MODE_ENABLED" in environment,
    }
    for what, is_set in asked.items():
        if is_set:
            raise SettingsError(
                f"{what} asks for Spark Connect, which is not supported: the driver must be this process, with Spark's JVM "
                "beside it. Take it away, and name the cluster itself, as in STORMPROOF_MASTER=spark://HOST:7077",
                setting=what,
            )
