"""What ranks compute, send and receive, without computing it; parts of block masks."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuflash
from cuflash import BlockMask
from cuflash.distributed import (
    Communicator,
    LocalComm,
    Machine,
    attention,
    plan,
    positions,
    ring,
)
from cuflash.distributed.communicator import Nothing
from cuflash.distributed.estimate import pairs
from cuflash.distributed.schedule import STEP, Sight, is_crowded, ring_steps
from cuflash.distributed.task import Task
from cuflash.masks.band import Band
from cuflash.masks.sections import digest, section, shows_nothing

LAYOUTS = st.sampled_from(["contiguous", "zigzag"])
WIDTHS = st.none() | st.integers(0, 60)


def seen_by(steps, rank, size, layout, lengths):
    """How often each pair of a rank's queries and all keys is worked on."""
    comms = LocalComm.make(size)
    rows = positions(lengths[0], comms[rank], layout)
    seen = np.zeros((len(rows), lengths[1]), int)
    for step in steps:
        columns = positions(lengths[1], comms[step.source], layout)
        for block in step.blocks:
            left, right = block.window or (None, None)
            shape = len(block.rows), len(block.columns)
            visible = Band(left, right).to_dense(*shape, block.shift)
            seen[np.ix_(block.rows, columns[list(block.columns)])] += visible
    return rows, seen


@given(
    st.integers(1, 6), LAYOUTS, st.integers(1, 9), st.integers(1, 9), WIDTHS, WIDTHS,
    st.sampled_from(["bottom_right", "top_left"]), st.booleans(),
)  # fmt: skip
def test_every_visible_pair_is_worked_on_once(size, layout, n, m, left, right, alignment, apart):
    lengths = 2 * size * n, 2 * size * m
    band = Band(left, right, alignment)
    sight = Sight(band, lengths, None, apart)
    expected = band.to_dense(*lengths)
    every = [ring_steps(rank, size, layout, sight) for rank in range(size)]
    for rank, steps in enumerate(every):
        rows, seen = seen_by(steps, rank, size, layout, lengths)
        np.testing.assert_array_equal(seen, expected[rows])
        counted = sum(pairs(x) for step in steps for x in step.blocks)
        assert counted == expected[rows].sum()
        for number, step in enumerate(steps[1:], 1):
            assert every[step.source][number].send == step.receive
            if not step.blocks:
                assert not step.receive
            for block in step.blocks:
                assert set(block.columns) <= set(step.receive)
                if apart:
                    assert rows[list(block.rows)].tolist() == list(block.queries)
                    assert len(block.keys) == len(block.columns)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_zigzag_gives_all_ranks_the_same_work_in_one_call_a_step(size):
    tokens = 2 * size * STEP
    sight = Sight(Band(right=0), (tokens, tokens), None, False)
    works = set()
    for rank in range(size):
        steps = ring_steps(rank, size, "zigzag", sight)
        assert [len(x.blocks) for x in steps] == [1] * size
        works |= {pairs(x.blocks[0]) for x in steps[1:]}
        # Ranks before need all of the keys, ranks behind the first half.
        assert [len(x.send) for x in steps[1:]] == [
            STEP if x.target > rank else 2 * STEP for x in steps[1:]
        ]
    assert works == {2 * STEP * STEP}


def test_windows_send_what_is_near():
    tokens, size = 4 * 1024, 4
    sight = Sight(Band(200, 0), (tokens, tokens), None, False)
    for rank in range(size):
        _, before, *others = ring_steps(rank, size, "contiguous", sight)
        assert before.receive == (range(768, 1024) if rank else range(0))
        assert not any(x.receive or x.send or x.blocks for x in others)
    middle = ring_steps(2, size, "zigzag", sight)  # spans 2 and 5, next to 1, 4 and 6
    assert [len(x.receive) for x in middle] == [0, 256, 0, 256]


def test_blocks_that_a_mask_hides_are_neither_computed_nor_sent():
    documents = BlockMask.documents(np.repeat(np.arange(4), 64), block_size=32)
    sight = Sight(Band(), (256, 256), documents, True)
    for rank in range(4):
        first, *others = ring_steps(rank, 4, "contiguous", sight)
        assert len(first.blocks) == 1
        assert not any(x.receive or x.send or x.blocks for x in others)


# ------------------------------------------------------------------------- parts of block masks
def some_mask(shape=(2, 3, 200, 240), block_size=(32, 48)):
    rng = np.random.default_rng(0)
    return BlockMask.from_dense(rng.random(shape) < 0.98, block_size) & BlockMask.sliding_window(
        shape[-2:], (70, 50), block_size=block_size
    )


@pytest.mark.parametrize(
    ("queries", "keys", "block_size"),
    [
        (range(200), range(240), (32, 48)),
        (range(64, 128), range(48, 144), (32, 48)),
        (range(64, 200), range(96, 240), (32, 48)),
        (range(16, 80), range(16, 64), (16, 16)),
        (range(192, 200), range(240), (32, 48)),
        (range(5, 77), range(11, 52), (32, 48)),
        (range(3), range(240), (32, 48)),
        (range(64, 64), range(240), (32, 48)),
    ],
)
@pytest.mark.parametrize("heads", [None, range(1, 3)])
def test_sections_are_what_slices_of_the_elements_are(queries, keys, block_size, heads):
    mask = some_mask()
    part = section(mask, queries, keys, heads)
    dense = mask.to_dense() if heads is None else mask.to_dense()[:, heads.start : heads.stop]
    expected = dense[..., queries.start : queries.stop, keys.start : keys.stop]
    np.testing.assert_array_equal(part.to_dense(), expected)
    assert part == BlockMask.from_dense(expected, part.block_size)
    assert part.block_size == block_size
    assert section(mask, queries, keys, heads) is part
    if shows_nothing(mask, queries, keys):
        assert not expected.any()


def test_heads_of_a_mask_that_all_heads_share():
    mask = BlockMask.causal((64, 64), block_size=16)
    assert section(mask, range(64), range(64), range(2)) == mask


def test_digests_differ_where_elements_do():
    mask = some_mask()
    same = BlockMask.from_dense(mask.to_dense(), (32, 48))
    assert digest(same) == digest(mask)
    others = [mask.T, ~mask, section(mask, range(199), range(240)), mask | some_mask((1, 200, 240))]
    assert len({digest(x) for x in (mask, *others)}) == 5


# -------------------------------------------------------------------------------------- the plan
def planned(size=2, tokens=4096, layout="zigzag", **options):
    heads = options.pop("heads", 8)
    shape = (1, heads, tokens // size, 64)
    q = np.broadcast_to(np.zeros(1, options.pop("dtype", np.float16)), shape)
    comm = LocalComm.make(size)[0]
    comm.machine = options.pop("machine", Machine())
    return plan(q, q, q, comm=comm, layout=layout, **options)


def test_the_plan_says_what_each_method_costs():
    made = planned(causal=True)
    ring, ulysses, gather = made.estimates
    key = 2 * 8 * 64 * 2  # bytes of a token's key and value
    assert [x.method for x in made.estimates] == ["ring", "ulysses", "gather"]
    assert gather.sent == 2048 * key
    assert ulysses.sent == (3 * 1024 * 8 * 64 * 2) + 1024 * 8 * (64 * 2 + 4)
    assert ring.calls == gather.calls == 2
    assert ring.work - ulysses.work == pytest.approx(Machine().launch)
    assert made.method == min(made.estimates, key=lambda x: x.total).method
    text = str(made)
    assert "ring on 2 ranks, zigzag: 4096 x 4096 tokens, 8 heads on 8, attention, causal" in text
    assert "300 GB/s to ranks of a host, 50 GB/s to others" in text


def test_two_results_of_halves_take_the_memory_of_one():
    """Kernels merge the second with the first; of more ranks all are kept until the end."""
    halves, floats = (planned(causal=True, dtype=x).estimates[0] for x in (np.float16, np.float32))
    keys = 2048 * 2 * 8 * 64  # numbers that come to rank 0
    copied = keys // 2  # for rank 1, which sees half of them
    assert halves.memory == 2 * (keys + copied)
    assert floats.memory == 4 * (keys + copied) + 2 * 2048 * 8 * (64 * 4 + 4)
    four = planned(size=4, causal=True).estimates[0]
    assert four.memory == 2 * keys + keys // 2 + 4 * 1024 * 8 * (64 * 2 + 4)


@pytest.mark.parametrize("name", ["float16", "float32"])
def test_a_rank_takes_the_memory_that_the_plan_says(monkeypatch, name):
    """Of one rank alone, with kernels that compute nothing."""

    class Alone(Communicator):
        def tell(self, words):
            return [words] * self.size

        def start(self, sends, receives):
            return Nothing()

        def check(self):
            pass

    def forward_block(task, block, arrays, first, slot):
        slot.out[...] = 0
        slot.lse[...] = 0

    monkeypatch.setattr(ring, "forward_block", forward_block)
    x = np.zeros((4, 1024, 64), name)
    found = {}
    for size in (1, 2, 4, 8, 9, 32):
        how = {"comm": Alone(0, size), "method": "ring"}
        planned = plan(x, x, x, **how).estimates[0].memory
        tracemalloc.start()
        try:
            attention(x, x, x, **how)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        # The result, what NumPy merges in, in the type of sums, and what is no array.
        beside = x.nbytes + 3 * 4 * x.size + (128 << 10)
        assert planned <= peak <= planned + beside, size
        found[size] = planned / x.nbytes
    assert found[1] == 0
    assert found[9] == found[32] < 1.01 * found[8]  # however many ranks there are


def test_gradients_send_keys_and_their_gradients():
    forward, backward = planned(causal=True), planned(causal=True, backward=True)
    for one, other in zip(forward.estimates, backward.estimates, strict=True):
        assert other.sent > one.sent
        assert other.total > one.total
    assert backward.estimates[2].sent == 2 * forward.estimates[2].sent


def test_what_is_chosen_depends_on_the_machine():
    slow = Machine(bandwidth=1e9, latency=0)
    assert planned(layout="contiguous", window=(64, 0), machine=slow).method == "ring"
    late = Machine(latency=1.0)
    assert planned(size=8, machine=late).method == "gather"
    assert planned(size=8, tokens=1 << 20, machine=Machine(bandwidth=2e9)).method == "ulysses"


def test_hosts_that_are_apart_take_longer():
    near, far = (planned(size=4, machine=Machine(host=x)) for x in (4, 2))
    for one, other in zip(near.estimates, far.estimates, strict=True):
        assert other.transfer > one.transfer
        assert other.sent == one.sent


def test_heads_that_do_not_divide_are_refused():
    made = planned(size=4, heads=6)
    assert made.method != "ulysses"
    assert "not ulysses: 6 heads of queries and 6 of keys do not divide by 4 ranks" in str(made)
    with pytest.raises(ValueError, match="method='ulysses': 6 heads of queries .* give 'ring'"):
        planned(size=4, heads=6, method="ulysses")


@given(st.integers(0, 50), st.integers(0, 50), WIDTHS, WIDTHS, st.integers(-60, 60))
def test_pairs_are_counted_without_a_mask(n, m, left, right, shift):
    block = cuflash.distributed.schedule.Block(range(n), range(m), None, None, (left, right), shift)
    assert pairs(block) == Band(left, right).to_dense(n, m, shift).sum()


def test_kernels_yield_while_keys_of_later_steps_may_be_under_way():
    """Also where these take no time beside the work: one rank's may wait for the other's kernel."""

    def crowded(size, layout="zigzag", right=0, left=None, tokens=1 << 20):
        sight = Sight(Band(left, right), (tokens, tokens), None, False)
        steps = ring_steps(0, size, layout, sight)
        return [is_crowded(steps, number) for number in range(size)]

    assert crowded(1) == [False]
    assert crowded(2) == [True, False]
    assert crowded(4) == [True, True, True, False]
    # A window needs keys of one rank before: at the first step alone something is sent.
    assert crowded(4, "contiguous", left=1000) == [True, False, False, False]


def test_who_asks_for_an_algorithm_gets_it():
    for asked, taken in ((None, "fa2"), ("fa1", "fa1"), ("fa3", "fa3")):
        own = Task(**dict.fromkeys(Task._fields) | {"options": {"algo": asked}})
        assert own.yielding().options == {"algo": taken}
