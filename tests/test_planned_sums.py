"""Sums of dQ in a planned order, where a mask of blocks alone says what is visible."""

import random

import emulated
import numpy as np
import pytest
from cases import H200, random_mask
from compile_kernels import compile_source, require_nvrtc
from emulated import attention_backward
from emulator import EAGER, EmulatorError, available
from test_emulator_catches import must_be_caught
from tolerance import assert_backward_close

import cuflash
from cuflash import BlockMask, reference
from cuflash.masks.planned_sums import chained_order, planned_visits
from cuflash.masks.tile_lists import tile_lists
from cuflash.planning import wgmma_gradients
from cuflash.planning.plan import make_plan
from cuflash.planning.problem import Device, Problem

EMULATED = pytest.mark.skipif(available() is not None, reason=str(available()))
AHEAD = 2  # visits of an item that are left when the next ticket is taken


def shown_tiles(rows, columns, density, seed=0):
    """Tiles of one list, some rows and columns of which are empty."""
    rng = np.random.default_rng(seed)
    shown = rng.random((rows, columns)) < density
    shown[rng.random(rows) < 0.1] = False
    shown[:, rng.random(columns) < 0.1] = False
    return shown


@pytest.mark.parametrize("counts", [[], [3], [0, 5, 2, 9, 9, 1, 0], range(20)], ids=str)
@pytest.mark.parametrize("chains", [1, 2, 3, 7, 30])
def test_rounds_have_the_longest_rows_first(counts, chains):
    counts = np.array(counts, int)
    order = chained_order(counts, chains)
    assert sorted(order.tolist()) == list(range(len(counts)))
    longest = np.sort(counts)[::-1]
    for first in range(0, len(counts), chains):
        here = np.sort(counts[order[first : first + chains]])[::-1]
        np.testing.assert_array_equal(here, longest[first : first + chains])


def test_a_long_row_goes_to_a_short_chain():
    assert chained_order(np.array([9, 8, 7, 3, 2, 1]), 3).tolist() == [0, 1, 2, 5, 4, 3]


@pytest.mark.parametrize("shape", [(1, 1), (9, 5), (20, 40), (128, 30)], ids=str)
@pytest.mark.parametrize("density", [0, 0.1, 0.5, 1])
@pytest.mark.parametrize("chains", [1, 4, 33])
def test_each_tile_is_visited_once_and_no_column_twice_a_slot(shape, density, chains):
    shown = shown_tiles(*shape, density)
    order = chained_order(shown.sum(axis=1), chains)
    rows, columns = planned_visits(shown, order, chains)
    assert sorted(zip(rows.tolist(), columns.tolist())) == sorted(zip(*shown.nonzero()))
    # A chain is done with a row before it begins the next one.
    turn = np.argsort(order)
    for chain in range(chains):
        own = turn[rows][turn[rows] % chains == chain]
        assert (np.diff(own) >= 0).all()


def entries_of(lists, row):
    begin, end = lists.ranges[row]
    return lists.entries[begin:end]


def test_lists_have_the_planned_order():
    """Rows visit the same tiles as without; a column's turns go through all of its rows."""
    mask = BlockMask(shown_tiles(12, 9, 0.5)[None].repeat(2, axis=0), 16)
    mask &= BlockMask.from_dense(random_mask((192, 144), 16), 16)
    plain, planned = (tile_lists(mask, 16, 16, True, chains) for chains in (0, 3))
    np.testing.assert_array_equal(planned.ranges, plain.ranges)
    np.testing.assert_array_equal(planned.bits, plain.bits)
    for number in range(2):
        before: dict = {}
        for row in range(12):
            here = entries_of(planned, 12 * number + row)
            wanted = entries_of(plain, 12 * number + row)
            assert sorted(map(tuple, here[:, :2])) == sorted(map(tuple, wanted[:, :2]))
            for column, _, previous, _ in here.tolist():
                before.setdefault(column, {})[previous] = row
        for following in before.values():
            row, seen = -1, 0
            while row in following:
                row, seen = following[row], seen + 1
            assert seen == len(following)


def finishes(lists, heads, rows, chains, blocks, rng, checks_head=True):
    """Whether so many blocks come to an end, each with its own luck, as chains.cuh takes chains."""
    turns: dict = {}
    tickets = iter(range(heads * chains + blocks))
    state = [{"head": -1, "rank": 0, "left": [], "next": None} for _ in range(blocks)]
    peek = [0]

    def take():
        peek[0] += 1
        return next(tickets)

    def plan_next(block, at_end):
        if block["next"] is not None:
            return
        head, rank = block["head"], block["rank"]
        if head >= 0 and rank + chains < rows:
            block["next"] = head, rank + chains
        elif at_end or not checks_head or peek[0] // chains != head:
            block["next"] = divmod(take(), chains)

    running = list(range(blocks))
    while running:
        moved = False
        for number in rng.sample(running, len(running)):
            block = state[number]
            if len(block["left"]) <= AHEAD:
                plan_next(block, at_end=not block["left"])
            if not block["left"]:
                block["head"], block["rank"] = block["next"]
                block["next"], moved = None, True
                if block["head"] >= heads:
                    running.remove(number)
                    continue
                block["row"] = int(lists.order[block["head"] * rows + block["rank"]])
                own = entries_of(lists, block["head"] * rows + block["row"])
                block["left"] = own[:, [0, 2]].tolist()  # the last one first
            elif rng.random() < 0.7:
                column, previous = block["left"][-1]
                if turns.get((block["head"], column), -1) == previous:
                    turns[block["head"], column] = block["row"]
                    block["left"].pop()
                    moved = True
            else:
                moved = True
        if not moved:
            return False
    return True


@pytest.mark.parametrize("density", [0.1, 0.4, 1])
@pytest.mark.parametrize(("chains", "blocks"), [(1, 1), (3, 3), (3, 5), (8, 8), (8, 19)])
def test_nobody_waits_for_ever(density, chains, blocks):
    heads, rows = 3, 17
    shown = np.stack([shown_tiles(rows, 11, density, seed) for seed in range(heads)])
    lists = tile_lists(BlockMask(shown, 16), 16, 16, True, chains)
    for seed in range(20):
        assert finishes(lists, heads, rows, chains, blocks, random.Random(seed))


def test_a_second_chain_of_a_head_taken_ahead_can_wait_for_ever():
    """Which is what the rule about chains of the head at hand is for."""
    shown = np.stack([shown_tiles(17, 11, 0.2, seed) for seed in range(3)])
    lists = tile_lists(BlockMask(shown, 16), 16, 16, True, 8)
    ends = [finishes(lists, 3, 17, 8, 8, random.Random(seed), False) for seed in range(50)]
    assert not all(ends)


def plan_of(heads=32, length=16384, dim=64, device=H200, **more):
    problem = Problem(
        "bfloat16", (1, heads), length, length, dim, dim, heads=heads, backward=True,
        **{"mask": "blocks", **more},
    )  # fmt: skip
    return make_plan(problem, device)


def test_the_plan_says_so():
    plan = plan_of()
    assert plan.chains == 33
    assert plan.section == 1
    assert "order      planned, of 33 chain(s) of tiles of keys a head" in str(plan)
    main = next(x for x in plan.kernels if x.name == plan.kernel)
    assert main.together
    assert [x.together for x in plan.kernels].count(True) == 1
    assert not any(x.follows for x in plan.kernels)  # nor does one ahead of it


@pytest.mark.parametrize(
    "more",
    [{"mask": ""}, {"mask": "elements"}, {"deterministic": False}, {"kv_lengths": "int32"},
     {"dim": 256}, {"mask_lists": 200}],
    ids=str,
)  # fmt: skip
def test_where_no_order_is_planned(more):
    plan = plan_of(**more)
    assert plan.chains == 0
    assert "chain(s)" not in str(plan)
    assert not any(x.together for x in plan.kernels)


@pytest.mark.parametrize(
    ("shown", "evenness"),
    [(np.ones((4, 6)), 1), (np.eye(8), 1), (np.zeros((3, 3)), 1), (np.ones((0, 3)), 1),
     (np.eye(64)[:1], 1 / 16), (np.tri(4), 10 / 16), ([np.ones((4, 4)), np.tri(4)], 10 / 16),
     ([np.zeros((2, 4)), np.tri(2, 4)], 6 / 16)],
    ids=str,
)  # fmt: skip
def test_evenness(shown, evenness):
    """10 of 16 blocks in a triangle; of its two rows beside zeros, where columns of 2, 1, 0, 0."""
    mask = BlockMask(np.asarray(shown, bool), 16)
    assert mask.evenness == evenness == mask.T.evenness


@pytest.mark.parametrize(
    ("dim", "evenness", "chains"),
    [(64, 1 / 4, 33), (64, 3 / 16, 0), (128, 7 / 16, 66), (128, 6 / 16, 0)],
)
def test_one_long_row_or_column_takes_the_order_of_keys(dim, evenness, chains):
    assert plan_of(dim=dim, mask_evenness=evenness).chains == chains


def test_a_block_for_each_tile_of_keys():
    assert plan_of(heads=1, mask_evenness=1 / 16).chains == 128


def test_calls_know_how_even_a_mask_is():
    """Two masks of one shape: the second has one column that all rows see."""
    shown = np.eye(64, dtype=bool)
    x = np.zeros((1, 16, 8192, 64), np.float16)
    for mask, even in (shown, True), (shown | (np.arange(64) == 0), False):
        plan = cuflash.plan(x, x, x, mask=BlockMask(mask, 128), backward=True, device=H200)
        assert (plan.chains > 0) == even


@pytest.mark.parametrize(
    ("options", "chains"),
    [({"heads": 1}, 128), ({"heads": 3}, 44), ({"heads": 5}, 26), ({"length": 1024}, 4),
     ({"heads": 1, "device": Device(90, multiprocessors=20)}, 20)],
    ids=str,
)  # fmt: skip
def test_chains_for_as_many_heads_at_a_time_as_there_are(options, chains):
    assert plan_of(**options).chains == chains


@pytest.mark.parametrize("dim", [64, 128])
def test_no_registers_are_missing(dim):
    require_nvrtc()
    cost = compile_source(plan_of(dim=dim).source(), "sm_90a")
    assert (cost.stack, cost.spills) == (0, 0)


@pytest.fixture
def few_chains(monkeypatch):
    """Two of each head: of some hundred positions as well a chain has several tiles."""
    tile = wgmma_gradients.WgmmaGradientTile
    right = tile.chains
    monkeypatch.setattr(tile, "chains", lambda self, problem: min(2, right(self, problem)))
    monkeypatch.setattr(wgmma_gradients, "LEAST_SHARE_OF_LONGEST", 0)


def inputs_of(heads=2, key_heads=None, n=500, m=600, dim=64):
    rng = np.random.default_rng(0)
    shapes = [(1, x, y, dim) for x, y in zip((heads, heads, key_heads or heads), (n, n, m))]
    dout, q, k = (rng.standard_normal(shape).astype(np.float16) for shape in shapes)
    return dout, q, k, rng.standard_normal(shapes[2]).astype(np.float16)


def gradients_are_right(mask, inputs, blocks=(2,), seeds=(EAGER, 0, 1), **options):
    """Under several schedules and on devices of several sizes: right, and the same bits."""
    dout, q, k, v = inputs
    out, lse = reference.attention(q, k, v, mask=mask, return_lse=True, **options)
    given = dout, q, k, v, out.astype(q.dtype), lse.astype(np.float32)
    first = None
    for count in blocks:
        device = Device(90, multiprocessors=count)
        for seed in seeds:
            *grads, plan, _, _ = attention_backward(
                *given, mask=mask, algo="fa3", engine="wgmma", device=device, schedule=seed,
                **options,
            )  # fmt: skip
            assert plan.chains == 2
            bits = [x.tobytes() for x in grads]
            if bits != first:
                assert_backward_close(grads, dout, q, k, v, mask=mask, **options)
            first = first or bits
            assert bits == first, f"other bits with seed {seed} on {count} multiprocessors"


def random_blocks(heads, n, m, size=128, density=0.6):
    shape = -(-n // size), -(-m // size)
    shown = np.stack([shown_tiles(*shape, density, seed) for seed in range(heads)])
    return BlockMask(shown, size, (n, m))


@EMULATED
@pytest.mark.parametrize("dim", [64, 128])
def test_gradients(few_chains, dim):
    inputs = inputs_of(heads=3, dim=dim)
    gradients_are_right(random_blocks(3, 500, 600), inputs, blocks=(2, 5), seeds=(EAGER, 0))


@EMULATED
def test_gradients_of_partial_tiles(few_chains):
    mask = BlockMask.from_dense(random_mask((2, 500, 600), 64, shown=0.4, partial=0.4), 64)
    gradients_are_right(mask, inputs_of())


@EMULATED
def test_gradients_of_heads_that_share_keys(few_chains):
    """Each head by itself, since few heads in groups would leave multiprocessors idle."""
    mask = random_blocks(4, 500, 600)
    gradients_are_right(mask, inputs_of(4, 2), seeds=(EAGER, 1), enable_gqa=True)


@EMULATED
def test_gradients_of_rows_without_a_visit(few_chains):
    mask = BlockMask(np.zeros((2, 4, 5), bool), 128, (500, 600))
    gradients_are_right(mask, inputs_of(), seeds=(EAGER, 0))


BUGS = [
    ("a second chain of the head is taken ahead",
     r"else if \(int\(atomicAdd\(p\.tickets, 0u\)\).*?\)\n", "else if (true)\n"),
    ("nobody waits for the end of the item",
     # nor asks for the ticket again, which makes the emulator begin another block
     r"if \(!slots\.is_taken\) take_ahead\(p\);(\s+if \(!slots\.is_taken\) \{).*?take_chain",
     r"\1 take_chain"),
    ("the next item is the next tile", r"slots\.ticket \+= p\.chains;", "slots.ticket += 1;"),
    ("a chain is that of the head before", r"while \(chain >= slots\.next_head_chain\)",
     "if (slots.next_head_chain == 0)"),
    ("a ticket is taken twice", r"slots\.is_taken = true;", ""),
    ("a ticket stays taken", r"slots\.is_taken = false;\n    }", "}"),
]  # fmt: skip


def bugs_are_shown():
    """All tiles are visible: a head's chains wait for each other, in the last visits too."""
    for n, m in ((384, 512), (256, 256)):
        mask = BlockMask(np.ones((3, n // 128, m // 128), bool), 128)
        gradients_are_right(mask, inputs_of(3, n=n, m=m), seeds=(0, EAGER, 1))


@EMULATED
def test_without_a_planted_bug(few_chains):
    bugs_are_shown()


@EMULATED
@pytest.mark.parametrize(("text", "wrong"), [x[1:] for x in BUGS], ids=[x[0] for x in BUGS])
def test_planted_bugs(few_chains, monkeypatch, text, wrong):
    must_be_caught(monkeypatch, text, wrong, bugs_are_shown)


@EMULATED
def test_visits_in_another_order_than_turns_are_caught(few_chains, monkeypatch):
    """Rows visit their tiles the other way round."""

    def turned_round(*given):
        lists = tile_lists(*given)
        for begin, end in lists.ranges:
            lists.entries[begin:end] = lists.entries[begin:end][::-1].copy()
        return lists

    monkeypatch.setattr(emulated, "tile_lists", turned_round)
    with pytest.raises(EmulatorError, match="wait"):
        bugs_are_shown()
