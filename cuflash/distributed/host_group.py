"""Ranks that are processes: words between them over sockets, and news of those that fail or leave.

Rank 0 has a hub, to which all ranks, itself included, hold one connection. What rank 0 tells and is
told takes the short way, by a call. Who waits for words reads what comes, and on rank 0 answers for
the hub: no other thread has to wake up for that, and to get hold of the interpreter first. While
nobody waits, a thread looks for news now and then. Messages are JSON, each behind its length:

    to the hub      [rank, size, port]    once, at the start: the port that was asked for
                    ["tell", words]       for all; the hub answers when all ranks have told
                    ["fail", [rank, why]]
                    ["leave"]             the end is no failure
    from the hub    ["here"]              the answer to the first message
                    ["told", [words of rank 0, ...]]
                    ["fail", [rank, why]]
                    ["leave", [0, why]]   the hub will end
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from .communicator import TIMEOUT, RankError

_HEAD = struct.Struct("!I")
_TICK = 0.05  # seconds
_PATIENCE = 1.0  # seconds: of the hub for a first message, of ranks for its news
_PORTS = 8  # that are tried
_LONGEST = 1 << 24  # bytes of a message
_LEFT = "has left"
_ENDED = f"{_LEFT}: its process has ended"


class HostGroup:
    """A rank's connection to the hub, and on rank 0 the hub.

    Parameters
    ----------
    rank, size : int
    address : (str, int), optional
        Host and port of rank 0; by default those of MASTER_ADDR and MASTER_PORT.
    timeout : float
        Seconds after which a rank that has not told is given up.
    """

    def __init__(
        self, rank: int, size: int, address: tuple[str, int] | None = None,
        timeout: float = TIMEOUT,
    ):  # fmt: skip
        self.rank, self.timeout = rank, timeout
        self.error: RankError | None = None
        self.on_failure: Callable[[], None] = lambda: None  # called by who hears of it
        self._told: queue.Queue[list[Any] | None] = queue.Queue()
        self._sending, self._reading = threading.Lock(), threading.Lock()
        self._ended = threading.Event()
        self._leaves = False
        self._last = RankError(0, _ENDED)  # what it means if the connection ends now
        address = address or address_of_environment()
        self._hub = _Hub(address, size, timeout, self._told.put) if rank == 0 else None
        self._socket = _connected(address, [rank, size, address[1]], timeout)
        # By which the hub's host, and so the others, reach this one.
        self.own_host = str(self._socket.getsockname()[0])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        threading.Thread(target=self._watch, daemon=True).start()

    def tell(self, words: Any) -> list[Any]:
        """What each rank has told, by rank."""
        self.say(words)
        return self.hear()

    def say(self, words: Any) -> None:
        """Tell all ranks, which is to be followed by :meth:`hear`."""
        self.check()
        if self._hub is None:
            self._send(["tell", words])
        else:
            self._hub.tell(0, json.loads(json.dumps(words)))  # as others hear them

    def hear(self) -> list[Any]:
        """What each rank has told, by rank, once all have."""
        end = time.monotonic() + self.timeout + 2  # the hub is to notice first that a rank is late
        while time.monotonic() < end:
            ended = self._ended.is_set()  # with words, maybe, that came before the end
            with contextlib.suppress(queue.Empty):
                told = self._told.get_nowait()
                if told is not None:
                    return told
            if ended:
                break
            if self._hub is not None:
                self._hub.look(_TICK)
            elif self._reading.acquire(timeout=_TICK):
                try:
                    self._read(_TICK)
                finally:
                    self._reading.release()
        self.check()
        self.error = RankError(0, f"has not answered in {self.timeout:g} s")
        raise self.error

    def fail(self, error: RankError) -> None:
        """Make all ranks fail with this error, or that which the hub has heard of before."""
        if self.error is None:
            self._send(["fail", [error.rank, error.message]])
            if not self._ended.wait(self.timeout):
                self._end(error)

    def lost(self, peer: int) -> None:
        """Fail because a connection to another rank has ended, unless the hub knows more of it."""
        if not self._ended.wait(_PATIENCE):
            self.fail(RankError(peer, _LEFT))

    def check(self) -> None:
        """Raise the error with which a rank has failed, if one has."""
        if self.error is not None:
            raise RankError(self.error.rank, self.error.message)

    def leave(self) -> None:
        """End the connection: this rank will make no more calls."""
        self._leaves = True
        self._send(["leave"])
        if self._hub is not None:  # the process may end now
            self._hub.look(0)

    def _send(self, message: list[Any]) -> None:
        with self._sending, contextlib.suppress(OSError):  # who reads is told why
            _send(self._socket, message)

    def _watch(self) -> None:
        """Take what the hub says while nobody waits for it, in a thread."""
        while not self._ended.wait(_TICK):
            if self._reading.acquire(blocking=False):
                try:
                    while self._read(0):
                        pass
                finally:
                    self._reading.release()

    def _read(self, timeout: float) -> bool:
        """Take a message that has come, or comes in time; False where there is none."""
        if self._ended.is_set() or not self._selector.select(timeout):
            return False
        message = None
        with contextlib.suppress(OSError, EOFError):
            message = _receive(self._socket)
        if message is not None and message[0] == "told":
            self._told.put(message[1])
            return True
        if message is not None:
            self._last = RankError(*message[1])
            if message[0] == "leave":
                self._leaves = True
                return True
        self._selector.close()
        self._socket.close()
        has_left = self._last.message == _ENDED and self._leaves
        self._end(RankError(self.rank, _LEFT) if has_left else self._last)
        return False

    def _end(self, error: RankError) -> None:
        """Keep the error; unless ranks have left in peace, let no transfer go on."""
        first, self.error = self.error is None, self.error or error
        self._ended.set()
        self._told.put(None)
        if first and not self._leaves:
            self.on_failure()


class _Hub:
    """Takes what ranks say, and answers, in whichever thread of rank 0 looks."""

    def __init__(
        self, address: tuple[str, int], size: int, timeout: float,
        answer: Callable[[list[Any]], None],
    ):  # fmt: skip
        self.size, self.timeout = size, timeout
        self.answer = answer  # to rank 0, whose words come and go by no socket
        self.lock = threading.RLock()  # of who looks
        self.server, self.port = _server(address, size), address[1]
        self.ranks: dict[socket.socket, int] = {}
        self.told: list[deque[Any]] = [deque() for _ in range(size)]
        self.gone: dict[int, bool] = {}  # and whether it said so
        self.since = time.monotonic()  # when the oldest words came that wait for others
        self.error: RankError | None = None
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.server, selectors.EVENT_READ)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        """Look for messages: at once until all ranks are there, then for what nobody waits for."""
        while len(self.gone) < self.size:
            if len(self.ranks) + len(self.gone) < self.size:
                self.look(_TICK)
            else:
                time.sleep(_TICK)
                if self.lock.acquire(blocking=False):
                    try:
                        self.look(0)
                    finally:
                        self.lock.release()
        with self.lock:
            # Of ranks, of who has not said what it is, and the server.
            sockets = [key.fileobj for key in self.selector.get_map().values()]
            self.selector.close()
            for one in sockets:
                one.close()  # type: ignore[union-attr]

    def look(self, timeout: float) -> None:
        """Do what messages say that have come, or come in time."""
        with self.lock:
            if len(self.gone) == self.size:
                return
            for key, _ in self.selector.select(timeout):
                if key.fileobj is self.server:
                    connection, _ = self.server.accept()
                    send_at_once(connection)
                    connection.settimeout(_PATIENCE)  # until it is known to be a rank's
                    self.selector.register(connection, selectors.EVENT_READ)
                else:
                    connection = key.fileobj  # type: ignore[assignment]
                    if not self._hear(connection):
                        self.selector.unregister(connection)
                        connection.close()
            self._look_for_late()

    def _hear(self, connection: socket.socket) -> bool:
        """Take one message; False where there is no more."""
        try:
            message = _receive(connection)
        except (OSError, EOFError, ValueError):
            rank = self.ranks.pop(connection, None)
            if rank is not None and rank not in self.gone:
                self.gone[rank] = False
                self._fail(RankError(rank, _ENDED))
            return False
        if connection not in self.ranks:
            if not isinstance(message, list) or message[2:] != [self.port]:
                return False  # a rank that looks for another hub
            rank, size, _ = message
            self.ranks[connection] = rank
            connection.settimeout(None)
            _send(connection, ["here"])
            if size != self.size:
                self._fail(RankError(rank, f"is one of {size}, rank 0 one of {self.size}"))
            elif self.error is not None:
                self._say(["fail", [self.error.rank, self.error.message]])
            return True
        rank = self.ranks[connection]
        if message[0] == "leave":
            self.gone[rank] = True
            if rank == 0:
                self._say(["leave", [0, _LEFT]])
            self._answer()
            del self.ranks[connection]
            return False
        elif message[0] == "fail":
            self._fail(RankError(*message[1]))
        else:
            self.tell(rank, message[1])
        return True

    def tell(self, rank: int, words: Any) -> None:
        """Take what a rank tells all others."""
        with self.lock:
            if not any(self.told):
                self.since = time.monotonic()
            self.told[rank].append(words)
            self._answer()

    def _answer(self) -> None:
        """Answer if all have told; fail if one that has not has left."""
        if self.error is not None:
            return
        if all(self.told):
            told = [words.popleft() for words in self.told]
            self._say(["told", told], but=0)
            self.answer(told)
            self.since = time.monotonic()
        elif any(self.told):
            late = [rank for rank, words in enumerate(self.told) if not words and rank in self.gone]
            if late:
                self._fail(RankError(late[0], _LEFT))

    def _look_for_late(self) -> None:
        late = [rank for rank, words in enumerate(self.told) if not words]
        waits = 0 < len(late) < self.size and self.error is None
        if waits and time.monotonic() - self.since > self.timeout:
            message = f"has not arrived at a call in which others wait, in {self.timeout:g} s"
            self._fail(RankError(late[0], message))

    def _fail(self, error: RankError) -> None:
        if self.error is None:
            self.error = error
            self._say(["fail", [error.rank, error.message]])

    def _say(self, message: list[Any], but: int | None = None) -> None:
        # Rank 0 is the last to hear: its process may end then, and the hub with it.
        ranks = {rank: connection for connection, rank in self.ranks.items() if rank != but}
        for _, connection in sorted(ranks.items(), reverse=True):
            with contextlib.suppress(OSError):
                _send(connection, message)


def address_of_environment() -> tuple[str, int]:
    """Host and port of rank 0, as launchers say them."""
    return variable("MASTER_ADDR"), integer_variable("MASTER_PORT")


def variable(name: str) -> str:
    """A variable of the environment.

    Raises
    ------
    ValueError
        Where there is none of this name.
    """
    try:
        return os.environ[name]
    except KeyError:
        raise ValueError(
            f"{name} is not set: start ranks with python -m cuflash launch -n SIZE SCRIPT, or "
            "another launcher that sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
        ) from None


def integer_variable(name: str) -> int:
    """A variable of the environment that holds an integer, or a ValueError as of `variable`."""
    text = variable(name)
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} is set to {text!r}: give an integer") from None


def _server(address: tuple[str, int], size: int) -> socket.socket:
    """A server at the first port that is free, from the given one on: launchers may hold that."""
    host, first = address
    for port in range(first, first + _PORTS):
        with contextlib.suppress(OSError):
            return socket.create_server((host, port), backlog=size)
    raise RankError(0, f"cannot listen at {host}:{first}, nor at the next {_PORTS - 1} ports")


def _connected(address: tuple[str, int], hello: list[int], timeout: float) -> socket.socket:
    """A connection to the hub, once that is there."""
    host, first = address
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        for port in range(first, first + _PORTS):
            with contextlib.suppress(OSError, EOFError, ValueError), contextlib.ExitStack() as held:
                connection = held.enter_context(socket.create_connection((host, port), _PATIENCE))
                _send(connection, hello)
                if _receive(connection) == ["here"]:
                    connection.settimeout(None)
                    send_at_once(connection)
                    held.pop_all()
                    return connection
        time.sleep(_TICK)
    raise RankError(0, f"does not answer at {host}:{first}")


def send_at_once(connection: socket.socket) -> None:
    """Let words not wait for more of them."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _send(connection: socket.socket, message: list[Any]) -> None:
    text = json.dumps(message).encode()
    connection.sendall(_HEAD.pack(len(text)) + text)


def _receive(connection: socket.socket) -> Any:
    """The next message; a ValueError for what is none."""
    head = bytearray(_HEAD.size)
    fill(connection, memoryview(head))
    (length,) = _HEAD.unpack(head)
    if length > _LONGEST:
        raise ValueError(f"a message of {length} bytes is none")
    text = bytearray(length)
    fill(connection, memoryview(text))
    return json.loads(bytes(text))


def fill(connection: socket.socket, target: memoryview) -> None:
    """Receive as many bytes as there is room for; an EOFError where the connection ends."""
    while len(target):
        count = connection.recv_into(target)
        if not count:
            raise EOFError("a connection has ended")
        target = target[count:]
