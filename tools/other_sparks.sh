#!/usr/bin/env bash
# Runs the tests that rest on Spark with the PySparks that are served beside that of the set-up: other_sparks.sh [VERSION...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tests=(spark_engine spark_robust delta_by_spark foreach_batch foreach_upserts once spark_crashes in_flight_spark
    kept_by_spark compaction_by_spark executors_elsewhere)
files=("${tests[@]/#/tests/integration/test_}")
versions=("${@:-4.2.1}")
[ $# -gt 0 ] || versions+=(4.1.4 4.0.5 3.5.9)
failed=()

for version in "${versions[@]}"; do
    folder=build/spark-$version
    if ! [ -e "$folder/ready" ]; then
        rm -rf "$folder"
        cp -a .venv "$folder"
        "$folder/bin/python" -m pip install --quiet --no-deps "pyspark==$version"
        "$folder/bin/python" -m stormproof jars # this Spark's, in the user's folder: those of the clone are not taken
        touch "$folder/ready"
    fi
    echo "PySpark $version"
    # Older ones leave a socket to the garbage collector, and warn of what Python will remove.
    "$folder/bin/python" -m pytest -W ignore "${files[@]/%/.py}" || failed+=("$version")
done
[ ${#failed[@]} -eq 0 ] || { echo "failed with: ${failed[*]}"; exit 1; }
