#!/usr/bin/env bash
# Runs the tests that rest on Spark with other packages than the set-up has: other_versions.sh [REQUIREMENT...]
# `lowest` is each package at the lower bound that pyproject.toml names, `newest` the newest that it allows; with these
# tests/unit and tests/migrations run, too. `drawn` is one of the Sparks and 60 of the tests, drawn by the commit;
# `drawn-set-up` only installs it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tests=(spark_engine spark_robust delta_by_spark foreach_batch foreach_upserts once spark_crashes in_flight_spark
    kept_by_spark compaction_by_spark executors_elsewhere)
tests=("${tests[@]/#/tests/integration/test_}")
sparks=(pyspark==4.2.1 pyspark==4.1.4 pyspark==4.0.5 pyspark==3.5.9)
wanted=("$@")
arguments=()
[ $# -gt 0 ] || wanted=("${sparks[@]}" 'pandas>=3' lowest newest)
if [[ "$*" = drawn* ]]; then
    tree=$(git rev-parse 'HEAD^{tree}')
    wanted=("${sparks[0x${tree:0:7} % ${#sparks[@]}]}")
    arguments=(--drawn=60 -n 2 --dist loadgroup)
fi
failed=()

lower_bounds() {
    .venv/bin/python - <<'END'
import re, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
for one in sum(project["optional-dependencies"].values(), project["dependencies"]):
    print(re.sub(r"(\[.*\])?>=([^,]+).*", r"==\2", one))
END
}

for one in "${wanted[@]}"; do
    files=("${tests[@]/%/.py}")
    case "$one" in
        # Pages are made with the set-up's packages.
        lowest | newest) files+=(tests/unit tests/migrations "--deselect=tests/unit/test_docs.py::test_a_page_made_from_the_code_is_current") ;;
    esac
    folder=build/with-${one//[^a-z0-9.]/-}
    if ! [ -e "$folder/ready" ]; then
        rm -rf "$folder"
        mkdir -p build
        cp -al .venv "$folder" # pip makes files anew, and writes into none
        install=("$folder/bin/python" -m pip install --quiet)
        everything=(--upgrade --upgrade-strategy eager --editable . --group dev)
        case "$one" in
            lowest)
                lower_bounds >"$folder/bounds"
                # delta-spark, which only tests use, would not have the oldest PySpark.
                "${install[@]}" "${everything[@]}" --constraint <(grep -v ^pyspark== "$folder/bounds")
                "${install[@]}" --no-deps "$(grep ^pyspark== "$folder/bounds")"
                ;;
            newest) "${install[@]}" "${everything[@]}" ;;
            *) "${install[@]}" --no-deps "$one" ;;
        esac
        "$folder/bin/python" -m stormproof jars # this Spark's, in the user's folder: those of the clone are not taken
        touch "$folder/ready"
    fi
    echo "$one"
    [ "$*" != drawn-set-up ] || continue
    # Older Sparks leave a socket to the garbage collector, and warn of what Python will remove.
    tools/run_tests.sh "$folder/bin/python" -m pytest -W ignore "${arguments[@]}" "${files[@]}" || failed+=("$one")
done
[ ${#failed[@]} -eq 0 ] || { echo "failed with: ${failed[*]}"; exit 1; }
