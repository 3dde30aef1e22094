#!/bin/sh
# Installs what tests need and what is a package of Debian: RabbitMQ; Chromium, which drives the page; promtool, which checks
# the alerts; ip, by which a cluster's hosts get a network. It changes the machine, so only .ci/run calls it; all else is installed by make setup, inside this folder. What
# cannot be installed is named, and is no failure: its tests are then left out. Arguments: which of them; default: all.
set -u

seconds=${SECONDS_MAX:-180}

say() { printf 'programs: %s\n' "$*"; }
# What is installed: $what in words, $program by path or name, $packages of Debian.
left_out() { say "$*: $what's tests are left out; install it with: apt-get install $packages"; }
there() { command -v "$program" >/dev/null 2>&1; }

# No service is started: the tests start servers of their own (RUNLEVEL is heeded by invoke-rc.d).
apt() {
    $as_root timeout --kill-after=10 "$seconds" env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get -qq -o Acquire::Retries=1 \
        -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20 -o DPkg::Lock::Timeout=60 "$@" </dev/null >/dev/null
}

install() {
    if there; then
        say "$what is installed"
        return
    fi
    command -v apt-get >/dev/null 2>&1 || { left_out "no apt-get here"; return; }
    command -v timeout >/dev/null 2>&1 || { left_out "no timeout here"; return; }
    as_root=""
    if [ "$(id -u)" != 0 ]; then
        sudo -n true 2>/dev/null || { left_out "no right to install packages (neither root, nor sudo without a password)"; return; }
        as_root="sudo -n"
    fi
    say "installing $what (at most $seconds s for each step)"
    # shellcheck disable=SC2086 # the packages are words
    apt install -y --no-install-recommends $packages 2>/dev/null ||
        { apt update && apt install -y --no-install-recommends $packages; } ||
        { left_out "apt-get could not install it"; return; }
    there || { left_out "the package has no $program"; return; }
    say "$what is installed"
}

for one in ${*:-rabbitmq chromium promtool ip}; do
    case $one in
    rabbitmq) what=RabbitMQ program=${RABBITMQ_PROGRAM:-/usr/lib/rabbitmq/bin/rabbitmq-server} packages=rabbitmq-server ;;
    chromium) what=Chromium program=${CHROMEDRIVER_PROGRAM:-chromedriver} packages="chromium chromium-driver" ;;
    promtool) what=promtool program=${PROMTOOL_PROGRAM:-promtool} packages=prometheus ;;
    ip) what=ip program=${IP_PROGRAM:-ip} packages=iproute2 ;;
    *) say "no program $one is known here: rabbitmq, chromium, promtool, ip" && exit 2 ;;
    esac
    install
done
