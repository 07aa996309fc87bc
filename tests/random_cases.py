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

import numpy as np
from cases import T4, BackwardCase, Case, calls_of, random_mask
from packed_cases import (
    BY_SEQUENCE,
    WEIGHTS,
    PackedCase,
    assert_gradients_close,
    assert_sequences_close,
)
from random_changes import changed, is_served, with_arrays_anyhow, with_wide_heads
from random_draws import Draw
from tolerance import assert_arrays_close, assert_backward_close, assert_forward_close

import cuflash
from cuflash import BlockMask, Device, ScoreMod

# Devices with less shared memory, whose rows of the table are others: the emulator is any of them.
SMALLER = {
    "simt": (T4, Device(89, multiprocessors=2)),
    "mma": (Device(80, multiprocessors=2), Device(89, multiprocessors=2)), "wgmma": (),
}  # fmt: skip


def random_case(seed: int) -> Case:
    """A problem; the same for the same seed."""
    return changed(plain_case(seed), Draw(seed, 3))


def plain_case(seed: int) -> Case:
    """The same problem, without the changes that have draws of their own."""
    case = _problem(seed)
    other = with_arrays_anyhow(case, Draw(seed, 1))
    return with_wide_heads(other if is_served(other) else case, Draw(seed, 2))


def _problem(seed: int) -> Case:
    draw = Draw(seed)
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
    return changed(plain_packed_case(seed), Draw(seed, 3))


def plain_packed_case(seed: int) -> PackedCase:
    """The same sequences, without the changes that have draws of their own."""
    draw = Draw(seed)
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
    return with_wide_heads(case, Draw(seed, 2))


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
        with calls_of(case):
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
