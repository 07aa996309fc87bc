"""A sequence that one rank has no room for: attention and its gradients on several ranks.

    python examples/long_context.py                                        ranks are threads
    python -m cuflash launch -n 2 examples/long_context.py --tokens 65536 --budget 0.05

In the second line each rank is a process: with a GPU of its own where CuPy finds one, and else on
NumPy arrays, with sockets in between. Every rank draws its own part of the operands, and computes
its part of the results. Then some rows are compared with the reference, in float64, which needs no
result of other rows:

    any rows of out, lse and dq       depend on these rows of q and dout, and on all of k and v
    the last rows of dk and dv        are of keys that only the last queries see
"""

from __future__ import annotations

import argparse
import os

import ml_dtypes
import numpy as np

from cuflash import distributed, reference

BLOCK = 256  # tokens that are drawn together
ROWS = 32  # of a sample
CAUSAL = {"causal": True}


def draw(name, span, heads, dim, dtype):
    """Random numbers of a span of tokens: the same ones whoever draws them."""
    first, last = span.start // BLOCK, -(-span.stop // BLOCK)
    blocks = [
        np.random.default_rng([ord(name), block]).standard_normal((heads, BLOCK, dim), np.float32)
        for block in range(first, last)
    ]
    begin = span.start - first * BLOCK
    return np.concatenate(blocks, axis=1)[:, begin : begin + len(span)].astype(dtype)


def own_part(name, comm, tokens, heads, dim, dtype):
    """Tokens of this rank, of zigzag shards."""
    half = tokens // (2 * comm.size)
    numbers = comm.rank, 2 * comm.size - 1 - comm.rank
    spans = [range(i * half, (i + 1) * half) for i in numbers]
    return np.concatenate([draw(name, x, heads, dim, dtype) for x in spans], axis=1)


def gigabytes(tokens, heads, dim, dtype):
    """Of q, k, v, out, dout, dq, dk and dv."""
    return 8 * tokens * heads * dim * np.dtype(dtype).itemsize / 1e9


def why_pointless(ranks, budget, *form):
    """In words, where a rank has room for the whole, or none for its part; else an empty string."""
    whole = gigabytes(*form)
    part = whole / max(ranks, 1)
    if part <= (part if budget is None else budget) < whole:
        return ""
    return (
        f"operands and results take {whole:.3g} GB, {part:.3g} on each of {ranks} ranks: give more "
        "ranks than one, and a --budget between, or none"
    )


def rank(comm, tokens, heads, dim, dtype, on_device):
    """One rank's work; returns the worst error over its bound."""
    form = tokens, heads, dim, dtype
    q, k, v, dout = (on_device(own_part(name, comm, *form)) for name in "qkvd")
    how = {"comm": comm, "layout": "zigzag", **CAUSAL}
    if comm.rank == 0:
        print(distributed.plan(q, k, v, **how))
    out, lse = distributed.attention(q, k, v, return_lse=True, **how)
    dq, dk, dv = distributed.attention_backward(dout, q, k, v, out, lse, **how)
    found = {"out": out, "lse": lse[..., None], "dq": dq, "dk": dk, "dv": dv}
    return max(comm.tell(worst_of_samples(comm, form, found)))


def worst_of_samples(comm, form, found):
    """The worst error over its bound of some of this rank's rows."""
    tokens, heads, dim, dtype = form
    k, v = (draw(name, range(tokens), heads, dim, dtype) for name in "kv")
    own = distributed.positions(tokens, comm, "zigzag")
    worst = 0.0
    for begin in (0, len(own) // 2, len(own) - ROWS):  # within a span each
        rows = range(int(own[begin]), int(own[begin]) + ROWS)
        q, dout = (draw(name, rows, heads, dim, dtype) for name in "qd")
        mine = {name: on_host(x[:, begin : begin + ROWS]) for name, x in found.items()}
        options = CAUSAL | {"q_offset": rows.start}
        forward = reference.forward_bound(q, k, v, dtype, **options)
        backward = reference.backward_bound(dout, q, k, v, dtype, **options)
        ratios = list(forward.ratios(mine["out"], mine["lse"][..., 0]))
        names = ["dq"]
        if rows.stop == tokens:
            names += ["dk", "dv"]
        for name in names:
            count = slice(None) if name == "dq" else slice(-ROWS, None)
            expected = getattr(backward, name)[:, count]
            error = np.abs(mine[name].astype(np.float64) - expected)
            ratios.append(error / getattr(backward, f"{name}_bound")[:, count])
        worst = max(worst, *(float(x.max()) for x in ratios))
    return worst


def on_host(x):
    """A NumPy array of what may be a CuPy array."""
    return x.get() if hasattr(x, "get") else x


def launched():
    """The communicator, type and arrays of a process that a launcher has started."""
    try:
        import cupy
    except ModuleNotFoundError:
        cupy = None
    if cupy is None or not cupy.cuda.is_available():
        return distributed.SocketComm.from_environment(), np.float32, np.asarray
    return distributed.NcclComm.from_environment(), ml_dtypes.bfloat16, cupy.asarray


def main(arguments=None):
    """Compute, compare and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--ranks", type=int, default=2, help="threads, where no launcher says")
    parser.add_argument(
        "--budget", type=float, help="GB that a rank has room for, by default those of its part"
    )
    asked = parser.parse_args(arguments)
    form = asked.tokens, asked.heads, asked.dim
    comm, dtype, on_device = launched() if "RANK" in os.environ else (None, np.float32, np.asarray)
    ranks = asked.ranks if comm is None else comm.size
    if wrong := why_pointless(ranks, asked.budget, *form, dtype):
        parser.error(wrong)

    def work(comm):
        return rank(comm, *form, dtype, on_device)

    worst = max(distributed.LocalComm.run(ranks, work)) if comm is None else work(comm)
    if comm is None or comm.rank == 0:
        print(
            f"{asked.tokens} tokens on {ranks} ranks: rows of out, lse and gradients are within "
            f"{worst:.2f} of their bounds"
        )
    return 0 if worst <= 1 else 1


if __name__ == "__main__":
    raise SystemExit(main())
