// The gradient of an array that scores depend on: sums of dS times the derivative of the changed score
// by an element. `modify` differentiates by that element here (planning/array_gradients.py), so that
// slope dS is a pair's share.
//
// S^T and dP^T are computed once more, by the tiles of gradients.cuh, but no product follows. A block
// visits tiles one after the other and keeps their sum in registers, element by element. What it sums
// over in the end depends on what the array has:
//
//     queries and keys   grid: (element of the heads, key tile, query tile). The heads that share the
//                        element are visited in turn; each sum is an element of the gradient.
//     keys, or neither   grid: (head, key tile). All query tiles are visited. Sums over queries, or
//                        over the tile, go to array_sums,
//     queries            grid: (head, query tile), likewise with all key tiles.
//
// array_sums.cu adds those. Every sum has one order. Where elements are at indices that an expression
// works out (SCATTERS) each pair adds to its own, in array_sums, in any order; the grid is that of keys.
// Heads are those of array_heads.cuh.
#include "array_heads.cuh"
#include "key_scores.cuh"
#include "ptx/overlap.cuh"

constexpr int K_TILE = BLOCK_K * KeyTile::PITCH, V_TILE = BLOCK_K * ValueTile::PITCH;
constexpr int Q_TILE = BLOCK_Q * KeyTile::PITCH, O_TILE = BLOCK_Q * ValueTile::PITCH;
static_assert(is_laid_out<Shared>(tile_bytes::K, K_TILE) &&
                  is_laid_out<Shared>(tile_bytes::V, V_TILE) &&
                  is_laid_out<Shared>(tile_bytes::Q, Q_TILE) &&
                  is_laid_out<Shared>(tile_bytes::dO, O_TILE),
              "the plan's tiles in shared memory are those of the kernel");
static_assert(BLOCK_Q % STEPS == 0, "whole steps");
constexpr int PASSES = BLOCK_Q / STEPS, ROW_WARPS = WARPS / WARP_SPLIT;

// Of lanes that hold the same scores one speaks for all.
constexpr int ROW_HOLDERS = KeyTile::ROW_THREADS * KeyTile::HOLDERS;
__device__ __forceinline__ bool speaks(const KeyTile& tile) {
    return KeyTile::HOLDERS == 1 || tile.lane % ROW_HOLDERS < KeyTile::ROW_THREADS;
}

using Sums = Accumulator[PASSES][ROWS][COLUMNS];

// The tiles of one visit. With two stages those of the next are under way; keys that all visits share
// have one place.
struct SharedTiles {
    Shared *K, *V, *Q, *dO;
    Accumulator* log2_sums;
    __device__ __forceinline__ SharedTiles(unsigned char* smem, int slot) {
        const int key_slot = KEEPS_QUERIES ? slot : 0;
        K = reinterpret_cast<Shared*>(smem + shared_at::K) + key_slot * K_TILE;
        V = reinterpret_cast<Shared*>(smem + shared_at::V) + key_slot * V_TILE;
        Q = reinterpret_cast<Shared*>(smem + shared_at::Q) + slot * Q_TILE;
        dO = reinterpret_cast<Shared*>(smem + shared_at::dO) + slot * O_TILE;
        log2_sums = reinterpret_cast<Accumulator*>(smem + shared_at::row_stats) + slot * ROW_STATS;
    }
};

// A tile that a block visits, if `exists`. The keys are there already, unless it `brings_keys`.
struct TileVisit {
    Head head;
    Visit visit;
    int key_tile;
    bool exists, cut, brings_keys;
};

// One pair's share, added to its element if there is one.
__device__ __forceinline__ void add_term(const Params& p, const Head& head, int q, int k,
                                         Accumulator term) {
    if (q >= head.query_length || k >= head.key_length || term == Accumulator(0)) return;
    const i64 element = array_element(head, q, k, p);
    if (element >= 0) atomicAdd(p.array_sums + element, term);
}

// The terms of a warp's keys and STEP_Q queries of a tile, from `step` on, added to `sums`.
template <bool CUT>
__device__ __forceinline__ void add_step(Accumulator (&sums)[ROWS][COLUMNS],
                                         const SharedTiles& smem, const Params& p, const Head& head,
                                         int key_tile, const Visit& visit, int step) {
    const int warp_row = first_row_of_warp(), k_begin = key_tile * BLOCK_K + warp_row;
    const int q = visit.tile * BLOCK_Q + step;
    const Accumulator* const deltas = smem.log2_sums + BLOCK_Q;
    const bool weightless = smem.log2_sums[WEIGHTLESS] != Accumulator(0);
    KeyTile keys(threadIdx.x % 32, nullptr);
    ValueTile values(threadIdx.x % 32, nullptr);
    keys.take_queries(smem.K + warp_row * KeyTile::PITCH);
    values.take_queries(smem.V + warp_row * ValueTile::PITCH);

    Accumulator P_regs[ROWS][COLUMNS], dS_regs[ROWS][COLUMNS], slope[ROWS][COLUMNS];
    keys.score(P_regs, smem.Q + step * KeyTile::PITCH);
    to_probabilities<CUT>(P_regs, slope, keys, p, head, smem.log2_sums + step, q, k_begin,
                          TileBits(p, head, visit.bits, warp_row, k_begin, q - step), step,
                          weightless);
    values.score(dS_regs, smem.dO + step * ValueTile::PITCH);  // dP
    to_score_gradients<CUT>(dS_regs, P_regs, slope, keys, p, head, deltas + step, q, k_begin);
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            if constexpr (SCATTERS)
                add_term(p, head, q + keys.column(j), k_begin + keys.row(i),
                         speaks(keys) ? dS_regs[i][j] : Accumulator(0));
            else
                sums[i][j] += dS_regs[i][j];
        }
}

// Begins to copy the tiles of a visit.
__device__ __forceinline__ void load_place(const SharedTiles& smem, const Params& p,
                                           const TileVisit& place) {
    const Head& head = place.head;
    const int q_begin = place.visit.tile * BLOCK_Q, k_begin = place.key_tile * BLOCK_K;
    const Element* const dout =
        p.dout + locate_queries(p, head, p.dout_axis_stride, p.dout_row_stride);
    const i64 stats = query_tiles_at<BLOCK_Q>(p, head) + place.visit.tile;
    if (place.brings_keys) {
        load_rows<BLOCK_K, KeyTile, HEAD_DIM>(smem.K, head.k, p.k_row_stride, k_begin,
                                              head.key_length);
        load_rows<BLOCK_K, ValueTile, HEAD_DIM_V>(smem.V, head.v, p.v_row_stride, k_begin,
                                                  head.key_length);
    }
    load_rows<BLOCK_Q, KeyTile, HEAD_DIM>(smem.Q, head.q, p.q_row_stride, q_begin,
                                          head.query_length);
    load_rows<BLOCK_Q, ValueTile, HEAD_DIM_V>(smem.dO, dout, p.dout_row_stride, q_begin,
                                              head.query_length);
    load_tile<1, ROW_STATS, ROW_STATS, THREADS, true, 1>(
        smem.log2_sums, p.row_stats + stats * ROW_STATS, 0, 1, threadIdx.x);
}

// The terms of one tile, which has arrived.
__device__ __forceinline__ void add_tile(Sums& sums, const SharedTiles& smem, const Params& p,
                                         const TileVisit& place) {
    // Queries that do not exist add 0, or NaN to sums that infinite values make NaN anyway.
    const bool cut = place.cut || smem.log2_sums[WEIGHTLESS] != Accumulator(0);
    const int first_step = threadIdx.x / 32 % WARP_SPLIT * STEP_Q;
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        const int step = pass * STEPS + first_step;
        if (cut || SCORE_MAY_HIDE)
            add_step<true>(sums[pass], smem, p, place.head, place.key_tile, place.visit, step);
        else
            add_step<false>(sums[pass], smem, p, place.head, place.key_tile, place.visit, step);
    }
}

// Adds up the tiles that `next()` names one after the other, until one does not exist.
template <typename Next>
__device__ __forceinline__ void walk(Sums& sums, unsigned char* bytes, const Params& p,
                                     const Next& next) {
    int slot = 0;
    const auto begin = [&](int slot) {
        const TileVisit place = next();
        if (place.exists) load_place(SharedTiles(bytes, slot), p, place);
        commit_copies();
        return place;
    };
    TileVisit place = begin(0), following = {};
#pragma unroll 1
    while (place.exists) {
        if (STAGES > 1) following = begin(slot ^ 1);
        wait_copies<STAGES - 1>();
        __syncthreads();  // this visit's tiles have arrived for all
        add_tile(sums, SharedTiles(bytes, slot), p, place);
        __syncthreads();  // nobody reads them any more
        place = STAGES > 1 ? following : begin(0);
        slot ^= STAGES - 1;
    }
    wait_copies<0>();
}

// Calls `store(q, k, sum)` for the thread's elements of the tile; both count from the tile's first.
template <typename Store>
__device__ __forceinline__ void each_pair(const Sums& sums, const Store& store) {
    const KeyTile tile(threadIdx.x % 32, nullptr);
    const int first_step = threadIdx.x / 32 % WARP_SPLIT * STEP_Q;
    if (!speaks(tile)) return;
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass)
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j)
                store(pass * STEPS + first_step + tile.column(j), first_row_of_warp() + tile.row(i),
                      sums[pass][i][j]);
}

// Sums over queries, in shared_sums[part][key of the tile]: a part for each of the warps that share keys.
__device__ __forceinline__ void sum_over_queries(const Sums& sums, Accumulator* shared_sums) {
    const KeyTile tile(threadIdx.x % 32, nullptr);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        Accumulator total = Accumulator(0);
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) total += sums[pass][i][j];
        total = row_sum<KeyTile::ROW_THREADS>(total);
        const int part = threadIdx.x / 32 % WARP_SPLIT;
        if (tile.lane % ROW_HOLDERS == 0)
            shared_sums[part * BLOCK_K + first_row_of_warp() + tile.row(i)] = total;
    }
}

// Sums over keys, in shared_sums[part][query of the tile]: a part for each of the warps that score it.
__device__ __forceinline__ void sum_over_keys(const Sums& sums, Accumulator* shared_sums) {
    const KeyTile tile(threadIdx.x % 32, nullptr);
    const int warp = threadIdx.x / 32, first_step = warp % WARP_SPLIT * STEP_Q;
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass)
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            Accumulator total = Accumulator(0);
#pragma unroll
            for (int i = 0; i < ROWS; ++i) total += sums[pass][i][j];
#pragma unroll
            for (int lane = ROW_HOLDERS; lane < 32; lane *= 2)
                total += __shfl_xor_sync(FULL_WARP, total, lane);
            const int column = pass * STEPS + first_step + tile.column(j);
            if (tile.lane < KeyTile::ROW_THREADS)
                shared_sums[warp / WARP_SPLIT * BLOCK_Q + column] = total;
        }
}

// Writes the sums of `parts` rows of so many columns, those of `count` that exist.
__device__ __forceinline__ void store_parts(Accumulator* target, const Accumulator* sums, int parts,
                                            int columns, int count) {
    __syncthreads();  // all have left their sums
    for (int i = threadIdx.x; i < min(columns, count); i += THREADS) {
        Accumulator total = Accumulator(0);
        for (int part = 0; part < parts; ++part) total += sums[part * columns + i];
        target[i] = total;
    }
}

// The visit of a tile of queries by a tile of keys, if there is one.
__device__ __forceinline__ TileVisit find_place(const Params& p, const Head& head, int key_tile,
                                                int query_tile) {
    const QueryTiles<BLOCK_Q> tiles(p, head, key_tile, BLOCK_K, 0);
    const int at = tiles.list.find(query_tile), i = tiles.end - 1 - at;
    if (i < 0 || i >= tiles.count) return {head, {}, key_tile, false, false, false};
    const Visit visit = tiles[i];
    return {head, visit, key_tile, visit.tile == query_tile, tiles.is_cut(visit), true};
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    array_gradients(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    await_kernel_before();
    Accumulator* const shared_sums = reinterpret_cast<Accumulator*>(bytes + shared_at::sums);
    Sums sums = {};
    int i = 0;  // what comes next
    const int query_tiles = array_query_tiles(p), key_tiles = array_key_tiles(p);
    if constexpr (KEEPS_QUERIES && KEEPS_KEYS) {
        const int query_tile = blockIdx.x % query_tiles, rest = blockIdx.x / query_tiles;
        const int key_tile = rest % key_tiles;
        const ArrayHeads heads(p, rest / key_tiles);
        walk(sums, bytes, p, [&] {
            TileVisit place = {};
            while (!place.exists && i < heads.count)
                place = find_place(p, array_head(p, heads[i++]), key_tile, query_tile);
            return place;
        });
        ArrayElement* const gradient = array_gradient(p) + heads.offset;
        const long long* const step = array_steps(p);
        each_pair(sums, [&](int q, int k, Accumulator sum) {
            q += query_tile * BLOCK_Q, k += key_tile * BLOCK_K;
            if (q < array_queries(p) && k < array_keys(p))
                gradient[q * step[0] + k * step[1]] = narrow<ArrayElement>(sum);
        });
    } else if constexpr (KEEPS_QUERIES) {
        const int query_tile = blockIdx.x % query_tiles, q_begin = query_tile * BLOCK_Q;
        const int number = blockIdx.x / query_tiles, length = array_queries(p);
        const Head head = array_head(p, number);
        walk(sums, bytes, p, [&] {
            TileVisit place = {};
            while (!place.exists && i < key_tiles) place = find_place(p, head, i++, query_tile);
            return place;
        });
        sum_over_keys(sums, shared_sums);
        store_parts(p.array_sums + i64(number) * length + q_begin, shared_sums, ROW_WARPS, BLOCK_Q,
                    length - q_begin);
    } else {
        const int key_tile = blockIdx.x % key_tiles, k_begin = key_tile * BLOCK_K;
        const int number = blockIdx.x / key_tiles, length = array_keys(p);
        const Head head = array_head(p, number);
        const QueryTiles<BLOCK_Q> tiles(p, head, key_tile, BLOCK_K, 0);
        walk(sums, bytes, p, [&] {
            TileVisit place = {};
            if (i >= tiles.count) return place;
            const Visit visit = tiles[i];
            place = {head, visit, key_tile, true, tiles.is_cut(visit), i == 0};
            ++i;
            return place;
        });
        if constexpr (SCATTERS) return;
        sum_over_queries(sums, shared_sums);
        if constexpr (KEEPS_KEYS)
            store_parts(p.array_sums + i64(number) * length + k_begin, shared_sums, WARP_SPLIT,
                        BLOCK_K, length - k_begin);
        else
            store_parts(p.array_sums + blockIdx.x, shared_sums, WARP_SPLIT * BLOCK_K, 1, 1);
    }
}
