"""All pairs of options that go together, on the NumPy engine, over several tiles."""

import itertools

import numpy as np
import pytest
from tolerance import assert_arrays_close, assert_backward_close, assert_forward_close

import cuflash
from cuflash import BlockMask, ScoreMod, reference
from cuflash.calls import run
from cuflash.planning import plan
from cuflash.planning.numpy import NumpyTile

BATCH, HEADS, N, M, DIM, PAGE = 2, 4, 21, 32, 4, 16
QUERIES, KEYS = np.array([N, 9]), np.array([18, M])  # of packed sequences
RNG = np.random.default_rng(0)
SHOWN = RNG.random((BATCH, HEADS, N, M)) < 0.7
BLOCKS = SHOWN[0, 0].copy()
BLOCKS[:16, :16], BLOCKS[:16, 16:] = True, False
OPTIONS = {
    "causal": {"causal": True},
    "window": {"window": (12, 4)},
    "softcap": {"softcap": 2.0},
    "bias": {"bias": RNG.standard_normal((BATCH, 1, N, M))},
    "alibi": {"alibi_slopes": np.array([0.3, 0.05, 0.2, 0.1])},
    "sinks": {"sinks": np.array([0.5, 4, -2, 1])},
    "score_mod": {"score_mod": ScoreMod("where(k % 5 != q % 3, score * much + t[head], -1)",
                                        much=0.5, t=RNG.standard_normal(HEADS))},
    "mask": {"mask": SHOWN},
    "blocks": {"mask": BlockMask.from_dense(BLOCKS, 16)},
    "lengths": {"q_lengths": np.array([15, N]), "kv_lengths": np.array([30, 11])},
    "offset": {"q_offset": 9, "causal": True},  # without a band it means nothing
    "scale": {"scale": 0.3},
    "dropout": {"dropout_p": 0.2, "seed": 5},
    "split_keys": {"split_keys": 16},
}  # fmt: skip
# What is more than options of the call.
FORMS = ("pages", "packed", "grouped", "broadcast", "values", "dlse", "wrt")
FORWARD_ONLY = {"pages", "split_keys"}
APART = [
    {"mask", "blocks"},  # are one argument
    {"packed", "broadcast"},  # tokens of packed sequences have no batch to broadcast over
    {"pages", "broadcast"},  # nor have pages
    *({a, b} for a in FORWARD_ONLY for b in ("dlse", "wrt")),
]
PAIRS = [x for x in itertools.combinations([*OPTIONS, *FORMS], 2) if set(x) not in APART]
ARRAYS = {"bias": "bias", "alibi": "alibi_slopes", "sinks": "sinks", "score_mod": "t"}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """So that several queries and keys are several tiles."""
    tiles = tuple(
        NumpyTile(algo=algo, max_dim=1 << 30, block_q=16, block_k=16, backward=backward)
        for algo in ("fa2", "fa1")
        for backward in (False, True)
    )
    monkeypatch.setattr(plan, "TILES", tiles)
    monkeypatch.setattr(run, "_calls", {})


def operands(names):
    """q, k, v, dout and dlse of a batch."""
    rng = np.random.default_rng(3)
    key_heads = 2 if "grouped" in names else HEADS
    value_dim = 6 if "values" in names else DIM
    lead = BATCH, key_heads
    if "broadcast" in names:
        lead = 1, key_heads if "grouped" in names else 1
    shapes = (BATCH, HEADS, N, DIM), (*lead, M, DIM), (*lead, M, value_dim)
    q, k, v = map(rng.standard_normal, shapes)
    dout, dlse = rng.standard_normal((*q.shape[:3], value_dim)), rng.standard_normal(q.shape[:3])
    return q, k, v, dout, dlse if "dlse" in names else None


def packed(x, lengths):
    """The tokens of a batch, one sequence behind another; of rows of lse, too."""
    x = np.concatenate([entry[:, :n] for entry, n in zip(x, lengths, strict=True)], axis=1)
    return x.swapaxes(0, 1) if x.ndim == 3 else x


def unpacked(x, lengths, longest, beyond=0.0):
    """The batch again, with `beyond` in rows that no sequence has."""
    is_lse = x.ndim == 2
    x = x if is_lse else x.swapaxes(0, 1)
    batch = np.full((len(lengths), len(x), longest, *x.shape[2:]), beyond, x.dtype)
    for entry, (n, end) in enumerate(zip(lengths, np.cumsum(lengths), strict=True)):
        batch[entry, :, :n] = x[:, end - n : end]
    return batch


def in_pages(k, v):
    """Pools that hold these keys and values, in pages in another order, and the table of these."""
    count = M // PAGE
    order = np.random.default_rng(1).permutation(BATCH * count)
    pools = []
    for x in (k, v):
        pages = x.reshape(BATCH, x.shape[1], count, PAGE, -1).swapaxes(1, 2)
        pools.append(pages.reshape(-1, *pages.shape[2:])[np.argsort(order)])
    return *pools, order.reshape(BATCH, count)


class Problem:
    """A call in the form that it is made in, and what it means: a call of a batch."""

    def __init__(self, names, algo):
        self.names, self.algo = names, algo
        self.arrays = operands(names)
        self.options = {"enable_gqa": "grouped" in names}
        for name in names:
            self.options |= OPTIONS.get(name, {})
        if "wrt" in names:
            self.options |= OPTIONS["bias"] if not ARRAYS.keys() & {*names} else {}
        self.wrt = tuple(ARRAYS[x] for x in names if x in ARRAYS) or ("bias",)
        self.meaning = {x: y for x, y in self.options.items() if x != "split_keys"}
        self.lengths = {}
        if "packed" in names:
            self.lengths = {"q_lengths": QUERIES, "kv_lengths": KEYS}
        elif "pages" in names:
            self.lengths = {"kv_lengths": np.array([M, M])}
        for name, most in self.lengths.items():
            self.meaning[name] = np.minimum(self.options.get(name, most), most)

    def forward(self):
        """out and lse, of a batch."""
        q, k, v = self.arrays[:3]
        options = self.options | {"algo": self.algo, "return_lse": True}
        if "pages" in self.names:
            k, v, options["page_table"] = in_pages(k, v)
            options["kv_lengths"] = self.meaning["kv_lengths"]
        if "packed" not in self.names:
            return cuflash.attention(q, k, v, **options)
        if "pages" in self.names:
            out, lse = cuflash.attention_varlen(
                packed(q, QUERIES), k, v, starts_of(QUERIES), max_seqlen_q=N, **options
            )
        else:
            q, k, v = packed(q, QUERIES), packed(k, KEYS), packed(v, KEYS)
            out, lse = cuflash.attention_varlen(q, k, v, **self.starts, **options)
        return unpacked(out, QUERIES, N), unpacked(lse, QUERIES, N, -np.inf)

    def gradients(self, out, lse):
        """dq, dk and dv, of a batch, and those of arrays."""
        q, k, v, dout, dlse = self.arrays
        options = self.options | {"algo": self.algo}
        if "wrt" in self.names:
            options["wrt"] = self.wrt
        if "packed" not in self.names:
            return cuflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
        dout, q, out, lse = (packed(x, QUERIES) for x in (dout, q, out, lse))
        if dlse is not None:
            options["dlse"] = packed(dlse, QUERIES)
        k, v = packed(k, KEYS), packed(v, KEYS)
        dq, dk, dv, *others = cuflash.attention_varlen_backward(
            dout, q, k, v, out, lse, **self.starts, **options
        )
        return unpacked(dq, QUERIES, N), unpacked(dk, KEYS, M), unpacked(dv, KEYS, M), *others

    @property
    def starts(self):
        """Where sequences begin, and how long they may be."""
        return {"cu_seqlens_q": starts_of(QUERIES), "cu_seqlens_k": starts_of(KEYS),
                "max_seqlen_q": N, "max_seqlen_k": M}  # fmt: skip


def starts_of(lengths):
    """Offsets of sequences of these lengths."""
    return np.cumsum([0, *lengths])


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_every_pair(pair):
    """Results and, where there are any, gradients."""
    for algo in ("fa2",) if "split_keys" in pair else ("fa1", "fa2"):
        case = Problem(pair, algo)
        q, k, v, dout, dlse = case.arrays
        assert_forward_close(*case.forward(), q, k, v, **case.meaning)
        if FORWARD_ONLY & {*pair}:
            continue
        out, lse = reference.attention(q, k, v, return_lse=True, **case.meaning)
        grads = case.gradients(out, lse)
        how = {"dlse": dlse, **case.meaning}
        assert_backward_close(grads[:3], dout, q, k, v, **how)
        if "wrt" in pair:
            assert_arrays_close(grads[3:], case.wrt, dout, q, k, v, **how)


def test_all_pairs_are_there():
    """But for those that exclude each other."""
    count = len(OPTIONS) + len(FORMS)
    assert len(PAIRS) == count * (count - 1) // 2 - len(APART)
