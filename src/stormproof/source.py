"""To write a source, and what sources are made of."""

from __future__ import annotations

from stormproof.core.base.public_names import names_of_stub

__getattr__, __dir__, __all__ = names_of_stub(__name__)
