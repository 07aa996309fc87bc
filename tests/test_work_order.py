"""The order of a persistent kernel's work: complete, longest first, and balanced."""

import dataclasses

import numpy as np
import pytest

from cuflash.masks import Band
from cuflash.plan import Device, Problem, make_plan
from cuflash.work_order import ITEM_TILES, MOST_ITEMS, _key_tiles, work_order

H200 = Device(90, "NVIDIA H200", multiprocessors=132)
CAUSAL = Problem("float16", (4, 16), 4096, 4096, 128, 128, heads=16, band=Band(right=0))


def plan_of(problem=CAUSAL, algo="fa3", device=H200, **changes):
    return make_plan(dataclasses.replace(problem, **changes), device, algo, "wgmma")


@pytest.mark.parametrize("changes", [{}, {"query_length": 700}, {"leading": (3,)}])
def test_every_item_is_some_blocks_once(changes):
    plan = plan_of(**changes)
    order, count = work_order(plan), plan.problem.head_count * plan.query_tiles
    assert order.shape[1] == plan.grid
    assert order.dtype == np.int32
    assert sorted(order[order < count]) == list(range(count))
    assert (order[-1] == count).all()
    for own in order.T:  # items, then none
        assert (own[(own < count).sum() :] == count).all()


def test_blocks_get_about_as_much():
    plan = plan_of()
    order, tiles = work_order(plan), plan.query_tiles
    count, section = plan.problem.head_count * tiles, plan.section
    cost = np.zeros(count + 1)
    for index in range(count):
        rest = index % (section * tiles) // section  # sections are of one size here
        cost[index] = _key_tiles(plan, tiles - 1 - rest) + ITEM_TILES
    assert plan.problem.head_count % section == 0
    loads = cost[order].sum(axis=0)
    assert loads.max() - loads.min() <= 6  # key tiles, of some 300


def test_key_tiles_of_a_query_tile():
    plan = plan_of(query_length=300, key_length=300)
    assert [_key_tiles(plan, tile) for tile in range(3)] == [1, 2, 3]
    window = plan_of(band=Band.from_options(False, (10, 10)))
    for tile in range(window.query_tiles):
        begin = tile * window.block_q - window.query_lead
        keys = np.arange(max(0, begin) - 10, begin + window.block_q + 10).clip(0, 4095)
        assert _key_tiles(window, tile) == len(np.unique(keys // window.block_k))
    blind = plan_of(query_length=4096, key_length=128)
    assert _key_tiles(blind, 0) == 1  # a tile of keys even where none is visible


def test_no_order_where_none_is_needed():
    assert work_order(plan_of(band=Band())) is None
    assert work_order(plan_of(algo="fa2")) is None
    assert work_order(plan_of(leading=(MOST_ITEMS,))) is None
