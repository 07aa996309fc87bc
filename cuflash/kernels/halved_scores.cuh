// Scores of fa2_shared_forward.cu with TRADES_SCORES: of a pair of warps each multiplies one half of the
// columns of Q with the keys of both, and gives the other warp what that is of its keys' scores.
//
// A warp's own keys are few: a matrix of queries that comes from shared memory would feed two products, and
// so it feeds four. That saves one of three or four matrices, and costs what changes hands. Reads the
// prelude.
#pragma once
#include "forward_loads.cuh"
#include "ptx/named_barrier.cuh"

// A warp's rows against the keys of both.
using PairTile = TileOf<TRADES_SCORES ? 2 * STEP_K : STEP_K, HEAD_DIM, HEAD_DIM_V>;
constexpr int TRADED = Tile::ROWS * Tile::COLUMNS * 32;  // numbers that a warp gives

// The scores of a warp's own keys from those of `pair`, the warp's half for both. `traded` has room for
// what each warp is given; a barrier of the block comes before it is used again.
__device__ __forceinline__ void trade_halves(
    Accumulator (&S)[Tile::ROWS][Tile::COLUMNS],
    const Accumulator (&pair)[Tile::ROWS][PairTile::COLUMNS], Accumulator* traded) {
    constexpr int NUMBERS = Tile::ROWS * Tile::COLUMNS, COLUMNS = Tile::COLUMNS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const bool odd = warp % 2 != 0;
    const auto chunk = [&](int warp, int number) -> Vector<Accumulator>& {
        return *reinterpret_cast<Vector<Accumulator>*>(traded + warp * TRADED + number * 32 +
                                                       lane * CHUNK<Accumulator>);
    };
#pragma unroll
    for (int n = 0; n < NUMBERS; n += CHUNK<Accumulator>) {
        Vector<Accumulator> given;
#pragma unroll
        for (int c = 0; c < CHUNK<Accumulator>; ++c) {
            const int i = (n + c) / COLUMNS, j = (n + c) % COLUMNS;
            given.at[c] = odd ? pair[i][j] : pair[i][COLUMNS + j];
        }
        chunk(warp ^ 1, n) = given;
    }
    meet(1 + warp / 2, 64);  // both have given
#pragma unroll
    for (int n = 0; n < NUMBERS; n += CHUNK<Accumulator>) {
        const Vector<Accumulator> taken = chunk(warp, n);
#pragma unroll
        for (int c = 0; c < CHUNK<Accumulator>; ++c) {
            const int i = (n + c) / COLUMNS, j = (n + c) % COLUMNS;
            S[i][j] = (odd ? pair[i][COLUMNS + j] : pair[i][j]) + taken.at[c];
        }
    }
}

// S = Q K^T for the warp's own keys; K_smem has the first of the block's.
__device__ __forceinline__ void score_own_keys(Accumulator (&S)[Tile::ROWS][Tile::COLUMNS],
                                               const Tile& tile, const Tile::Shared* Q_slab,
                                               const Tile::Shared* K_smem, Accumulator* traded) {
    const int part = Tile::part();
    if constexpr (TRADES_SCORES) {
        PairTile both(tile.lane, nullptr);
        both.take_queries(Q_slab);
        Accumulator pair[Tile::ROWS][PairTile::COLUMNS];
        both.score_half(pair, K_smem + part / 2 * (2 * STEP_K) * Tile::PITCH, part % 2);
        trade_halves(S, pair, traded);
    } else {
        tile.score(S, K_smem + part * STEP_K * Tile::PITCH);
    }
}
