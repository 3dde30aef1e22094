#!/usr/bin/env bash
# Runs the tests that rest on Spark with other packages than the set-up has: other_versions.sh [REQUIREMENT...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tests=(spark_engine spark_robust delta_by_spark foreach_batch foreach_upserts once spark_crashes in_flight_spark
    kept_by_spark compaction_by_spark executors_elsewhere)
files=("${tests[@]/#/tests/integration/test_}")
wanted=("$@")
[ $# -gt 0 ] || wanted=(pyspark==4.2.1 pyspark==4.1.4 pyspark==4.0.5 pyspark==3.5.9 'pandas>=3')
failed=()

for one in "${wanted[@]}"; do
    folder=build/with-${one//[^a-z0-9.]/-}
    if ! [ -e "$folder/ready" ]; then
        rm -rf "$folder"
        cp -a .venv "$folder"
        "$folder/bin/python" -m pip install --quiet --no-deps "$one"
        "$folder/bin/python" -m stormproof jars # this Spark's, in the user's folder: those of the clone are not taken
        touch "$folder/ready"
    fi
    echo "$one"
    # Older Sparks leave a socket to the garbage collector, and warn of what Python will remove.
    "$folder/bin/python" -m pytest -W ignore "${files[@]/%/.py}" || failed+=("$one")
done
[ ${#failed[@]} -eq 0 ] || { echo "failed with: ${failed[*]}"; exit 1; }
