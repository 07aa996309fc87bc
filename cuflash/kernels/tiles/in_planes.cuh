// What kernels do about planes where tiles become such (float_mma.cuh); where they do not, nothing.
#pragma once
#include "planes/factors.cuh"
#include "planes/find_planes.cuh"
#include "planes/left_rows.cuh"
#include "planes/plane_range.cuh"
#include "seams/sequence.cuh"
#include "tiles/engine.cuh"

constexpr bool SPLITS_TILES = IN_PLANES && !PLANES_ARE_MADE;
// Whether tiles know the largest weights that their rows keep (planes/small_weights.cuh).
constexpr bool KEEPS = IN_PLANES && DROPS;

// Which scores planes hold, for a tile that has not scored yet: as find_factors() has it, with the
// largest numbers that planes have.
template <typename Tile>
__device__ __forceinline__ void limit_scores(Tile& tile, Accumulator scale) {
    if constexpr (IN_PLANES) {
        const float square = 1 << 2 * (LARGEST_EXPONENT + 1);
        tile.limit_scores(
            fminf(LARGEST_SCORE_SUM / (square * HEAD_DIM * fabsf(scale)), power_of_two(120)));
    }
}

// Before weights are multiplied with values: whether these may be 0 for keys that are hidden.
template <typename Tile>
__device__ __forceinline__ void expect_zeros(Tile& tile, bool cut) {
    if constexpr (SPLITS_TILES) tile.has_zeros = cut || DROPS || SCORE_MAY_HIDE;
}

// Where planes of keys and values were made before: the head's keys and values are these from here on. Returns
// whether they hold it, to all threads; where they do not, the kernel behind works on the rows of this block.
template <typename Tile, typename P>
__device__ __forceinline__ bool take_planes(Tile& tile, const P& p, Head& head,
                                            PlaneFactors& factors) {
    if constexpr (PLANES_ARE_MADE) {
        const bool held = find_factors(p, head, factors);
        if (!held && threadIdx.x == 0) p.again[blockIdx.x] = true;
        tile.sparse = factors.sparse;
        if (DROPS) tile.take_spread(factors.spread);
        if (threadIdx.x % 32 == 0) tile.least_unit() = power_of_two(-125) / score_multiplier(p);
        const auto find = [&](auto width, const void* planes, const long long* strides) {
            return reinterpret_cast<const float*>(find_planes<decltype(width)::value>(
                planes, p, head, strides, p.key_length, key_origin(head)));
        };
        head.k = find(Constant<Tile::PADDED_D>(), p.k_planes, p.k_planes_stride);
        head.v = find(Constant<Tile::PADDED_DV>(), p.v_planes, p.v_planes_stride);
        return held;
    }
    return true;
}

// What a tile of planes that were made before is multiplied by.
template <typename Tile, typename P>
__device__ __forceinline__ void take_units(Tile& tile, const P& p, const PlaneFactors& factors,
                                           int number) {
    if constexpr (PLANES_ARE_MADE) {
        const TileUnits units(p, factors, number);
        tile.take_units(units.k, units.v);
    }
}

// Scores become weights, as OnlineSoftmax::update() has it.
template <typename Softmax, typename Tile, int ROWS, int COLUMNS, typename... Again>
__device__ __forceinline__ bool update(Softmax& softmax, Tile& tile,
                                       Accumulator (&S)[ROWS][COLUMNS], Accumulator multiplier,
                                       Accumulator (&rescale)[ROWS], const Again&... score_again) {
    bool stale;
    if constexpr (PLANES_ARE_MADE) {
        float units[ROWS];
#pragma unroll
        for (float& unit : units) unit = SCORE_IS_MODIFIED ? 1.0f : tile.unit;
        constexpr float EXPONENT = Tile::WEIGHT_EXPONENT;
        stale = softmax.update_scaled(S, multiplier, units, EXPONENT, rescale);
    } else {
        stale = softmax.update(S, multiplier, rescale, score_again...);
    }
    if constexpr (IN_PLANES)
        if (stale) tile.kept.rescale(rescale);
    return stale;
}
// The largest weights that rows keep, of fa1, whose rows come and go: a new slab's; the i-th row's, to all its
// lanes; and back again.
template <typename Tile>
__device__ __forceinline__ void clear_kept(Tile& tile) {
    if constexpr (KEEPS) tile.kept.clear();
}
template <typename Tile>
__device__ __forceinline__ Accumulator kept_of(const Tile& tile, int i) {
    if constexpr (KEEPS) return tile.kept.of_row(i);
    return Accumulator(1);
}
template <typename Tile>
__device__ __forceinline__ void restore_kept(Tile& tile, int i, const Accumulator* kept) {
    if constexpr (KEEPS) tile.kept.largest[i] = *kept;
}
// The warp's rows have seen all their keys.
template <typename Tile>
__device__ __forceinline__ void finish_rows(Tile& tile) {
    if constexpr (IN_PLANES) tile.finish_rows();
}
// Sums of such weights are those of weights.
template <typename Tile, typename Softmax>
__device__ __forceinline__ void lower_sums(Softmax& softmax) {
    if constexpr (PLANES_ARE_MADE)
        for (float& sum : softmax.sum) sum /= 1 << Tile::WEIGHT_EXPONENT;
}

// Makes planes of a tile of keys that has arrived. Returns, to all threads, whether something is unheld.
// Holds a barrier behind.
template <typename Tile>
__device__ __forceinline__ bool split_keys(Tile& tile, typename Tile::Shared* K_smem) {
    if constexpr (SPLITS_TILES) {
        tile.template split_keys<BLOCK_K, THREADS>(K_smem);
        return __syncthreads_or(tile.unheld);  // planes of all rows
    }
    return false;
}
// The same of one of values, of which `valid_rows` exist.
template <typename Tile>
__device__ __forceinline__ bool split_values(Tile& tile, typename Tile::Shared* V_smem,
                                             int valid_rows) {
    if constexpr (SPLITS_TILES) {
        tile.template split_values<BLOCK_K, THREADS>(V_smem, valid_rows);
        return __syncthreads_or(tile.unheld);  // planes of all rows
    }
    return false;
}
// Of both.
template <typename Tile>
__device__ __forceinline__ bool split_tiles(Tile& tile, typename Tile::Shared* K_smem,
                                            typename Tile::Shared* V_smem, int valid_rows) {
    if constexpr (SPLITS_TILES) tile.template split_keys<BLOCK_K, THREADS>(K_smem);
    return split_values(tile, V_smem, valid_rows);
}

// Whether the kernel behind must work on the rows of this block, to all its threads; it finds the mark.
// `shared` is memory that nobody uses any more. P is Params, a template's because not all have marks.
template <typename P, typename Tile>
__device__ __forceinline__ bool is_left_to_kernel_behind(const P& p, const Tile& tile,
                                                         void* shared) {
    if constexpr (IN_PLANES) {
        const bool left = tile.leaves_out(static_cast<u32*>(shared));
        if (threadIdx.x == 0) p.again[blockIdx.x] = left;
        return left;
    }
    return false;
}

// In the kernel behind: whether the one before has left these rows, which are this block's. The two
// have the same blocks if that one is on mma.
template <typename P>
__device__ __forceinline__ bool is_left_by_kernel_before(const P& p, const Head& head,
                                                         int row_begin, int row_end) {
    if constexpr (SAME_BLOCKS) return p.again[blockIdx.x] != 0;
    return is_left_out(p, head, row_begin, row_end);
}
