"""Ranks that talk over sockets: threads here stand for processes, but where one is killed."""

import contextlib
import inspect
import re
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import cuflash
from cuflash import distributed
from cuflash.distributed import LocalComm, NcclComm, RankError, SocketComm, host_group

# What takes milliseconds may take many seconds on a busy machine. Nobody waits that long in vain.
PATIENCE = 60.0


def free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()


def run(size, function, timeout=PATIENCE):
    """What each rank returns or raises."""
    address = free_address()

    def rank(number):
        try:
            comm = SocketComm(number, size, address, timeout)
            try:
                return function(comm)
            finally:
                comm.close()
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


@pytest.mark.parametrize(
    "function",
    [LocalComm.make, LocalComm.run, SocketComm.from_environment, NcclComm.from_environment],
)
def test_docstrings_tell_of_every_parameter(function):
    told = re.findall(r"^(\w+) : ", inspect.getdoc(function), re.MULTILINE)
    assert told == list(inspect.signature(function).parameters)


@pytest.mark.parametrize("method", ["ring", "ulysses", "gather"])
def test_equals_threads_that_share_memory(method):
    rng = np.random.default_rng(0)
    q, k, v, dout = rng.standard_normal((4, 3, 48, 8), dtype=np.float32)

    def rank(comm):
        mine = [distributed.shard(x, comm, layout="zigzag") for x in (q, k, v, dout)]
        how = {"comm": comm, "layout": "zigzag", "method": method, "causal": True}
        out, lse = distributed.attention(*mine[:3], return_lse=True, **how)
        grads = distributed.attention_backward(mine[3], *mine[:3], out, lse, **how)
        return [distributed.unshard(x, comm, layout="zigzag") for x in (out, *grads)]

    expected = distributed.LocalComm.run(3, rank)[0]
    for found in run(3, rank):
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_array_equal(x, y)


def test_words_are_told_to_all():
    def rank(comm):
        return comm.tell({"rank": comm.rank}), comm.tell([1.5, "zwölf", None])

    for first, second in run(3, rank):
        assert first == [{"rank": i} for i in range(3)]
        assert second == [[1.5, "zwölf", None]] * 3


# ------------------------------------------------------------------------------ ranks that fail
def failing(comm, act):
    """Rank 1 does something else than the others, who compute."""
    x = np.ones((2, 8, 4), np.float32)
    if comm.rank == 1:
        act(comm)
    begin = time.monotonic()
    try:
        return distributed.attention(x, x, x, comm=comm, method="ring")
    except RankError as error:
        assert time.monotonic() - begin < PATIENCE / 2
        return error


def test_a_rank_that_leaves_fails_the_others():
    first, _, third = run(3, lambda comm: failing(comm, SocketComm.close))
    assert str(first) == str(third) == "rank 1 has left"
    assert (type(first), first.rank) == (RankError, 1)


def test_a_rank_that_fails_makes_all_fail_with_its_error():
    def fail(comm):
        comm.fail(RankError(comm.rank, "raised MemoryError: no room"))

    for error in run(3, lambda comm: failing(comm, fail)):
        assert (str(error), error.rank) == ("rank 1 raised MemoryError: no room", 1)


def test_an_error_between_transfers_reaches_all(monkeypatch):
    """Of the middle of a call, when arrays are under way: at the latest in the next call."""
    whole = cuflash.distributed.ring.forward_block

    def broken(task, *args, **kwargs):
        if task.rank == 1:
            raise MemoryError("no room")
        return whole(task, *args, **kwargs)

    monkeypatch.setattr(cuflash.distributed.ring, "forward_block", broken)

    def rank(comm):
        failing(comm, lambda _: None)
        return failing(comm, lambda _: None)

    for error in run(3, rank):
        assert str(error) == "rank 1 raised MemoryError: no room"


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_does_not_arrive_is_named(late):
    ended = threading.Event()

    def rank(comm):
        if comm.rank == late:
            ended.wait(PATIENCE)
            return None
        begin = time.monotonic()
        try:
            comm.tell("here")
        except RankError as error:
            ended.set()
            return str(error), time.monotonic() - begin
        return None

    told = [x for x in run(2, rank, timeout=0.5) if x]
    ((message, seconds),) = told
    assert message == f"rank {late} has not arrived at a call in which others wait, in 0.5 s"
    assert 0.4 < seconds < PATIENCE / 2


def test_an_array_that_does_not_come_is_an_error():
    def rank(comm):
        room = np.empty((2, 8, 4), np.float32)
        begin = time.monotonic()
        try:
            comm.start([], [(1 - comm.rank, room)]).wait()
        except RankError as error:
            return str(error), time.monotonic() - begin

    (first, seconds), (second, _) = run(2, rank, timeout=0.5)
    assert first == second
    assert first in {f"rank {i} has moved no array in 0.5 s" for i in range(2)}
    assert 0.4 < seconds < PATIENCE / 2


def test_a_hub_that_does_not_answer_is_rank_0s_error(monkeypatch):
    monkeypatch.setattr(host_group._Hub, "_answer", lambda self: None)
    monkeypatch.setattr(host_group._Hub, "_look_for_late", lambda self: None)
    found = run(2, lambda comm: comm, timeout=0.1)
    assert {str(x) for x in found} == {"rank 0 has not answered in 0.1 s"}


def test_sizes_that_differ_are_an_error():
    address = free_address()

    def rank(number):
        try:
            SocketComm(number, 2 + number, address, PATIENCE)
        except RankError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        assert set(pool.map(rank, range(2))) == {"rank 1 is one of 3, rank 0 one of 2"}


def test_a_port_that_a_launcher_holds_is_passed_over():
    with socket.create_server(("127.0.0.1", 0)) as held:
        address = held.getsockname()

        def rank(number):
            comm = SocketComm(number, 2, address, PATIENCE)
            told = comm.tell(number)
            comm.close()
            return told

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(rank, range(2))) == [[0, 1]] * 2


def test_ranks_of_another_hub_are_turned_away():
    """Who looks for the hub of the port before does not join this one."""
    host, port = free_address()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(SocketComm, 0, 2, (host, port), PATIENCE)
        stranger = pool.submit(SocketComm, 1, 2, (host, port - 1), 0.5)
        assert "does not answer" in str(stranger.exception())
        second = pool.submit(SocketComm, 1, 2, (host, port), PATIENCE)
        comms = first.result(), second.result()
        assert list(pool.map(lambda comm: comm.tell(comm.rank), comms)) == [[0, 1]] * 2
        for comm in comms:
            comm.close()


def connected(address):
    """A connection to a hub that may not be there yet."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(address)
        time.sleep(0.01)
    raise AssertionError(address)


def test_words_that_are_none_do_not_end_the_hub():
    address = free_address()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(SocketComm, 0, 2, address, PATIENCE)
        strangers = b"GET / HTTP/1.1", b"\x00\x00\x00\x03???", b"\x00\x00\x00\x02[]", b"\x00\x00"
        for words in strangers:
            with connected(address) as stranger, contextlib.suppress(ConnectionResetError):
                stranger.sendall(words)
                assert stranger.recv(1) == b""
        second = pool.submit(SocketComm, 1, 2, address, PATIENCE)
        for future in (first, second):
            future.result().close()


def test_a_hub_that_ends_closes_the_connection_of_who_has_said_nothing():
    comm = SocketComm(0, 1, address := free_address())
    connections = comm.group._hub.selector.get_map()
    with connected(address) as stranger:
        end = time.monotonic() + PATIENCE
        while len(connections) < 3 and time.monotonic() < end:  # the server's, the rank's, this
            time.sleep(0.01)
        held = [key.fileobj for key in connections.values()]  # only the hub can close them
        comm.close()
        stranger.settimeout(PATIENCE)
        assert stranger.recv(1) == b""
    assert len(held) == 3


def test_a_rank_that_ends_while_ranks_connect_is_an_error(recwarn):
    address = free_address()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(SocketComm, 0, 3, address, PATIENCE)
        groups = [host_group.HostGroup(rank, 3, address, PATIENCE) for rank in (1, 2)]
        for group in groups:
            group.say(None)
        ((host, port), _, _), _ = (group.hear() for group in groups)
        with socket.create_connection((host, port)) as whole:
            whole.sendall((1).to_bytes(4, "big"))
            socket.create_connection((host, port)).close()
            assert str(first.exception()) == (
                "rank 0 cannot reach the others: a connection has ended"
            )
            whole.settimeout(PATIENCE)
            assert whole.recv(1) == b""
        for group in groups:
            with pytest.raises(RankError, match="rank 0 cannot reach the others"):
                group.hear()
            group.leave()
    assert not recwarn.list  # of sockets left to the collector


def test_nobody_at_the_address():
    with pytest.raises(RankError, match="rank 0 does not answer at 127.0.0.1:"):
        SocketComm(1, 2, free_address(), timeout=0.2)


KILLED = """
import os, signal, time
import numpy as np
from cuflash import distributed

comm = distributed.SocketComm.from_environment(timeout=60)
x = np.ones((2, 64, 16), np.float32)
for step in range(1000):
    if comm.rank == 1 and step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        distributed.attention(x, x, x, comm=comm, method="ring")
    except distributed.RankError as error:
        print(f"{error}, step {step}\\n", end="", flush=True)
        raise SystemExit(3)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signal that kills")
def test_killing_a_rank_ends_the_others(tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    begin = time.monotonic()
    command = [sys.executable, "-m", "cuflash", "launch", "-n", "3", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    said = ["rank 1 has left: its process has ended, step 3"] * 2
    assert done.stdout.splitlines() == said, done.stderr
    assert done.returncode == 128 + 9
    assert time.monotonic() - begin < PATIENCE
