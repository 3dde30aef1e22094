"""What an object store must do for a Delta table: refuse a second PUT of one name; and options by which it would not."""

from __future__ import annotations

import os
import uuid
from typing import Final

from stormproof.core.base.errors import SinkRefused, TopologyError
from stormproof.core.storage.files import files_at
from stormproof.core.storage.protocol import refusal_of_url, shown_url, storage_options

_LOCKING: Final = ("aws_s3_locking_provider", "s3_locking_provider")
_UNSAFE: Final = ("aws_s3_allow_unsafe_rename", "s3_allow_unsafe_rename", "allow_unsafe_rename")
_CONDITIONAL: Final = ("aws_conditional_put", "conditional_put", "aws_copy_if_not_exists", "copy_if_not_exists")
_OFF: Final = ("disabled", "none", "false")


def check_store(url: str, where: str) -> None:
    """Refuse a URL, or options, by which no table is written exactly once. Asks nothing of the store.

    Raises:
        TopologyError: names the option or what is wrong with the URL.
    """
    wrong = refusal_of_url(url)
    if wrong is not None:
        raise TopologyError(f"{where}: {shown_url(url)}: {wrong}")
    options = storage_options(url)
    if (options.get_option(*_LOCKING) or "").lower() not in ("", *_OFF):
        raise TopologyError(
            f"{where}: {_LOCKING[0]} is set: a lock elsewhere (DynamoDB, say) orders the commits of such a lake, and "
            "drivers that rely on the store's own conditional PUT would not see it. Have every writer of the table use "
            "conditional PUTs, and unset it"
        )
    if (options.get_option(*_UNSAFE) or "").lower() == "true":
        raise TopologyError(f"{where}: {_UNSAFE[0]} lets two drivers overwrite each other's commits; unset it")
    for name in _CONDITIONAL:
        if (found := options.get_option(name) or "").lower() in _OFF[:1] or "dynamo" in found.lower():
            raise TopologyError(
                f"{where}: {name} is {found.partition(':')[0]!r}; a table is written by the store's own "
                "conditional PUTs; unset it"
            )


def require_conditional_put(url: str, where: str) -> None:
    """Ask the store whether it refuses a second PUT on the condition that the name is free.

    A store that refuses it here may let both of two PUTs at the same instant through: that cannot be told by asking.

    Raises:
        SinkRefused: it let the second one through.
        OSError: it does not answer, or takes no PUT.
    """
    files, path = files_at(url), os.path.join(url, f"_stormproof-probe-{uuid.uuid4().hex}")
    files.put_new(path, b"1")
    try:
        files.put_new(path, b"2")
    except FileExistsError:
        return
    finally:
        files.remove(path)
    raise SinkRefused(
        f"{where}: this store overwrites an object although the PUT says that it must not exist: of two drivers that commit "
        "at once, one would lose its rows. Use a store with conditional PUTs (If-None-Match)"
    )
