"""Attention on several ranks: threads of one process, on NumPy arrays, against the reference."""

import functools
import pickle
import threading
import time

import numpy as np
import pytest
from cases import numpy_dtype
from hypothesis import given, settings
from hypothesis import strategies as st

from cuflash import BlockMask, distributed, reference
from cuflash.distributed import LocalComm, RankError, task
from cuflash.distributed.totals import GradientSum

SIZES = (1, 2, 3, 4, 8)
LAYOUTS = ("contiguous", "zigzag")
METHODS = ("ring", "ulysses", "gather")


def random_mask(shape, block_size):
    rng = np.random.default_rng(shape[-1])
    grid = *shape[:-2], -(-shape[-2] // block_size), -(-shape[-1] // block_size)
    whole = BlockMask(rng.random(grid) < 0.4, block_size, shape[-2:])
    return whole & BlockMask.from_dense(rng.random(shape[-2:]) < 0.9, block_size)


CASES = {
    "full": ({}, {}),
    "causal": ({"causal": True}, {}),
    "grouped heads": ({"causal": True, "enable_gqa": True}, {"group": 2}),
    "one key head": ({"causal": True}, {"key_heads": 1}),
    "window": ({"window": (40, 5), "softcap": 3.0}, {}),
    "window, causal": ({"window": (30, 0), "causal": True}, {}),
    "more keys": ({"causal": True, "scale": 0.3}, {"more_keys": 2}),
    "more keys, top left": ({"causal": "top_left"}, {"more_keys": 2}),
    "dropout": ({"causal": True, "dropout_p": 0.3, "seed": 7}, {"group": 2, "gqa": True}),
    "blocks": ({"mask": 32, "causal": True}, {}),
    "unaligned blocks": ({"mask": 48}, {"spans": 24}),
    "half types": ({"causal": True}, {"dtype": "bfloat16"}),
    "no heads": ({"causal": True}, {"plain": True}),
}


class Case:
    """Operands of the whole sequence and options; what the reference says of them."""

    def __init__(self, name, size):
        self.options, form = dict(CASES[name][0]), dict(CASES[name][1])
        self.size, dtype = size, numpy_dtype(form.get("dtype", "float32"))
        n = 2 * size * form.get("spans", 128 if "dropout_p" in self.options else 12)
        m = n * form.get("more_keys", 1)
        keys = form.get("key_heads", size)
        heads = size * form.get("group", 1)
        if form.get("gqa"):
            self.options["enable_gqa"] = True
        rng = np.random.default_rng(n)
        shapes = [(heads, n, 8), (keys, m, 8), (keys, m, 6), (heads, n, 6)]
        self.q, self.k, self.v, self.dout = (
            rng.standard_normal(x[1:] if form.get("plain") else x).astype(dtype) for x in shapes
        )
        self.dlse = rng.standard_normal(self.q.shape[:-1]).astype(np.float32)
        dense = dict(self.options)
        if block := self.options.get("mask"):
            self.options["mask"] = random_mask((heads, n, m), block)
            dense["mask"] = self.options["mask"].to_dense()
        arrays = self.q, self.k, self.v, dtype
        self.forward = reference.forward_bound(*arrays, **dense)
        self.backward = reference.backward_bound(self.dout, *arrays, dlse=self.dlse, **dense)

    def run(self, layout, method):
        """out, lse, dq, dk and dv of the whole sequence."""

        def rank(comm):
            q, k, v, dout = (
                distributed.shard(x, comm, layout=layout)
                for x in (self.q, self.k, self.v, self.dout)
            )
            dlse = distributed.shard(self.dlse, comm, axis=-1, layout=layout)
            how = {"comm": comm, "layout": layout, "method": method, **self.options}
            out, lse = distributed.attention(q, k, v, return_lse=True, **how)
            grads = distributed.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **how)
            assert [x.dtype for x in grads] == [self.q.dtype] * 3
            own = [distributed.unshard(x, comm, layout=layout) for x in (out, *grads)]
            return own[0], distributed.unshard(lse, comm, -1, layout), *own[1:]

        first, *others = LocalComm.run(self.size, rank)
        for other in others:
            for x, y in zip(first, other, strict=True):
                np.testing.assert_array_equal(x, y)
        return first


case_of = functools.cache(Case)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_equals_one_rank(name, size):
    case = case_of(name, size)
    for layout in LAYOUTS:
        for method in METHODS:
            if method == "ulysses" and (case.q.ndim < 3 or len(case.k) % size):
                continue
            out, lse, *grads = case.run(layout, method)
            ratios = case.forward.ratios(out, lse) + case.backward.ratios(*grads)
            for x, ratio in zip(("out", "lse", "dq", "dk", "dv"), ratios, strict=True):
                worst = float(np.max(ratio))
                assert worst <= 1, f"{x} of {layout}, {method}: {worst:.2f} of its bound"


def test_many_parts_are_merged_as_they_come():
    """More than a rank has slots for: the sum so far is in the type of sums."""
    size, n = 11, 22
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, n, 8)).astype(numpy_dtype("bfloat16"))

    def rank(comm):
        mine = [distributed.shard(x, comm) for x in (q, k, v)]
        out, lse = distributed.attention(*mine, comm=comm, method="ring", return_lse=True)
        return distributed.unshard(out, comm), distributed.unshard(lse, comm, -1)

    out, lse = LocalComm.run(size, rank)[0]
    assert out.dtype == q.dtype
    ratios = reference.forward_bound(q, k, v, q.dtype).ratios(out, lse)
    assert max(float(x.max()) for x in ratios) <= 1


@settings(max_examples=30)
@given(
    st.integers(1, 4), st.sampled_from(LAYOUTS), st.sampled_from(METHODS), st.integers(1, 5),
    st.integers(1, 5), st.integers(1, 3), st.sampled_from([False, True, "top_left"]),
    st.none() | st.tuples(st.none() | st.integers(0, 9), st.none() | st.integers(0, 9)),
    st.integers(1, 5), st.integers(1, 5),
)  # fmt: skip
def test_any_shape(size, layout, method, n, m, group, causal, window, d, dv):
    """Against one rank: both are within their bounds of the reference."""
    rng = np.random.default_rng(n)
    heads = size * group if method == "ulysses" else group
    shapes = [(2, heads, x * 2 * size, dim) for x, dim in ((n, d), (m, d), (m, dv), (n, dv))]
    q, k, v, dout = (rng.standard_normal(shape, dtype=np.float32) for shape in shapes)
    k, v = k[:1, :: heads // size or heads], v[:, :: heads // size or heads]
    options = {"causal": causal, "window": window, "enable_gqa": True}

    def rank(comm):
        mine = [distributed.shard(x, comm, layout=layout) for x in (q, k, v, dout)]
        how = {"comm": comm, "layout": layout, "method": method, **options}
        out, lse = distributed.attention(*mine[:3], return_lse=True, **how)
        grads = distributed.attention_backward(mine[3], *mine[:3], out, lse, **how)
        return [distributed.unshard(x, comm, layout=layout) for x in (out, *grads, lse[..., None])]

    out, *grads, lse = LocalComm.run(size, rank)[0]
    arrays = q, k, v, np.float32
    ratios = reference.forward_bound(*arrays, **options).ratios(out, lse[..., 0])
    ratios += reference.backward_bound(dout, *arrays, **options).ratios(*grads)
    assert max(float(x.max()) for x in ratios) <= 1


@pytest.mark.parametrize("method", [None, "ring", "gather"])
def test_values_of_one_head(method):
    """Which keys do not share, so that there is no head of values for each rank."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 4, 12, 8), dtype=np.float32)
    k, v, options = k[:2], v[:1], {"causal": True, "enable_gqa": True}

    def rank(comm, method=method):
        mine = [distributed.shard(x, comm) for x in (q, k, v)]
        return distributed.attention(*mine, comm=comm, method=method, **options)

    out = np.concatenate(LocalComm.run(2, rank), axis=-2)
    assert (reference.forward_bound(q, k, v, q.dtype, **options).ratios(out)[0] <= 1).all()
    with pytest.raises(ValueError, match="the heads of values, 1, do not divide by 2 ranks; give"):
        LocalComm.run(2, functools.partial(rank, method="ulysses"))


def test_values_of_more_heads_than_queries():
    """Where one rank has all heads, so that they divide."""
    q, k = np.random.default_rng(0).standard_normal((2, 1, 12, 8))
    v = np.random.default_rng(1).standard_normal((2, 12, 8))

    def rank(comm, method=None):
        return distributed.attention(q, k, v, comm=comm, method=method)

    (out,) = LocalComm.run(1, rank)
    assert (reference.forward_bound(q, k, v, q.dtype).ratios(out)[0] <= 1).all()
    with pytest.raises(ValueError, match="1 heads of queries broadcast against 2 of values; give"):
        LocalComm.run(1, functools.partial(rank, method="ulysses"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
def test_the_same_bits_each_time(method, layout):
    case = case_of("grouped heads", 4)
    for x, y in zip(case.run(layout, method), case.run(layout, method), strict=True):
        np.testing.assert_array_equal(x, y)


def test_gradients_travel_while_dq_is_summed(monkeypatch):
    """dk and dv leave as soon as they are there, each by itself."""
    done = {0: [], 1: []}
    of_thread = threading.local()

    def note(owner, name, word):
        whole = getattr(owner, name)

        def noted(*args, **options):
            done[of_thread.rank].append(word)
            return whole(*args, **options)

        monkeypatch.setattr(owner, name, noted)

    note(LocalComm, "start", "transfer")
    note(distributed.ring, "backward_block", "block")
    note(GradientSum, "add", "sum")
    x = np.random.default_rng(0).standard_normal((2, 64, 8), dtype=np.float32)

    def rank(comm):
        of_thread.rank = comm.rank
        how = {"comm": comm, "method": "ring", "layout": "zigzag", "causal": True}
        out, lse = distributed.attention(x, x, x, return_lse=True, **how)
        done[comm.rank].clear()
        distributed.attention_backward(x, x, x, x, out, lse, **how)

    LocalComm.run(2, rank)
    own = ["transfer", "block", *["sum"] * 3]  # keys and values come; dk, dv and dq
    others = ["block", *["sum"] * 2, *["transfer"] * 2, "sum"]
    returned = ["sum"] * 2
    assert list(done.values()) == [[*own, *others, *returned]] * 2


def test_nan_stays_with_the_queries_that_see_it():
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 64, 8), dtype=np.float32)
    v[:, 40] = np.nan

    def rank(comm):
        mine = [distributed.shard(x, comm, layout="zigzag") for x in (q, k, v)]
        how = {"comm": comm, "layout": "zigzag", "method": "ring", "causal": True}
        return distributed.unshard(distributed.attention(*mine, **how), comm, layout="zigzag")

    out = LocalComm.run(2, rank)[0]
    assert np.isfinite(out[:, :40]).all()
    assert np.isnan(out[:, 40:]).all()


# --------------------------------------------------------------------------------------- shards
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_unshard_undoes_shard(layout, axis):
    whole = np.arange(6 * 12 * 18).reshape(6, 12, 18)

    def rank(comm):
        part = distributed.shard(whole, comm, axis=axis, layout=layout)
        own = distributed.positions(whole.shape[axis], comm, layout)
        np.testing.assert_array_equal(part, whole.take(own, axis))
        assert part.flags.c_contiguous
        assert not np.shares_memory(part, whole)
        return distributed.unshard(part, comm, axis, layout)

    for found in LocalComm.run(3, rank):
        np.testing.assert_array_equal(found, whole)


def test_lengths_that_do_not_divide_name_the_next_one():
    comm = LocalComm.make(4)[0]
    x = np.zeros((33, 2))
    with pytest.raises(ValueError, match="33 tokens on 4 ranks, layout='contiguous'.* is so is 36"):
        distributed.shard(x, comm)
    with pytest.raises(ValueError, match="layout='zigzag': they must be 8 spans .* is so is 40"):
        distributed.positions(33, comm, "zigzag")
    with pytest.raises(ValueError, match="layout=array.*: give 'contiguous' or 'zigzag'"):
        distributed.shard(np.zeros((8, 1)), comm, layout=np.zeros(2))
    with pytest.raises(ValueError, match="layout='striped': give 'contiguous' or 'zigzag'"):
        distributed.shard(x, comm, layout="striped")
    with pytest.raises(ValueError, match="axis=2: the array has 2 axes"):
        distributed.shard(x, comm, axis=2)
    with pytest.raises(TypeError, match="axis=None: give that of the tokens, an integer"):
        distributed.shard(x, comm, axis=None)
    with pytest.raises(TypeError, match="length=8.0: give how many tokens the whole sequence has"):
        distributed.positions(8.0, comm)
    with pytest.raises(ValueError, match="length=-8: give how many tokens the whole sequence has"):
        distributed.positions(-8, comm)


@pytest.mark.parametrize(("window", "same"), [([3, 1], (3, 1)), (np.array(3), 3)], ids=str)
def test_windows_that_no_dictionary_holds(window, same):
    (comm,) = LocalComm.make(1)
    x = np.random.default_rng(0).standard_normal((2, 32, 4), dtype=np.float32)
    found = distributed.attention(x, x, x, comm=comm, window=window)
    expected = distributed.attention(x, x, x, comm=comm, window=same)
    np.testing.assert_array_equal(found, expected)


def test_whether_to_plan_gradients_is_a_truth_value():
    (comm,) = LocalComm.make(1)
    x = np.ones((2, 32, 4), np.float32)
    with pytest.raises(TypeError, match="backward='no': give True or False"):
        distributed.plan(x, x, x, comm=comm, backward="no")


# --------------------------------------------------------------------------------------- errors
def errors_of(size, function, timeout=20.0):
    """What each rank raises."""

    def rank(comm):
        try:
            function(comm)
        except Exception as error:
            return error

    return LocalComm.run(size, rank, timeout)


def call(comm, **options):
    x = np.ones((2, 128, 4), np.float32)
    return distributed.attention(x, x, x, comm=comm, **options)


DIFFERENT = {
    "causal differs between ranks: True on rank 0; False on ranks 1, 2": lambda r: {
        "causal": r == 0
    },
    "seed differs between ranks: 5 on ranks 0, 1; 6 on rank 2": lambda r: {
        "dropout_p": 0.1, "seed": 5 + r // 2
    },
    "method differs between ranks: ring on rank 0; gather on ranks 1, 2": lambda r: {
        "method": "gather" if r else "ring"
    },
    "rank 1: window=-1: widths are not negative; None leaves a side open, as -1 does in "
    "flash-attn": lambda r: {"window": -1 if r else 1},
    "rank 2: method='star': give 'ring', 'ulysses', 'gather', or None": lambda r: {
        "method": "star" if r == 2 else None
    },
    "rank 0: mask has shape (96, 64): it must be that of the whole sequence, and broadcast to "
    "(2, 384, 384)": lambda r: {"mask": BlockMask.causal((96, 64))},
    "rank 0: dropout_p=0.1 goes with seed, the same on all ranks": lambda r: {"dropout_p": 0.1},
}  # fmt: skip


@pytest.mark.parametrize("message", DIFFERENT)
def test_what_differs_or_is_wrong_is_the_same_error_on_all_ranks(message):
    options = DIFFERENT[message]

    def rank(comm):
        with pytest.raises(ValueError) as raised:
            call(comm, **options(comm.rank))
        assert call(comm, method="ring").shape == (2, 128, 4)  # they can go on
        return str(raised.value)

    assert set(LocalComm.run(3, rank)) == {message}


def test_shapes_and_types_must_be_the_same():
    def shape(comm):
        x = np.ones((2, 16 + comm.rank, 4), np.float32)
        distributed.attention(x, x, x, comm=comm)

    def dtype(comm):
        x = np.ones((2, 16, 4), "f4" if comm.rank else "f8")
        distributed.attention(x, x, x, comm=comm)

    def function(comm):
        x = np.ones((2, 16, 4), np.float32)
        distributed.unshard(x, comm) if comm.rank else call(comm)

    for run, words in (
        (shape, "q differs between ranks: float32 (2, 16, 4) on rank 0; float32 (2, 17, 4) on"),
        (dtype, "q differs between ranks: float64 (2, 16, 4) on rank 0; float32 (2, 16, 4) on"),
        (function, "call differs between ranks: attention on rank 0; unshard on rank 1"),
    ):
        found = errors_of(2, run)
        assert len({str(x) for x in found}) == 1
        assert str(found[0]).startswith(words)


def test_types_of_errors_stay():
    found = errors_of(2, lambda comm: call(comm, mask=np.ones((32, 32), bool)))
    assert {type(x) for x in found} == {TypeError}
    assert "rank 0: mask is a ndarray: give a BlockMask of the whole sequence" in str(found[1])


def test_gradients_need_the_parts_of_this_rank():
    x, row = np.ones((2, 16, 4), np.float32), np.ones((2, 16), np.float32)

    def rank(comm):
        distributed.attention_backward(x[:, :8], x, x, x, x, row, comm=comm)

    for error in errors_of(2, rank):
        assert str(error) == "rank 0: dout has shape (2, 8, 4): this rank's part has (2, 16, 4)"


def test_spans_of_dropout():
    x = np.ones((2, 40, 4), np.float32)

    def rank(comm):
        distributed.attention(x, x, x, comm=comm, layout="zigzag", dropout_p=0.1, seed=1)

    for error in errors_of(2, rank):
        assert "4 spans of a multiple of 128 tokens, since dropout" in str(error)
        assert "the next length that is so is 512" in str(error)


def test_an_error_in_the_middle_reaches_all(monkeypatch):
    whole = distributed.ring.forward_block

    def broken(task, *args, **kwargs):
        if task.rank == 1:
            raise MemoryError("no room")
        return whole(task, *args, **kwargs)

    monkeypatch.setattr(distributed.ring, "forward_block", broken)

    def rank(comm):
        call(comm, method="ring")
        call(comm, method="ring")

    for error in errors_of(3, rank):
        assert isinstance(error, RankError)
        assert (str(error), error.rank) == ("rank 1 raised MemoryError: no room", 1)


def test_an_error_while_words_are_on_their_way_reaches_all(monkeypatch):
    whole = distributed.ring.Results

    def broken(task, *args):
        if task.rank == 1:
            raise MemoryError("no room")
        return whole(task, *args)

    monkeypatch.setattr(distributed.ring, "Results", broken)
    for error in errors_of(3, lambda comm: call(comm, method="ring")):
        assert (str(error), error.rank) == ("rank 1 raised MemoryError: no room", 1)


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_sent_before_all_agree(monkeypatch, method):
    whole, started = LocalComm.start, []

    def start(comm, *parcels):
        started.append(comm.rank)
        return whole(comm, *parcels)

    monkeypatch.setattr(LocalComm, "start", start)

    def rank(comm):
        with pytest.raises(ValueError, match="causal differs between ranks"):
            call(comm, method=method, causal=comm.rank == 1)
        comm.tell("all have raised")
        before = len(started)
        comm.tell("all have counted")
        call(comm, method=method)
        return before

    assert LocalComm.run(2, rank) == [0, 0]
    assert set(started) == {0, 1}


def test_a_rank_that_does_not_arrive_is_named():
    begin = time.monotonic()
    found = errors_of(3, lambda comm: comm.rank == 1 or call(comm), timeout=0.3)
    assert 0.25 < time.monotonic() - begin < 5
    assert found[1] is None
    message = "rank 1 has not arrived at a call in which others wait, in 0.3 s"
    assert str(found[0]) == str(found[2]) == message


def test_a_rank_that_raises_elsewhere_fails_the_others():
    def rank(comm):
        if comm.rank == 2:
            raise KeyError("lost")
        try:
            call(comm)
        except RankError as error:
            seen.append(str(error))
            raise

    seen = []
    with pytest.raises(KeyError, match="lost"):
        LocalComm.run(3, rank)
    assert seen == ["rank 2 raised KeyError: 'lost'"] * 2


def test_a_communicator_that_has_failed_stays_so():
    first, second = LocalComm.make(2)
    second.fail(RankError(1, "is tired"))
    second.fail(RankError(0, "comes too late"))
    for comm in (first, second):
        for use in (comm.check, lambda comm=comm: call(comm), lambda comm=comm: comm.start([], [])):
            with pytest.raises(RankError, match="rank 1 is tired"):
                use()


def test_errors_travel():
    error = pickle.loads(pickle.dumps(RankError(3, "has left")))
    assert (str(error), error.rank) == ("rank 3 has left", 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((2, 2), "rank=2: give a rank from 0 to size - 1, size is 2"), ((0, 1, -1), "timeout=-1")],
)
def test_wrong_communicators(arguments, message):
    with pytest.raises(ValueError, match=message):
        distributed.Communicator(*arguments)


def test_words_are_no_ranks():
    """As those of the environment are."""
    with pytest.raises(TypeError, match="rank='0': give a rank from 0 to size - 1"):
        distributed.Communicator("0", 2)
    with pytest.raises(TypeError, match="size='2': give how many ranks there are, 1 or more"):
        distributed.Communicator(0, "2")
    with pytest.raises(TypeError, match="size='2': give how many ranks there are, 1 or more"):
        LocalComm.make("2")
    with pytest.raises(ValueError, match="size=0: give how many ranks there are, 1 or more"):
        LocalComm.run(0, str)


def test_an_error_of_another_kind_ends_the_communicator_everywhere():
    def rank(comm):
        comm.agree({}, OSError("no disk") if comm.rank else None)

    for error in errors_of(2, rank):
        assert (type(error), str(error)) == (RankError, "rank 1 raised OSError: no disk")


def test_a_part_that_is_no_array():
    def rank(comm):
        distributed.unshard("words" if comm.rank else np.ones((4, 4)), comm)

    for error in errors_of(2, rank):
        assert str(error).startswith("rank 1: x is a str: give a NumPy or CuPy array")


def test_calls_that_are_alike_are_checked_once(monkeypatch):
    monkeypatch.setattr(task, "_tasks", {})
    x = np.ones((2, 32, 4), np.float32)
    (comm,) = LocalComm.make(1)
    for seed in (1, 2, np.array([1], np.uint64)):
        distributed.attention(x, x, x, comm=comm, dropout_p=0.5, seed=seed)
    assert len(task._tasks) == 1
    first = distributed.attention(x, x, x, comm=comm, dropout_p=0.5, seed=1)
    other = distributed.attention(x, x, x, comm=comm, dropout_p=0.5, seed=2)
    assert (first != other).any()
    # 1 == True, but a window of True is none.
    distributed.attention(x, x, x, comm=comm, window=1)
    with pytest.raises(ValueError, match="causal=1: give False, True"):
        distributed.attention(x, x, x, comm=comm, causal=1)
    monkeypatch.setattr(task, "_MOST_TASKS", 2)
    for window in (2, 3, 4):
        distributed.attention(x, x, x, comm=comm, window=window)
    assert len(task._tasks) <= 2


def test_half_a_call_of_packed_options_is_refused():
    (comm,) = LocalComm.make(1)
    x = np.ones((2, 32, 4), np.float32)
    with pytest.raises(TypeError, match="unexpected keyword argument 'page_table'"):
        distributed.attention(x, x, x, comm=comm, page_table=x)
