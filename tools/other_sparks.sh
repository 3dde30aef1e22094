#!/usr/bin/env bash
# Runs the tests that rest on Spark with PySparks that are served, and are not that of the set-up: other_sparks.sh [VERSION...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tests=(spark_engine spark_robust delta_by_spark foreach_batch foreach_upserts once spark_crashes in_flight_spark
    kept_by_spark compaction_by_spark executors_elsewhere)

for version in "${@:-4.1.4}"; do
    folder=build/spark-$version
    if ! [ -e "$folder/ready" ]; then
        rm -rf "$folder"
        cp -a .venv "$folder"
        "$folder/bin/python" -m pip install --quiet --no-deps "pyspark==$version"
        "$folder/bin/python" -m stormproof jars # this Spark's, in the user's folder: those of the clone are not taken
        touch "$folder/ready"
    fi
    # Its PySpark leaves a socket to the garbage collector.
    files=("${tests[@]/#/tests/integration/test_}")
    "$folder/bin/python" -m pytest -W ignore::ResourceWarning "${files[@]/%/.py}"
done
