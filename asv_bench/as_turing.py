"""The rows for sm_75 on the GPU that is here: kernels are built as PTX of compute_75, which the
driver translates.

    python asv_bench/as_turing.py           # times beside simt's
    python asv_bench/as_turing.py --rows    # what the plan's estimate reckons with

As many blocks share a multiprocessor as have room in the 64 KB of sm_75. The times are not those of
a T4, whose tensor cores, memory and clocks are others: they tell rows apart.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import calibrate
from benchmarks import gpu as bench

import cuflash
from cuflash.calls import run
from cuflash.planning.plan import Plan
from cuflash.planning.problem import SHARED_BYTES
from cuflash.planning.turing import ARCH, ROWS

SHAPES = [(4, 32, 4096, 64), (4, 16, 4096, 128), (4, 8, 4096, 224), (4, 8, 4096, 256)]
DTYPE = "fp16"


def crowded(kernel, attributes):
    """A launch that asks for so much shared memory that no more blocks have room than on sm_75."""
    if not kernel.shared_bytes:
        return kernel
    blocks = SHARED_BYTES[ARCH] // kernel.shared_bytes
    share = attributes["MaxSharedMemoryPerMultiprocessor"] // blocks
    room = share - attributes["ReservedSharedMemoryPerBlock"]
    return kernel._replace(shared_bytes=max(room, kernel.shared_bytes))


@contextlib.contextmanager
def as_turing(cupy):
    """Plan for sm_75, and compile for it."""
    from cuflash.gpu import launch

    attributes, kernels = cupy.cuda.Device().attributes, Plan.kernels

    compiler, facts = cupy.cuda.compiler, launch.device_facts
    options = compiler._get_arch_for_options_for_nvrtc

    def forget():
        run._calls.clear()
        launch._load.cache_clear()
        launch.compiled.cache_clear()

    def turing(number):
        return dataclasses.replace(facts(number), arch=ARCH, shared_bytes=SHARED_BYTES[ARCH])

    forget()
    compiler._get_arch_for_options_for_nvrtc = lambda arch=None: (f"-arch=compute_{ARCH}", "ptx")
    launch.device_facts = turing
    Plan.kernels = property(lambda plan: tuple(crowded(x, attributes) for x in kernels.fget(plan)))
    try:
        yield
    finally:
        compiler._get_arch_for_options_for_nvrtc, launch.device_facts = options, facts
        Plan.kernels = kernels
        forget()


def calls(shape, engine: str, causal: bool, backward: bool):
    """A function that runs an engine's kernel, and the operations of its products."""
    q, k, v, dout = (bench.draw(shape, DTYPE).cupy for _ in range(4))
    options = {"engine": engine, "causal": causal}
    flops = cuflash.plan(q, k, v, **options).flops
    if not backward:
        return functools.partial(cuflash.attention, q, k, v, **options), flops
    cuflash.plan(q, k, v, backward=True, **options)  # or an error that says why there is none
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    of_kernel = functools.partial(cuflash.attention_backward, dout, q, k, v, out, lse, **options)
    return of_kernel, 5 * flops // 2


def compare(milliseconds: float) -> None:
    """Print TFLOP/s of mma and simt, and their ratio."""
    meter = bench.meter()
    for backward in (False, True):
        for shape in SHAPES:
            for causal in (False, True):
                what = f"{'backward' if backward else 'forward'} {shape}{' causal' * causal}"
                try:
                    (mma, flops), (simt, _) = (
                        calls(shape, engine, causal, backward) for engine in ("mma", "simt")
                    )
                except NotImplementedError as error:
                    print(f"{what}: {bench.in_words(error)}")
                    continue
                columns = meter.measure([mma, simt], milliseconds)
                rates = [flops / statistics.median(x) / 1e6 for x in columns]
                print(f"{what}: mma {rates[0]:.1f} TFLOP/s, simt {rates[1]:.1f}, "
                      f"ratio {rates[0] / rates[1]:.2f}", flush=True)  # fmt: skip
                bench.release()


def measure_rows(milliseconds: float) -> None:
    """Print what `turing.py` says of its forward rows of fa2."""
    for row in ROWS:
        if row.rate:
            rate, item, start = calibrate.measure(row, DTYPE, milliseconds)
            print(f"{row} D {row.max_dim}: rate={rate:.0f}, item_time={item:.2f}, "
                  f"start_time={start:.1f}", flush=True)  # fmt: skip
            bench.release()


def main(arguments=None) -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", action="store_true", help="the rows of the table, one by one")
    parser.add_argument("--ms", type=float, default=20, help="GPU time per call")
    options = parser.parse_args(arguments)
    with as_turing(bench.need_gpu()):
        print(cuflash.__name__, ", ".join(f"{key} {value}" for key, value in bench.facts().items()))
        (measure_rows if options.rows else compare)(options.ms)


if __name__ == "__main__":
    main()
