"""Ranks that do not ask for the same, and have not caught the error: each of them is told the same.

Who is told first leaves while others still read what has arrived. So ranks come and leave at random
times here, several times over.
"""

import functools
import itertools
import random
import time

import numpy as np
import pytest
from test_socket_comm import run as run_over_sockets

from cuflash import BlockMask, distributed
from cuflash.distributed import LocalComm, RankError, local

SIZE = 3
X = np.ones((2, 128, 4), np.float32)
ROW = np.ones((2, 128), np.float32)


def forward(comm, x=X, **options):
    return distributed.attention(x, x, x, comm=comm, **options)


def backward(comm, out=X, lse=ROW, **options):
    return distributed.attention_backward(X, X, X, X, out, lse, comm=comm, **options)


# What ranks do, and with what the error of all begins.
DIFFERENT = {
    "lengths": (
        lambda c: forward(c, X[:, : 128 - c.rank]),
        "ValueError: q differs between ranks: float32 (2, 128, 4) on rank 0; "
        "float32 (2, 127, 4) on",
    ),
    "types": (
        lambda c: forward(c, X.astype("f8") if c.rank else X),
        "ValueError: q differs between ranks: float32 (2, 128, 4) on rank 0; "
        "float64 (2, 128, 4) on",
    ),
    "causal": (
        lambda c: forward(c, causal=c.rank == 1),
        "ValueError: causal differs between ranks: False on ranks 0, 2; True on rank 1",
    ),
    "seed": (
        lambda c: forward(c, dropout_p=0.1, seed=c.rank),
        "ValueError: seed differs between ranks: 0 on rank 0; 1 on rank 1; 2 on rank 2",
    ),
    "mask": (
        lambda c: forward(c, mask=BlockMask.causal((128 * SIZE,) * 2) if c.rank else None),
        "ValueError: mask differs between ranks: None on rank 0; ",
    ),
    "layout": (
        lambda c: forward(c, layout="zigzag" if c.rank else "contiguous"),
        "ValueError: layout differs between ranks: contiguous on rank 0; zigzag on ranks 1, 2",
    ),
    "method": (
        lambda c: forward(c, method="ring" if c.rank else "gather"),
        "ValueError: method differs between ranks: gather on rank 0; ring on ranks 1, 2",
    ),
    "algo": (
        lambda c: forward(c, algo="fa2" if c.rank else "fa1"),
        "ValueError: algo differs between ranks: fa1 on rank 0; fa2 on ranks 1, 2",
    ),
    "scale": (
        lambda c: forward(c, scale=0.5 + (c.rank == 2)),
        "ValueError: scale differs between ranks: 0.5 on ranks 0, 1; 1.5 on rank 2",
    ),
    "return_lse": (
        lambda c: forward(c, return_lse=c.rank == 2),
        "ValueError: return_lse differs between ranks: False on ranks 0, 1; True on rank 2",
    ),
    "deterministic": (
        lambda c: backward(c, deterministic=c.rank != 1),
        "ValueError: deterministic differs between ranks: True on ranks 0, 2; False on rank 1",
    ),
    "dlse": (
        lambda c: backward(c, dlse=ROW if c.rank else None),
        "ValueError: dlse differs between ranks: None on rank 0; float32 (2, 128) on ranks 1, 2",
    ),
    "kinds of calls": (
        lambda c: backward(c) if c.rank else forward(c),
        "ValueError: call differs between ranks: attention on rank 0; attention_backward on ranks",
    ),
    "a call that is another": (
        lambda c: forward(c) if c.rank else distributed.unshard(X, c),
        "ValueError: call differs between ranks: unshard on rank 0; attention on ranks 1, 2",
    ),
    "what is wrong on a rank": (
        lambda c: forward(c, window=-1 if c.rank == 1 else 1),
        "ValueError: rank 1: window=-1: widths are not negative",
    ),
    "what is wrong on all": (
        lambda c: forward(c, layout="foo"),
        "ValueError: rank 0: layout='foo': give 'contiguous' or 'zigzag'",
    ),
    "what has no hash": (
        lambda c: forward(c, layout=["zigzag"]),
        "ValueError: rank 0: layout=['zigzag']: give 'contiguous' or 'zigzag'",
    ),
    "an engine that cannot": (
        lambda c: forward(c, engine="wgmma"),
        "NotImplementedError: rank 0: no kernel serves",
    ),
    "a seed that is none": (
        lambda c: forward(c, dropout_p=0.1, seed=-c.rank),
        "ValueError: rank 1: seed=-1: give an integer from 0 to 2^64 - 1",
    ),
    "a flag that is none": (
        lambda c: backward(c, deterministic="no"),
        "TypeError: rank 0: deterministic='no': give True or False",
    ),
    "no lse": (lambda c: backward(c, lse=None), "TypeError: rank 0: lse is a NoneType: give"),
    "lse of another type": (
        lambda c: backward(c, lse=ROW.astype("f8")),
        "TypeError: rank 0: lse has dtype float64: it must be float32",
    ),
    "out of another type": (
        lambda c: backward(c, out=X.astype("i4")),
        "TypeError: rank 0: out has dtype int32: it must be float32, or a float that",
    ),
}  # fmt: skip


def found_by_threads(size, function):
    """What each rank raises; that of one that leaves reaches the others."""
    found = {}

    def rank(comm):
        try:
            return function(comm)
        except Exception as error:
            found[comm.rank] = error
            raise

    with pytest.raises(Exception) as raised:
        LocalComm.run(size, rank, 20)
    assert raised.value in found.values()
    return [found[rank] for rank in range(size)]


def said(found):
    return {f"{type(error).__name__}: {error}" for error in found}


def slowly(numbers, function):
    """`function`, each rank after a time of its own."""

    def rank(comm):
        time.sleep(numbers.random() / 500)
        return function(comm)

    return rank


@pytest.fixture
def ranks_that_wait_wake_up_late(monkeypatch):
    """Who is told last has had its words for long by then."""
    whole = local._Exchange.take
    turn = itertools.count()

    def take(*args):
        time.sleep(0.002 * (next(turn) % 3))
        return whole(*args)

    monkeypatch.setattr(local._Exchange, "take", take)


@pytest.mark.usefixtures("ranks_that_wait_wake_up_late")
@pytest.mark.parametrize("what", DIFFERENT)
def test_threads_raise_the_same(what):
    function, begin = DIFFERENT[what]
    numbers = random.Random(0)
    forward_again = functools.partial(forward, dropout_p=0.1, seed=1)
    LocalComm.run(SIZE, forward_again)  # a call that is known is looked at no less
    for _ in range(5):
        (message,) = said(found_by_threads(SIZE, slowly(numbers, function)))
        assert message.startswith(begin)


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_over_sockets_raise_the_same(what):
    function, begin = DIFFERENT[what]
    numbers = random.Random(0)
    for _ in range(2):
        (message,) = said(run_over_sockets(SIZE, slowly(numbers, function)))
        assert message.startswith(begin)


def test_an_error_that_ends_the_communicator_is_the_same_everywhere_and_stays():
    def rank(comm):
        time.sleep(0.002 * comm.rank)
        try:
            comm.agree({}, OSError("no disk") if comm.rank == 1 else None)
        finally:
            comms.append(comm)

    comms = []
    assert said(found_by_threads(SIZE, rank)) == {"RankError: rank 1 raised OSError: no disk"}
    for comm in comms:
        with pytest.raises(RankError, match="^rank 1 raised OSError: no disk$"):
            comm.check()


def test_what_has_arrived_is_there_after_its_sender_has_failed():
    first, second = LocalComm.make(2)
    first.start([(1, np.arange(3.0))], [])
    transfer = second.start([], [(0, room := np.empty(3))])
    first.fail(RankError(0, "is tired"))
    transfer.wait()
    np.testing.assert_array_equal(room, np.arange(3.0))
    with pytest.raises(RankError, match="rank 0 is tired"):
        second.check()


@pytest.mark.parametrize("comm", [None, 2, LocalComm], ids=["None", "number", "class"])
def test_what_is_no_communicator(comm):
    calls = (
        lambda: forward(comm),
        lambda: backward(comm),
        lambda: distributed.plan(X, X, X, comm=comm),
        lambda: distributed.shard(X, comm),
        lambda: distributed.unshard(X, comm),
        lambda: distributed.positions(128, comm),
    )
    for call in calls:
        with pytest.raises(TypeError, match=f"comm is a {type(comm).__name__}: give a Commun"):
            call()


def test_flags_are_of_one_call_that_is_known():
    """They need no plan of their own."""
    (comm,) = LocalComm.make(1)
    forward(comm, scale=0.75)
    before = dict(distributed.task._tasks)
    out, lse = forward(comm, scale=0.75, return_lse=True)
    assert (out.shape, lse.shape) == (X.shape, ROW.shape)
    assert distributed.task._tasks.keys() == before.keys()
