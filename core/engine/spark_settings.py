"""Which settings a Spark session gets: those that exactly-once rests on, ours, the user's, and what was submitted.

A user's own settings pass through: `spark.*` in `stormproof.toml`, ``--conf`` of `stormproof run`, and what `spark-submit`
set. Only those that exactly-once rests on are fixed, and another value is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stormproof.core.errors import SettingsError

if TYPE_CHECKING:
    from stormproof.core.settings import Settings

REQUIRED: Final = {
    # User code need not be deterministic, and Spark assumes that it is. These checksums detect a repeated map task whose
    # output differs; everything that read the old output then runs again.
    "spark.sql.shuffle.orderIndependentChecksum.enabled": "true",
    "spark.sql.shuffle.orderIndependentChecksum.enableFullRetryOnMismatch": "true",
    "spark.shuffle.push.enabled": "false",  # turns the checksums off
    "spark.speculation": "false",
}
"""Without these settings the engine refuses to start."""

SETTINGS: Final = {
    **REQUIRED,
    "spark.sql.adaptive.enabled": "false",  # it would merge the tasks after a small exchange into one
    "spark.sql.execution.arrow.pyspark.validateSchema.enabled": "true",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "64",  # a row between stages is a chunk of thousands of rows
    "spark.sql.execution.arrow.maxBytesPerBatch": str(64 * 2**20),
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled": "false",
    "spark.python.worker.faulthandler.enabled": "true",
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.python.sql.dataFrameDebugging.enabled": "false",  # it calls the JVM once for each column that is named
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
    # Spark's defaults notice after 120 s that a driver and an executor do not hear each other.
    "spark.network.timeout": "20s",
    "spark.network.timeoutInterval": "5s",
    "spark.executor.heartbeatInterval": "3s",
    # Executors that die in a loop show nowhere else.
    "spark.log.level": "WARN",
}
"""Where executors are other processes, on this or on other machines."""

LISTS: Final = ("spark.jars", "spark.jars.packages", "spark.sql.extensions")
"""A user's values of these are added to ours."""


def is_local(master: str) -> bool:
    """Whether a master's executors run inside the driver's own process."""
    return master == "local" or master.startswith("local[")


def session_settings(settings: Settings, jars: Sequence[Path], submitted: Mapping[str, str]) -> dict[str, str]:
    """All settings of a new session.

    A user's value goes before ours; `submitted` are those that `spark-submit` gave the process.

    Raises:
        SettingsError: a setting that exactly-once rests on has another value, or the master is given as one.
    """
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
    theirs = {**submitted, **settings.spark}
    for name, value in REQUIRED.items():
        if theirs.get(name, value) != value:
            raise SettingsError(
                f"{name}={theirs[name]} was set for Spark; exactly-once rests on {value}: take it away", setting=name
            )
    for name in LISTS:
        parts = [part.strip() for part in (*ours.get(name, "").split(","), *theirs.get(name, "").split(","))]
        if name in theirs:
            theirs[name] = ",".join(dict.fromkeys(part for part in parts if part))
    return {**ours, **theirs, "spark.master": master}
