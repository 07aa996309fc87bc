"""mask= of the public functions: arrays of bool and BlockMask."""

import numpy as np
import pytest
from cases import H200
from small_calls import (
    DOUT,
    Dlpack,
    K,
    Q,
    V,
    backward,
    check,
    check_backward,
    count_calls,
    inputs,
    normal,
)

import cuflash
from cuflash import BlockMask

pytestmark = pytest.mark.usefixtures("empty_cache")


def bools(*shape, shown=0.6, seed=0):
    return np.random.default_rng([seed, *shape]).random(shape) < shown


def check_masked(q, k, v, mask, **options):
    """Forward and backward, both algorithms."""
    for algo in ("fa1", "fa2"):
        check(q, k, v, algo, mask=mask, **options)
        check_backward(q, k, v, algo=algo, mask=mask, **options)


MASK_SHAPES = [
    (2, 3, 5, 7), (2, 1, 5, 7), (1, 3, 5, 7), (3, 5, 7), (5, 7), (1, 7), (7,), (5, 1), (3, 1, 7),
    (2, 1, 1, 7), (2, 1, 5, 1), (3, 1, 1), (1, 1, 1, 1), (1,), (),
]  # fmt: skip


@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
def test_arrays_that_mask(shape):
    """Whatever broadcasts to (..., H, N, M), in any layout; 0-d ones say all or nothing."""
    for seed in range(2):
        mask = bools(*shape, seed=seed) if shape else np.array(bool(seed))
        check_masked(Q, K, V, mask)
        out, lse = cuflash.attention(Q, K, V, mask=mask, return_lse=True)
        whole = np.broadcast_to(mask, (2, 3, 5, 7))
        again = cuflash.attention(Q, K, V, mask=np.ascontiguousarray(whole), return_lse=True)
        for a, b in zip((out, lse), again, strict=True):
            np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(cuflash.attention(Q, K, V, mask=whole), out)
        backwards = mask[(..., *[slice(None, None, -1)] * mask.ndim)].copy()
        for strided in (backwards[(..., *[slice(None, None, -1)] * mask.ndim)], mask.T.copy().T):
            np.testing.assert_array_equal(cuflash.attention(Q, K, V, mask=strided), out)


def test_masks_of_one_head():
    q, k, v = Q[0, 0], K[0, 0], V[0, 0]
    for mask in (bools(5, 7), bools(7), bools(5, 1), np.array(True)):
        check_masked(q, k, v, mask)
    check_masked(q, k, v, BlockMask.from_dense(bools(5, 7), 16))
    check_masked(q, K[0], V[0], BlockMask.from_dense(bools(3, 5, 7), 16))


@pytest.mark.parametrize("leading", [(), (3,), (1, 3), (2, 1), (2, 3)], ids=str)
def test_block_masks(leading):
    dense = bools(*leading, 5, 7)
    mask = BlockMask.from_dense(dense, (16, 32))
    check_masked(Q, K, V, mask)
    check_masked(Q, K, V, mask, causal=True, kv_lengths=[7, 3], softcap=2.0)
    for algo in ("fa1", "fa2"):
        np.testing.assert_array_equal(
            cuflash.attention(Q, K, V, mask=mask, algo=algo),
            cuflash.attention(Q, K, V, mask=dense, algo=algo),
        )


@pytest.mark.parametrize("shape", [(2, 6, 5, 7), (6, 5, 7), (2, 1, 5, 7), (5, 7)], ids=str)
def test_masks_of_grouped_heads(shape):
    """A mask has the heads of the queries."""
    q, mask = np.repeat(Q, 2, axis=1), bools(*shape)
    check_masked(q, K, V, mask, enable_gqa=True)
    check_masked(q, K, V, BlockMask.from_dense(mask, 16), enable_gqa=True)
    out = cuflash.attention(q, K, V, mask=mask, enable_gqa=True)
    repeated = cuflash.attention(q, *(np.repeat(x, 2, 1) for x in (K, V)), mask=mask)
    np.testing.assert_array_equal(out, repeated)


def test_no_mask_is_the_default():
    everything = np.ones((5, 7), bool)
    for options in ({}, {"causal": True}):
        expected, _ = check(Q, K, V, **options)
        grads, dout = backward(Q, K, V, **options)
        for mask in (None, everything, BlockMask.from_dense(everything)):
            got = cuflash.attention(Q, K, V, mask=mask, **options)
            np.testing.assert_array_equal(got, expected)
            for a, b in zip(backward(Q, K, V, dout, mask=mask, **options)[0], grads, strict=True):
                np.testing.assert_array_equal(a, b)
    assert cuflash.plan(Q, K, V, mask=None) == cuflash.plan(Q, K, V)


@pytest.mark.parametrize("algo", ["fa1", "fa2"])
@pytest.mark.parametrize("as_blocks", [False, True])
def test_queries_without_keys_and_keys_without_queries(algo, as_blocks):
    dense = np.ones((2, 3, 5, 7), bool)
    dense[0, 1, 2], dense[1, :, :, 4] = False, False
    dense[1, 2] = False
    mask = BlockMask.from_dense(dense, 16) if as_blocks else dense
    out, lse = cuflash.attention(Q, K, V, mask=mask, algo=algo, return_lse=True)
    unseeing = ~dense.any(-1)
    assert (out[unseeing] == 0).all()
    assert np.isneginf(lse[unseeing]).all()
    assert (out[~unseeing] != 0).all()
    assert np.isfinite(lse[~unseeing]).all()
    (dq, dk, dv), _ = backward(Q, K, V, mask=mask, algo=algo)
    unseen = ~dense.any(-2)
    assert (dq[unseeing] == 0).all()
    assert (dk[unseen] == 0).all()
    assert (dv[unseen] == 0).all()
    assert (dv[~unseen] != 0).all()


@pytest.mark.parametrize("algo", ["fa1", "fa2"])
@pytest.mark.parametrize("shapes", [
    ((0, 3, 5, 4), (0, 3, 7, 4), (0, 3, 7, 6)),
    ((2, 3, 0, 4), (2, 3, 7, 4), (2, 3, 7, 6)),
    ((2, 3, 5, 4), (2, 3, 0, 4), (2, 3, 0, 6)),
    ((0, 4), (0, 4), (0, 4)),
], ids=str)  # fmt: skip
def test_masks_of_nothing(shapes, algo):
    arrays = [normal(*shape) for shape in shapes]
    shape = (*shapes[0][:-1], shapes[1][-2])
    dense = np.ones(shape, bool)
    for mask in (dense, np.array(True), BlockMask.from_dense(dense, 16)):
        out, lse = cuflash.attention(*arrays, mask=mask, algo=algo, return_lse=True)
        assert out.shape == (*shapes[0][:-1], shapes[2][-1])
        assert (out == 0).all()
        assert np.isneginf(lse).all()
        grads, _ = backward(*arrays, mask=mask, algo=algo)
        for x, grad in zip(arrays, grads, strict=True):
            assert grad.shape == x.shape
            assert (grad == 0).all()
        for gradients in (False, True):
            cuflash.plan(*arrays, mask=mask, algo=algo, device=H200, backward=gradients)


def test_vjp_passes_the_mask_on():
    dense = bools(2, 1, 5, 7)
    for mask in (dense, BlockMask.from_dense(dense, 16)):
        out, vjp = cuflash.attention_vjp(Q, K, V, mask=mask, causal=True)
        expected, _ = backward(Q, K, V, DOUT, mask=mask, causal=True)
        np.testing.assert_array_equal(out, cuflash.attention(Q, K, V, mask=mask, causal=True))
        for a, b in zip(vjp(DOUT), expected, strict=True):
            np.testing.assert_array_equal(a, b)


def test_plans_of_masks():
    q, k, v = inputs((2, 4), 300, 500, 64, 64, np.float16)
    blocks = BlockMask.causal((300, 500), block_size=64)
    for gradients in (False, True):
        options = {"device": H200, "backward": gradients}
        plan = cuflash.plan(q, k, v, mask=blocks, **options)
        assert (plan.problem.mask, plan.problem.mask_lists) == ("blocks", 1)
        assert "mask of blocks" in str(plan)
        assert plan.kernels[0].name != "mask_tiles"
        for shape, lists in (((300, 500), 1), ((4, 300, 500), 4), ((2, 4, 1, 500), 8), ((), 1)):
            plan = cuflash.plan(q, k, v, mask=np.ones(shape, bool), **options)
            assert (plan.problem.mask, plan.problem.mask_lists) == ("elements", lists)
            assert [x.name for x in plan.kernels[:2]] == ["mask_tiles", "mask_lists"]
        one = np.ones((1, 1, 300, 500), bool)
        for same in (np.broadcast_to(one, (2, 4, 300, 500)), one):  # not copied for each head
            assert cuflash.plan(q, k, v, mask=same, **options).problem.mask_lists == 1
    assert cuflash.plan(q, k, v, mask=blocks).engine == "numpy"


def test_masks_of_one_form_share_a_call(monkeypatch):
    made = count_calls(monkeypatch)
    first, second = (BlockMask.from_dense(bools(5, 7, seed=seed), 16) for seed in (1, 2))
    a, b, c = (cuflash.attention(Q, K, V, mask=x) for x in (first, second, first.to_dense()))
    assert len(made) == 2  # of blocks, and of elements
    assert (a != b).any()
    np.testing.assert_array_equal(a, c)
    cuflash.attention(Q, K, V, mask=np.asfortranarray(first.to_dense()))
    assert len(made) == 3
    cuflash.attention(Q, K, V)
    assert len(made) == 4


def test_masks_of_other_libraries():
    mask = bools(5, 7)
    np.testing.assert_array_equal(
        cuflash.attention(Q, K, V, mask=Dlpack(mask)), cuflash.attention(Q, K, V, mask=mask)
    )


def test_masks_are_left_alone():
    mask = bools(2, 1, 5, 7)
    kept = mask.copy()
    mask.flags.writeable = False
    check_masked(Q, K, V, mask)
    np.testing.assert_array_equal(mask, kept)
