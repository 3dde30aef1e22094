"""Every error that users meet, as a tree."""

from __future__ import annotations

from stormproof.core.base.public_names import names_of_stub

__getattr__, __dir__, __all__ = names_of_stub(__name__)
