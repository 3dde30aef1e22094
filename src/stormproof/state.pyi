"""What `stormproof.state` offers; this list is the only one."""

from .trident.state.key_value import (
    NonTransactionalMap as NonTransactionalMap,
    OpaqueMap as OpaqueMap,
    TransactionalMap as TransactionalMap,
)
from .trident.state.merge import RowMerge as RowMerge
from .trident.state.protocol import (
    MapState as MapState,
    Merge as Merge,
    State as State,
    StateContext as StateContext,
    StateFactory as StateFactory,
    StateKind as StateKind,
    StateUpdater as StateUpdater,
)
from .trident.state.sink import (
    MapSetter as MapSetter,
    MapUpdater as MapUpdater,
    StateSink as StateSink,
)
from .trident.state.stores import (
    KeyValueStore as KeyValueStore,
    MemoryStore as MemoryStore,
)
