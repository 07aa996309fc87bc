"""What instructions cost on Hopper, alone and while products run: clocks of a quadrant for each.

    python asv_bench/beside_wgmma.py

A quadrant of a multiprocessor has one tensor core, and issues an instruction a clock. wgmma keeps
its sums in the registers, which it reads and writes at nearly every clock: other instructions then
wait for the registers' ports, and some hold wgmma up. So what a softmax takes beside products is no
sum of what its instructions take alone. One block runs: a warpgroup multiplies 64 x 128 x 16 all
the time, three others repeat eight times one instruction, whose operands are its own results. The
last column is the clocks that such a product takes meanwhile; 64 is the least.
"""

from __future__ import annotations

from benchmarks import gpu as bench

WARPS = 3  # of a quadrant, beside those that multiply
ROUNDS = 1000

# Name, and what is done to number j of eight: of x (float) or w (32 bits).
INSTRUCTIONS = (
    ("FFMA", 'asm volatile("fma.rn.ftz.f32 %0, %0, %0, 0f3F800001;" : "+f"(x[j]));'),
    ("FADD", 'asm volatile("add.ftz.f32 %0, %0, 0f3F800001;" : "+f"(x[j]));'),
    ("MUFU.EX2", 'asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x[j]));'),
    ("MUFU.RSQ", 'asm volatile("rsqrt.approx.ftz.f32 %0, %0;" : "+f"(x[j]));'),
    ("FMNMX", 'asm volatile("min.ftz.f32 %0, %0, %1;" : "+f"(x[j]) : "f"(limit));'),
    ("LOP3", 'asm volatile("xor.b32 %0, %0, %1;" : "+r"(w[j]) : "r"(w[(j + 1) % 8]));'),
    ("SHF", 'asm volatile("shf.l.wrap.b32 %0, %0, %0, 16;" : "+r"(w[j]));'),
    ("PRMT", 'asm volatile("prmt.b32 %0, %0, %0, 0x2103;" : "+r"(w[j]));'),
    ("IMAD", 'asm volatile("mul.lo.u32 %0, %0, 0xd2511f53;" : "+r"(w[j]));'),
    ("IMAD.HI", 'asm volatile("mul.hi.u32 %0, %0, 0xd2511f53;" : "+r"(w[j]));'),
    (
        "IMAD.WIDE",
        "unsigned long long wide = w[j] * 0xd2511f53ull;"
        ' asm volatile("" : "+l"(wide)); w[j] = unsigned(wide >> 32);',
    ),
)

REGISTERS = ", ".join(f"%{i}" for i in range(64))
SUMS = ", ".join(f'"+f"(sums[{i}])' for i in range(64))
SOURCE = (
    r"""
extern "C" __global__ void __launch_bounds__(128 * (1 + WARPS), 1)
    beside(float* out, long long* clocks, int rounds, float limit) {
    extern __shared__ __align__(1024) unsigned char tiles[];
    __shared__ int done;
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) done = 0;
    __syncthreads();
    if (warp < 4) {
        float sums[64] = {};
        const unsigned shared = unsigned(__cvta_generic_to_shared(tiles));
        const unsigned long long a =
            (shared & 0x3ffff) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
        long long products = 0;
        const long long begin = clock64();
        while (MULTIPLIES) {
            // All four warps, or none, start the next products.
            int ends;
            asm volatile(
                "{.reg .pred p; setp.ge.s32 p, %1, %2; barrier.cta.red.or.pred p, 1, 128, p;"
                " selp.s32 %0, 1, 0, p;}"
                : "=r"(ends) : "r"(*(volatile int*)&done), "r"(4 * WARPS));
            if (ends) break;
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int i = 0; i < 16; ++i)
                asm volatile(
                    "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {REGISTERS}, %64,"
                    " %65, 1, 1, 1, 0, 0;" : SUMS : "l"(a), "l"(a + 512));
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            products += 16;
        }
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 64; ++i) sum += sums[i];
        out[threadIdx.x] = sum;
        if (threadIdx.x == 0) clocks[0] = clock64() - begin, clocks[1] = products;
        return;
    }
    float x[8];
    unsigned w[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = 0.01f * (threadIdx.x + j), w[j] = threadIdx.x * 7 + j;
    const long long begin = clock64();
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
#pragma unroll
        for (int j = 0; j < 8; ++j) { BODY }
    }
    const long long end = clock64();
    float sum = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += x[j] + w[j];
    out[threadIdx.x] = sum;
    if (threadIdx.x % 32 == 0) clocks[warp - 2] = end - begin, atomicAdd(&done, 1);
}
""".replace("REGISTERS", REGISTERS)
    .replace("SUMS", SUMS)
    .replace("WARPS", str(WARPS))
)


def clocks_of(xp, body: str, multiplies: bool) -> tuple[float, float]:
    """Clocks of a quadrant for one round of a warp, and of a product meanwhile."""
    source = SOURCE.replace("BODY", body).replace("MULTIPLIES", str(int(multiplies)))
    kernel = xp.RawKernel(source, "beside", options=("-std=c++17", "-arch=sm_90a"))
    kernel.max_dynamic_shared_size_bytes = 1 << 16
    out, clocks = xp.zeros(128 * (1 + WARPS), "f4"), xp.zeros(2 + 4 * WARPS, "i8")
    for _ in range(2):  # the first time it comes from memory
        kernel((1,), (out.size,), (out, clocks, ROUNDS, xp.float32(259)), shared_mem=1 << 16)
    found = clocks.get()
    return found[2:].mean() / ROUNDS / WARPS, found[0] / max(found[1], 1)


def main() -> int:
    """Print the table; 77 without a Hopper GPU."""
    xp = bench.find_cupy()
    if xp is None or xp.cuda.Device().compute_capability != "90":
        print("needs a GPU of compute capability 9.0")
        return 77
    nothing = 'asm volatile("");'  # a round is then the loop itself
    empty = [clocks_of(xp, nothing, multiplies)[0] for multiplies in (False, True)]
    print(f"{'clocks of a quadrant':22} {'alone':>8} {'beside':>8} {'product':>8}")
    for name, body in INSTRUCTIONS:
        alone, _ = clocks_of(xp, body, False)
        beside, product = clocks_of(xp, body, True)
        each = (alone - empty[0]) / 8, (beside - empty[1]) / 8
        print(f"{name:22} {each[0]:8.1f} {each[1]:8.1f} {product:8.0f}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
