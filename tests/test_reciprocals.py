"""The numbers by which kernels divide."""

import numpy as np
import pytest
from emulator import Memory, Module, available
from hypothesis import example, given
from hypothesis import strategies as st

from cuflash.gpu.arguments import reciprocal
from cuflash.planning.source import expand

LARGEST = (1 << 31) - 1
numbers = st.integers(0, LARGEST)


def divide(value, factor_and_shift):
    """As kernels do, with integers of 32 bits."""
    factor, shift = factor_and_shift & 0xFFFFFFFF, factor_and_shift >> 32
    return (2 * value * factor >> 32) >> shift


@given(numbers, st.integers(1, LARGEST), st.integers(-2, 2))
@example(LARGEST, 1, 0)
@example(LARGEST, LARGEST, 0)
@example(LARGEST, 3, 1)
def test_division_is_exact(value, divisor, beside):
    """Also at multiples of the divisor and beside them, where a wrong factor shows first."""
    number = reciprocal(divisor)
    assert 1 << 31 <= number & 0xFFFFFFFF  # all 32 bits
    edge = min(max(value // divisor * divisor + beside, 0), LARGEST)
    for n in (value, edge):
        assert divide(n, number) == n // divisor


@pytest.mark.skipif(available() is not None, reason=str(available()))
def test_division_in_a_kernel():
    rng = np.random.default_rng(0)
    values = rng.integers(0, LARGEST, 64, np.int32)
    divisors = rng.integers(1, LARGEST, 64) >> rng.integers(0, 31, 64)
    divisors[:3] = 1, 2, LARGEST
    divisors = np.maximum(divisors, 1)
    memory = Memory()
    found = np.zeros(64, np.int32)
    given_arrays = [values, np.array([reciprocal(int(x)) for x in divisors], np.uint64)]
    pointers = [memory.place(x) for x in given_arrays] + [memory.place(found, initialised=False)]
    body = """
extern "C" __global__ void k(const int* values, const unsigned long long* by, int* found) {
    found[threadIdx.x] = divide(values[threadIdx.x], by[threadIdx.x]);
}
"""
    prelude = "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n"
    module = Module(prelude + expand("numeric.cuh") + body)
    module.launch("k", 1, 64, pointers, memory=memory)
    memory.fetch()
    memory.close()
    assert (found == values // divisors).all()
