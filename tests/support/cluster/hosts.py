"""Hosts of a network that the test makes itself: each has network, mounts, processes and name of its own.

A host is a set of namespaces of this kernel. Its root is read-only, its temporary folders are its own, and its disk
(`DISK`) is a folder that no other host sees. All traffic stays inside these namespaces; they end with this process.
"""

from __future__ import annotations

import ipaddress
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psutil
import pytest

from support.brokers import LEFT_OUT

NETWORK: Final = ipaddress.ip_network("10.77.0.0/24")
"""Addresses of hosts. They exist in the test's own namespaces alone."""

DISK: Final = "/mnt/disk"
"""A host's own disk, as it is called there."""

PROGRAMS: Final = ("ip", "unshare", "nsenter", "setpriv", "mount")
NOWHERE: Final = "02:00:00:00:00:fe"
"""A hardware address that nobody has: what is sent there is lost without a word."""

_UNSHARE: Final = ("unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
_CLIP: Final = 4_000
_SETUP: Final = """
hostname {name}
mount -t tmpfs -o mode=755 tmpfs /mnt
mkdir {places}
{binds}
for folder in /tmp /var/tmp /dev/shm; do mount -t tmpfs -o mode=1777 tmpfs $folder; done
{more}
mount -o remount,bind,ro /
trap '' CHLD
echo ready
exec sleep infinity
"""
"""Ignoring its children's ends, the first process leaves no zombies of those that it adopts."""


def skip_where_hosts_cannot_be_made() -> None:
    """Skip the test, with the reason, where namespaces cannot be made."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip(f"{LEFT_OUT}a cluster of several hosts: needs root on Linux")
    if missing:
        pytest.skip(f"{LEFT_OUT}a cluster of several hosts: {', '.join(missing)} missing; apt-get install iproute2")
    probe = subprocess.run(
        [*_UNSHARE, "sh", "-ec", "ip link add one type veth peer name other && mount -t tmpfs tmpfs /mnt"],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    if probe.returncode != 0:
        pytest.skip(f"{LEFT_OUT}a cluster of several hosts: namespaces are denied here: {probe.stderr.strip()}")


@dataclass(frozen=True, slots=True)
class Image:
    """What a host sees of this machine beside its root: folders by their places on the host, and folders that it does not
    see at all.
    """

    places: Mapping[str, Path] = field(default_factory=dict[str, Path])
    hidden: Sequence[Path] = ()
    kept: Sequence[Path] = ()
    """Folders that it sees under their own names, also where they lie below /tmp."""


class Host:
    """One host. `folder` is its disk, seen from here."""

    def __init__(self, name: str, address: str, folder: Path, image: Image, hosts_file: Path | None) -> None:
        self.name, self.address, self.folder = name, address, folder
        self._image, self._hosts_file = image, hosts_file
        self._holder: subprocess.Popen[str] | None = None
        self._started: list[subprocess.Popen[bytes]] = []
        self._first = 0

    # Power.

    def switch_on(self) -> None:
        """Make its namespaces; its disk has what it had. It is not plugged in yet."""
        self.folder.mkdir(exist_ok=True)
        # Our end ends every host, however it comes.
        command = ["setpriv", "--pdeathsig", "KILL", *_UNSHARE, "--propagation", "private", "sh", "-ec", self._setup()]
        self._holder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        if self._holder.stdout.readline() != "ready\n":
            raise AssertionError(f"host {self.name} does not start: {self._holder.stderr.read()}")
        (self._first,) = (child.pid for child in psutil.Process(self._holder.pid).children())
        self.ip("link", "set", "lo", "up")

    def switch_off(self) -> None:
        """End all of its processes at once, as a power failure does; nobody is told."""
        if self._holder is None:
            return
        if self._first:  # else it did not start, and 0 would be our own process group
            with suppress(ProcessLookupError):
                os.kill(self._first, signal.SIGKILL)  # the kernel kills all others in its PID namespace
        else:
            self._holder.kill()
        self._first = 0
        self._holder.wait(60)
        for pipe in (self._holder.stdout, self._holder.stderr):
            if pipe is not None:
                pipe.close()
        self._holder = None
        for program in self._started:
            program.wait(60)
        self._started.clear()

    def _setup(self) -> str:
        image = self._image
        kept = {f"/mnt/kept{number}": folder for number, folder in enumerate(image.kept)}
        places = {DISK: self.folder, **image.places, **kept}
        binds = [f"mount --bind {shlex.quote(str(folder))} {place}" for place, folder in places.items()]
        if self._hosts_file is not None:
            binds.append(f"mount --bind {shlex.quote(str(self._hosts_file))} /etc/hosts")
        binds += [f"mount -o remount,bind,ro {place}" for place in places if place != DISK]
        hidden = [shlex.quote(str(folder)) for folder in image.hidden]
        more = [f"test ! -e {folder} || mount -t tmpfs tmpfs {folder}" for folder in hidden]  # one below /tmp is gone
        for place, folder in kept.items():
            name = shlex.quote(str(folder))
            more.append(f"test -e {name} || {{ mkdir -p {name}; mount --bind {place} {name}; }}")
        return _SETUP.format(name=self.name, places=" ".join(places), binds="\n".join(binds), more="\n".join(more))

    # Programs.

    def inside(self, *command: str, environment: Mapping[str, str] | None = None) -> list[str]:
        """The command that runs a program on this host."""
        given = [f"{name}={value}" for name, value in (environment or {}).items()]
        enter = ("nsenter", "--target", str(self._first), "--net", "--mount", "--uts", "--ipc", "--pid")
        return [*enter, "--", "env", f"--chdir={DISK}", *given, *command]

    def run(
        self, *command: str, environment: Mapping[str, str] | None = None, seconds: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end."""
        return subprocess.run(
            self.inside(*command, environment=environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
        )

    def start(self, log: str, *command: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a program; what it says goes to a file on the host's disk."""
        with (self.folder / log).open("ab") as file:
            program = subprocess.Popen(
                self.inside(*command, environment=environment),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append(program)
        return program

    def processes(self, *words: str) -> Iterator[psutil.Process]:
        """Those of its processes whose command line has all these words."""
        mine = _namespace(self._first)
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if _namespace(process.pid) == mine and all(word in " ".join(process.cmdline()) for word in words):
                    yield process

    def kill(self, *words: str) -> int:
        """SIGKILL to those processes; how many there were."""
        found = list(self.processes(*words))
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return len(found)

    # Network.

    def ip(self, *arguments: str) -> None:
        """Run `ip` in this host's network."""
        done = subprocess.run(
            ["nsenter", "--target", str(self._first), "--net", "--", "ip", *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
        assert done.returncode == 0, (arguments, done.stderr)

    @property
    def network_of(self) -> int:
        """A process in its network."""
        return self._first

    @property
    def is_on(self) -> bool:
        """Whether it is switched on."""
        return self._holder is not None

    def in_network(self, *command: str) -> int:
        """Run a program of this machine in the host's network, quickly; its exit status."""
        return self._in_network(*command).returncode

    def in_network_said(self, *command: str) -> str:
        """Likewise; what it printed."""
        return self._in_network(*command).stdout

    def _in_network(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["nsenter", "--target", str(self._first), "--net", "--", "timeout", "5", *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )

    def lose(self, other: Host) -> None:
        """From now on what this host sends to the other one is lost without a word; it still hears the other one."""
        self.ip("neigh", "replace", other.address, "lladdr", NOWHERE, "nud", "permanent", "dev", "eth0")

    def find(self, other: Host) -> None:
        """The end of `lose`."""
        self.ip("neigh", "del", other.address, "dev", "eth0")

    def hear_all(self) -> None:
        """The end of every `lose`."""
        self.ip("neigh", "flush", "nud", "permanent", "dev", "eth0")


class Network:
    """A switch, and the hosts on it. A context; its end ends them all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.hosts: dict[str, Host] = {}
        self._file = folder / "hosts"
        self._switch = Host("switch", "", folder / "switch", Image(), None)

    def __enter__(self) -> Self:
        self._file.write_text("127.0.0.1 localhost\n")
        self._switch.switch_on()
        self._switch.ip("link", "add", "br0", "type", "bridge")
        self._switch.ip("link", "set", "br0", "up")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in [*self.hosts.values(), self._switch]:
            host.switch_off()

    def host(self, name: str, image: Image) -> Host:
        """A new host, switched on and plugged in; all know it by its name."""
        address = str(NETWORK[len(self.hosts) + 1])
        with self._file.open("a") as file:
            file.write(f"{address} {name}\n")
        made = self.hosts[name] = Host(name, address, self._folder / name, image, self._file)
        made.switch_on()
        self.connect(made)
        return made

    def connect(self, host: Host) -> None:
        """Lay a cable between a host that was just switched on and the switch."""
        with suppress(AssertionError):  # it goes by itself with the host's network, and that takes a moment
            self._switch.ip("link", "del", f"to-{host.name}")
        self._switch.ip("link", "add", f"to-{host.name}", "type", "veth", "peer", "name", f"of-{host.name}")
        self._switch.ip("link", "set", f"of-{host.name}", "netns", str(host.network_of), "name", "eth0")
        self._switch.ip("link", "set", f"to-{host.name}", "master", "br0", "up")
        host.ip("addr", "add", f"{host.address}/{NETWORK.prefixlen}", "dev", "eth0")
        host.ip("link", "set", "eth0", "up")

    def pull_cable(self, host: Host) -> None:
        """Nothing reaches the host, and nothing that it sends arrives; nobody is told."""
        self._switch.ip("link", "set", f"to-{host.name}", "down")

    def plug_in(self, host: Host) -> None:
        """The end of `pull_cable`."""
        self._switch.ip("link", "set", f"to-{host.name}", "up")


def part(one: Host, other: Host) -> None:
    """Neither hears the other."""
    one.lose(other)
    other.lose(one)


def join(one: Host, other: Host) -> None:
    """Both hear each other again."""
    one.find(other)
    other.find(one)


def _namespace(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/pid")
