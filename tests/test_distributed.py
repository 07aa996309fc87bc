"""Attention on several ranks: threads of one process, on NumPy arrays, against the reference."""

import functools

import numpy as np
import pytest
from cases import numpy_dtype

from cuflash import BlockMask, distributed, reference
from cuflash.distributed import LocalComm

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
        n = 2 * size * form.get("spans", 16 if "dropout_p" in self.options else 12)
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
