"""Ranks as threads of one process."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from ..operands.checks import checked_integer
from .communicator import (
    SIZE_WANTED,
    TIMEOUT,
    Communicator,
    OnHost,
    Parcel,
    RankError,
    Transfer,
)

Result = TypeVar("Result")


class _Exchange:
    """What ranks share: things under way by kind, sender, receiver and number, and the error."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.things: dict[tuple[str, int, int, int], Any] = {}
        self.error: RankError | None = None

    def put(self, key: tuple[str, int, int, int], thing: Any) -> None:
        with self.changed:
            self.things[key] = thing
            self.changed.notify_all()

    def take(self, key: tuple[str, int, int, int], timeout: float) -> Any:
        """What was put there, once it is: also where a rank has failed since."""
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.things or self.error, timeout):
                message = f"has not arrived at a call in which others wait, in {timeout:g} s"
                self.fail(RankError(key[1], message))
            if key not in self.things:
                self.check()
            return self.things.pop(key)

    def fail(self, error: RankError) -> None:
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()

    def check(self) -> None:
        if self.error is not None:
            raise RankError(self.error.rank, self.error.message)


class _Arriving(OnHost):
    """Arrays that are to come."""

    def __init__(self, comm: LocalComm, receives: Sequence[Parcel]):
        self.comm = comm
        self.receives = [(comm._next("array", x, comm.rank), target) for x, target in receives]

    def wait(self) -> None:
        for key, target in self.receives:
            source, event = self.comm._take(key)
            if isinstance(target, np.ndarray):
                target[...] = source
            else:
                stream = event.wait_here()
                target.data.copy_from_device_async(source.data, source.nbytes, stream)
                stream.synchronize()  # the sender's memory may be used again
        self.receives = []


class LocalComm(Communicator):
    """A rank that is a thread; arrays are of NumPy or CuPy.

    Made by :meth:`make`, or by :meth:`run` together with the threads. Arrays are copied from rank
    to rank, nothing overlaps: for tests, and to see what ranks do.

    Examples
    --------
    Each rank has a part of the sequence, and computes its part of the result:

    >>> import numpy as np, cuflash
    >>> from cuflash import distributed
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 4, 96, 16))
    >>> def rank(comm):
    ...     mine = (distributed.shard(x, comm, layout="zigzag") for x in (q, k, v))
    ...     out = distributed.attention(*mine, comm=comm, layout="zigzag", causal=True)
    ...     return distributed.unshard(out, comm, layout="zigzag")
    >>> first, second = distributed.LocalComm.run(2, rank)
    >>> np.allclose(first, cuflash.attention(q, k, v, causal=True))
    True
    """

    def __init__(self, rank: int, size: int, timeout: float, exchange: _Exchange):
        super().__init__(rank, size, timeout)
        self._exchange = exchange
        self._counts: Counter[tuple[str, int, int]] = Counter()

    @classmethod
    def make(cls, size: int, timeout: float = TIMEOUT) -> list[LocalComm]:
        """The communicators of `size` ranks, one for each thread.

        Parameters
        ----------
        size : int
        timeout : float
            Seconds after which a rank that has not arrived is given up.
        """
        size = checked_integer("size", size, SIZE_WANTED)
        if size < 1:
            raise ValueError(f"size={size}: {SIZE_WANTED}")
        exchange = _Exchange()
        return [cls(rank, size, timeout, exchange) for rank in range(size)]

    @classmethod
    def run(
        cls, size: int, function: Callable[[LocalComm], Result], timeout: float = TIMEOUT
    ) -> list[Result]:
        """What `function(comm)` returns on each of `size` ranks, in threads of their own.

        An error of one rank makes all fail; it is raised here.

        Parameters
        ----------
        size : int
        function : function
            Of a rank's communicator.
        timeout : float
            Seconds after which a rank that has not arrived is given up.
        """

        def call(comm: LocalComm) -> Result:
            try:
                return function(comm)
            except RankError as error:
                comm.fail(error)
                raise
            except Exception as error:
                comm.fail(RankError(comm.rank, f"raised {type(error).__name__}: {error}"))
                raise

        comms = cls.make(size, timeout)
        with ThreadPoolExecutor(size) as pool:
            futures = [pool.submit(call, comm) for comm in comms]
        found = [future.exception() for future in futures]
        errors = [x for x in found if x is not None]
        if errors:
            # What a rank has raised itself tells more than that others have failed.
            raise next((x for x in errors if not isinstance(x, RankError)), errors[0])
        return [future.result() for future in futures]

    def _next(self, kind: str, sender: int, receiver: int) -> tuple[str, int, int, int]:
        """The key of what comes next from one rank to another: either of them counts."""
        self._counts[kind, sender, receiver] += 1
        return kind, sender, receiver, self._counts[kind, sender, receiver]

    def _put(self, kind: str, receiver: int, thing: Any) -> None:
        self._exchange.put(self._next(kind, self.rank, receiver), thing)

    def _take(self, key: tuple[str, int, int, int]) -> Any:
        return self._exchange.take(key, self.timeout)

    def start(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Transfer:
        """Send copies; receive when the transfer is waited for."""
        self.check()
        for receiver, array in sends:
            self._put("array", receiver, _copied(array))
        return _Arriving(self, receives)

    def tell(self, words: Any) -> list[Any]:
        """What each rank has told, by rank."""
        self.check()
        others = [rank for rank in range(self.size) if rank != self.rank]
        for other in others:
            self._put("words", other, words)
        told = {other: self._take(self._next("words", other, self.rank)) for other in others}
        return [told.get(rank, words) for rank in range(self.size)]

    def fail(self, error: RankError) -> None:
        """Make all ranks fail with this error, unless they already fail with another."""
        self._exchange.fail(error)

    def check(self) -> None:
        """Raise the error with which a rank has failed, if one has."""
        self._exchange.check()


def _copied(array: Any) -> tuple[Any, Any]:
    """A copy, and for an array of CuPy the event after which it is there."""
    if isinstance(array, np.ndarray):
        return array.copy(), None
    from ..gpu.streams import Mark

    return array.copy(), Mark()
