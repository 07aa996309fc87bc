"""The group of against_peers.py about one and few queries over caches, and short prompts.

What the plan chooses is held against the fastest of the peers, each with the settings that serve it
best: of FlashAttention-3 and -4 the number of splits and, where heads share keys, whether these
heads are packed. Which ones serve best is found in a short run; the row of the peer names them.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import statistics

import numpy as np
from benchmarks import gpu as bench
from benchmarks.gpu import BOTTOM_RIGHT, Problem
from peer_rows import CUDNN, FA2, Session

GROUPED = {"key_heads": 8}
ONE_QUERY = (1, 65536), (16, 8192), (128, 4096), (64, 1024), (1, 4096), (16, 65536)  # batch, keys
SPLITS = 0, 1, 8, 16, 32  # 0: as the peer chooses
TIGHT, ROOMY = 16384, 65536  # keys that caches have room for
PAGES = {16: 1.12, 64: 1.05, 256: 1.03}  # keys of a page, and the time that it may take
SOFTCAPS = {64: 1.6, 128: 1.25, 256: 1.15}  # head dim, and the time that softcap may take
SOFTCAP = 30.0


def _over_cache(batch, length, queries=1, width=128, dtype="bf16") -> tuple:
    """A case of few queries of 32 heads on 8 key heads."""
    causal = BOTTOM_RIGHT if queries > 1 else False
    return (batch, 32, length, width), dtype, causal, {**GROUPED, "queries": queries}


# Shape of the keys' side, type, causal, and what else Problem takes.
DECODE = [
    *(_over_cache(*sizes) for sizes in ONE_QUERY),
    ((4, 128, 16384, 128), "bf16", False, {"key_heads": 1, "queries": 1}),
    *(_over_cache(16, 8192, queries) for queries in (4, 2, 16)),
    _over_cache(16, 8192, width=64),
    *(_over_cache(*sizes, dtype="fp16") for sizes in ONE_QUERY[:3]),
]
PROMPTS = [
    ((1, 32, 16384, 128), "bf16", BOTTOM_RIGHT, {"queries": 1024}),
    ((1, 32, 512, 128), "bf16", BOTTOM_RIGHT, {}),
    ((8, 12, 512, 64), "bf16", False, {}),
    ((32, 12, 197, 64), "bf16", False, {}),
    ((16, 8, 1024, 256), "bf16", False, {}),
    ((16, 8, 1024, 256), "bf16", BOTTOM_RIGHT, {}),
    ((16, 16, 1024, 128), "bf16", BOTTOM_RIGHT, {}),
    ((2, 16, 4096, 192), "bf16", BOTTOM_RIGHT, {"value_width": 128}),
    ((1, 1, 4096, 64), "bf16", False, {}),
    ((1, 2, 16384, 128), "bf16", False, {}),
]


def flash_calls(problem, name) -> dict:
    """Calls of one of `bench.FLASH` by their settings in words, as far as it has them."""
    choices = {"num_splits": SPLITS}
    if "enable_gqa" in problem.options:
        choices["pack_gqa"] = True, False
    try:
        known = inspect.signature(bench.flash_function(name)).parameters
    except ImportError:
        known = ()
    choices = {setting: values for setting, values in choices.items() if setting in known}
    found = {}
    for values in itertools.product(*choices.values()):
        settings = dict(zip(choices, values))
        words = " ".join(f"{setting}={value}" for setting, value in settings.items())
        found[words] = problem.flash_attention(name, **settings)
    return found


def peers_of(problem) -> dict:
    """Calls of each peer by their settings.

    The diagonal of torch's is_causal starts at the first query and key.
    """
    same = not problem.causal or problem.queries == problem.shape[2]
    kernels = (CUDNN, FA2) if same else ()
    found = {name: {"": problem.torch_fused(kernel)} for name, kernel in kernels}
    return found | {name: flash_calls(problem, name) for name in bench.FLASH}


def fastest_settings(s: Session, calls) -> str:
    """Those of the call that takes least in a short run; of the first, where none runs."""
    if len(calls) == 1:
        return next(iter(calls))
    there = []
    for settings, call in calls.items():
        with contextlib.suppress(Exception):
            call()
            bench.need_gpu().cuda.Device().synchronize()
            there.append(settings)
    if not there:
        return next(iter(calls))
    columns = s.timer.measure([calls[settings] for settings in there], s.milliseconds / 8)
    return min(zip(there, columns), key=lambda pair: statistics.median(pair[1]))[0]


def compare(s: Session, problem, peers, targets, rated=False) -> None:
    """What the plan chooses against each peer with its fastest settings.

    `peers` are calls by name and settings, `targets` the ratios to reach to some of them, or to the
    fastest of several. Where the call is `rated` its rate is noted: keys and values / time.
    """
    name, settings = problem.chosen(), {}
    contenders = {name: problem.ours(None)}
    for peer, calls in peers.items():
        settings[peer] = fastest_settings(s, calls)
        contenders[peer] = calls[settings[peer]]
    held = {**dict.fromkeys(peers), **targets}
    pairs = [(name, peer, target) for peer, target in held.items()]
    for row in s.compare_pairs("decode", problem, contenders, pairs):
        words = [row["note"], settings.get(row["peer"])]
        if rated and "us" in row:
            row["rate"] = problem.key_bytes / row["us"] / 1e6
            words.append(f"{row['rate']:.2f} TB/s")
        row["note"] = ", ".join(filter(None, words))


def decode(s: Session) -> None:
    """One and few queries over caches, also with lengths and in pages; short prompts; softcap."""
    cases = DECODE[:3] + PROMPTS[:1] if s.quick else DECODE + PROMPTS
    for case in s.asked(cases):
        _against_peers(s, *case, rated=case in DECODE)
        bench.release()
    for part in (_room, _pages, _softcap):
        part(s)
        bench.release()


def _against_peers(s: Session, shape, dtype, causal, options, rated) -> None:
    """At least as fast as the fastest peer."""
    problem = Problem(shape, dtype, causal, "bnhd", **options)
    peers = peers_of(problem)
    compare(s, problem, peers, {tuple(peers): 1.0}, rated)


def _room(s: Session) -> None:
    """Caches with room for more keys may take 1.1 times the time of the same with less."""
    for (shape,) in s.asked([((64, 32, ROOMY, 128),)]):
        lengths = np.random.default_rng(0).integers(128, TIGHT, shape[0], endpoint=True)
        options = {**GROUPED, "queries": 1, "kv_lengths": lengths}
        problem = Problem(shape, "bf16", False, "bnhd", **options)
        tight, words = problem.with_capacity(TIGHT), f"room for {TIGHT}"
        peers = {words: {"": tight.ours(None)}, "FA3": flash_calls(problem, "FA3")}
        compare(s, problem, peers, {words: 1 / 1.1, "FA3": 1.0}, rated=True)


def _pages(s: Session) -> None:
    """Keys in pages against keys in a row, where lengths are given as for pages, and without."""
    for (shape,) in s.asked([((16, 32, 8192, 128),)]):
        options = {**GROUPED, "queries": 1, "kv_lengths": np.full(shape[0], shape[2])}
        problem = Problem(shape, "bf16", False, "bnhd", **options)
        in_a_row = {
            "no pages": {"": problem.ours(None)},
            "no pages, no lengths": {"": problem.ours(None, kv_lengths=None)},
        }
        for page_size, most in PAGES.items():
            targets = dict.fromkeys(in_a_row, 1 / most)
            compare(s, problem.in_pages(page_size), in_a_row, targets, rated=True)


def _softcap(s: Session) -> None:
    """Softcap against the same call without, and against FlashAttention-3."""
    for shape, most in s.asked([((2, 16, 4096, width), x) for width, x in SOFTCAPS.items()]):
        problem = Problem(shape, "bf16", BOTTOM_RIGHT, "bnhd", softcap=SOFTCAP)
        problem.others, without = ("no softcap",), problem.ours(None, softcap=None)
        peers = {"no softcap": {"": without}, "FA3": flash_calls(problem, "FA3")}
        compare(s, problem, peers, {"no softcap": 1 / most, "FA3": 1.0})
