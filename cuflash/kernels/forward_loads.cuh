// Tiles of keys, values and queries of fa2's forward kernels on their way into shared memory. Reads the
// prelude.
#pragma once
#include "seams/pages.cuh"
#include "seams/sequence.cuh"
#include "tiles/engine.cuh"
#include "tiles/spread_loads.cuh"
#include "tiles/tile_copy.cuh"

using Tile = TileOf<STEP_K, HEAD_DIM, HEAD_DIM_V>;
constexpr int K_TILE = BLOCK_K * Tile::PITCH, V_TILE = BLOCK_K * Tile::VALUE_PITCH;
constexpr int Q_TILE = BLOCK_Q * Tile::PITCH;

// Columns that rows of keys and values have in memory, of floats for planes' pairs of halves.
constexpr int K_COLUMNS = PLANES_ARE_MADE ? Tile::PADDED_D : HEAD_DIM;
constexpr int V_COLUMNS = PLANES_ARE_MADE ? Tile::PADDED_DV : HEAD_DIM_V;
// Whether the lower half of the warps copies keys and the upper half values. Threads that copy wait for the unit
// that takes copies. In double the other half keeps the tensor cores busy meanwhile.
constexpr bool HALVES_COPY = ENGINE_IS_MMA && SAME<Element, double> && STAGES == 1 && WARPS == 8;
constexpr int COPIERS = HALVES_COPY ? THREADS / 2 : THREADS;
using KeyCopy = TileCopy<BLOCK_K, K_COLUMNS, Tile::PADDED_D, Tile::Shared, Element, COPIERS>;
using ValueCopy = TileCopy<BLOCK_K, V_COLUMNS, Tile::PADDED_DV, Tile::Shared, Element, COPIERS>;

// From one row to the next.
__device__ __forceinline__ i64 key_stride(const Params& p) {
    return PLANES_ARE_MADE ? K_COLUMNS : p.k_row_stride;
}
__device__ __forceinline__ i64 value_stride(const Params& p) {
    return PLANES_ARE_MADE ? V_COLUMNS : p.v_row_stride;
}

__device__ __forceinline__ KeyCopy load_keys(Tile::Shared* K_smem, const Params& p,
                                             const Head& head, int tile) {
    const int first = tile * BLOCK_K, valid_rows = head.key_length - first;
    KeyCopy copy(K_smem);
    if (HALVES_COPY && threadIdx.x >= COPIERS) return copy;
    if constexpr (PAGED)
        copy.begin_scattered([&](int row) { return find_key(p, head, first + row); }, valid_rows);
    else
        copy.begin(head.k + i64(tile) * BLOCK_K * key_stride(p), key_stride(p), valid_rows);
    return copy;
}

__device__ __forceinline__ ValueCopy load_values(Tile::Shared* V_smem, const Params& p,
                                                 const Head& head, int tile) {
    const int first = tile * BLOCK_K, valid_rows = head.key_length - first;
    ValueCopy copy(V_smem);
    if (HALVES_COPY && threadIdx.x < COPIERS) return copy;
    if constexpr (PAGED)
        copy.begin_scattered([&](int row) { return find_value(p, head, first + row); }, valid_rows);
    else
        copy.begin(head.v + i64(tile) * BLOCK_K * value_stride(p), value_stride(p), valid_rows);
    return copy;
}

__device__ __forceinline__ void load_queries(Tile::Shared* Q_smem, const Params& p,
                                             const Head& head, int row_begin) {
    if constexpr (PACKED == 1)
        load_tile<BLOCK_Q, HEAD_DIM, Tile::PADDED_D, THREADS, ALIGNED, LOAD_UNROLL>(
            Q_smem, head.q + i64(row_begin) * p.q_row_stride, p.q_row_stride,
            head.query_length - row_begin, threadIdx.x);
    else
        load_scattered_tile<BLOCK_Q, HEAD_DIM, Tile::PADDED_D, THREADS, ALIGNED, LOAD_UNROLL>(
            Q_smem,
            [&](int row) {
                row += row_begin;
                const bool valid = query_of(row) < head.query_length && row_exists(p, head, row);
                return valid ? query_row(p, head, row) : nullptr;
            },
            BLOCK_Q, threadIdx.x);
}

// Whether the next keys and values are loaded among the products of the scores. Functions of scores leave
// no registers for that.
constexpr bool SPREADS = ENGINE_IS_MMA && sizeof(Element) == 2 && STAGES > 1 && BLOCK_K == STEP_K &&
                         !PAGED && !HOLDS_TILES && !SCORE_IS_MODIFIED;
template <int D, int PADDED>
using SpreadRows =
    SpreadTile<BLOCK_K, D, PADDED, THREADS, ALIGNED, Tile::PADDED_D / 16, Tile::Shared, Element>;

// A tile of them on its way, zeros unless it is `wanted`.
__device__ __forceinline__ SpreadRows<HEAD_DIM, Tile::PADDED_D> spread_keys(Tile::Shared* K_smem,
                                                                            const Params& p,
                                                                            const Head& head,
                                                                            int tile, bool wanted) {
    return {K_smem, head.k + i64(tile) * BLOCK_K * p.k_row_stride, p.k_row_stride,
            wanted ? head.key_length - tile * BLOCK_K : 0, int(threadIdx.x)};
}
__device__ __forceinline__ SpreadRows<HEAD_DIM_V, Tile::PADDED_DV> spread_values(
    Tile::Shared* V_smem, const Params& p, const Head& head, int tile, bool wanted) {
    return {V_smem, head.v + i64(tile) * BLOCK_K * p.v_row_stride, p.v_row_stride,
            wanted ? head.key_length - tile * BLOCK_K : 0, int(threadIdx.x)};
}
