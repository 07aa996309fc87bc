// FlashAttention-2 forward (Dao 2023, Algorithm 1): O = softmax(Q K^T) V and its log-sum-exp.
//
// Grid: one block per (head, query tile), B * H * Tr in all, longest tiles first; where keys are
// split, one for each part of the keys. A block keeps its
// queries, and O, l and m in registers, while the key tiles stream through shared memory:
//
//     Q_smem  [BLOCK_Q][D]            loaded once
//     K_smem  [STAGES][BLOCK_K][D]    a ring that cp.async fills ahead of its use
//     V_smem  [STAGES][BLOCK_K][DV]
//
// Each warp owns WARP_ROWS rows and needs the others only for loading tiles. O is normalised once,
// at the end. A tile is scored STEP_K keys at a time. With STAGES > 1 tile i + STAGES - 1 is under
// way during tile i, one barrier per tile; with STAGES == 1 V_i arrives during Q K_i^T and K_i+1
// during P V_i, two barriers per tile.
//
// docs/kernels.md says what bounds its speed, and what counted.
#include "forward_loads.cuh"
#include "nonfinite.cuh"
#include "numeric.cuh"
#include "planes/left_rows.cuh"
#include "ptx/overlap.cuh"
#include "tiles/tile_copy.cuh"
#include "tiles/guarded_softmax.cuh"
#include "tiles/mma.cuh"
#include "tiles/simt.cuh"
#include "seams/sequence.cuh"
#include "seams/pages.cuh"
#include "seams/key_tiles.cuh"
#include "seams/query_block.cuh"
#include "seams/score.cuh"
#include "seams/output.cuh"
#include "seams/whole_rows.cuh"
#include "tiles/engine.cuh"
#include "tiles/in_planes.cuh"

// Behind Hopper's kernel on planes there is seldom anything to do: few blocks find that out, and share what
// there is.
constexpr bool BEHIND_HOPPER = AFTER_PLANES && !SAME_BLOCKS;

static_assert(STAGES > 1 || BLOCK_K == STEP_K, "with one stage, a tile is one step");
static_assert(is_laid_out<Tile::Shared>(tile_bytes::Q, Q_TILE) &&
                  is_laid_out<Tile::Shared>(tile_bytes::K, K_TILE) &&
                  is_laid_out<Tile::Shared>(tile_bytes::V, V_TILE) &&
                  is_laid_out<Tile::Shared>(tile_bytes::exchange, Tile::EXCHANGE),
              "the plan's tiles are those of the kernel");

// Works on the tile of queries, or the part of its keys, with this number. Infinities and NaN among the
// values leave some in all sums, and seldom there are any: so a block that is not `careful` does not look
// for them in tiles in which something is hidden. It returns whether it must be, to all threads.
__device__ __forceinline__ bool attend(const Params& p, int number, bool careful) {
    extern __shared__ __align__(16) unsigned char smem[];
    Tile::Shared* const Q_smem = reinterpret_cast<Tile::Shared*>(smem + shared_at::Q);
    Tile::Shared* const K_smem = reinterpret_cast<Tile::Shared*>(smem + shared_at::K);
    Tile::Shared* const V_smem = reinterpret_cast<Tile::Shared*>(smem + shared_at::V);
    Tile::Shared* const exchange = reinterpret_cast<Tile::Shared*>(smem + shared_at::exchange);

    const int warp = threadIdx.x / 32;
    int query_tiles = p.query_tiles;
    if constexpr (BEHIND_HOPPER) query_tiles = tiles_behind(p);
    QueryBlock block;
    if (!block.locate(p, number, query_tiles)) return false;
    Head& head = block.head;
    const int query_tile = block.query_tile;
    const int first_row = warp * Tile::WARP_ROWS;
    const int block_row = query_tile * BLOCK_Q, row_begin = block_row + first_row;
    if (!has_work(p, head, block_row, block_row + BLOCK_Q)) return false;
    if constexpr (AFTER_PLANES)
        if (!is_left_by_kernel_before(p, head, block_row, block_row + BLOCK_Q)) return false;
    const KeyTiles<BLOCK_K> tiles(p, head, query_tile, BLOCK_Q);
    const Accumulator multiplier = score_multiplier(p);

    Tile tile(threadIdx.x % 32, exchange + warp * Tile::EXCHANGE);
    PlaneFactors factors;
    if (!take_planes(tile, p, head, factors)) return false;
    limit_scores(tile, p.scale);
    using Exact = OnlineSoftmax<Accumulator, Tile::ROWS, Tile::ROW_THREADS>;
    using Guarded = GuardedSoftmax<Accumulator, Tile::ROWS, Tile::ROW_THREADS>;
    using InPlanes = OnlineSoftmax<Accumulator, Tile::ROWS, Tile::ROW_THREADS, LAZINESS_OF_PLANES>;
    using OfHalves = typename Select<ENGINE_IS_MMA, Guarded, Exact>::type;
    typename Select<IN_PLANES, InPlanes, OfHalves>::type softmax;
    Accumulator O_regs[Tile::ROWS][Tile::VALUE_COLUMNS];
#pragma unroll
    for (int i = 0; i < Tile::ROWS; ++i)
#pragma unroll
        for (int j = 0; j < Tile::VALUE_COLUMNS; ++j) O_regs[i][j] = Accumulator(0);

    load_queries(Q_smem, p, head, block_row);
#pragma unroll
    for (int stage = 0; stage < max(1, STAGES - 1); ++stage) {
        if (stage < tiles.count()) {
            const int key_tile = tiles[stage].tile;
            load_keys(K_smem + stage * K_TILE, p, head, key_tile).finish();
            if constexpr (STAGES > 1)
                load_values(V_smem + stage * V_TILE, p, head, key_tile).finish();
        }
        commit_copies();
    }

    constexpr int PENDING = STAGES == 1 ? 0 : STAGES - 2;
    bool nonfinite = false;  // values of cut tiles that the products must not see
    wait_copies<PENDING>();
    __syncthreads();  // Q and the first tile have arrived for all
    tile.take_queries(Q_smem + warp * Tile::WARP_ROWS * Tile::PITCH);
    for (int i = 0; i < tiles.count(); ++i) {
        const Visit visit = tiles[i];
        const int k_begin = visit.tile * BLOCK_K, stage = i % STAGES;
        const MissingKeys<BLOCK_K> missing(p, head, k_begin);
        const bool cut = tiles.is_cut(visit) || missing.any();
        const TileBits bits(p, head, visit.bits, first_row, row_begin, k_begin);
        KeyCopy next_keys(K_smem);
        ValueCopy values(V_smem);
        if constexpr (STAGES == 1) {
            values = load_values(V_smem, p, head, visit.tile);
        } else if (!SPREADS && i + STAGES - 1 < tiles.count()) {
            const int ahead = (i + STAGES - 1) % STAGES, key_tile = tiles[i + STAGES - 1].tile;
            load_keys(K_smem + ahead * K_TILE, p, head, key_tile).finish();
            load_values(V_smem + ahead * V_TILE, p, head, key_tile).finish();
        }
        if (!SPREADS) commit_copies();
        take_units(tile, p, factors, visit.tile);
        const int valid_rows = head.key_length - k_begin;
        if (STAGES == 1
                ? split_keys(tile, K_smem)
                : split_tiles(tile, K_smem + stage * K_TILE, V_smem + stage * V_TILE, valid_rows))
            break;
        if (careful && STAGES > 1 && (cut || SCORE_MAY_HIDE))
            nonfinite |=
                clear_nonfinite<BLOCK_K, Tile::PADDED_DV, THREADS>(V_smem + stage * V_TILE);

#pragma unroll 1
        for (int step = 0; step < BLOCK_K; step += STEP_K) {
            Accumulator S_regs[Tile::ROWS][Tile::COLUMNS], rescale[Tile::ROWS];
            RowsAhead<Tile, Tile::ROWS, Tile::COLUMNS> rows;    // of a captured array
            LoadedBits<Tile, Tile::ROWS, Tile::COLUMNS> shown;  // by a mask
            if (!IN_PLANES) shown.load(tile, bits, step);       // planes leave no registers for it
            rows.fetch(tile, p, head, row_begin, k_begin + step);
            const auto score_beside = [&](const auto&... beside) {
                if constexpr (SPREADS)
                    tile.score(S_regs, K_smem + stage * K_TILE, beside...);
                else
                    tile.score(S_regs, K_smem + stage * K_TILE + step * Tile::PITCH);
                rows.take(tile, p, head, row_begin, k_begin + step);
                modify_scores(S_regs, tile, p, head, row_begin, k_begin + step, rows, !cut);
                if (cut) {
                    if (IN_PLANES) shown.load(tile, bits, step);
                    hide_outside_band(S_regs, tile, p, head, row_begin, k_begin + step);
                    shown.hide(S_regs, -infinity<Accumulator>(), tile, bits, step);
                }
                missing.hide(S_regs, tile, step);
            };
            const auto score = [&] {
                rows.fetch(tile, p, head, row_begin, k_begin + step);
                score_beside();
            };
            if constexpr (SPREADS) {
                const int next = i + STAGES - 1, ahead = next % STAGES;
                const bool more = next < tiles.count();
                const int next_tile = more ? tiles[next].tile : 0;
                auto K_loads = spread_keys(K_smem + ahead * K_TILE, p, head, next_tile, more);
                auto V_loads = spread_values(V_smem + ahead * V_TILE, p, head, next_tile, more);
                score_beside([&](auto part) {
                    K_loads.load(part);
                    V_loads.load(part);
                });
                commit_copies();
            } else {
                score_beside();
            }
            if (update(softmax, tile, S_regs, multiplier, rescale, score))
                scale_rows(O_regs, rescale);
            // S_regs hold P from here on
            drop_probabilities(S_regs, tile, p, head, row_begin, k_begin + step);
            if constexpr (STAGES == 1) {
                values.finish();
                wait_copies<0>();
                __syncthreads();  // V_i has arrived for all; nobody reads K_i any more
                if (i + 1 < tiles.count())
                    next_keys = load_keys(K_smem, p, head, tiles[i + 1].tile);
                commit_copies();
                split_values(tile, V_smem, valid_rows);  // what is unheld is seen at the next keys
                if (careful && (cut || SCORE_MAY_HIDE))
                    nonfinite |= clear_nonfinite<BLOCK_K, Tile::PADDED_DV, THREADS>(V_smem);
            }
            expect_zeros(tile, cut);
            tile.accumulate(O_regs, S_regs, V_smem + stage * V_TILE + step * Tile::VALUE_PITCH);
        }
        if (STAGES == 1 && i + 1 < tiles.count()) next_keys.finish();
        wait_copies<PENDING>();
        __syncthreads();  // tile i + 1 has arrived for all; nobody reads tile i any more
    }
    wait_copies<0>();
    if (!IN_PLANES && !careful && __syncthreads_or(has_nonfinite_sums(O_regs))) return true;
    finish_rows(tile);
    if (is_left_to_kernel_behind(p, tile, K_smem)) return false;
    if (nonfinite) {
#pragma unroll 1
        for (int i = 0; i < tiles.count(); ++i) {
            const Visit visit = tiles[i];
            add_nonfinite_values<BLOCK_K>(
                O_regs, softmax, tile, p, head, row_begin, visit.tile * BLOCK_K,
                TileBits(p, head, visit.bits, first_row, row_begin, visit.tile * BLOCK_K));
        }
    }
    lower_sums<Tile>(softmax);
    const Position position(p, head.index);
    const HeadOutput output = locate_output(
        p, head, block.part, [&](const auto* strides) { return position.offset(p, strides); });
    store_rows_by_way_of<Tile::PITCH>(Q_smem + first_row * Tile::PITCH, O_regs, softmax, tile, p,
                                      head, row_begin, output);
    return false;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    fa2_forward(const __grid_constant__ Params p) {
    if (SPLIT) admit_kernel_behind();
    await_kernel_before();
    if constexpr (BEHIND_HOPPER) {
        if (!__syncthreads_or(has_mark(p, threadIdx.x, THREADS))) return;
        const int count = p.head_count * tiles_behind(p) * (SPLIT ? p.parts : 1);
        for (int number = blockIdx.x; number < count; number += gridDim.x) {
            attend(p, number, true);
            __syncthreads();  // nobody reads this tile's memory any more
        }
    } else {
        bool careful = AFTER_PLANES;  // planes leave out what is not finite
#pragma unroll 1
        while (attend(p, blockIdx.x, careful)) careful = true;
    }
}
