#!/bin/sh
# Installs the brokers that are packages of Debian: RabbitMQ. It changes the machine, so only .ci/run calls it; Kafka, Redis
# and NATS are installed by make setup, inside this folder. What cannot be installed is named, and is no failure: the tests
# of that broker are then left out.
set -u

program=${RABBITMQ_PROGRAM:-/usr/lib/rabbitmq/bin/rabbitmq-server}
seconds=${SECONDS_MAX:-180}

say() { printf 'brokers: %s\n' "$*"; }
left_out() {
    say "$*: RabbitMQ's tests are left out; install it with: apt-get install rabbitmq-server"
    exit 0
}

if [ -e "$program" ]; then
    say "RabbitMQ is installed"
    exit 0
fi
command -v apt-get >/dev/null 2>&1 || left_out "no apt-get here"
command -v timeout >/dev/null 2>&1 || left_out "no timeout here"
as_root=""
if [ "$(id -u)" != 0 ]; then
    sudo -n true 2>/dev/null || left_out "no right to install packages (neither root, nor sudo without a password)"
    as_root="sudo -n"
fi

# The service is not started: the tests start nodes of their own (RUNLEVEL is heeded by invoke-rc.d).
apt() {
    $as_root timeout --kill-after=10 "$seconds" env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get -qq -o Acquire::Retries=1 \
        -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20 -o DPkg::Lock::Timeout=60 "$@" </dev/null >/dev/null
}
say "installing RabbitMQ (at most $seconds s for each step)"
apt install -y --no-install-recommends rabbitmq-server 2>/dev/null ||
    { apt update && apt install -y --no-install-recommends rabbitmq-server; } ||
    left_out "apt-get could not install it"
[ -e "$program" ] || left_out "the package has no $program"
say "RabbitMQ is installed"
