"""Calls of the public functions on small arrays, and what their results must be.

The arrays here are shared: no test writes them.
"""

import numpy as np
from tolerance import assert_backward_close, assert_forward_close

import cuflash
from cuflash import _attention as module
from cuflash.calls import call as calls


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def inputs(leading=(2, 3), n=5, m=7, d=4, e=6, dtype=np.float32):
    shapes = ((*leading, n, d), (*leading, m, d), (*leading, m, e))
    return [normal(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]


def check(q, k, v, algo=None, **options):
    out, lse = cuflash.attention(q, k, v, algo=algo, return_lse=True, **options)
    assert_forward_close(out, lse, q, k, v, **options)
    assert out.dtype == np.result_type(q.dtype, k.dtype, v.dtype)
    assert lse.dtype == (np.float64 if out.dtype == np.float64 else np.float32)
    np.testing.assert_array_equal(cuflash.attention(q, k, v, algo=algo, **options), out)
    return out, lse


Q, K, V = inputs()


def result(*shape, dtype=np.float32):
    return np.full(shape, 77, dtype)


class Dlpack:
    """A CPU array of another library, as its DLPack methods show it."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def count_calls(monkeypatch):
    made = []

    class Counted(calls.ForwardCall):
        def __init__(self, *arguments):
            made.append(arguments)
            super().__init__(*arguments)

    monkeypatch.setattr(module, "ForwardCall", Counted)
    return made


def backward(q, k, v, dout=None, dlse=None, grads_out=None, **options):
    """dq, dk and dv of a forward call with these options, and the dout they are for."""
    forward_options = {n: x for n, x in options.items() if n not in ("deterministic",)}
    out, lse = cuflash.attention(q, k, v, return_lse=True, **forward_options)
    dout = normal(*out.shape, seed=7).astype(out.dtype) if dout is None else dout
    grads = cuflash.attention_backward(
        dout, q, k, v, out, lse, dlse=dlse, grads_out=grads_out, **options
    )
    return grads, dout


def check_backward(q, k, v, dout=None, dlse=None, **options):
    grads, dout = backward(q, k, v, dout, dlse, **options)
    options.pop("algo", None)
    options.pop("deterministic", None)
    assert_backward_close(grads, dout, q, k, v, dlse=dlse, **options)
    assert [x.dtype for x in grads] == [x.dtype for x in (q, k, v)]
    return grads


OUT, LSE = cuflash.attention(Q, K, V, return_lse=True)
DOUT = normal(2, 3, 5, 6, seed=7)
GRADIENTS = {"dout": DOUT, "q": Q, "k": K, "v": V, "out": OUT, "lse": LSE}

# Leading axes of q, k and v: grouped heads, and what broadcasts.
GQA = [
    ((2, 6), (2, 3), (2, 3)),
    ((2, 6), (2, 2), (1, 2)),
    ((6,), (2,), (2,)),
    ((2, 6), (3,), (3,)),
    ((2, 6), (2, 3), (2, 1)),
    ((2, 6), (2, 1), (2, 3)),
    ((2, 6), (), (3,)),
]
BROADCAST = [
    ((), (), ()),
    ((3,), (3,), ()),
    ((), (3,), (1,)),
    ((2, 1), (3,), (2, 3)),
    ((1, 3), (2, 1), (1, 1)),
    ((4, 1, 3), (2, 1), ()),
    ((2, 1, 1, 2), (1, 3, 1, 1), (2, 1, 5, 2)),
]
