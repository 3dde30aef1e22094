"""Storm's guarantees for pipelines on Spark: every message tracked, replayed when it fails, applied exactly once.

What a topology is written with is here; all else that is public, in `source`, `sink`, `state`, `topology`, `errors`,
`testing` and `web`. The names stand in the `.pyi` beside each module, and nowhere else. They are imported when they are
first used, so that a command that needs no Spark does not wait for it.
"""

from __future__ import annotations

from stormproof.core.base.public_names import names_of_stub

__getattr__, __dir__, __all__ = names_of_stub(__name__)
