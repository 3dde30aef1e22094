"""Commands in a container of their own: PID, IPC and mount namespaces of this kernel, as container engines make them."""

from __future__ import annotations

import functools
import os
import subprocess

import pytest


@functools.cache
def container() -> tuple[str, ...]:
    """What stands before a command that runs in a container; all of it dies with its first process.

    Skips the test, with the reason, where namespaces are denied.
    """
    user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    prefix = ("unshare", *user, "--pid", "--ipc", "--mount", "--fork", "--kill-child", "--mount-proc", "--")
    try:
        probe = subprocess.run([*prefix, "true"], capture_output=True, text=True, check=False, timeout=30)
    except FileNotFoundError:
        pytest.skip("there is no program unshare here, so no container can be made")
    if probe.returncode != 0:
        pytest.skip(f"namespaces are denied here: {probe.stderr.strip()}")
    return prefix


def mounted(command: str, *arguments: str) -> list[str]:
    """In a container, first the shell command (a mount), then the program; skips where mounts are denied."""
    prefix = container()
    probe = subprocess.run(
        [*prefix, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, text=True, check=False, timeout=30
    )
    if probe.returncode != 0:
        pytest.skip(f"mounts are denied here: {probe.stderr.strip()}")
    return [*prefix, "sh", "-ec", f'{command}; exec "$@"', "sh", *arguments]
