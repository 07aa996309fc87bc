"""One sequence on many devices: attention whose tokens are shared out over ranks."""

from .communicator import Communicator, RankError
from .entry import attention, attention_backward
from .local import LocalComm
from .shards import positions, shard, unshard

__all__ = [
    "Communicator",
    "LocalComm",
    "RankError",
    "attention",
    "attention_backward",
    "positions",
    "shard",
    "unshard",
]
