"""Storm's guarantees for pipelines on Spark: every message tracked, replayed when it fails, applied exactly once.

The public names stand in `__init__.pyi`, and nowhere else. They are imported when they are first used, so that a command
that needs no Spark does not wait for it.
"""

from __future__ import annotations

from stormproof.core.public_names import names_of_stub, shown_as_public

_attribute, __dir__, __all__ = names_of_stub(__name__)


def __getattr__(name: str) -> object:
    return shown_as_public(_attribute(name))
