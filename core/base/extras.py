"""A package that only some sources need is imported when one is used, and asked for by name where it is missing."""

from __future__ import annotations

import importlib
import socket
from typing import Any

from stormproof.core.base.errors import MachineUnfit


def required(module: str, extra: str, who: str) -> Any:
    """A module of an optional package.

    Raises:
        MachineUnfit: it is not installed here; says what installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise  # it is there, and lacks something itself
        host = socket.gethostname()
        raise MachineUnfit(
            f"{who} needs the Python package {module.partition('.')[0]}, which is not installed on {host}; "
            f"install it with: pip install 'stormproof[{extra}]'",
            host=host,
            error="missing package",
            extra=extra,
        ) from error
