"""Secrets from the environment: the value of a variable, or the content of the file that `NAME_FILE` names."""

from __future__ import annotations

import os
from typing import Final

from stormproof.core.errors import SettingsError

FILE: Final = "_FILE"
"""Ends the name of a variable that names a file with the value, as containers' secrets are mounted."""


def secret(name: str) -> str:
    """A password, key or URL, as `secret("ORDERS_URL")`: a variable's value, or what is in the file that `NAME_FILE` names.

    The line's end after the last line of the file is no part of it. The file is read at each call, so that a value that is
    changed holds from the next start on.

    Raises:
        SettingsError: neither variable is set, or both are; the file cannot be read, is empty, or is not UTF-8. No part of
            a value is in an error's text.
    """
    text = secret_in_file(name)
    if text is None:
        text = os.environ.get(name)
    if not text:
        raise SettingsError(f"no secret: set the variable {name}, or {name}{FILE} to a file that has it", setting=name)
    return text


def secret_in_file(name: str) -> str | None:
    """The content of the file that `NAME_FILE` names; None where that is not set, or empty.

    Raises:
        SettingsError: as `secret`.
    """
    path = os.environ.get(name + FILE)
    if not path:
        return None
    if os.environ.get(name):
        raise SettingsError(f"both {name} and {name}{FILE} are set: take one of them away", setting=name)
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror or "no such file") if isinstance(error, OSError) else "it is not UTF-8"
        raise SettingsError(
            f"the file {path}, which {name}{FILE} names, cannot be read: {reason}; mend the file or the variable",
            setting=name,
            path=path,
        ) from None  # a decoder's error has the bytes
    if not text:
        raise SettingsError(f"the file {path}, which {name}{FILE} names, is empty", setting=name, path=path)
    return text
