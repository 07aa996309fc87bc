// The bits of a mask of elements by way of shared memory: the copy engine brings those of a tile with the
// tile itself, so that nobody waits for memory when the scores are there. Reads the prelude: STAGES_BITS.
#pragma once
#include "ptx/tma.cuh"
#include "seams/tile_lists.cuh"
#include "tiles/lane_bits.cuh"

// What a mask shows of a tile, for a slot of shared memory.
struct StagedBits {
    static constexpr int WORDS = StoredTile::WORDS;  // of a row
    static constexpr int BYTES = STAGES_BITS ? MASK_ROWS * WORDS * int(sizeof(u32)) : 0;

    alignas(16) u32 words[STAGES_BITS ? MASK_ROWS * WORDS : 4];

    // Begins to copy the bits with this number, if it is one. Who arrives at `full` does so later.
    template <typename P>
    __device__ __forceinline__ void load(const P& p, int number, Barrier& full) {
        if constexpr (STAGES_BITS) {
            if (number < 0) return;
            full.expect(BYTES);
            load_bytes(words, p.mask_bits + i64(number) * (MASK_ROWS * WORDS), BYTES, full);
        }
    }

    // Sets a warp's values, whose rows are those from `first_row` on, to `hidden` where the mask hides
    // them.
    template <typename Tile, int ROWS, int COLUMNS, typename A>
    __device__ __forceinline__ void hide(A (&values)[ROWS][COLUMNS], A hidden, const Tile& tile,
                                         int first_row) const {
        static_assert(LaneBits<COLUMNS>::WORDS == WORDS, "a lane's bits of a row are one word");
        using Row = Vector<u32, WORDS == 3 ? 1 : WORDS>;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int r = first_row + tile.row(i);
            const Row* const row = reinterpret_cast<const Row*>(words + r * WORDS);
            LaneBits<COLUMNS>(tile.column(0), [&](int w) {
                return WORDS == 3 ? row[w].at[0] : row->at[w];
            }).hide(values[i], hidden);
        }
    }
};

// What the mask shows of a tile, from a warpgroup's first row on: its bits in the slot or, where there is
// no room for them, in memory. The rest is what TileBits has.
template <typename Bits = TileBits, typename P>
__device__ __forceinline__ Bits find_bits(const StagedBits& staged, const P& p, const Head& head,
                                          int number, int first_row, int row_begin,
                                          int column_begin) {
    if constexpr (STAGES_BITS)
        return Bits(number < 0 ? nullptr : staged.words + first_row * StagedBits::WORDS);
    else
        return Bits(p, head, number, first_row, row_begin, column_begin);
}
