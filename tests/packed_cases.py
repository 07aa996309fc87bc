"""Packed sequences that the kernels are tested on, in the emulator and on a GPU."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace

import numpy as np
from cases import BACKWARD_KERNELS, DIMS, DTYPES, KERNELS, numpy_dtype, random_mask
from tolerance import assert_arrays_close, assert_backward_close, assert_forward_close

from cuflash import BlockMask, ScoreMod, reference

LENGTHS = (0, 37, 1, 0, 150, 64, 0), (0, 20, 70, 5, 131, 0, 0)  # of queries and keys
GAPS = 3, 5  # tokens before the first sequence and behind the last one
MOST = 160  # tokens that a sequence may have, where that is said
# Options that say how, or of which gradients, not what the result is.
OTHERS = "split_keys", "max_seqlen_q", "max_seqlen_k", "page_table", "deterministic", "wrt"


@dataclass(frozen=True)
class PackedCase:
    """One call of attention_varlen() or attention_varlen_backward().

    Parameters
    ----------
    name : str
    algo, engine, dtype : str
    queries, keys : tuple of int
        Lengths of the sequences.
    heads, dims : (int, int)
        Of queries and of keys; D and Dv.
    options : dict
        Of attention_varlen(). What has a first axis of sequences stands in `by_sequence`.
    by_sequence : tuple of str
        Those options whose first axis counts the sequences.
    hidden : tuple of int
        Sequences that have no valid query nor key, and NaN and infinity in all of their tokens.
    qkv : bool
        Whether q, k and v are views of one array.
    page : int
        Keys of a page, where they lie in pages.
    backward : bool
    copies : bool
        As of :class:`cases.Case`.
    """

    name: str
    algo: str
    engine: str
    dtype: str
    queries: tuple[int, ...] = LENGTHS[0]
    keys: tuple[int, ...] = LENGTHS[1]
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (64, 64)
    options: dict = field(default_factory=dict)
    by_sequence: tuple[str, ...] = ("q_lengths", "kv_lengths", "q_offset", "page_table")
    hidden: tuple[int, ...] = ()
    qkv: bool = False
    page: int = 16
    backward: bool = False
    copies: bool = False

    def __str__(self):
        kind = "-backward" if self.backward else ""
        return f"{self.algo}{kind}-{self.engine}-{self.dtype}-{self.name}"

    @property
    def starts(self):
        """cu_seqlens_q and cu_seqlens_k."""
        return tuple(np.cumsum((GAPS[0], *x)) for x in (self.queries, self.keys))

    @property
    def call(self):
        """The keyword arguments of the function."""
        kernel = {} if self.copies else {"algo": self.algo, "engine": self.engine}
        return dict(self.options, **kernel, enable_gqa=True)

    def operands(self):
        """q, k and v; NaN in tokens of no sequence and of those that are `hidden`."""
        rng = np.random.default_rng(zlib.crc32(str(self).encode()))
        (hq, hk), (d, dv) = self.heads, self.dims
        tokens = [x[-1] + GAPS[1] for x in self.starts]
        shapes = (tokens[0], hq, d), (tokens[1], hk, d), (tokens[1], hk, dv)
        if self.qkv:
            q, k, v = np.moveaxis(np.zeros((tokens[0], 3, hq, d), numpy_dtype(self.dtype)), 1, 0)
        else:
            q, k, v = (np.zeros(x, numpy_dtype(self.dtype)) for x in shapes)
        for x, starts in zip((q, k, v), self.starts[:1] + 2 * self.starts[1:], strict=True):
            x[...] = rng.standard_normal(x.shape)
            x[: starts[0]] = x[starts[-1] :] = np.nan
            for b in self.hidden:
                x[starts[b] : starts[b + 1]] = np.inf
                x[starts[b] : starts[b + 1], :, 0] = np.nan
        return q, k, v

    def paged(self, k, v):
        """Pools that hold the sequences' keys and values, and the table of their pages."""
        rng = np.random.default_rng(1)
        most = -(-max(self.keys) // self.page) + 1
        count = len(self.keys)
        table = rng.permutation(count * most).reshape(count, most)
        pools = []
        for x in (k, v):
            pool = np.full((count * most, x.shape[1], self.page, x.shape[2]), np.nan, x.dtype)
            for b, (begin, end) in enumerate(zip(self.starts[1][:-1], self.starts[1][1:])):
                for j, row in enumerate(range(begin, end)):
                    pool[table[b, j // self.page], :, j % self.page] = x[row]
            pools.append(pool)
        return *pools, table

    def rows(self, b):
        """Which rows sequence `b` has of queries, and of keys."""
        return tuple(slice(x[b], x[b + 1]) for x in self.starts)

    def meaning(self, b):
        """The options of attention() for sequence `b` alone."""
        named = {name: x for name, x in self.options.items() if name not in OTHERS}
        named |= {
            name: named[name][b % len(named[name])] for name in self.by_sequence if name in named
        }
        n, m = self.queries[b], self.keys[b]
        if isinstance(mask := named.get("mask"), BlockMask):
            mask = mask.to_dense()[b]
        if mask is not None:
            named["mask"] = mask[..., :n, :m]
        if "bias" in named:
            named["bias"] = named["bias"][..., :n, :m]
        if "score_mod" in named:
            named["score_mod"] = ScoreMod(BY_SEQUENCE, weights=np.asarray(WEIGHTS[b : b + 1]))
        return dict(named, enable_gqa=True)

    @property
    def is_batch(self):
        """Whether it is compared with a batch, of whose entries dropout knows the number."""
        return bool({"dropout_p", "wrt"} & self.options.keys())

    def meaning_in_batch(self):
        """The options of attention() for a batch of all sequences."""
        named = {name: x for name, x in self.options.items() if name not in OTHERS}
        lengths = {"q_lengths": np.array(self.queries), "kv_lengths": np.array(self.keys)}
        return lengths | named | {"enable_gqa": True}

    def in_batch(self, *arrays, of_keys=False, filled=0):
        """Rows of sequences as those of a batch: (tokens, heads, ...) as (B, heads, N, ...)."""
        lengths, starts = (self.queries, self.keys)[of_keys], self.starts[of_keys]
        longest = self.options.get(f"max_seqlen_{'qk'[of_keys]}") or max(1, *lengths)
        padded = []
        for x in arrays:
            whole = np.full((len(lengths), x.shape[1], longest, *x.shape[2:]), filled, x.dtype)
            for entry, begin, n in zip(whole, starts, lengths):
                entry[:, :n] = x[begin : begin + n].swapaxes(0, 1)
            padded.append(whole)
        return padded

    def arguments(self):
        """Arguments of the function: without offsets of keys where these lie in pages."""
        q, k, v = self.operands()
        options, (q_starts, k_starts) = self.call, self.starts
        if "page_table" in options:
            k, v, options["page_table"] = self.paged(k, v)
            k_starts = None
        return (q, k, v, q_starts, k_starts), options

    def outputs(self):
        """dout, out, lse and dlse: NaN in tokens of no sequence and of those that are `hidden`."""
        q, k, v = self.operands()
        rng = np.random.default_rng(0)
        shape = (len(q), self.heads[0], v.shape[-1])
        dout, out = rng.standard_normal(shape).astype(q.dtype), np.full(shape, np.nan, q.dtype)
        lse_dtype = np.float64 if self.dtype == "float64" else np.float32
        dlse = rng.standard_normal((shape[1], len(q))).astype(lse_dtype)
        lse = np.full_like(dlse, np.nan)
        outside = np.ones(len(q), bool)
        if self.is_batch:
            batch = *self.in_batch(q), *self.in_batch(k, v, of_keys=True)
            whole = reference.attention(*batch, return_lse=True, **self.meaning_in_batch())
        for b in range(len(self.queries)):
            rows, keys = self.rows(b)
            outside[rows] = b in self.hidden
            if self.is_batch:
                n = self.queries[b]
                out[rows], lse[:, rows] = whole[0][b, :, :n].swapaxes(0, 1), whole[1][b, :, :n]
                continue
            arrays = own_heads(q, rows), own_heads(k, keys), own_heads(v, keys)
            own, own_lse = reference.attention(*arrays, return_lse=True, **self.meaning(b))
            out[rows], lse[:, rows] = own.swapaxes(0, 1), own_lse
        dout[outside] = out[outside] = np.nan
        dlse[:, outside] = np.nan
        return dout, out, lse, dlse


def own_heads(x, rows):
    """The rows of one sequence, heads ahead of tokens."""
    return np.ascontiguousarray(x[rows].swapaxes(0, 1))


def assert_sequences_close(case, out, lse, plan=None):
    """Fail unless each sequence is as if it were alone, and all other tokens are 0 and -inf."""
    q, k, v = case.operands()
    outside = np.ones(len(q), bool)
    for b in range(len(case.queries)):
        rows, keys = case.rows(b)
        outside[rows] = False
        if case.queries[b] and not case.is_batch:
            arrays = own_heads(q, rows), own_heads(k, keys), own_heads(v, keys)
            own = own_heads(out, rows), lse[:, rows]
            assert_forward_close(*own, *arrays, plan=plan, **case.meaning(b))
    if case.is_batch:
        batch = *case.in_batch(q), *case.in_batch(k, v, of_keys=True)
        found = *case.in_batch(out), *case.in_batch(lse.T, filled=-np.inf)
        assert_forward_close(*found, *batch, plan=plan, **case.meaning_in_batch())
    assert not out[outside].astype(np.float64).any()
    assert np.isneginf(lse[:, outside]).all()


def assert_gradients_close(case, grads, dout, dlse, plan=None):
    """Fail unless each sequence's gradients are as if it were alone, and all others are 0.

    Behind those of q, k and v come those of the options that `wrt` names.
    """
    q, k, v = case.operands()
    outside = [np.ones(len(x), bool) for x in (q, k)]
    for b in range(len(case.queries)):
        rows, keys = case.rows(b)
        if case.queries[b] and case.keys[b]:
            outside[0][rows] = outside[1][keys] = False
            if case.is_batch:
                continue
            arrays = own_heads(q, rows), own_heads(k, keys), own_heads(v, keys)
            own = [own_heads(x, span) for x, span in zip(grads, (rows, keys, keys), strict=True)]
            of_lse = dlse[:, rows]
            assert_backward_close(
                own, own_heads(dout, rows), *arrays, plan=plan, dlse=of_lse, **case.meaning(b)
            )
    if case.is_batch:
        assert_batch_gradients_close(case, grads, dout, dlse, plan)
    for x, is_outside in zip(grads, (outside[0], outside[1], outside[1])):
        assert not x[is_outside].astype(np.float64).any()


def assert_batch_gradients_close(case, grads, dout, dlse, plan):
    """Fail unless gradients are those of a batch of all sequences."""
    q, k, v = case.operands()
    batch = *case.in_batch(dout, q), *case.in_batch(k, v, of_keys=True)
    found = *case.in_batch(grads[0]), *case.in_batch(*grads[1:3], of_keys=True)
    named = dict(case.meaning_in_batch(), dlse=case.in_batch(dlse.T)[0], plan=plan)
    assert_backward_close(found, *batch, **named)
    assert_arrays_close(grads[3:], case.options.get("wrt", ()), *batch, **named)


BY_SEQUENCE = "score + weights[batch] * (q - k) / 64"
WEIGHTS = np.linspace(-1, 1, len(LENGTHS[0])).astype(np.float32)


def _hiding(hidden):
    """Lengths within sequences, of which some have none."""
    queries, keys = (np.array(x) for x in LENGTHS)
    queries[4] -= 20
    keys[4] -= 7
    for b in hidden:
        queries[b] = keys[b] = 0
    return {"q_lengths": queries, "kv_lengths": keys}


def _cases(kernel, backward):
    algo, engine = kernel
    dtypes = DTYPES[engine]
    rng = np.random.default_rng(0)
    most = {"max_seqlen_q": MOST, "max_seqlen_k": MOST}
    count = len(LENGTHS[0])

    def case(name, number, **more):
        more = {"dims": (DIMS[engine],) * 2, "backward": backward, **more}
        return PackedCase(f"packed {name}", algo, engine, dtypes[number % len(dtypes)], **more)

    odd = (DIMS[engine], 40) if engine == "wgmma" else (33, 19)
    scores = {
        "window": (60, 9), "softcap": 5.0, "alibi_slopes": np.array([0.5, 0.1, 0, 1], np.float32),
        "sinks": np.linspace(-1, 1, 4).astype(np.float32), **_hiding((1, 5)),
    }  # fmt: skip
    elements = random_mask((count, 1, MOST, MOST), 16, shown=0.7)
    bias = rng.standard_normal((count, 4, MOST, MOST)).astype(np.float32)
    blocks = BlockMask.from_dense(random_mask((count, 2, MOST, MOST), 32, 0.7), block_size=32)
    square = {"queries": LENGTHS[0], "keys": LENGTHS[0], "heads": (2, 2), "qkv": True}
    yield case("causal", 0, options={"causal": True})
    yield case("scored", 1, options=scores, dims=odd, hidden=(1, 5))
    yield case("elements", 2, options={"mask": elements, "bias": bias, **most},
               by_sequence=("mask", "bias"))  # fmt: skip
    yield case("blocks", 3, **square, options={
        "mask": blocks, "causal": "top_left", **most,
        "score_mod": ScoreMod(BY_SEQUENCE, weights=WEIGHTS)})  # fmt: skip
    if engine == "wgmma":
        wide = {"options": {"causal": True, **_hiding((1, 5))}, "hidden": (1, 5), **square}
        yield case("wide", 6, **{**wide, "dims": (192, 192), "qkv": False})
        yield case("wide grouped", 7, **{**wide, "dims": (144, 160), "qkv": False, "heads": (4, 2)})
    elif kernel == ("fa2", "mma") and not backward:
        yield case("wide", 6, options={"causal": True, **_hiding((1, 5))}, hidden=(1, 5),
                   dims=(264, 300))  # fmt: skip
    if backward:
        yield case("any order", 4, options={"deterministic": False, "causal": "top_left"})
    elif algo != "fa1":
        yield case("split", 4, options={"split_keys": 32, "causal": True})
        yield case("pages", 5, options={
            "page_table": None, "causal": True, "kv_lengths": np.array(LENGTHS[1])})  # fmt: skip


def _in_planes(cases):
    """Those of fa3 in float32, and gradients on mma, as far as planes serve them."""
    own = [x for x in cases if x.algo == "fa3" and not {"split_keys", "page_table"} & {*x.options}]
    on_mma = [x for x in cases if x.backward and (x.algo, x.engine) == ("fa2", "mma")]
    own += [replace(x, dims=(32, 20) if 33 in x.dims else x.dims) for x in on_mma]
    names = [x.name.replace("packed", "in planes") for x in own]
    return [replace(x, name=name, dtype="float32") for x, name in zip(own, names, strict=True)]


CASES = [case for kernel in KERNELS for case in _cases(kernel, backward=False)]
CASES += _in_planes(CASES)
BACKWARD_CASES = [case for kernel in BACKWARD_KERNELS for case in _cases(kernel, backward=True)]
BACKWARD_CASES += _in_planes(BACKWARD_CASES)

# Forward on mma in float32, as halves have them.
MMA_FLOATS = [
    replace(x, name=x.name.replace("packed", "floats"), dtype="float32")
    for x in CASES
    if (x.algo, x.engine) == ("fa2", "mma")
]

_WHOLE = [("fa2", "mma"), ("fa2", "simt"), ("fa3", "wgmma")]


def in_emulator(cases):
    """Those that are worth their time there: of fa1 few, of fa2 on wgmma, which is fa3, one."""
    some = {"fa1": ("causal", "elements", "scored"), "fa2": ("causal",)}
    return [
        case
        for case in cases
        if (case.algo, case.engine) in _WHOLE
        or case.name.removeprefix("packed ") in some[case.algo]
    ]
