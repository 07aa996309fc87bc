"""Attention for Thinc: a layer whose forward pass is `cuflash.attention_vjp`.

    python examples/thinc_attention.py
    python examples/thinc_attention.py --device gpu --steps 300

trains a small model to reverse sequences, which it cannot do without attention, and prints its
loss. The same layer runs on NumPy and on CuPy arrays: Thinc's `Ops` decide. Besides cuflash (with
CuPy for a GPU) it needs

    pip install thinc
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
from thinc.api import Adam, Linear, Model, chain, fix_random_seed, require_gpu, residual

import cuflash

SYMBOLS = 8


def Attention(heads, **options) -> Model:
    """Multi-head self-attention over the sequences of a batch.

    Maps queries, keys and values side by side, (B, N, 3 * heads * D), to (B, N, heads * D).

    Parameters
    ----------
    heads : int
        Attention heads.
    **options
        Passed on to `cuflash.attention_vjp`: `causal`, `window`, `algo`, ...
    """
    return Model("attention", _forward, attrs={"heads": heads, "options": options})


def _forward(model, qkv, is_train):
    heads = model.attrs["heads"]
    batch, tokens, width = qkv.shape

    def split(array):  # (B, N, parts * heads * D) -> (parts, B, heads, N, D), a view
        parts = array.reshape(batch, tokens, -1, heads, width // (3 * heads))
        return parts.transpose(2, 0, 3, 1, 4)

    def join(array):  # (B, heads, N, D) -> (B, N, heads * D)
        return array.swapaxes(1, 2).reshape(batch, tokens, -1)

    out, vjp = cuflash.attention_vjp(*split(qkv), **model.attrs["options"])

    def backprop(dout):
        gradient = model.ops.xp.empty_like(qkv)
        for part, array in zip(split(gradient), vjp(split(dout)[0]), strict=True):
            part[...] = array
        return gradient

    return join(out), backprop


def SelfAttention(width, heads, **options) -> Model:
    """:func:`Attention` between the projections around it: (B, N, width) to (B, N, width)."""
    if width % heads:
        raise ValueError(f"width={width} is not a multiple of heads={heads}")
    return chain(
        rows(Linear(3 * width, width)), Attention(heads, **options), rows(Linear(width, width))
    )


def rows(layer) -> Model:
    """Apply a layer of (rows, width) arrays to the last axis of (B, N, width) arrays."""
    return Model("rows", _forward_rows, layers=[layer], init=_init_rows)


def _forward_rows(model, x, is_train):
    y, backprop = model.layers[0](x.reshape(-1, x.shape[-1]), is_train)

    def backprop_rows(dy):
        return backprop(dy.reshape(-1, dy.shape[-1])).reshape(x.shape)

    return y.reshape(*x.shape[:-1], -1), backprop_rows


def _init_rows(model, X=None, Y=None):
    model.layers[0].initialize()


def reversal(length, width=32, heads=4) -> Model:
    """A model from :func:`batch_of` to the scores of each place's symbol, (B, N, SYMBOLS)."""
    model = chain(
        rows(Linear(width, SYMBOLS + length)),
        residual(SelfAttention(width, heads)),
        rows(Linear(SYMBOLS, width)),
    )
    model.initialize()
    return model


def batch_of(rng, size, length):
    """Sequences of symbols with their places, one-hot side by side, and the reversed symbols."""
    symbols = rng.integers(SYMBOLS, size=(size, length))
    one_hot = np.eye(SYMBOLS, dtype=np.float32)[symbols]
    places = np.broadcast_to(np.eye(length, dtype=np.float32), (size, length, length))
    return np.concatenate([one_hot, places], axis=-1), one_hot[:, ::-1]


def train(steps, *, length=6, size=64, seed=0):
    """Train on new sequences; yields each step's mean cross-entropy before the step."""
    fix_random_seed(seed)
    rng = np.random.default_rng(seed)
    model = reversal(length)
    ops, optimizer = model.ops, Adam(0.01)
    for _ in range(steps):
        x, wanted = (ops.asarray(array) for array in batch_of(rng, size, length))
        scores, backprop = model.begin_update(x)
        chances = ops.softmax(scores)
        yield float(-(wanted * ops.xp.log(chances)).sum() / (size * length))
        backprop((chances - wanted) / (size * length))
        model.finish_update(optimizer)


def main(argv=None) -> int:
    """Run from the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Learn to reverse sequences.")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args(argv)
    if args.device == "gpu":
        try:
            require_gpu()
        except ValueError as error:
            print(f"thinc_attention: {error}", file=sys.stderr)
            return 2
    for step, loss in enumerate(train(args.steps)):
        if step % 20 == 0 or step == args.steps - 1:
            print(f"step {step:4}  loss {loss:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
