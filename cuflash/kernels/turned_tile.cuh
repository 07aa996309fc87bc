// Steps against a tile of scores that stands on its side: rows are keys, columns queries. What those of
// gradients of keys and values have in common. Reads the prelude.
#pragma once
#include "row_stats.cuh"
#include "seams/hooks.cuh"
#include "seams/key_tiles.cuh"
#include "tiles/lane_bits.cuh"
#include "tiles/warp_rows.cuh"

// Keys from k_begin on, against queries from q_begin on.
template <typename Scores>
struct TurnedTile {
    static constexpr int ROWS = Scores::ROWS, COLUMNS = Scores::COLUMNS;
    using Rows = LoadedColumns<Scores, ROWS, COLUMNS>;  // of captured arrays
    using Columns = typename Scores::FromFirstColumn;
    using Shown = LoadedTile<Scores>;  // by a mask

    const Params& p;
    const Scores& tile;
    const Head& head;
    u32 row_stats;  // of the queries, in shared memory
    int q_begin, k_begin;
    KeptPairs<ROWS, COLUMNS> kept;

    __device__ __forceinline__ void draw_kept() {
        kept.draw_turned(tile, p, head, q_begin, k_begin);
    }

    // Of the row statistics from number `first` on those of columns 2 * m and 2 * m + 1.
    __device__ __forceinline__ Vector<float, 2> stats(int first, int m) const {
        const int column = m * 8 + tile.lane % 4 * 2;
        const auto pair = load_pair(row_stats + (first + column) * int(sizeof(float)));
        return {__uint_as_float(pair.at[0]), __uint_as_float(pair.at[1])};
    }

    // hide_row(i, seen) for each row of the lane: seen has the queries that see its key, but those without
    // weight.
    template <typename HideRow>
    __device__ __forceinline__ void hide_rows(const TileBits& bits, const Shown& shown,
                                              const HideRow& hide_row) const {
        using Seen = LaneBits<COLUMNS>;
        const Seen weighs = Seen::where(
            [&](int j) { return stats(0, j / 2).at[j % 2] != infinity<Accumulator>(); });
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const VisibleQueries visible(p, head, k_begin + tile.row(i));
            Seen seen(tile.column(0), visible.first - q_begin, visible.last - q_begin,
                      [&](int w) { return shown.word(i, w); });
            seen.bits &= weighs.bits;
            if constexpr (MASK_IS_COMPUTED)
                seen.bits &= Seen::where([&](int j) {
                                 return shown.has(Columns{tile}, bits, tile.column(0), i, j);
                             }).bits;
            hide_row(i, seen);
        }
    }
};
