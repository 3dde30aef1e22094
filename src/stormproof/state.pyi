"""What `stormproof.state` offers; this list is the only one."""

from .trident.state.key_value import (
    NonTransactionalMap as NonTransactionalMap,
    OpaqueMap as OpaqueMap,
    TransactionalMap as TransactionalMap,
    KeyValueStore as KeyValueStore,
    MemoryStore as MemoryStore,
)
from .trident.state.map import RowMerge as RowMerge
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
