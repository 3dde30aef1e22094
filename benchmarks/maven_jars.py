"""Jars that a rival needs and we do not: copied by Maven at the first use."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]


def jars_of(pom: Path, name: str) -> tuple[Path, ...]:
    """The jars of a POM below `tools`, kept below `.brokers`; none where Maven cannot copy them."""
    folder = ROOT / ".brokers" / name
    done = folder / ".done"
    if not done.exists() and shutil.which("mvn") is not None:
        command = ["mvn", "-q", "-B", "-f", str(ROOT / pom), "dependency:copy-dependencies"]
        if subprocess.run([*command, f"-DoutputDirectory={folder}"], check=False).returncode == 0:
            done.touch()
    return tuple(sorted(folder.glob("*.jar"))) if done.exists() else ()


def kafka_jars() -> tuple[Path, ...]:
    """Spark's Kafka source."""
    return jars_of(Path("tools/kafka/spark.xml"), "kafka-spark")


def s3a_jars() -> tuple[Path, ...]:
    """Hadoop's file system of S3."""
    return jars_of(Path("tools/s3a/pom.xml"), "s3a-spark")
