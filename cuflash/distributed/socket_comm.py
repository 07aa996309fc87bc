"""Ranks that are processes, on NumPy arrays, which go from one to another over sockets."""

from __future__ import annotations

import contextlib
import functools
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .communicator import TIMEOUT, OnHost, Parcel, RankError, Transfer
from .host_group import HostGroup, fill, integer_variable, send_at_once
from .process_comm import ProcessComm

_TICK = 0.05  # seconds


class _Job:
    """An array to be sent or received by the thread of one connection and direction."""

    def __init__(self, peer: int, array: Any):
        self.peer, self.done = peer, threading.Event()
        self.bytes = memoryview(array.reshape(-1).view(np.uint8))


class _Jobs(OnHost):
    """Arrays under way."""

    def __init__(self, comm: SocketComm, jobs: list[_Job]):
        self.comm, self.jobs = comm, jobs

    def wait(self) -> None:
        for job in self.jobs:
            end = time.monotonic() + self.comm.timeout
            while not job.done.wait(_TICK):
                if time.monotonic() > end:
                    message = f"has moved no array in {self.comm.timeout:g} s"
                    self.comm.fail(RankError(job.peer, message))
                self.comm.check()
        self.jobs = []


class SocketComm(ProcessComm):
    """A rank that is a process; arrays are NumPy's.

    Parameters
    ----------
    rank, size : int
    address : (str, int), optional
        Host and port of rank 0; by default those of MASTER_ADDR and MASTER_PORT.
    timeout : float
        Seconds after which a rank that has not arrived is given up.

    Raises
    ------
    RankError
        If the ranks do not come together.
    """

    def __init__(
        self, rank: int, size: int, address: tuple[str, int] | None = None,
        timeout: float = TIMEOUT,
    ):  # fmt: skip
        super().__init__(rank, size, timeout)
        self.group = HostGroup(rank, size, address, timeout)
        self._sockets: dict[int, socket.socket] = {}
        try:
            self._sockets = self._connect()
        except (OSError, EOFError, RankError) as error:
            if not isinstance(error, RankError):
                self.group.fail(RankError(rank, f"cannot reach the others: {error}"))
            self.group.leave()
            self.group.check()
            raise
        self.group.on_failure = self._cut
        self._queues: dict[tuple[str, int], queue.Queue[_Job | None]] = {}
        self._threads: list[threading.Thread] = []
        for peer, connection in self._sockets.items():
            self._serve("send", peer, connection.sendall)
            self._serve("receive", peer, functools.partial(fill, connection))

    @classmethod
    def from_environment(cls, timeout: float = TIMEOUT) -> SocketComm:
        """The rank that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say.

        Parameters
        ----------
        timeout : float
            Seconds after which a rank that has not arrived is given up.
        """
        return cls(integer_variable("RANK"), integer_variable("WORLD_SIZE"), timeout=timeout)

    def _connect(self) -> dict[int, socket.socket]:
        """A connection to each other rank: the later of two connects to the earlier."""
        found: dict[int, socket.socket] = {}
        server = socket.create_server(("", 0), backlog=self.size)
        with server, contextlib.ExitStack() as held:
            server.settimeout(self.timeout)
            addresses = self.group.tell([self.group.own_host, server.getsockname()[1]])
            for peer in range(self.rank):
                connection = socket.create_connection(tuple(addresses[peer]), self.timeout)
                found[peer] = held.enter_context(connection)
                connection.sendall(self.rank.to_bytes(4, "big"))
            for _ in range(self.rank + 1, self.size):
                connection = held.enter_context(server.accept()[0])
                connection.settimeout(self.timeout)
                number = bytearray(4)
                fill(connection, memoryview(number))
                found[int.from_bytes(number, "big")] = connection
            for connection in found.values():
                connection.settimeout(None)
                send_at_once(connection)
            held.pop_all()
        return found

    def _serve(self, kind: str, peer: int, move: Callable[[memoryview], object]) -> None:
        """Start the thread that does the jobs of one connection and direction."""
        jobs: queue.Queue[_Job | None] = queue.Queue()
        self._queues[kind, peer] = jobs

        def work() -> None:
            try:
                while (job := jobs.get()) is not None:
                    move(job.bytes)
                    job.done.set()
            except (OSError, EOFError):
                self.group.lost(peer)

        self._threads.append(threading.Thread(target=work, daemon=True))
        self._threads[-1].start()

    def _cut(self) -> None:
        """Close the connections, so that nobody waits for a rank that has failed."""
        for connection in self._sockets.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def start(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Transfer:
        """Begin to send and receive; threads do so while the caller goes on."""
        self.check()
        jobs = []
        for kind, parcels in (("send", sends), ("receive", receives)):
            for peer, array in parcels:
                if array.nbytes:
                    jobs.append(_Job(peer, array))
                    self._queues[kind, peer].put(jobs[-1])
        return _Jobs(self, jobs)

    def close(self) -> None:
        """Leave the other ranks, which can make no calls with this one any more."""
        for jobs in self._queues.values():
            jobs.put(None)
        if self.group.error is not None:
            self._cut()
        for thread in self._threads:
            thread.join(self.timeout)
        for connection in self._sockets.values():
            connection.close()
        super().close()
