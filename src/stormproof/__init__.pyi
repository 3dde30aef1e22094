"""What a topology is written with. All else that is public stands in the submodules.

This list is the only one. Names are imported when they are first used, so that a command that needs no Spark does not
wait for it.
"""

from . import (
    errors as errors,
    sink as sink,
    source as source,
    state as state,
    testing as testing,
    topology as topology,
    web as web,
)
from .core.bolt import (
    ArrowBolt as ArrowBolt,
    BasicBolt as BasicBolt,
    Bolt as Bolt,
    BoltContext as BoltContext,
    Collector as Collector,
    Emit as Emit,
    FailTuple as FailTuple,
    Tuple as Tuple,
)
from .core.user_code.functions import context as context
from .core.engine.spark import spark_session as spark_session
from .core.base.errors import StormproofError as StormproofError
from .core.base.message import Guarantee as Guarantee
from .core.start.settings import (
    Settings as Settings,
    secret as secret,
)
from .core.source.files import FileSource as FileSource
from .core.source.kafka import KafkaSource as KafkaSource
from .core.source.iterator import IteratorSource as IteratorSource
from .core.source.kestrel import KestrelSource as KestrelSource
from .core.source.memory import MemorySource as MemorySource
from .core.source.nats import NatsSource as NatsSource
from .core.source.postgres_queue import PostgresQueue as PostgresQueue
from .core.source.rabbitmq import (
    RabbitMQSource as RabbitMQSource,
    RabbitMQStreamSource as RabbitMQStreamSource,
)
from .core.source.redis_streams import RedisStreamSource as RedisStreamSource
from .sinks.delta.catalog import CatalogTable as CatalogTable
from .sinks.delta.sink import DeltaSink as DeltaSink
from .sinks.stores.memory import MemorySink as MemorySink
from .sinks.postgres.sink import PostgresSink as PostgresSink
from .trident.topology.aggregate import (
    collect_set as collect_set,
    count as count,
    distinct_count as distinct_count,
    first as first,
    last as last,
    max_ as max_,
    mean as mean,
    min_ as min_,
    sum_ as sum_,
)
from .trident.driver.run import run as run
from .trident.state.delta import DeltaMap as DeltaMap
from .trident.state.key_value import MemoryMap as MemoryMap
from .trident.state.postgres import PostgresMap as PostgresMap
from .trident.terms.observers import RunStatistics as RunStatistics
from .trident.topology.stream import (
    Stream as Stream,
    Topology as Topology,
)
from .trident.streaming.api import (
    exactly_once as exactly_once,
    feed as feed,
)
