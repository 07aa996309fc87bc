"""Random problems: options together that no list of cases has together.

    python tests/random_cases.py SEED SECONDS [--emulate | --numpy]

goes on for so long, on a GPU, in the emulator or on NumPy arrays, and prints each problem whose
results are wrong.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
import traceback
import zlib
from dataclasses import replace

import numpy as np
from cases import H200, T4, BackwardCase, Case, numpy_dtype, random_mask
from packed_cases import (
    BY_SEQUENCE,
    WEIGHTS,
    PackedCase,
    assert_gradients_close,
    assert_sequences_close,
)
from tolerance import assert_arrays_close, assert_backward_close, assert_forward_close

import cuflash
from cuflash import BlockMask, Device, ScoreMod
from cuflash.operands.dtypes import HALF

MAX_DIM = {"mma": {"float32": 128, "float64": 128}, "wgmma": {"float32": 128}, "simt": {}}
LAYOUTS = {"wgmma": ("bnhd", "padded"), "mma": ("bnhd", "odd"), "simt": ("reversed", "columns")}
MAPPABLE = "dense", "bnhd", "padded"  # layouts that wgmma reads
ANYHOW = *MAPPABLE, "odd", "offset", "reversed", "sparse", "columns"
WRITTEN = "out", "dq", "dk", "dv"
# Devices with less shared memory, whose rows of the table are others: the emulator is any of them.
SMALLER = {
    "simt": (T4, Device(89, multiprocessors=2)),
    "mma": (Device(80, multiprocessors=2), Device(89, multiprocessors=2)), "wgmma": (),
}  # fmt: skip
EXPRESSIONS = (
    "score * t[head] + where(q % 5 == k % 7, -inf, 1)",
    "where(shift < k - q, score, tanh(score) + u[batch, head])",
    "score + near[k - q + 20]", "score * rows[q] + abs(score)",
)  # fmt: skip


class _Draw:
    """What one seed draws."""

    def __init__(self, *seed: int):
        self.rng = np.random.default_rng(seed[0] if len(seed) == 1 else seed)

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def pick(self, *choices):
        return choices[self.rng.integers(len(choices))]

    def integer(self, low: int, high: int) -> int:
        """One from low to high."""
        return int(self.rng.integers(low, high + 1))

    def normal(self, *shape, dtype="float32"):
        return self.rng.standard_normal(shape).astype(numpy_dtype(dtype))

    def kernel(self, backward):
        engine = self.pick("wgmma", "wgmma", "mma", "mma", "simt")
        dtypes = ["float16", "bfloat16", "bfloat16", "float32", "float64"]
        if engine == "wgmma":
            dtypes.remove("float64")
        if engine == "mma" and backward:
            dtypes.remove("float32")
        dtype = self.pick(*dtypes)
        algos = ["fa1", "fa2", "fa2"]
        if engine == "wgmma":
            algos = ["fa2", "fa3", "fa3"] if backward or dtype == "float32" else [*algos, "fa3"]
        return self.pick(*algos), engine, dtype

    def dims(self, engine, dtype):
        most = MAX_DIM[engine].get(dtype, 256 if engine != "simt" else 512)
        step = 8 if engine == "wgmma" else 1

        def draw():
            return self.pick(64, 128, 32, step * self.integer(1, most // step))

        dim = draw()
        return dim, dim if self.chance(0.7) else draw()

    def length(self):
        return self.pick(self.integer(1, 5), self.integer(1, 300), self.integer(100, 500), 128, 256)

    def band(self, batch, n, m):
        options = {"causal": self.pick(False, False, True, True, "top_left")}
        if self.chance(0.25):
            left, right = self.integer(0, m), self.integer(0, 90)
            options["window"] = self.pick(left, (left, None), (None, right), (left, right))
        if self.chance(0.2) and options["causal"] != "top_left":
            places = self.rng.integers(-n, m + 5, batch)
            options["q_offset"] = self.pick(int(places[0]), places.astype(np.int32))
        if self.chance(0.2):
            options["q_lengths"] = self.rng.integers(0, n + 3, batch).astype(np.int32)
        if self.chance(0.25):
            options["kv_lengths"] = self.rng.integers(0, m + 3, batch)
        return options

    def mask(self, batch, heads, n, m):
        seed, axes = self.integer(0, 1 << 30), self.pick((batch, heads), (heads,), (), (batch, 1))
        kind = self.rng.random()
        if kind < 0.12:
            shown = random_mask((*axes, n, m), 32, seed=seed, shown=0.6)
            return {"mask": BlockMask.from_dense(shown, self.pick(16, 32, 64, 128))}
        if kind < 0.25:
            return {"mask": random_mask((*axes, n, m), 16, seed=seed, shown=0.6)}
        if kind < 0.3:
            return {"mask": self.rng.random((batch, 1, 1, m)) < 0.7}
        if kind < 0.37:
            ids, reach = self.rng.integers(0, 3, n + m), self.integer(0, 100)
            function = self.pick(
                lambda b, h, q, k: (ids[q] == ids[k]) & (k <= q + reach),
                lambda b, h, q, k: (q - k < reach << h) | (k % 3 == b),
            )
            shape = (*axes, n, m)
            return {"mask": BlockMask.from_function(function, shape, self.pick(32, 128))}
        return {}

    def scores(self, dtype, batch, heads, n, m):
        options = {}
        if self.chance(0.12):
            options["softcap"] = self.pick(1.5, 20.0)
        if self.chance(0.15):
            slopes = abs(self.normal(batch, heads)) / 5
            options["alibi_slopes"] = self.pick(slopes, slopes[0])
        if self.chance(0.15):
            options["sinks"] = self.normal(heads)
        if self.chance(0.2):
            axes = self.pick((batch, heads), (heads,), (), (batch, 1))
            rows = self.pick((n, m), (n, m), (1, m), (n, 1))
            options["bias"] = self.normal(*axes, *rows, dtype=self.pick(dtype, dtype, "float32"))
        if self.chance(0.08):
            options["score_mod"] = ScoreMod(
                "where((q + k) % 3 == 0, score / 2, score) + t[head] * (k - q) / 50",
                t=self.normal(heads),
            )
        if self.chance(0.1):
            options["scale"] = self.rng.random()
        if self.chance(0.2):
            options |= {"dropout_p": self.pick(0.1, 0.5), "seed": self.integer(0, 1 << 40)}
        return options

    def layouts(self, engine, backward):
        if self.chance(0.75):
            return {}
        layout = self.pick(*LAYOUTS[engine])
        names = [*self.pick("qkv", "q", "k", "v")]
        if self.chance(0.5):
            names.append("dout" if backward else "out")
        if backward and self.chance(0.3):
            names += ["dq", "dk", "dv"]
        return dict.fromkeys(names, layout)


def random_case(seed: int) -> Case:
    """A problem; the same for the same seed."""
    case = _problem(seed)
    changed = _with_arrays_anyhow(case, _Draw(seed, 1))
    case = changed if _is_served(changed) else case
    dims = _wide_heads(case, _Draw(seed, 2))
    if not dims or isinstance(case, BackwardCase):
        return case
    shapes = {x: (*getattr(case, x)[:-1], dims[x == "v"]) for x in "qkv"}
    return replace(case, **shapes)


def _with_arrays_anyhow(case: Case, draw: _Draw) -> Case:
    """With operands that the batch shares, arrays that lie in any way, and other scores."""
    batch, heads = case.leading
    changes: dict = {}
    if draw.chance(0.2):
        for name in draw.pick("q", "k", "v", "qk", "qv", "kv"):
            changes[name] = (1, *getattr(case, name)[1:])
    if draw.chance(0.15) and not case.poison:
        kinds = MAPPABLE if case.engine == "wgmma" else ANYHOW
        arrays = ("dout", "dq", "dk", "dv") if isinstance(case, BackwardCase) else ("out",)
        changes["layouts"] = {
            name: draw.pick(*kinds, *(() if name in WRITTEN else ("repeated",)))
            for name in ("q", "k", "v", *arrays)
        }
    if "score_mod" in case.options and draw.chance(0.8):
        arrays = {
            "t": draw.normal(heads), "u": draw.normal(batch, heads), "near": draw.normal(41),
            "rows": draw.normal(case.q[-2]),
        }  # fmt: skip
        text = draw.pick(*EXPRESSIONS)
        used = {name: x for name, x in arrays.items() if f"{name}[" in text}
        changes["options"] = case.options | {"score_mod": ScoreMod(text, **used)}
        if isinstance(case, BackwardCase) and draw.chance(0.5):
            changes["wrt"] = (*case.wrt, *used)
    return replace(case, **changes)


def _wide_heads(case: Case | PackedCase, draw: _Draw) -> tuple[int, int] | None:
    """Head dims beyond 256, for some forward cases of halves on mma."""
    if (case.algo, case.engine) != ("fa2", "mma") or case.dtype not in HALF or draw.chance(0.5):
        return None
    widths = [draw.pick(320, 512, draw.integer(257, 512)) for _ in range(2)]
    dim, value_dim = widths[0], draw.pick(*widths, draw.integer(1, 256))
    return draw.pick((dim, value_dim), (value_dim, dim))


def _is_served(case: Case) -> bool:
    """Whether its kernel exists: some sum over no other heads, or add nothing up in order."""
    backward = isinstance(case, BackwardCase)
    out = case.grads_out() if backward else None
    try:
        cuflash.plan(*case.operands(), out=out, backward=backward, device=H200, **case.call())
    except NotImplementedError:
        return False
    return True


def _problem(seed: int) -> Case:
    draw = _Draw(seed)
    backward = draw.chance(0.55)
    algo, engine, dtype = kernel = draw.kernel(backward)
    dim, value_dim = draw.dims(engine, dtype)
    batch, key_heads, group = draw.integer(1, 3), draw.integer(1, 3), draw.pick(1, 1, 1, 2, 4)
    heads, n, m = key_heads * group, draw.length(), draw.length()
    if draw.chance(0.4):
        m = n
    options = {"enable_gqa": group > 1}
    if group == 1 and draw.chance(0.15):
        key_heads = 1  # for all
    options |= draw.band(batch, n, m) | draw.mask(batch, heads, n, m)
    options |= draw.scores(dtype, batch, heads, n, m)
    poison = draw.pick("", "", "", "hidden", "visible")
    if poison == "visible" and {"bias", "score_mod", "softcap"} & options.keys():
        poison = ""
    shapes = (batch, heads, n, dim), (batch, key_heads, m, dim), (batch, key_heads, m, value_dim)
    given = (f"random {seed}", *kernel, *shapes, options, draw.layouts(engine, backward), poison)
    if not backward:
        splits = algo != "fa1" and (engine, dtype) != ("wgmma", "float32")
        if splits and draw.chance(0.25):
            options["split_keys"] = draw.pick(16, 48, 64, 128, 4096, 0)
        return Case(*given)
    wrt = [x for x in ("bias", "sinks", "alibi_slopes") if x in options and draw.chance(0.5)]
    return BackwardCase(
        *given, deterministic=draw.chance(0.7), with_dlse=draw.chance(0.3), wrt=tuple(wrt)
    )


def random_packed_case(seed: int) -> PackedCase:
    """Packed sequences; the same for the same seed."""
    draw = _Draw(seed)
    backward = draw.chance(0.5)
    algo, engine, dtype = kernel = draw.kernel(backward)
    dims = draw.dims(engine, dtype)
    count, key_heads, group = draw.integer(1, 9), draw.integer(1, 2), draw.pick(1, 1, 2, 3)

    def lengths():
        few, many = draw.rng.integers(1, 41, count), draw.rng.integers(1, 301, count)
        return tuple(draw.pick(0, 1, int(a), int(b)) for a, b in zip(few, many))

    queries = lengths()
    keys = queries if draw.chance(0.6) else lengths()
    heads, longest = key_heads * group, (max(1, *queries), max(1, *keys))
    options = draw.band(count, *longest)
    by_sequence = [x for x in ("q_lengths", "kv_lengths") if x in options]
    for name, length in zip(("q_lengths", "kv_lengths"), (queries, keys)):
        if name in options:
            options[name] = np.minimum(options[name], length)
    if np.ndim(options.get("q_offset", 0)):
        by_sequence.append("q_offset")
    scores = draw.scores(dtype, count, heads, *longest)
    if {"score_mod", "dropout_p"} & scores.keys():  # which count sequences
        scores = (
            {"score_mod": ScoreMod(BY_SEQUENCE, weights=WEIGHTS)} if count <= len(WEIGHTS) else {}
        )
    if np.ndim(scores.get("alibi_slopes")) == 2:
        by_sequence.append("alibi_slopes")
    options |= scores
    if draw.chance(0.2):
        shown = random_mask(
            (count, draw.pick(1, heads), *longest), 16, shown=0.7, seed=draw.integer(0, 99)
        )
        options["mask"] = draw.pick(shown, BlockMask.from_dense(shown, draw.pick(16, 32, 64)))
        by_sequence += ["mask"] if options["mask"] is shown else []
    if {"bias", "mask"} & options.keys() or draw.chance(0.2):
        options |= dict(zip(("max_seqlen_q", "max_seqlen_k"), longest))
    if "bias" in scores and scores["bias"].ndim == 4 and len(scores["bias"]) == count:
        by_sequence.append("bias")
    if not backward and algo != "fa1" and dtype != "float32" and draw.chance(0.2):
        options["split_keys"] = draw.pick(16, 64, 128)
    has_pages = not backward and algo != "fa1" and dtype != "float32"
    if has_pages and not {"bias", "mask"} & options.keys() and draw.chance(0.25):
        options["page_table"], options["kv_lengths"] = None, np.array(keys)
        options.pop("max_seqlen_k", None)
        by_sequence += ["page_table", "kv_lengths"]
    if backward:
        options["deterministic"] = draw.chance(0.7)
    case = PackedCase(
        f"random {seed}", *kernel, queries, keys, (heads, key_heads), dims, options,
        tuple(by_sequence), backward=backward, page=draw.pick(16, 16, 32, 48, 80),
    )  # fmt: skip
    dims = _wide_heads(case, _Draw(seed, 2))
    return replace(case, dims=dims) if dims and not backward else case


def checker(emulate: bool, on_numpy: bool):
    """What checks a case."""
    if on_numpy:
        return check_on_numpy
    if emulate:
        import test_kernels
        import test_packed

        plain = test_kernels.check_random, test_kernels.check_random
        packed = test_packed.check_forward, test_packed.check_backward
    else:
        import cupy
        import test_gpu

        functions = (
            (test_gpu.check, test_gpu.check_backward),
            (test_gpu.test_packed_case, test_gpu.test_packed_backward_case),
        )
        plain, packed = ([functools.partial(f, cupy) for f in x] for x in functions)

    def check(case):
        if isinstance(case, PackedCase):
            function = packed[case.backward]
        else:
            function = plain[isinstance(case, BackwardCase)]
        if emulate and (device := smaller_device(case)):
            try:
                return function(case, device=device)
            except NotImplementedError:  # the smaller one has no kernel for it
                pass
        return function(case)

    return check


def smaller_device(case: Case | PackedCase) -> Device | None:
    """Another device than cases are for, or None for these; the same for the same case."""
    choices = None, *SMALLER[case.engine]
    return choices[zlib.crc32(str(case).encode()) % len(choices)]


def check_on_numpy(case: Case | PackedCase) -> None:
    """Fail unless the NumPy engine's results are right."""
    if isinstance(case, PackedCase):
        _check_packed_on_numpy(case)
        return
    algo = "fa1" if case.algo == "fa1" else "fa2"
    call = case.call() | {"algo": algo, "engine": "numpy"}
    if not isinstance(case, BackwardCase):
        q, k, v = case.operands()
        out, lse = cuflash.attention(q, k, v, return_lse=True, **call)
        assert_forward_close(out, lse, q, k, v, **case.meaning)
        return
    dout, q, k, v, out, lse, dlse = case.inputs()
    grads_out = case.grads_out()
    grads = cuflash.attention_backward(
        dout, q, k, v, out, lse, dlse=dlse, grads_out=grads_out, **call
    )
    named = dict(case.meaning, dlse=dlse)
    assert_backward_close(grads[:3], dout, q, k, v, **named)
    assert_arrays_close(grads[3:], case.wrt, dout, q, k, v, **named)


def _check_packed_on_numpy(case: PackedCase) -> None:
    (q, k, v, *starts), options = case.arguments()
    options |= {"algo": "fa1" if case.algo == "fa1" else "fa2", "engine": "numpy"}
    if not case.backward:
        out, lse = cuflash.attention_varlen(q, k, v, *starts, return_lse=True, **options)
        assert_sequences_close(case, out, lse)
        return
    dout, out, lse, dlse = case.outputs()
    grads = cuflash.attention_varlen_backward(
        dout, q, k, v, out, lse, *starts, dlse=dlse, **options
    )
    assert_gradients_close(case, grads, dout, dlse)


def describe(case: Case | PackedCase) -> str:
    """All that a case says, long arrays by their shapes."""

    def text(x):
        if isinstance(x, dict):
            return "{" + ", ".join(f"{name}: {text(value)}" for name, value in x.items()) + "}"
        if isinstance(x, np.ndarray) and x.size > 9:
            return f"{x.dtype}{list(x.shape)}"
        return str(x)

    return text(vars(case))


def main() -> int:
    """Check problems for a while."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("seed", type=int, help="of the first problem")
    parser.add_argument("seconds", type=float)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--emulate", action="store_true", help="kernels on a CPU")
    where.add_argument("--numpy", action="store_true", help="the NumPy engine")
    options = parser.parse_args()
    check = checker(options.emulate, options.numpy)
    end, count, wrong = time.monotonic() + options.seconds, 0, 0
    for seed in itertools.count(options.seed):
        if time.monotonic() > end:
            break
        case, count = (random_case if seed % 4 else random_packed_case)(seed), count + 1
        try:
            check(case)
        except Exception:
            wrong += 1
            print(describe(case), traceback.format_exc(), sep="\n", flush=True)
    print(f"{count} problems from seed {options.seed} on, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
