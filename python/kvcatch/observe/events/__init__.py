"""KV events: what an engine says of blocks it stores and removes, as a live index of its prefix cache.

vLLM, SGLang and Dynamo publish the same events over ZMQ (``--kv-events-config`` of vLLM). ``Subscriber``
receives them and notices what is lost, ``decode`` reads one batch, ``BlockIndex`` keeps what is resident.
"""

from kvcatch.observe.events.index import BlockIndex, SharedPrefix
from kvcatch.observe.events.subscriber import Subscriber, check_endpoint
from kvcatch.observe.events.wire import Batch, Cleared, EventError, Removed, Stored, decode

__all__ = [
    "Batch",
    "BlockIndex",
    "Cleared",
    "EventError",
    "Removed",
    "SharedPrefix",
    "Stored",
    "Subscriber",
    "check_endpoint",
    "decode",
]
