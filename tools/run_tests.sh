#!/usr/bin/env bash
# Runs the tests (the given command, a pytest) with their temporary files in memory, where there is room for them: the
# tests force thousands of files to the disk, and wait for it each time. Elsewhere they are where pytest puts them.
# What failed tests leave is moved to the temporary folder of the disk; databases are not kept.
# Once after each set-up it makes an archive of Spark's classes, with which each of the tests' JVMs starts faster; without
# a command it does only that.
set -euo pipefail

clone=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if ! [ "$clone/build/tests.jsa" -nt "$clone/.venv/.stormproof-set-up" ]; then
    rm -f "$clone"/build/tests.*
    "$clone/.venv/bin/python" "$clone/tests/support/jvm.py" || true # slower without
fi

[ "$#" -gt 0 ] || exit 0

memory=${TESTS_IN-/dev/shm} # make test TESTS_IN= : on the disk
need_kib=$((6 * 1024 * 1024)) # twice the most that the whole suite was seen to take

free_kib() { df -k --output=avail "$memory" | tail -n 1; }
available_kib() { sed -n 's/^MemAvailable: *\([0-9]*\) kB$/\1/p' /proc/meminfo; }

if ! [ -w "$memory" ] || [ "$(free_kib)" -lt "$need_kib" ] || [ "$(available_kib)" -lt "$need_kib" ]; then
    exec "$@"
fi

folder=$(mktemp -d "$memory/st-XXXXXX") # short: Postgres's sockets have paths of 107 bytes at most
trap 'rm -rf "$folder"' EXIT
chmod 755 "$folder" # root's Postgres may run as nobody, who has to reach its data

status=0
"$@" --basetemp="$folder/r" -o tmp_path_retention_policy=failed || status=$?
if [ "$status" = 1 ]; then # a test failed
    find "$folder" -path '*/postgres/data' -prune -exec rm -rf {} +
    kept=$(mktemp -d "${TMPDIR:-/tmp}/stormproof-tests-XXXXXX")
    cp -a "$folder/r" "$kept"
    echo "what the failed tests left: $kept"
fi
exit "$status"
