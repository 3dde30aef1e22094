"""For tests of what you build on Stormproof: simulations of whole topologies; suites for sources, sinks and states of yours.

`SourceConformance`, `SinkConformance` and `MapStateConformance` need pytest; nothing here is imported before it is used. The
names stand in `__init__.pyi`.
"""

from __future__ import annotations

from stormproof.core.base.public_names import names_of_stub

__getattr__, __dir__, __all__ = names_of_stub(__name__)
