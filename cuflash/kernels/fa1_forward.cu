// FlashAttention-1 forward (Dao et al. 2022, Algorithms 1 and 2), in its own loop order.
//
// Grid: one block per head, B * H in all, of packed sequences per region of a head. The block walks over the key tiles; for each, its warps
// walk over slabs of WARP_ROWS queries. O, l and m of a slab live in global memory from one key tile
// to the next. That traffic, and a grid that cannot fill a GPU when B * H is small, is what
// FlashAttention-2 later removed. So the key tile is as large as shared memory holds.
//
//     for each key tile j:                K_smem, V_smem <- K_j, V_j        (whole block)
//         for each slab i that sees j:    Q_i, O_i, l_i, m_i <- global      (one warp)
//             for each step of STEP_K keys: S = Q K^T, online softmax, O += P V
//             O_i, l_i, m_i -> global, or, where j is the last tile that i sees, out and lse
//
// Slab i always belongs to warp i % WARPS: a lane reads back only what it wrote itself, and the state
// needs no fence. O is kept unnormalised between visits (one division per row, not per visit).
//
// docs/kernels.md says what bounds its speed.
#include "nonfinite.cuh"
#include "numeric.cuh"
#include "ptx/overlap.cuh"
#include "tiles/copies.cuh"
#include "tiles/softmax.cuh"
#include "tiles/mma.cuh"
#include "tiles/simt.cuh"
#include "seams/sequence.cuh"
#include "seams/key_tiles.cuh"
#include "seams/score.cuh"
#include "seams/output.cuh"
#include "tiles/engine.cuh"
#include "tiles/in_planes.cuh"

using Tile = TileOf<STEP_K, HEAD_DIM, HEAD_DIM_V>;
constexpr int STEPS = BLOCK_K / STEP_K;
constexpr int K_TILE = BLOCK_K * Tile::PITCH, V_TILE = BLOCK_K * Tile::VALUE_PITCH;
constexpr int Q_SLAB = Tile::WARP_ROWS * Tile::PITCH;
static_assert(STAGES == 2, "one slab of queries is used while the next one arrives");
static_assert(is_laid_out<Tile::Shared>(tile_bytes::K, K_TILE) &&
                  is_laid_out<Tile::Shared>(tile_bytes::V, V_TILE) &&
                  is_laid_out<Tile::Shared>(tile_bytes::Q, Q_SLAB) &&
                  is_laid_out<Tile::Shared>(tile_bytes::exchange, Tile::EXCHANGE) &&
                  is_laid_out<Accumulator>(tile_bytes::state, HEAD_DIM_V + 2 + KEEPS),
              "the plan's tiles are those of the kernel");

using Softmax = OnlineSoftmax<Accumulator, Tile::ROWS, Tile::ROW_THREADS,
                              IN_PLANES ? LAZINESS_OF_PLANES : LAZINESS>;

// O, l and m of one head between two visits: [query_length][HEAD_DIM_V] and twice [query_length]. In planes with
// dropout the largest weight that a row keeps as well.
struct State {
    static constexpr int GROUP = HEAD_DIM_V % Tile::COLUMN_GROUP == 0 ? Tile::COLUMN_GROUP : 1;
    using Group = Vector<Accumulator, GROUP>;
    Accumulator *output, *sum, *maximum, *kept;
    int rows;

    __device__ __forceinline__ State(const Params& p, const Head& head)
        : rows(query_extent(p, head)) {
        const i64 all_rows = i64(p.head_count) * p.query_length;
        const i64 row = i64(head.index) * p.query_length + query_origin(head);
        output = p.state + row * HEAD_DIM_V;
        sum = p.state + all_rows * HEAD_DIM_V + row;
        maximum = sum + all_rows;
        kept = maximum + all_rows;
    }
    __device__ __forceinline__ Group* group(int q, int column) const {
        return reinterpret_cast<Group*>(output + i64(q) * HEAD_DIM_V + column);
    }
    __device__ __forceinline__ void load(Accumulator (&O)[Tile::ROWS][Tile::VALUE_COLUMNS],
                                         Softmax& softmax, Tile& tile, int q_begin) const {
#pragma unroll
        for (int i = 0; i < Tile::ROWS; ++i) {
            const int q = q_begin + tile.row(i);
            if (q >= rows) continue;
            softmax.origin[i] = maximum[q];
            restore_kept(tile, i, kept + q);
            if (tile.lane % Tile::ROW_THREADS == 0) softmax.sum[i] = sum[q];
#pragma unroll
            for (int j = 0; j < Tile::VALUE_COLUMNS; j += GROUP) {
                if (tile.value_column(j) >= HEAD_DIM_V) continue;
                const Group values = *group(q, tile.value_column(j));
#pragma unroll
                for (int c = 0; c < GROUP; ++c) O[i][j + c] = values.at[c];
            }
        }
    }
    __device__ __forceinline__ void store(const Accumulator (&O)[Tile::ROWS][Tile::VALUE_COLUMNS],
                                          const Softmax& softmax, const Tile& tile,
                                          int q_begin) const {
#pragma unroll
        for (int i = 0; i < Tile::ROWS; ++i) {
            const int q = q_begin + tile.row(i);
            const Accumulator total = softmax.total(i), largest = kept_of(tile, i);
            if (q >= rows) continue;
            if (tile.lane % (Tile::ROW_THREADS * Tile::HOLDERS) == 0)
                maximum[q] = softmax.origin[i], sum[q] = total;
            if (KEEPS && tile.lane % Tile::ROW_THREADS == 0) kept[q] = largest;
#pragma unroll
            for (int j = 0; j < Tile::VALUE_COLUMNS; j += GROUP) {
                if (tile.value_column(j) >= HEAD_DIM_V) continue;
                Group values;
#pragma unroll
                for (int c = 0; c < GROUP; ++c) values.at[c] = O[i][j + c];
                *group(q, tile.value_column(j)) = values;
            }
        }
    }
};

// One slab of queries: the steps of STEP_K keys that it visits in all, and those of them in the
// `key_tile`-th tile, entries [begin, end) of the list.
struct Slab {
    int q_begin;
    KeyTiles<STEP_K> steps;
    int begin, end;
    __device__ __forceinline__ Slab(const Params& p, const Head& head, int index, int key_tile = 0)
        : q_begin(index * Tile::WARP_ROWS), steps(p, head, index, Tile::WARP_ROWS) {
        begin = max(steps.begin, steps.list.find(key_tile * STEPS));
        end = min(steps.end, steps.list.find((key_tile + 1) * STEPS));
    }
};

__device__ __forceinline__ void load_queries(Tile::Shared* Q_smem, const Params& p,
                                             const Head& head, int q_begin, int lane) {
    load_tile<Tile::WARP_ROWS, HEAD_DIM, Tile::PADDED_D, 32, ALIGNED, LOAD_UNROLL>(
        Q_smem, head.q + i64(q_begin) * p.q_row_stride, p.q_row_stride, head.query_length - q_begin,
        lane);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    fa1_forward(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char smem[];
    await_kernel_before();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Tile::Shared* const K_smem = reinterpret_cast<Tile::Shared*>(smem + shared_at::K);
    Tile::Shared* const V_smem = reinterpret_cast<Tile::Shared*>(smem + shared_at::V);
    Tile::Shared* const Q_smem =
        reinterpret_cast<Tile::Shared*>(smem + shared_at::Q) + warp * STAGES * Q_SLAB;
    Tile::Shared* const exchange =
        reinterpret_cast<Tile::Shared*>(smem + shared_at::exchange) + warp * Tile::EXCHANGE;

    const HeadBlock block(p, blockIdx.x);
    const Head head = locate_head(p, block.head, block.region);
    const State state(p, head);
    const Accumulator multiplier = score_multiplier(p);
    if constexpr (AFTER_PLANES)
        if (!is_left_by_kernel_before(p, head, 0, head.query_length)) return;
    Tile tile(lane, exchange);
    limit_scores(tile, p.scale);

    const KeyRange keys(p, head, 0, head.query_length);
    for (int j = keys.begin / BLOCK_K; j < divide_up(keys.end, BLOCK_K); ++j) {
        const int k_tile = j * BLOCK_K, rows = head.key_length - k_tile;
        __syncthreads();  // nobody reads the previous key tile any more
        load_tile<BLOCK_K, HEAD_DIM, Tile::PADDED_D, THREADS, ALIGNED, LOAD_UNROLL>(
            K_smem, head.k + i64(k_tile) * p.k_row_stride, p.k_row_stride, rows, threadIdx.x);
        load_tile<BLOCK_K, HEAD_DIM_V, Tile::PADDED_DV, THREADS, ALIGNED, LOAD_UNROLL>(
            V_smem, head.v + i64(k_tile) * p.v_row_stride, p.v_row_stride, rows, threadIdx.x);
        commit_copies();
        wait_copies<0>();
        __syncthreads();  // K_j and V_j have arrived for all
        if (split_tiles(tile, K_smem, V_smem, rows)) break;
        const bool nonfinite =
            !IN_PLANES && clear_nonfinite<BLOCK_K, Tile::PADDED_DV, THREADS>(V_smem);

        const QuerySlabs<Tile::WARP_ROWS> slabs(p, head, k_tile, k_tile + BLOCK_K);
        // The warp's first slab from `index` on that sees a key of this tile.
        auto seeing = [&](int index) {
            if constexpr (MASKED) {
                for (; index < slabs.end; index += WARPS) {
                    const Slab slab(p, head, index, j);
                    if (slab.begin < slab.end) break;
                }
            }
            return index;
        };
        int index = seeing(round_up(slabs.begin - warp, WARPS) + warp), stage = 0, next;
        if (index < slabs.end) load_queries(Q_smem, p, head, index * Tile::WARP_ROWS, lane);
        commit_copies();
        for (; index < slabs.end; index = next, stage ^= 1) {
            next = seeing(index + WARPS);
            if (next < slabs.end)
                load_queries(Q_smem + (stage ^ 1) * Q_SLAB, p, head, next * Tile::WARP_ROWS, lane);
            commit_copies();
            const Slab slab(p, head, index, j);
            const bool is_first = slab.begin == slab.steps.begin;
            const bool is_last = slab.end == slab.steps.end;

            Softmax softmax;
            Accumulator O_regs[Tile::ROWS][Tile::VALUE_COLUMNS];
#pragma unroll
            for (int r = 0; r < Tile::ROWS; ++r)
#pragma unroll
                for (int c = 0; c < Tile::VALUE_COLUMNS; ++c) O_regs[r][c] = Accumulator(0);
            clear_kept(tile);
            if (!is_first) state.load(O_regs, softmax, tile, slab.q_begin);

            wait_copies<1>();
            __syncwarp();  // Q_i has arrived for the whole warp
            tile.take_queries(Q_smem + stage * Q_SLAB);
            for (int entry = slab.begin; entry < slab.end; ++entry) {
                const Visit visit = slab.steps.list[entry];
                const int k_begin = visit.tile * STEP_K, offset = k_begin - k_tile;
                Accumulator S_regs[Tile::ROWS][Tile::COLUMNS], rescale[Tile::ROWS];
                tile.score(S_regs, K_smem + offset * Tile::PITCH);
                const bool cut = slab.steps.is_cut(visit);
                modify_scores(S_regs, tile, p, head, slab.q_begin, k_begin, !cut);
                if (cut)
                    mask_scores(S_regs, tile, p, head, slab.q_begin, k_begin,
                                TileBits(p, head, visit.bits, 0, slab.q_begin, k_begin), 0);
                if (update(softmax, tile, S_regs, multiplier, rescale)) scale_rows(O_regs, rescale);
                // S_regs hold P from here on
                drop_probabilities(S_regs, tile, p, head, slab.q_begin, k_begin);
                expect_zeros(tile, cut);
                tile.accumulate(O_regs, S_regs, V_smem + offset * Tile::VALUE_PITCH);
            }
            if (nonfinite) {
#pragma unroll 1
                for (int entry = slab.begin; entry < slab.end; ++entry) {
                    const Visit visit = slab.steps.list[entry];
                    const int k_begin = visit.tile * STEP_K;
                    add_nonfinite_values<STEP_K>(
                        O_regs, softmax, tile, p, head, slab.q_begin, k_begin,
                        TileBits(p, head, visit.bits, 0, slab.q_begin, k_begin));
                }
            }
            if (is_last) finish_rows(tile);
            if (is_last)
                store_rows(O_regs, softmax, tile, p, head, slab.q_begin, locate_output(p, head));
            else
                state.store(O_regs, softmax, tile, slab.q_begin);
            __syncwarp();  // the next load overwrites this slab's queries
        }
        wait_copies<0>();
    }

    if (is_left_to_kernel_behind(p, tile, K_smem)) return;
    // Slabs that no key tile visited.
    for (int index = warp; index * Tile::WARP_ROWS < query_extent(p, head); index += WARPS) {
        const Slab slab(p, head, index);
        if (slab.steps.count() > 0) continue;
        const Accumulator nothing[Tile::ROWS][Tile::VALUE_COLUMNS] = {};
        store_rows(nothing, Softmax(), tile, p, head, slab.q_begin, locate_output(p, head));
    }
}
