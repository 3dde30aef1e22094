"""What differs between the lines of Spark that are served."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

from stormproof.core.base.errors import SettingsError


@dataclass(frozen=True, slots=True)
class SparkLine:
    """A minor version of Spark."""

    name: str
    delta: str
    """The Delta release with jars for it."""
    artifact: str
    """Delta's jar for it, as the Maven registry names it."""
    jars: int
    """How many jars Delta is, without those that Spark has."""
    sees_repeated_tasks: bool
    """Whether Spark compares what a repeated map task sends with what it sent before, by checksums; see
    `spark_settings.CHECKSUMS`.
    """


_LINES: Final = (
    SparkLine("3.5", "3.3.3", "delta-spark_2.12", 2, sees_repeated_tasks=False),
    SparkLine("4.0", "4.4.0", "delta-spark_4.0_2.13", 7, sees_repeated_tasks=False),
    SparkLine("4.1", "4.4.0", "delta-spark_4.1_2.13", 7, sees_repeated_tasks=True),
    SparkLine("4.2", "4.4.0", "delta-spark_4.2_2.13", 7, sees_repeated_tasks=True),
)


def spark_line() -> SparkLine:
    """The line of the PySpark that is here. The module is asked: a platform's Spark is not installed as a package.

    Raises:
        SettingsError: there is none, it is the client of Spark Connect alone, or not one of those that are served.
    """
    if find_spec("pyspark") is None or find_spec("py4j") is None:
        raise SettingsError(
            "there is no PySpark here with a Spark in it (pyspark-client is a client of Spark Connect, which is not "
            'supported); install pyspark, as in: pip install pyspark. engine="inline" runs without it'
        )
    import pyspark

    found = ".".join(pyspark.__version__.split(".")[:2])
    for line in _LINES:
        if line.name == found:
            return line
    raise SettingsError(
        f"PySpark {pyspark.__version__} is not served: Delta has no jars for it that were tried. Served are "
        f"{', '.join(line.name for line in _LINES)}; install one, as in: pip install 'pyspark=={_LINES[-1].name}.*'",
        pyspark=pyspark.__version__,
    )
