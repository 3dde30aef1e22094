"""For tests of what you build on Stormproof: simulations of whole topologies; suites for sources, sinks and states of yours.

`SourceConformance`, `SinkConformance` and `MapStateConformance` need pytest; nothing here is imported before it is used. The
names stand in `__init__.pyi`.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
