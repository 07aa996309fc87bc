// FlashAttention-2 forward on tensor cores, where WARP_SPLIT warps share their rows: for wide heads.
//
// A warp has no registers for O of 32 rows of 256 columns, and with 16 rows it reads every key and value
// from shared memory for few products: the memory's port, not the tensor cores, then bounds it. So
// warps share 32 rows, in double 16. Each scores keys of its own, P of all meets in shared memory, and of O each
// sums columns of its own:
//
//     Q_smem  [BLOCK_Q][D]         loaded once
//     K_smem  [BLOCK_K][D]         K_i+1 arrives during P V_i
//     V_smem  [BLOCK_K][DV]        V_i arrives during Q K_i^T
//     P_smem  [BLOCK_Q][BLOCK_K]
//
// That takes no more barriers than one stage of keys does: where V_i has arrived for all, so has P.
//
// Up to 256 columns two warps share rows, up to 512 two or four. docs/kernels.md says what bounds the speed.
//
// Grid: as fa2_forward.cu.
#include "few_registers.cuh"
#include "forward_loads.cuh"
#include "halved_scores.cuh"
#include "nonfinite.cuh"
#include "ptx/overlap.cuh"
#include "tiles/shared_softmax.cuh"
#include "seams/key_tiles.cuh"
#include "seams/output.cuh"
#include "seams/query_block.cuh"
#include "seams/score.cuh"
#include "seams/whole_rows.cuh"

// Whether a row's first tile of keys has code of its own, which knows that there is no origin yet. In double,
// where it would cost registers, that is found out as at other tiles: its scores are worked out twice.
constexpr bool KNOWS_FIRST = sizeof(Element) == 2;
constexpr int P_PITCH = pitch<Tile::Shared>(BLOCK_K);
static_assert(STAGES == 1 && BLOCK_K == STEP_K * WARP_SPLIT, "a tile is one step of all warps");
static_assert(is_laid_out<Tile::Shared>(tile_bytes::Q, Q_TILE) &&
                  is_laid_out<Tile::Shared>(tile_bytes::K, K_TILE) &&
                  is_laid_out<Tile::Shared>(tile_bytes::V, V_TILE) &&
                  is_laid_out<Tile::Shared>(tile_bytes::P, BLOCK_Q* P_PITCH) &&
                  is_laid_out<Accumulator>(tile_bytes::traded, TRADED) &&
                  is_laid_out<Accumulator>(tile_bytes::exchange, Tile::WARP_ROWS),
              "the plan's tiles are those of the kernel");

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    fa2_shared_forward(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char smem[];
    if (SPLIT) admit_kernel_behind();
    await_kernel_before();
    Tile::Shared* const Q_smem = reinterpret_cast<Tile::Shared*>(smem + shared_at::Q);
    Tile::Shared* const K_smem = reinterpret_cast<Tile::Shared*>(smem + shared_at::K);
    Tile::Shared* const V_smem = reinterpret_cast<Tile::Shared*>(smem + shared_at::V);

    QueryBlock block;
    if (!block.locate(p, blockIdx.x, p.query_tiles)) return;
    const Head& head = block.head;
    const int block_row = block.query_tile * BLOCK_Q;
    if (!has_work(p, head, block_row, block_row + BLOCK_Q)) return;
    const KeyTiles<BLOCK_K> tiles(p, head, block.query_tile, BLOCK_Q);
    const Accumulator multiplier = score_multiplier(p);

    const int sharers = threadIdx.x / (32 * WARP_SPLIT);  // which of the groups of warps
    int first_row = sharers * Tile::WARP_ROWS;
    // There what is made of it stays in no register. At D 256 that would cost 5 %.
    if constexpr (PACKED > 1 || DROPS && HEAD_DIM > 256) first_row = afresh(first_row);
    const int row_begin = block_row + first_row;
    const int first_key = Tile::part() * STEP_K;
    Accumulator* const traded = reinterpret_cast<Accumulator*>(smem + shared_at::traded);
    Tile::Shared* const P_slab =
        reinterpret_cast<Tile::Shared*>(smem + shared_at::P) + first_row * P_PITCH;
    Tile tile(threadIdx.x % 32, nullptr);
    SharedSoftmax<Accumulator, Tile::ROWS, Tile::ROW_THREADS, Tile::WARP_ROWS, WARP_SPLIT> softmax(
        reinterpret_cast<Accumulator*>(smem + shared_at::exchange) + first_row * WARP_SPLIT,
        Tile::part());
    Accumulator O_regs[Tile::ROWS][Tile::VALUE_COLUMNS];

    load_queries(Q_smem, p, head, block_row);
    bool careful = false;    // as fa2_forward.cu has it
    bool nonfinite = false;  // values of cut tiles that the products must not see
    // Rows have no origins yet at their first tile of keys.
    const auto visit_keys = [&](int i, auto is_first) {
        const Visit visit = tiles[i];
        const int k_begin = visit.tile * BLOCK_K;
        const MissingKeys<BLOCK_K> missing(p, head, k_begin);
        const bool cut = tiles.is_cut(visit) || missing.any();
        const TileBits bits(p, head, visit.bits, first_row, row_begin, k_begin);
        load_values(V_smem, p, head, visit.tile);
        commit_copies();

        Accumulator S_regs[Tile::ROWS][Tile::COLUMNS];
        LoadedBits<Tile, Tile::ROWS, Tile::COLUMNS> shown;  // by a mask
        shown.load(tile, bits, first_key);
        const auto score = [&] {
            score_own_keys(S_regs, tile, Q_smem + first_row * Tile::PITCH, K_smem, traded);
            modify_scores(S_regs, tile, p, head, row_begin, k_begin + first_key, !cut);
            if (cut) {
                hide_outside_band(S_regs, tile, p, head, row_begin, k_begin + first_key);
                shown.hide(S_regs, -infinity<Accumulator>(), tile, bits, first_key);
            }
            missing.hide(S_regs, tile, first_key);
        };
        const auto publish = [&] {
            drop_probabilities(S_regs, tile, p, head, row_begin, k_begin + first_key);
            tile.publish(P_slab + first_key, P_PITCH, S_regs);
        };
        const auto raise_origins = [&] {
            softmax.share_maxima(S_regs, tile);
            __syncthreads();  // all maxima are there
            Accumulator rescale[Tile::ROWS];
            softmax.raise(S_regs, multiplier, rescale, tile);
            scale_rows(O_regs, rescale);
            publish();
        };
        score();
        if constexpr (decltype(is_first)::value) {
            raise_origins();
            wait_copies<0>();
            __syncthreads();  // V_i and P have arrived for all; nobody reads K_i nor maxima any more
        } else {
            const bool serves = softmax.try_origins(S_regs, multiplier);
            publish();
            wait_copies<0>();
            // V_i and P have arrived for all. Nobody reads K_i any more, unless some warp could not use its
            // origins: then all score again.
            if (__syncthreads_or(!serves)) {
                score();
                raise_origins();
                __syncthreads();  // P is there; nobody reads K_i nor maxima any more
            } else {
                softmax.take_sums();
            }
        }
        if (i + 1 < tiles.count()) load_keys(K_smem, p, head, tiles[i + 1].tile);
        commit_copies();
        if (careful && (cut || SCORE_MAY_HIDE))
            nonfinite |= clear_nonfinite<BLOCK_K, Tile::PADDED_DV, THREADS>(V_smem);
        tile.template accumulate_published<BLOCK_K>(O_regs, P_slab, V_smem);
        wait_copies<0>();
        __syncthreads();  // K_i+1 has arrived for all; nobody reads V_i nor P any more
    };
#pragma unroll 1
    for (;; careful = true) {
        if (tiles.count() > 0) load_keys(K_smem, p, head, tiles[0].tile);
        commit_copies();
        clear_rows(O_regs);
        softmax.restart();
        wait_copies<0>();
        __syncthreads();  // Q and the first keys have arrived for all
        tile.take_queries(Q_smem + first_row * Tile::PITCH);
        if (KNOWS_FIRST && tiles.count() > 0) visit_keys(0, Constant<true>());
        for (int i = KNOWS_FIRST ? 1 : 0; i < tiles.count(); ++i) visit_keys(i, Constant<false>());
        if (careful || !__syncthreads_or(has_nonfinite_sums(O_regs))) break;
    }
    wait_copies<0>();
    softmax.share_sums(tile);
    if (nonfinite) {
#pragma unroll 1
        for (int i = 0; i < tiles.count(); ++i) {
            const Visit visit = tiles[i];
            add_nonfinite_values<BLOCK_K>(
                O_regs, softmax, tile, p, head, row_begin, visit.tile * BLOCK_K,
                TileBits(p, head, visit.bits, first_row, row_begin, visit.tile * BLOCK_K));
        }
    }
    const Position position(p, head.index);
    const HeadOutput output = locate_output(
        p, head, block.part, [&](const auto* strides) { return position.offset(p, strides); });
    store_rows_by_way_of<Tile::PITCH>(Q_smem + first_row * Tile::PITCH, O_regs, softmax, tile, p,
                                      head, row_begin, output);
}
