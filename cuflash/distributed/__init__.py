"""One sequence on many devices: attention whose tokens are shared out over ranks."""

from .communicator import Communicator, RankError
from .entry import attention, attention_backward
from .local import LocalComm
from .machine import Machine
from .nccl_comm import NcclComm
from .plans import RanksPlan, plan
from .shards import positions, shard, unshard
from .socket_comm import SocketComm

__all__ = [
    "Communicator",
    "LocalComm",
    "Machine",
    "NcclComm",
    "RankError",
    "RanksPlan",
    "SocketComm",
    "attention",
    "attention_backward",
    "plan",
    "positions",
    "shard",
    "unshard",
]
