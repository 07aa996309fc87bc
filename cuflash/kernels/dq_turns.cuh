// Whose turn it is to add to a tile of dQ, where blocks add to it in the order of their keys, or in one
// that a mask's lists plan. Reads the prelude.
#pragma once
#include "numeric.cuh"
#include "seams/key_tiles.cuh"

static_assert(is_laid_out<u32>(tile_bytes::turns, TURNS), "turns are numbers");

// Whose turn it is to add to a tile of dQ: the key tile after the one that added last, 0 at first.
// Blocks wait only for blocks that started earlier, which have the lower numbers or, with
// LAST_KEYS_FIRST, the higher ones of the early tiles and then of the late ones; for others with chains.
//
// Relaxed, for who adds and stores behind it and reads nothing: that depends on a branch, ahead of which
// no GPU does it. An acquire would empty the L1 cache, for which a warp waits until the answer is there.
__device__ __forceinline__ u32 read_turn(const u32* turn) {
    u32 now;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
    return now;
}
__device__ __forceinline__ void wait_turn(const u32* turn, u32 wanted) {
    u32 now;
    do  // ld.acquire: what the previous block added is added before this block adds
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
    while (now != wanted);
}
__device__ __forceinline__ void pass_turn(u32* turn, u32 next) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" : : "l"(turn), "r"(next) : "memory");
}

// The turn of the tile of keys `key_tile` at the tile of queries that `visit` is: behind that of the
// tile of keys that adds before, unless the band hides all keys of that one from these queries.
__device__ __forceinline__ u32 turn_of(const Params& p, const Head& head, int key_tile,
                                       const Visit& visit) {
    const int q_begin = visit.tile * BLOCK_Q;
    const KeyRange keys(p, head, q_begin, q_begin + BLOCK_Q);
    const int previous = MASKED ? visit.previous : LAST_KEYS_FIRST ? key_tile + 1 : key_tile - 1;
    const bool is_seen =
        LAST_KEYS_FIRST ? previous * BLOCK_K < keys.end : previous >= keys.begin / BLOCK_K;
    if (LATE_QUARTER) {
        const int tiles = VARLEN ? divide_up(key_extent(p, head), BLOCK_K) : p.key_tiles;
        const int early = early_tiles(tiles);
        if (previous == early) return 0;
        if (key_tile >= early && !is_seen) return 1;  // behind tile 0, which all queries see
    }
    return is_seen ? previous + 1 : 0;
}
