"""Ranks that are processes, each with a GPU: arrays go from one to another through NCCL."""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from .communicator import TIMEOUT, Nothing, Parcel, RankError, Transfer
from .host_group import HostGroup, integer_variable
from .process_comm import ProcessComm

_TICK = 0.02  # seconds


class _Sent:
    """A transfer on the communicator's stream, which keeps its arrays until it is waited for."""

    def __init__(self, begun: Any, done: Any, parcels: Sequence[Parcel]):
        self.begun, self.done, self.parcels = begun, done, parcels

    def lead(self) -> None:
        import cupy

        cupy.cuda.get_current_stream().wait_event(self.begun)

    def wait(self) -> None:
        import cupy

        cupy.cuda.get_current_stream().wait_event(self.done)
        self.parcels = ()


class NcclComm(ProcessComm):
    """A rank that is a process with a GPU; arrays are CuPy's.

    Arrays travel on a stream of their own, while kernels run on the current one: nothing waits on
    the host. Words, such as what ranks compare at each call, travel over a host socket. A watchdog
    aborts NCCL's communicator if a rank fails or leaves, or if transfers are under way and none has
    ended within the time limit; the next call, or :meth:`Communicator.check`, raises.

    Parameters
    ----------
    communicator : cupy.cuda.nccl.NcclCommunicator or cupyx.distributed.NCCLBackend
    rank, size : int, optional
        By default the communicator's own.
    address : (str, int), optional
        Host and port at which rank 0 listens; by default those of MASTER_ADDR and MASTER_PORT.
    timeout : float
        Seconds.

    Raises
    ------
    RankError
        If the ranks do not come together.
    """

    def __init__(
        self, communicator: Any, rank: int | None = None, size: int | None = None, *,
        address: tuple[str, int] | None = None, timeout: float = TIMEOUT,
    ):  # fmt: skip
        communicator = getattr(communicator, "_comm", communicator)
        rank = communicator.rank_id() if rank is None else rank
        size = communicator.size() if size is None else size
        super().__init__(rank, size, timeout)
        self._begin(HostGroup(rank, size, address, timeout), communicator)

    @classmethod
    def from_environment(cls, timeout: float = TIMEOUT) -> NcclComm:
        """The rank that RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT say.

        Its GPU, the one with the number LOCAL_RANK, becomes the current one.

        Parameters
        ----------
        timeout : float
            Seconds after which a rank that has not arrived is given up.
        """
        import cupy
        from cupy.cuda import nccl

        if not nccl.available:
            raise RuntimeError(
                "NCCL is missing: pip install nvidia-nccl-cu13, or -cu12 for a driver of CUDA 12"
            )
        rank, size = integer_variable("RANK"), integer_variable("WORLD_SIZE")
        cupy.cuda.Device(integer_variable("LOCAL_RANK")).use()
        group = HostGroup(rank, size, timeout=timeout)
        mine = nccl.get_unique_id() if rank == 0 else b""
        kind, numbers = group.tell([type(mine).__name__, list(mine)])[0]
        unique_id = bytes(numbers) if kind == "bytes" else tuple(numbers)
        self = cls.__new__(cls)
        ProcessComm.__init__(self, rank, size, timeout)
        self._begin(group, nccl.NcclCommunicator(size, unique_id, rank))
        return self

    def _begin(self, group: HostGroup, communicator: Any) -> None:
        import cupy

        self.group, self._communicator = group, communicator
        self._device = int(cupy.cuda.runtime.getDevice())
        # Before blocks of a kernel that is to begin at the same time: these would fill the device.
        self._stream = cupy.cuda.Stream(non_blocking=True, priority=-1)
        self._ready = cupy.cuda.Event(disable_timing=True)  # of the last transfer to begin
        self._under_way: deque[tuple[Any, tuple[int, ...]]] = deque()
        self._aborting = threading.Lock()
        self._is_aborted = False
        group.on_failure = self._abort
        atexit.register(group.leave)
        threading.Thread(target=self._watch, daemon=True).start()

    def start(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Transfer:
        """Begin behind what the current stream has been given; the host does not wait."""
        import cupy
        from cupy.cuda import nccl

        self.check()
        sends, receives = ([x for x in parcels if x[1].nbytes] for parcels in (sends, receives))
        if not (sends or receives):
            return Nothing()
        self._ready.record()
        self._stream.wait_event(self._ready)
        begun = cupy.cuda.Event(disable_timing=True)
        begun.record(self._stream)
        nccl.groupStart()
        for move, parcels in (
            (self._communicator.send, sends),
            (self._communicator.recv, receives),
        ):
            for peer, x in parcels:
                move(x.data.ptr, x.nbytes, nccl.NCCL_UINT8, peer, self._stream.ptr)
        nccl.groupEnd()
        done = cupy.cuda.Event(disable_timing=True)
        done.record(self._stream)
        self._under_way.append((done, tuple(sorted({x for x, _ in (*receives, *sends)}))))
        return _Sent(begun, done, (*sends, *receives))

    def _watch(self) -> None:
        """Look, in a thread, whether transfers end."""
        import cupy

        cupy.cuda.Device(self._device).use()
        since = time.monotonic()
        while not self._is_aborted:
            time.sleep(_TICK)
            if not self._under_way:
                since = time.monotonic()
            while self._under_way and self._under_way[0][0].done:
                self._under_way.popleft()
                since = time.monotonic()
            if time.monotonic() - since > self.timeout and self._under_way:
                peers = self._under_way[0][1]
                message = f"has moved no array in {self.timeout:g} s"
                self.fail(RankError(peers[0], message))

    def _abort(self) -> None:
        """End what is under way, and whoever waits inside of NCCL for another rank."""
        with self._aborting:
            if not self._is_aborted:
                self._is_aborted = True
                self._communicator.abort()
