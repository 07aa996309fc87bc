// What a mask and a band show of a lane's scores: a bit for each. A few operations on whole words make
// them, where a test of each position takes several instructions. Reads the prelude.
#pragma once
#include "few_registers.cuh"
#include "ptx/bits.cuh"

// Of a row of a tile that four lanes share: of each eight columns a lane has two. Bit 2 * (m / 4) + e of byte
// m % 4 is of the lane's column 2 * m + e.
template <int COLUMNS>
struct LaneBits {
    static_assert(COLUMNS % 2 == 0 && COLUMNS <= 32, "a byte has two bits of each eight numbers");
    static constexpr int WORDS = (COLUMNS + 7) / 8;  // that a row of the tile has
    u32 bits = 0;

    LaneBits() = default;
    // Of `word(w)`, the tile's columns from 32 * w on. `lane_column` is the lane's first one.
    template <typename Word>
    __device__ __forceinline__ LaneBits(int lane_column, const Word& word) {
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
            const u32 seen = word(w);
            const u32 turned = __funnelshift_r(seen, seen, lane_column - 2 * w);
            bits |= turned & 0x03030303u << 2 * w;
        }
    }
    // The same, as far as they are in [first, last].
    template <typename Word>
    __device__ __forceinline__ LaneBits(int lane_column, int first, int last, const Word& word)
        : LaneBits(lane_column, [&](int w) {
              return word(w) & bits_from(first - 32 * w) & ~bits_from(last + 1 - 32 * w);
          }) {}
    // Those of the columns for which `has(j)`.
    template <typename Has>
    static __device__ __forceinline__ LaneBits where(const Has& has) {
        LaneBits found;
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j)
            found.bits |= has(j) ? 1u << (j / 2 % 4 * 8 + j / 8 * 2 + j % 2) : 0;
        return found;
    }

    // Sets the others' numbers to `hidden`. One instruction turns the bits of a byte into predicates.
    template <typename A>
    __device__ __forceinline__ void hide(A (&values)[COLUMNS], A hidden) const {
        const u32 shown = afresh(bits);  // else bits are tested where they came from
#pragma unroll
        for (int bit = 0; bit < 32; ++bit) {
            const int j = (bit % 8 / 2 * 4 + bit / 8) * 2 + bit % 2;
            if (j < COLUMNS && !(shown >> bit & 1)) values[j] = hidden;
        }
    }
    // Sets the others' halves to -0: `pair_of(m)` are the numbers 2 * m and 2 * m + 1.
    template <typename PairOf>
    __device__ __forceinline__ void hide_pairs(const PairOf& pair_of) const {
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
            const u32 lower = bits << (7 - 2 * w), upper = bits << (6 - 2 * w);
#pragma unroll
            for (int byte = 0; byte < 4; ++byte) {
                if (8 * w + 2 * byte >= COLUMNS) continue;
                const u32 shown = spread_signs(lower, upper, byte);
                u32& pair = pair_of(4 * w + byte);
                pair = pair & shown | 0x80008000 & ~shown;
            }
        }
    }

  private:
    // Those from bit n on.
    static __device__ __forceinline__ u32 bits_from(int n) {
        return u32(u64(~0u) << min(max(n, 0), 32));
    }
};
