// Two products of backward, S^T = K Q^T and dP^T = V dO^T, where warps share keys: of a pair of warps the
// even one multiplies keys with the queries of both, the odd one values with dO of both. Then each gives
// the other half of what it has.
//
// A warp that computed both for its own queries would bring its rows of K and those of V from shared
// memory. So it brings one of them. That saves a matrix for each 16 rows and depth of 16, and costs what
// changes hands. Reads the prelude.
#pragma once
#include "key_scores.cuh"
#include "ptx/named_barrier.cuh"

// Bytes of a warp: of matrices that it saves, and of numbers on their way into shared memory and back.
constexpr int SAVED = KeyTile::BESIDES * ROWS * 16 * 16, TRADED = 2 * ROWS * COLUMNS * 32 * 4;
constexpr bool TRADES = WARP_SPLIT % 2 == 0 && !ONE_SCORE_TILE &&
                        SAVED > 2 * TRADED&& KeyTile::PADDED_D == ValueTile::PADDED_D;
// A warp's rows, of K or of V, against the queries of both.
using PairTile = TileOf<TRADES ? 2 * STEP_Q : STEP_Q, KeyTile::PADDED_D, HEAD_DIM>;

// S and dP of a warp's own queries from those of `pair`, the warp's product for both. What a warp is given
// lies where it will publish P and dS of `step`, its first query in the slabs: nobody reads there yet.
template <int S_PITCH>
__device__ __forceinline__ void trade(Accumulator (&S)[ROWS][COLUMNS],
                                      Accumulator (&dP)[ROWS][COLUMNS],
                                      const Accumulator (&pair)[ROWS][PairTile::COLUMNS],
                                      Shared* P_slab, Shared* dS_slab, int step) {
    constexpr int NUMBERS = ROWS * COLUMNS, HALF = NUMBERS / 2;  // as floats, for each slab
    constexpr int AT_ONCE = HALF < CHUNK<Accumulator> ? HALF : CHUNK<Accumulator>;
    constexpr int WIDTH = HALF * int(sizeof(Accumulator) / sizeof(Shared)), LANES = STEP_Q / WIDTH;
    static_assert(!TRADES || 32 / LANES == KeyTile::WARP_ROWS,
                  "what a warp is given fills its columns of both slabs");
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const bool odd = warp % 2 != 0;
    const auto place = [&](Shared* slab, int step) {
        return reinterpret_cast<Vector<Accumulator, AT_ONCE>*>(slab + lane / LANES * S_PITCH +
                                                               step + lane % LANES * WIDTH);
    };
    const auto chunk = [&](int step, int number) -> Vector<Accumulator, AT_ONCE>& {
        return place(number < HALF ? P_slab : dS_slab, step)[number % HALF / AT_ONCE];
    };
#pragma unroll
    for (int n = 0; n < NUMBERS; n += AT_ONCE) {
        Vector<Accumulator, AT_ONCE> given;
#pragma unroll
        for (int c = 0; c < AT_ONCE; ++c) {
            const int i = (n + c) / COLUMNS, j = (n + c) % COLUMNS;
            given.at[c] = odd ? pair[i][j] : pair[i][COLUMNS + j];
        }
        chunk(odd ? step - STEP_Q : step + STEP_Q, n) = given;
    }
    meet(1 + warp / 2, 64);  // both have given
#pragma unroll
    for (int n = 0; n < NUMBERS; n += AT_ONCE) {
        const Vector<Accumulator, AT_ONCE> taken = chunk(step, n);
#pragma unroll
        for (int c = 0; c < AT_ONCE; ++c) {
            const int i = (n + c) / COLUMNS, j = (n + c) % COLUMNS;
            S[i][j] = odd ? taken.at[c] : pair[i][j];
            dP[i][j] = odd ? pair[i][COLUMNS + j] : taken.at[c];
        }
    }
    __syncwarp();  // all lanes have taken; P and dS may come there
}
