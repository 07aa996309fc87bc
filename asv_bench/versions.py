"""Several versions of cuflash in one process, timed call by call in turn.

    python asv_bench/versions.py main . --shapes 4,16,4096,128 1,16,16384,128 --causal both
    python asv_bench/versions.py . /tmp/another-loop --shapes 1,32,16384,64 --algo fa3
    python asv_bench/versions.py main . --with dropout --causal yes --backward
    python asv_bench/versions.py main . --shapes 4,16,4096,192 --value-width 128 --backward
    python asv_bench/versions.py . --backward --causal both --with order
    python asv_bench/versions.py main . --shapes 16,32,8192,64 --queries 1 --key-heads 8
    python asv_bench/versions.py main . --shapes 1,32,65536,128 --queries 1 --window 4096
    python asv_bench/versions.py main . --shapes 16,32,8192,64 --queries 1 --one-in 4
    python asv_bench/versions.py main . --shapes 16,16,4096,128 --packed --shortest 64 --backward
    python asv_bench/versions.py main . --queries 1 --causal yes --q-offset --shortest 1024

A version is a revision of this repository, or a folder that holds the package: "." is the working
tree. What is printed is the first version's time / each one's: above 1 it is faster than the first.
With a feature of features.py its time / that of the first version's call without it stands behind;
"order" is that of gradients' sums, and without it they are added in any order.
The exit status is 1 if a version fails or its results differ from the first one's.

For work on kernels. Equivalent ways to write a loop can differ by a tenth, by what the compiler
makes of them, and a device's clock drifts by as much: they can only be told apart in turns. Try
kernels of your own in the emulator before, under its eager schedule too: one that waits for ever
takes the device with it.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import numpy as np
from benchmarks import gpu as bench
from features import FEATURES
from sweep import find_commits, lay_out

from cuflash.planning.problem import Problem as Work

xp = bench.find_cupy() or np
ORDER = "order"
BLOCK = 128  # queries and keys of a block of a mask


def load(version: str, number: int, folder: Path):
    """The package of a version, under a name of its own."""
    root = Path(version)
    if not (root / "cuflash").is_dir():
        scratch = folder / str(number)
        scratch.mkdir()
        root = lay_out(find_commits([version])[0], scratch)
    name = f"cuflash_{folder.name}_{number}"
    ignored = shutil.ignore_patterns("__pycache__")
    package = Path(shutil.copytree(root / "cuflash", folder / name, ignore=ignored))
    source = package / "source.py"  # of older versions: it has the package's name in it
    if source.exists():
        source.write_text(source.read_text().replace('files("cuflash")', f'files("{name}")'))
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module(name)


def _both(first: int | None, second: int | None) -> str:
    """Sizes of queries and of keys, or the one that is given for both."""
    return "/".join(str(x) for x in (first, second) if x)


def _lengths(counts: np.ndarray, keys: np.ndarray, most, packed: bool, q_offset: bool) -> dict:
    """Options by which only the device knows how many keys each batch entry has.

    Queries end at the last of them. `most` are the queries and keys that there is room for.
    """
    if q_offset:
        return {"q_offset": xp.asarray(keys - counts, np.int32)}
    if not packed:
        return {"kv_lengths": xp.asarray(keys, np.int32)}
    starts = (xp.asarray(np.append(0, x.cumsum()), np.int32) for x in (counts, keys))
    names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
    return dict(zip(names, (*starts, *most)))


class Call:
    """One problem: operands, and what each version is to do with them."""

    def __init__(
        self, shape, dtype: str, causal: bool, gradients: dict | None, choice: dict,
        value_width: int | None = None, feature: str = "", queries: int | None = None,
        key_heads: int | None = None, window: int | None = None, filled: int | None = None,
        one_in: int | None = None, shortest: int | None = None, packed: bool = False,
        q_offset: bool = False,
    ):  # fmt: skip
        backward = gradients is not None
        name = bench.DTYPES[dtype].name
        batch, heads, length, width = shape
        values = value_width or width
        count, longest = queries or length, filled or length
        self.most = count, length
        keys = np.random.default_rng(0).integers(shortest or longest, longest, batch, endpoint=True)
        counts = keys if packed and not queries else np.full(batch, count)
        rows = (batch, heads, count), (batch, key_heads or heads, length)
        if packed:
            rows = (int(counts.sum()), heads), (int(keys.sum()), key_heads or heads)
        draw = functools.partial(bench.meters.draw, xp)
        sizes = (*rows[0], width), (*rows[1], width), (*rows[1], values), (*rows[0], values)
        drawn = [draw(x, name, seed) for seed, x in enumerate(sizes)]  # q, k, v and dout
        self.operands, self.dout = drawn[:3], drawn[3] if backward else None
        self.saved, self.gradients = (), gradients
        self.options = {"causal": bench.BOTTOM_RIGHT if causal and queries else causal, **choice}
        self.options |= {"enable_gqa": True} if key_heads else {}
        if window:
            self.options["window"] = window - 1, 0
        if filled or shortest or packed or q_offset:
            self.options |= _lengths(counts, keys, self.most, packed, q_offset)
        self.function = "attention_varlen" if packed else "attention"
        self.blocks = None
        if one_in:
            self.blocks = (np.arange(-(-length // BLOCK)) % one_in == 0)[None]
            self.blocks = self.blocks.repeat(-(-count // BLOCK), 0)
        if feature:
            self.options |= FEATURES[feature].options(shape, queries)
            if backward and FEATURES[feature].wrt:
                self.gradients = gradients | {"wrt": FEATURES[feature].wrt}
        sizes = batch, _both(heads, key_heads), _both(queries, length), width
        self.label = ("backward " if backward else "") + f"{dtype} ({','.join(map(str, sizes))})"
        self.label += f" values of {values}" if values != width else ""
        self.label += " causal" if causal else ""
        self.label += f" window of {window}" if window else ""
        self.label += f" filled with {filled}" if filled else ""
        self.label += f" lengths from {shortest}" if shortest else ""
        self.label += " packed" if packed else ""
        self.label += " q_offset" if q_offset else ""
        self.label += f" one block in {one_in}" if one_in else ""
        self.label += f" {feature}" if feature else ""
        seeing = np.minimum(counts, keys) if causal else counts
        shown = 1 - causal * (seeing - 1) / (2 * keys)
        pairs = seeing * shown * np.minimum(keys, window or length)  # nearly, in a window
        work = Work(name, (batch, heads), 1, 1, width, values, backward=backward)
        self.flops = work.flops * pairs.mean() / (one_in or 1)
        self.tolerance = (bench.GRADIENT_TOLERANCE if backward else bench.TOLERANCE)[dtype]

    def of(self, version):
        """The function to time."""
        given, forward = self.options | self.mask(version), getattr(version, self.function)
        if self.dout is None:
            return functools.partial(forward, *self.operands, **given)
        if not self.saved:
            self.saved = forward(*self.operands, return_lse=True, **given)
        arrays = (self.dout, *self.operands, *self.saved)
        options = given | self.gradients
        return functools.partial(getattr(version, f"{self.function}_backward"), *arrays, **options)

    def mask(self, version) -> dict:
        """A mask of blocks, as an option of that version's."""
        if self.blocks is None:
            return {}
        return {"mask": version.BlockMask(self.blocks, BLOCK, shape=self.most)}

    def compile(self, version) -> None:
        """Have the kernel ready, or leave it to the call to say why not."""
        try:
            launch = importlib.import_module(f"{version.__name__}.gpu.launch")
            given = self.options | self.mask(version)
            launch.compiled(version.plan(*self.operands, **given), 0)
        except Exception:
            return


def results(returned) -> list[np.ndarray]:
    """float32 copies on the host."""
    found = returned if isinstance(returned, tuple) else (returned,)
    return [x.astype(np.float32) if xp is np else bench.values(x).get() for x in found]


def time_in_turns(
    call: Call, versions: dict, meter, milliseconds: float, plain: Call | None = None
) -> bool:
    """Print a line per version; whether all ran and agreed. They are held against `plain`, too."""
    calls, first, agreed = {}, None, True
    for name, version in versions.items():
        try:
            calls[name] = call.of(version)
            found = results(calls[name]())
            first = first or found
            error = max(np.max(abs(a - b) / (1 + abs(b))) for a, b in zip(found, first))
            if not error < call.tolerance:
                raise ArithmeticError(f"results differ by {error:.2g} from the first one's")
        except Exception as reason:
            calls.pop(name, None)
            agreed = False
            print(f"{call.label:32} {name:24} {type(reason).__name__}: {reason}", flush=True)
    if not calls:
        return False
    beside = [] if plain is None else [plain.of(next(iter(versions.values())))]
    timed = meter.measure([*calls.values(), *beside], milliseconds)
    base = timed[0]
    for name, column in zip(calls, timed):
        rate = call.flops / statistics.median(column) / 1e6
        ratio = bench.paired_ratio(base, column)
        cost = f"  {bench.paired_ratio(column, timed[-1]):.3f} of plain" if beside else ""
        print(f"{call.label:32} {name:24} {rate:9.4g} TFLOP/s  {ratio:.3f}{cost}", flush=True)
    return agreed


def add_problems(parser: argparse.ArgumentParser) -> None:
    """The options that say which calls are timed, and how long."""
    parser.add_argument("--shapes", nargs="+", default=["4,16,4096,128"], metavar="B,H,N,D")
    parser.add_argument("--queries", type=int, metavar="N", help="the last N of a sequence alone")
    parser.add_argument("--key-heads", type=int, metavar="H", help="of k and v, by default all")
    parser.add_argument("--value-width", type=int, metavar="DV", help="by default D")
    parser.add_argument("--dtype", choices=bench.DTYPES, default="bf16")
    parser.add_argument("--causal", choices=("no", "yes", "both"), default="no")
    parser.add_argument(
        "--window", type=int, metavar="KEYS", help="that a query sees, its own last"
    )
    parser.add_argument("--filled", type=int, metavar="KEYS", help="of those there is room for")
    parser.add_argument(
        "--shortest", type=int, metavar="KEYS", help="lengths are random, from this to the longest"
    )
    form = parser.add_mutually_exclusive_group()  # of lengths, by default kv_lengths
    form.add_argument("--packed", action="store_true", help="sequences one behind another")
    form.add_argument("--q-offset", action="store_true", help="queries stand where lengths end")
    parser.add_argument(
        "--one-in", type=int, metavar="N", help=f"of so many blocks of {BLOCK} keys is shown"
    )
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--any-order", action="store_true", help="gradients in any order")
    parser.add_argument("--algo")
    parser.add_argument("--engine")
    parser.add_argument("--scale", type=float, help="scores then vary by SCALE * sqrt(D), not by 1")
    parser.add_argument("--with", dest="feature", choices=(*FEATURES, ORDER), default="")
    parser.add_argument("--ms", type=float, default=40, help="for each call and problem")


def problems(
    options: argparse.Namespace, parser: argparse.ArgumentParser
) -> Iterator[tuple[Call, Callable[[], Call] | None]]:
    """The calls asked for, each with what makes the plain one that a feature is held against."""
    choice = {"algo": options.algo, "engine": options.engine, "scale": options.scale}
    if options.feature == ORDER and (options.any_order or not options.backward):
        parser.error(f"--with {ORDER} goes with --backward, without --any-order")
    if options.q_offset and options.causal != "yes":
        parser.error("--q-offset goes with --causal yes")
    gradients = {"deterministic": not options.any_order} if options.backward else None
    without = {"deterministic": False} if options.feature == ORDER else gradients
    feature = "" if options.feature == ORDER else options.feature
    for shape in options.shapes:
        sizes = tuple(map(int, shape.split(",")))
        for causal in {"no": [False], "yes": [True], "both": [False, True]}[options.causal]:
            made = functools.partial(
                Call, sizes, options.dtype, causal, choice=choice, value_width=options.value_width,
                queries=options.queries, key_heads=options.key_heads, window=options.window,
                filled=options.filled, one_in=options.one_in, shortest=options.shortest,
                packed=options.packed, q_offset=options.q_offset,
            )  # fmt: skip
            plain = functools.partial(made, gradients=without) if options.feature else None
            yield made(gradients=gradients, feature=feature), plain


def main(arguments=None) -> int:
    """Time the versions asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="+", metavar="VERSION", help="a revision or a folder")
    add_problems(parser)
    options = parser.parse_args(arguments)
    meter = bench.meters.HostMeter() if xp is np else bench.meter()
    agreed = True
    with tempfile.TemporaryDirectory() as folder:
        names = dict.fromkeys(options.versions)
        versions = {name: load(name, i, Path(folder)) for i, name in enumerate(names)}
        for call, plain in problems(options, parser):
            if xp is not np:
                with ThreadPoolExecutor(os.cpu_count()) as pool:
                    list(pool.map(call.compile, versions.values()))
            agreed &= time_in_turns(call, versions, meter, options.ms, plain and plain())
    return 0 if agreed else 1


if __name__ == "__main__":
    raise SystemExit(main())
