// Warpgroup products, one warp's 16 rows at a time.
//
// The result appears at wgmma.wait_group (seed 0) or at a random earlier moment; until then the
// accumulators hold NaN and, in check mode, must not be touched.
#include <algorithm>
#include <cmath>

#include "runtime.h"

enum { WGMMA = 300, WGMMA_FENCE = 600, WGMMA_COMMIT, WGMMA_WAIT = 700 };

// A matrix descriptor names 8x8 "core matrices" in shared memory. They are read 8 consecutive
// elements at a time: along k for K-major operands, along m or n otherwise.
struct Descriptor {
    u32 start, leading, stride;
    int swizzle;
};
static Descriptor decode(u64 bits) {
    if (bits >> 49 & 7) fail("wgmma descriptor: matrix base offset is not modelled");
    if (bits & 0x3ff1c000c000c000ull & ~(7ull << 49))
        fail("wgmma descriptor 0x%016llx has reserved bits set", (unsigned long long)bits);
    return {(u32)(bits & 0x3fff) << 4, (u32)(bits >> 16 & 0x3fff) << 4,
            (u32)(bits >> 32 & 0x3fff) << 4, (int)(bits >> 62)};
}
// Elements per swizzle span (without swizzle: per core matrix).
static int span_of(const Descriptor& d) { return d.swizzle ? 128 >> d.swizzle : 8; }

// Address of 8 elements: row `mn`, columns k..k+7, or (MN-major) rows mn..mn+7 of column `k`.
static u32 chunk_address(const Descriptor& d, int mn, int k, bool mn_major) {
    static const u32 masks[] = {0, 7, 3, 1};
    int span = span_of(d);
    u32 address;
    if (!mn_major)
        address = d.swizzle ? d.start + mn / 8 * d.stride + mn % 8 * (span * 2) + k * 2
                            : d.start + mn / 8 * d.stride + k / 8 * d.leading + mn % 8 * 16;
    else
        address = d.swizzle ? d.start + mn / span * d.leading + mn % span * 2 + k % 8 * (span * 2) +
                                  k / 8 * d.stride
                            : d.start + mn / 8 * d.stride + k % 8 * 16 + k / 8 * d.leading;
    return address ^ (address >> 7 & masks[d.swizzle]) << 4;
}
template <class Function>
static void for_each_chunk(u64 bits, int first, int count, bool mn_major, Function function) {
    Descriptor d = decode(bits);
    int mn_step = mn_major ? 8 : 1, k_step = mn_major ? 1 : 8;
    for (int mn = first; mn < first + count; mn += mn_step)
        for (int k = 0; k < 16; k += k_step) {
            char* p = shared_at(chunk_address(d, mn, k, mn_major), 16, 16, "wgmma operand");
            function(p, mn - first, k);
        }
}
static void read_operand(u64 bits, int first, int count, bool mn_major, bool is_half,
                         float (*to)[16]) {
    auto widen = is_half ? half_to_float : bfloat16_to_float;
    for_each_chunk(bits, first, count, mn_major, [&](const char* p, int mn, int k) {
        u16 values[8];
        memcpy(values, p, 16);
        for (int e = 0; e < 8; e++)
            to[mn + (mn_major ? e : 0)][k + (mn_major ? 0 : e)] = widen(values[e]);
    });
}

bool truncates;
extern "C" void emu_truncate(int wanted) { truncates = wanted; }

static double cut(double x, int lowest) { return ldexp(trunc(ldexp(x, -lowest)), lowest); }

// What sm_90 makes of `before` and 16 products: each is cut off two binary digits below the last one
// that a float as large as the largest of them has, and the sum below its own last digit. Measured
// sums of float16 and bfloat16 products are off by as much on average, and at most.
float truncated_sum(float before, const float* a, const float* b, int step) {
    double terms[17] = {before}, sum = 0, largest = fabs(before);
    for (int k = 0; k < 16; k++) {
        terms[k + 1] = double(a[k]) * b[k * step];
        largest = fabs(terms[k + 1]) > largest ? fabs(terms[k + 1]) : largest;
        sum += terms[k + 1];
    }
    if (!std::isfinite(sum + before) || largest == 0) return float(sum + before);
    const int lowest = ilogb(largest) - 25;
    sum = 0;
    for (double x : terms) sum += cut(x, lowest);
    return sum == 0 ? 0.0f : float(cut(sum, ilogb(sum) - 23));
}

static void run(WgmmaOp& op) {
    if (op.done) return;
    op.done = true;
    issued = &op.where;
    static float A[16][16], B[256][16], B_columns[16][256];
    int first_row = current->warp % 4 * 16;
    if (op.a_in_registers) {
        auto widen = op.is_half ? half_to_float : bfloat16_to_float;
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++)
                for (int e = 0; e < 2; e++)
                    A[lane / 4 + 8 * (i % 2)][2 * (lane % 4) + e + 8 * (i / 2)] =
                        widen((u16)(op.a[lane][i] >> 16 * e));
    } else {
        read_operand(op.a_descriptor, first_row, 16, op.a_transposed, op.is_half, A);
    }
    read_operand(op.b_descriptor, 0, op.n, op.b_transposed, op.is_half, B);
    for (int n = 0; n < op.n; n++)
        for (int k = 0; k < 16; k++) B_columns[k][n] = B[n][k];
    for (int row = 0; row < 16; row++) {
        float sum[256] = {};
        for (int k = 0; k < 16 && !truncates; k++)
            for (int n = 0; n < op.n; n++) sum[n] += A[row][k] * B_columns[k][n];
        for (int n = 0; n < op.n; n++) {
            int lane = row % 8 * 4 + n % 8 / 2, i = n / 8 * 4 + row / 8 * 2 + n % 2;
            float before = !op.accumulate   ? 0
                           : op.holds_saved ? op.saved[lane * (op.n / 2) + i]
                                            : *op.d[lane][i];
            *op.d[lane][i] =
                truncates ? truncated_sum(before, A[row], B_columns[0] + n, 256) : before + sum[n];
        }
    }
    issued = nullptr;
}

// A thread's registers are those of two rows of the tile, by turns of two columns. Row by row they
// mostly lie side by side in memory, and those of a chain of products are the same: few ranges.
static void add_in_flight(Fiber& fiber, const std::vector<float*>& registers) {
    auto& flight = fiber.in_flight;
    for (size_t row = 0; row < 2; row++)
        for (size_t i = 2 * row; i < registers.size(); i += i % 2 ? 3 : 1) {
            char* d = (char*)registers[i];
            if (!flight.empty() && flight.back().first <= d && d < flight.back().second) continue;
            if (!flight.empty() && flight.back().second == d)
                flight.back().second += sizeof(float);
            else
                flight.push_back({d, d + sizeof(float)});
        }
}
struct WgmmaArguments {
    float* const* d;
    const u32* a;
    u64 a_descriptor, b_descriptor;
    int n, is_half, accumulate, a_transposed, b_transposed;
};
static void issue(Collective& c, Warp& warp) {
    auto& first = *(WgmmaArguments*)c.arguments[0];
    Block& block = *current->block;
    if (!warp.fenced)
        fail("wgmma without a wgmma.fence since the start or the last wgmma.wait_group");
    if (block.warps.size() < 4) fail("wgmma needs a warpgroup of four warps");
    WgmmaOp op{};
    op.a_in_registers = first.a;
    op.a_descriptor = first.a_descriptor;
    op.b_descriptor = first.b_descriptor;
    op.n = first.n;
    op.is_half = first.is_half;
    op.accumulate = first.accumulate;
    op.a_transposed = first.a_transposed;
    op.b_transposed = first.b_transposed;
    op.where = c.where;
    op.clock = ++warp.wgmma_clock;
    warp.wgmma_count++;
    stats.wgmma++;
    for (int lane = 0; lane < 32; lane++) {
        auto& mine = *(WgmmaArguments*)c.arguments[lane];
        if (mine.a_descriptor != first.a_descriptor || mine.b_descriptor != first.b_descriptor ||
            mine.accumulate != first.accumulate)
            fail("wgmma operands differ between lanes 0 and %d", lane);
        op.d[lane].assign(mine.d, mine.d + op.n / 2);
        if (mine.a) memcpy(op.a[lane], mine.a, 16);
    }
    if (checking) {
        // The product reads shared memory from now on, as an agent of its own.
        Knowledge all = current->knows;
        for (int lane = 0; lane < 32; lane++)
            all.join(block.fibers[current->warp * 32 + lane].knows);
        Actor actor{block.number, (u32)(block.fibers.size() + current->warp), op.clock, &all, true};
        auto check = [&](char* p, int, int) {
            touch(block.window, p, 16, READ, actor, current->caller);
        };
        if (!op.a_in_registers)
            for_each_chunk(op.a_descriptor, current->warp % 4 * 16, 16, op.a_transposed, check);
        for_each_chunk(op.b_descriptor, 0, op.n, op.b_transposed, check);
    }
    // A chain of products into one accumulator continues from registers that are in flight already.
    op.holds_saved = true;
    auto continues = [&](WgmmaOp& earlier) {
        if (!earlier.done && earlier.d[0][0] == op.d[0][0]) op.holds_saved = false;
    };
    for (auto& group : warp.wgmma_groups) std::for_each(group.begin(), group.end(), continues);
    std::for_each(warp.wgmma_open.begin(), warp.wgmma_open.end(), continues);
    if (op.holds_saved) {
        op.saved.resize(32 * (op.n / 2));
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < op.n / 2; i++) {
                op.saved[lane * (op.n / 2) + i] = *op.d[lane][i];
                *op.d[lane][i] = NAN;
            }
    }
    for (int lane = 0; checking && lane < 32; lane++)
        add_in_flight(block.fibers[current->warp * 32 + lane], op.d[lane]);
    warp.wgmma_open.push_back(std::move(op));
}
extern "C" void emu_wgmma(float* const* d, const u32* a, u64 a_descriptor, u64 b_descriptor, int n,
                          int is_half, int accumulate, int a_transposed, int b_transposed,
                          emu_where where) {
    ENTER(where);
    WgmmaArguments w{d,       a,          a_descriptor, b_descriptor, n,
                     is_half, accumulate, a_transposed, b_transposed};
    collective(0xffffffffu, WGMMA + n, "wgmma", &w, issue, true);
}
extern "C" void emu_wgmma_fence(emu_where where) {
    ENTER(where);
    collective(
        0xffffffffu, WGMMA_FENCE, "wgmma.fence", nullptr,
        [](Collective&, Warp& warp) { warp.fenced = true; }, false);
}
static void run_group(std::vector<WgmmaOp>& group) {
    for (auto& op : group) run(op);
}
extern "C" void emu_wgmma_commit(emu_where where) {
    ENTER(where);
    collective(
        0xffffffffu, WGMMA_COMMIT, "wgmma.commit_group", nullptr,
        [](Collective&, Warp& warp) {
            warp.wgmma_groups.push_back(std::move(warp.wgmma_open));
            warp.wgmma_open.clear();
            if (seed && random_below(2))
                for (auto& group : warp.wgmma_groups) run_group(group);
        },
        false);
}
extern "C" void emu_wgmma_wait(int pending, emu_where where) {
    ENTER(where);
    collective(
        0xffffffffu, WGMMA_WAIT + pending, "wgmma.wait_group", nullptr,
        [](Collective& c, Warp& warp) {
            int pending = c.operation - WGMMA_WAIT;
            while ((int)warp.wgmma_groups.size() > pending) {
                auto& group = warp.wgmma_groups.front();
                run_group(group);
                for (auto& op : group)
                    for (int lane = 0; checking && lane < 32; lane++) {
                        Fiber& fiber = current->block->fibers[current->warp * 32 + lane];
                        raise_entry(fiber.knows.own, current->block->fibers.size() + current->warp,
                                    op.clock);
                    }
                warp.wgmma_groups.pop_front();
                warp.fenced = false;
            }
            for (int lane = 0; checking && lane < 32; lane++) {
                Fiber& fiber = current->block->fibers[current->warp * 32 + lane];
                fiber.in_flight.clear();
                for (auto& group : warp.wgmma_groups)
                    for (auto& op : group) add_in_flight(fiber, op.d[lane]);
                for (auto& op : warp.wgmma_open) add_in_flight(fiber, op.d[lane]);
            }
        },
        false);
}
