"""What the estimate of a forward plan reckons with, measured: cuflash/planning/estimate.py.

    python asv_bench/calibrate.py [--engines wgmma mma simt] [--dtype fp64] [--ms 20]

Every row of the table works on items of one length, the same number of them for each thread block:
few and many items, short and long ones, of keys that all heads share and the L2 cache holds. A
call's time is `start + items (key tiles * step + item)`. Printed are, for each row at its largest
head dim, `rate` (TFLOP/s of the steps alone), `item_time` and `start_time` (us), as the table has
them.

The planning package's tables and constants are of an H200 with its clocks as they come.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import gpu as bench
from every_row import with_row

import cuflash
from cuflash.planning.plan import TILES

ITEMS, KEY_TILES = (4, 16), (2, 34)
DTYPES = {"wgmma": "bf16", "mma": "bf16", "simt": "fp32"}


def rows(engines, dtype=None):
    """The forward rows of those engines, and the type of each, by default the one that its engine's
    rates are of; but fa2 where fa3 has the same.
    """
    for row in TILES:
        kind = dtype or DTYPES.get(row.engine)
        serves = row.engine in engines and bench.DTYPES[kind].name in row.dtypes
        if row.rate and serves and (row.persists or row.engine != "wgmma"):
            yield row, kind


def work(row, dtype: str, items: int, key_tiles: int):
    """A call in which every block works on so many items of so many key tiles."""
    device = bench.need_gpu().cuda.Device()
    heads = device.attributes["MultiProcessorCount"] * row.blocks_per_multiprocessor
    width, keys = row.max_dim, key_tiles * row.block_k
    q = bench.draw((1, heads, items * row.block_q, width), dtype)
    k, v = (bench.draw((1, 1, keys, width), dtype) for _ in range(2))
    return with_row(row, functools.partial(cuflash.attention, q.cupy, k.cupy, v.cupy))


def measure(row, dtype: str, milliseconds: float) -> tuple[float, float, float]:
    """(rate, item_time, start) of a row."""
    meter, (few, many), (short, long) = bench.meter(), ITEMS, KEY_TILES
    sizes = [(few, short), (many, short), (many, long)]
    columns = meter.measure([work(row, dtype, *x) for x in sizes], milliseconds)
    shortest, short_ones, long_ones = map(statistics.median, columns)
    step = (long_ones - short_ones) / (many * (long - short))
    item = (short_ones - shortest) / (many - few) - short * step
    start = shortest - few * (short * step + item)
    multiprocessors = bench.need_gpu().cuda.Device().attributes["MultiProcessorCount"]
    flops = 4 * row.block_q * row.block_k * row.max_dim * row.blocks_per_multiprocessor
    return flops * multiprocessors / step / 1e6, item, start


def main(arguments=None) -> None:
    """Measure the rows asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--dtype", choices=list(bench.DTYPES), help="by default the engine's")
    parser.add_argument("--ms", type=float, default=20, help="GPU time per call")
    options = parser.parse_args(arguments)
    print(cuflash.__name__, ", ".join(f"{key} {value}" for key, value in bench.facts().items()))
    for row, dtype in rows(options.engines, options.dtype):
        try:
            rate, item, start = measure(row, dtype, options.ms)
        except Exception as error:
            print(f"{row} D {row.max_dim}: {bench.in_words(error)}")
            continue
        print(
            f"{row} D {row.max_dim}: rate={rate:.0f}, item_time={item:.2f}, start_time={start:.1f}"
        )
        bench.release()


if __name__ == "__main__":
    main()
