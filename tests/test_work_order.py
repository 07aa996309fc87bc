"""The order of a persistent kernel's work: complete, longest first, and balanced."""

import dataclasses

import numpy as np
import pytest

from cuflash.gpu.work_order import FIXED, ITEM_TILES, MOST_ITEMS, _key_tiles, _length, work_order
from cuflash.masks.band import Band
from cuflash.planning.plan import Plan, make_plan
from cuflash.planning.problem import Device, Problem

H200 = Device(90, "NVIDIA H200", multiprocessors=132)
CAUSAL = Problem("float16", (4, 16), 4096, 4096, 128, 128, heads=16, band=Band(right=0))


def plan_of(problem=CAUSAL, algo="fa3", device=H200, **changes):
    """The plan with the tiles of CAUSAL under the problem's band."""
    problem = dataclasses.replace(problem, **changes)
    long = dataclasses.replace(CAUSAL, band=problem.band)
    return Plan(problem, device, make_plan(long, device, algo, "wgmma").tile)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"query_length": 700},
        {"leading": (3,)},
        {"band": Band()},
        {"band": Band(left=9, right=5)},
        {"query_length": 700, "band": Band(right=0, alignment=2000)},
        {"query_length": 700, "band": Band(right=0, alignment=-300)},
    ],
)
def test_every_item_is_some_blocks_once(changes):
    plan = plan_of(**changes)
    order, count = work_order(plan), plan.problem.head_count * plan.query_tiles
    assert order.shape[1] == plan.grid
    assert order.dtype == np.int32
    assert sorted(order[order < count]) == list(range(count))
    assert (order[-1] == count).all()
    for own in order.T:  # items, then none
        assert (own[(own < count).sum() :] == count).all()


@pytest.mark.parametrize(
    ("band", "batch", "length", "most"),
    [(CAUSAL.band, 4, 4096, 6), (CAUSAL.band, 16, 1024, 4.1), (Band(), 16, 1024, 15)],
)
def test_blocks_get_about_as_much(band, batch, length, most):
    """Up to one item, where these are long: without a mask."""
    plan = plan_of(band=band, query_length=length, key_length=length, leading=(batch, 16))
    order, tiles = work_order(plan), plan.query_tiles
    heads, section = plan.problem.head_count, plan.section
    count = heads * tiles
    cost = np.zeros(count + 1)
    for index in range(count):
        first = index // (section * tiles) * section
        rest = (index - first * tiles) // min(section, heads - first)
        cost[index] = _length(plan, tiles - 1 - rest)
    loads = cost[order].sum(axis=0)
    assert loads.max() - loads.min() <= most  # key tiles, of some 300, 100 and 165


def test_key_tiles_of_queries():
    window = plan_of(band=Band.from_options(False, (10, 10)))
    for begin in range(-128, 4096, 64):
        keys = np.arange(max(0, begin) - 10, begin + 64 + 10).clip(0, 4095)
        seen = len(np.unique(keys // window.block_k)) if begin >= 0 else 0
        assert _key_tiles(window, begin, begin + 64) == seen
    blind = plan_of(query_length=4096, key_length=128)
    assert _key_tiles(blind, 0, 64) == 0


def test_items_of_a_chunk_are_as_long_as_in_the_whole():
    """Queries 1024 to 1535 of 4096, whose keys lie where the offset says."""
    whole, chunk = plan_of(), plan_of(query_length=512, band=Band(right=0, alignment=1024))
    for begin in range(0, 512, 64):
        seen = _key_tiles(whole, 1024 + begin, 1088 + begin)
        assert _key_tiles(chunk, begin, begin + 64) == seen
    assert work_order(plan_of(query_length=384, band=Band(right=0, alignment=-384))) is None
    assert work_order(plan_of(query_length=384, band=Band(right=0, alignment=4096))) is None


def test_items_of_packed_heads():
    """Each tile of a group once; of 70 heads two tiles side by side, which are as long."""
    leading, group = (3, 70), 70
    plan = plan_of(query_length=300, key_length=300, leading=leading, heads=70, group=group)
    tile = dataclasses.replace(plan.tile, warps=8, block_k=128, stages=3, packed=64)
    plan = dataclasses.replace(plan, tile=tile)
    assert plan.query_tiles == 2 * (300 * 64 // 128)
    order, count = work_order(plan), 3 * plan.query_tiles
    assert sorted(order[order < count]) == list(range(count))
    split = dataclasses.replace(plan, tile=dataclasses.replace(tile, span=512))
    assert work_order(split) is None


def test_length_of_a_tile_of_queries():
    """The last of 300 queries are in tiles of 192, and keys in tiles of 64."""
    plan = plan_of(query_length=300, key_length=300, leading=(16, 16))
    assert (plan.query_tiles, plan.block_q, plan.block_k) == (2, 192, 64)
    seen = [[0, 1, 2], [3, 4, 5]]  # queries up to -21, 43, 107; 171, 235, 299
    for tile, (first, second, third) in enumerate(seen):
        mean = (first + second + third) / 3
        expected = FIXED * third + (1 - FIXED) * mean + ITEM_TILES
        assert _length(plan, tile) == pytest.approx(expected)


def test_no_order_where_none_is_needed():
    """Where all items are as long as another: all consumers of each have queries."""
    assert work_order(plan_of(band=Band(), query_length=192 * 20)) is None
    assert work_order(plan_of(band=Band(), query_length=192 * 20 - 63)) is None
    assert work_order(plan_of(band=Band(), query_length=192 * 20 - 64)) is not None
    assert work_order(plan_of(band=Band(), query_length=4000, mask="blocks")) is None
    assert work_order(plan_of(algo="fa2")) is None
    assert work_order(plan_of(leading=(MOST_ITEMS,))) is None
