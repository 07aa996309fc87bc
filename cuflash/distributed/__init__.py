"""One sequence on many devices: attention whose tokens are shared out over ranks."""

from .communicator import Communicator, RankError
from .entry import attention, attention_backward
from .local import LocalComm
from .nccl_comm import NcclComm
from .shards import positions, shard, unshard
from .socket_comm import SocketComm

__all__ = [
    "Communicator",
    "LocalComm",
    "NcclComm",
    "RankError",
    "SocketComm",
    "attention",
    "attention_backward",
    "positions",
    "shard",
    "unshard",
]
