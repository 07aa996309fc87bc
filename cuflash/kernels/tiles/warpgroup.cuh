// Tiles of a warpgroup: 64 rows of queries, their scores and their outputs, on wgmma (sm_90a).
//
// In shared memory a matrix of `width` columns lies in panels of PANEL columns, each
// [rows][PANEL] with rows of 128 or 64 bytes. Of such a row the 16-byte units are permuted by the
// row's number (the swizzle), so that 8 rows of one unit meet no bank conflict. TMA and wgmma agree
// on it, since it is a function of the address and panels are aligned.
//
// A warp holds 16 rows of an accumulator in the layout of tiles/mma.cuh: rows lane/4 and
// lane/4 + 8, and of every 8 columns the two from 2 * (lane % 4) on. Packed to halves it is an A
// operand.
#pragma once
#include "nonfinite.cuh"
#include "numeric.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/wgmma.cuh"
#include "tiles/copies.cuh"
#include "tiles/softmax.cuh"
#include "tiles/warp_rows.cuh"

// How a matrix of `WIDTH` columns and `ROWS` rows of halves lies in shared memory.
template <int ROWS, int WIDTH>
struct Panels {
    static constexpr int PANEL = WIDTH % 64 == 0 ? 64 : 32, COUNT = WIDTH / PANEL;
    static constexpr int ROW_BYTES = 2 * PANEL;
    static constexpr int PANEL_BYTES = ROWS * ROW_BYTES, BYTES = COUNT * PANEL_BYTES;
    static constexpr u64 SWIZZLE = PANEL == 64 ? 1 : 2;  // as descriptors number them

    // Matrix descriptor of wgmma. Rows come in groups of 8; LEADING bytes lie between panels, which
    // counts only for an operand whose columns are not summed over (V).
    static __device__ __forceinline__ u64 descriptor(u32 address) {
        return u64(address >> 4) | u64(PANEL_BYTES >> 4) << 16 | u64(8 * ROW_BYTES >> 4) << 32 |
               SWIZZLE << 62;
    }
    // What to add to a descriptor for 16 columns from 16 * i on, and for 16 rows from 16 * i on.
    static constexpr __device__ int columns(int i) {
        return (i * 16 / PANEL * PANEL_BYTES + i * 16 % PANEL * 2) >> 4;
    }
    static constexpr __device__ int rows(int i) { return i * 16 * ROW_BYTES >> 4; }
    // In bytes, of one element. Every 8 rows are permuted alike.
    static __device__ __forceinline__ int offset(int row, int column) {
        const int unit = column % PANEL / 8 ^ (PANEL == 64 ? row % 8 : row % 8 / 2);
        return column / PANEL * PANEL_BYTES + row * ROW_BYTES + 16 * unit + column % 8 * 2;
    }
};

// Sets infinities and NaN of 16-byte units to zero; returns, to the whole warp that does it,
// whether there were any. Looks at several units at a time, since reading one takes long.
template <int UNITS, typename T>
__device__ __forceinline__ bool clear_nonfinite_units(T* units, int lane) {
    constexpr int AT_A_TIME = 4;
    static_assert(UNITS % 32 == 0, "whole warps");
    bool found = false;
#pragma unroll 1
    for (int begin = lane; begin < UNITS; begin += 32 * AT_A_TIME) {
        bool some = false;
#pragma unroll
        for (int i = 0; i < AT_A_TIME; ++i)
            if (UNITS % (32 * AT_A_TIME) == 0 || begin + 32 * i < UNITS)
                some |= has_nonfinite(units + (begin + 32 * i) * CHUNK<T>);
        if (!some) continue;
        found = true;
#pragma unroll 1
        for (int i = 0; i < AT_A_TIME && begin + 32 * i < UNITS; ++i)
#pragma unroll 1
            for (int e = 0; e < CHUNK<T>; ++e) {
                T& x = units[(begin + 32 * i) * CHUNK<T> + e];
                if (!is_finite(widen(x))) x = narrow<T>(0.0f);
            }
    }
    return __any_sync(FULL_WARP, found);
}

// Among four lanes that lie STRIDE apart: word i of lane j becomes word j of lane i.
template <int STRIDE>
__device__ __forceinline__ void exchange(Vector<u32, 4>& words, int lane) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
        const bool upper = lane & step * STRIDE;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (j & step) continue;
            u32 &low = words.at[j], &high = words.at[j + step];
            const u32 got = __shfl_xor_sync(FULL_WARP, upper ? low : high, step * STRIDE);
            (upper ? low : high) = got;
        }
    }
}

template <typename T, int BLOCK_K, int D, int DV>
struct WarpgroupTile : WarpRows<BLOCK_K / 4> {
    using Base = WarpRows<BLOCK_K / 4>;
    using Base::ROWS, Base::COLUMNS, Base::lane, Base::row, Base::column;
    static constexpr int VALUE_COLUMNS = padded(DV) / 4;
    using Queries = Panels<SLAB, HEAD_ROW>;
    using Keys = Panels<BLOCK_K, HEAD_ROW>;
    using Values = Panels<BLOCK_K, VALUE_ROW>;

    __device__ __forceinline__ WarpgroupTile(int thread) : Base(thread) {}

    // S = Q K^T as one group of products, by descriptors of Q and K.
    __device__ __forceinline__ void score(float (&S)[ROWS][COLUMNS], u64 Q, u64 K) const {
        multiply_shared<Queries, Keys>(S, Q, K);
        commit_products();
    }

    // The same by one warp, for its rows, where the others have gone on: `query(row)` says where a
    // row of the tile lies in global memory, null if it does not exist; K is in shared memory. Of 16
    // columns a lane takes 4 in a row, which mma.sync counts as 2 and 2: in both operands.
    template <typename Query>
    __device__ __forceinline__ void score_alone(float (&S)[ROWS][COLUMNS], const Query& query,
                                                u32 K_smem) const {
        using Four = Vector<u32, 2>;
        const T *const upper_row = query(row(0)), *const lower_row = query(row(1));
        const auto load = [&](const T* row, int column) {
            const bool exists = row != nullptr && column < D;
            return exists ? *reinterpret_cast<const Four*>(row + column) : Four{0, 0};
        };
        clear_rows(S);
#pragma unroll 1
        for (int column = lane % 4 * 4; column < padded(D); column += 16) {
            const Four upper = load(upper_row, column);
            const Four lower = load(lower_row, column);
            const u32 a[4] = {upper.at[0], lower.at[0], upper.at[1], lower.at[1]};
            const u32 k = K_smem + Keys::offset(lane / 4, column);
#pragma unroll
            for (int j = 0; j < COLUMNS; j += 2) {
                const Four b = load_pair(k + j * 4 * Keys::ROW_BYTES);
                multiply(S[0][j], S[0][j + 1], S[1][j], S[1][j + 1], a, b.at[0], b.at[1], T());
            }
        }
    }

    // O += P V as one group of products.
    __device__ __forceinline__ void accumulate(float (&O)[ROWS][VALUE_COLUMNS],
                                               const u32 (&P)[BLOCK_K / 16][4], u64 V) const {
        multiply_registers<Values>(O, P, V);
        commit_products();
    }

    // Columns [32 * group, 32 * group + 32) of a row of O times `factor`, packed to halves: after
    // two exchanges between the four lanes of the row, a lane has the 8 from 8 * (lane % 4) on.
    __device__ __forceinline__ Vector<u32, 4> eight_columns(const float (&O)[VALUE_COLUMNS],
                                                            int group, float factor) const {
        Vector<u32, 4> words;
#pragma unroll
        for (int j = 0; j < 4; ++j)
            words.at[j] =
                pack(O[8 * group + 2 * j] * factor, O[8 * group + 2 * j + 1] * factor, T());
        exchange<1>(words, lane);
        return words;
    }

    // P as the A operands of products: one for every 16 keys.
    __device__ __forceinline__ void pack_probabilities(u32 (&P)[BLOCK_K / 16][4],
                                                       const float (&S)[ROWS][COLUMNS]) const {
#pragma unroll
        for (int i = 0; i < BLOCK_K / 16; ++i)
#pragma unroll
            for (int r = 0; r < 4; ++r)
                P[i][r] = pack(S[r % 2][4 * i + r / 2 * 2], S[r % 2][4 * i + r / 2 * 2 + 1], T());
    }
    // Where it has put columns 2 m and 2 m + 1 of row i.
    static __device__ __forceinline__ u32& pair_of(u32 (&P)[BLOCK_K / 16][4], int i, int m) {
        return P[m / 2][m % 2 * 2 + i];
    }
};

// As write_row of seams/output.cuh, 16 bytes at a time: rows and their number of columns are multiples.
template <typename T, int BLOCK_K, int D, int DV, int COLUMNS>
__device__ __forceinline__ void write_row(const WarpgroupTile<T, BLOCK_K, D, DV>& tile, T* row,
                                          const float (&O)[COLUMNS], float total, bool exists,
                                          bool empty) {
    const float inverse = __fdividef(1.0f, total);
    const int column = 8 * (tile.lane % 4);
    row += column;
#pragma unroll
    for (int group = 0; group < COLUMNS / 8; ++group)
        store_where(exists && !empty && 32 * group + column < DV, row + 32 * group,
                    tile.eight_columns(O, group, inverse));
    if (exists && empty)
#pragma unroll 1
        for (int begin = column; begin < DV; begin += 32)
            store_where(true, row + begin - column, Vector<u32, 4>{});
}

// As join_row of seams/output.cuh, likewise. A row's own result is rounded before it is joined.
template <typename T, int BLOCK_K, int D, int DV, int COLUMNS, typename J>
__device__ __forceinline__ void join_row(const WarpgroupTile<T, BLOCK_K, D, DV>& tile, T* row,
                                         const float (&O)[COLUMNS], const J& joint, bool exists) {
    using Eight = Vector<T, 8>;
    const int column = 8 * (tile.lane % 4);
    row += column;
    constexpr int AT_ONCE = 4;  // loads
    Vector<u32, 4> there[AT_ONCE];
#pragma unroll
    for (int group = 0; group < COLUMNS / 8; ++group) {
        if (group % AT_ONCE == 0)
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
                there[i] =
                    load_where(exists && 32 * (group + i) + column < DV, row + 32 * (group + i));
        const Vector<u32, 4> words = tile.eight_columns(O, group, joint.own);
        const Eight own = *reinterpret_cast<const Eight*>(&words);
        const Eight earlier = *reinterpret_cast<const Eight*>(&there[group % AT_ONCE]);
        Eight joined;
#pragma unroll
        for (int c = 0; c < 8; ++c) joined.at[c] = joint.add(widen(own.at[c]), earlier.at[c]);
        store_where(exists && 32 * group + column < DV, row + 32 * group,
                    *reinterpret_cast<const Vector<u32, 4>*>(&joined));
    }
}
