// Seam 1, where keys lie: one row behind another, or in pages of a pool that a table names.
//
// Reads the prelude's PAGE_SIZE, 0 where there are no pages. P is Params: a template's body may read
// fields that only plans with pages have.
//
// The host has not seen a table on the device. Keys on what is no page of the pool are hidden;
// entries of keys beyond the length are not read.
#pragma once
#include "numeric.cuh"
#include "seams/sequence.cuh"

constexpr bool PAGED = PAGE_SIZE > 0;
constexpr int PAGE_GROUP = 16;  // page sizes are multiples of it: so many keys lie on one page

// What the table says of a head's k-th key.
template <typename P>
__device__ __forceinline__ PageNumber page_number(const P& p, const Head& head, int k) {
    return p
        .page_table[head.batch * p.page_table_stride[0] + k / PAGE_SIZE * p.page_table_stride[1]];
}
// The page of that number, or -1 where there is none.
template <typename P>
__device__ __forceinline__ i64 page_of(const P& p, i64 number) {
    return number >= 0 && number < p.pages ? number : -1;
}
// The page of a head's k-th key.
template <typename P>
__device__ __forceinline__ i64 find_page(const P& p, const Head& head, int k) {
    return page_of(p, page_number(p, head, k));
}

// Row k of a head, whose first page would have its rows from `rows` on; null if it is on no page.
template <typename P>
__device__ __forceinline__ const Element* find_row(const P& p, const Head& head,
                                                   const Element* rows, i64 page_stride,
                                                   i64 row_stride, int k) {
    const i64 page = find_page(p, head, k);
    return page < 0 ? nullptr : rows + (page * page_stride + k % PAGE_SIZE * row_stride);
}
template <typename P>
__device__ __forceinline__ const Element* find_key(const P& p, const Head& head, int k) {
    if constexpr (PAGED)
        return find_row(p, head, head.k, p.k_page_stride, p.k_row_stride, k);
    else
        return head.k + k * p.k_row_stride;
}
template <typename P>
__device__ __forceinline__ const Element* find_value(const P& p, const Head& head, int k) {
    if constexpr (PAGED)
        return find_row(p, head, head.v, p.v_page_stride, p.v_row_stride, k);
    else
        return head.v + k * p.v_row_stride;
}

// Which keys of a tile of KEYS keys from k_begin on are on no page. Those of a GROUP are on one page.
template <int KEYS, int GROUP = PAGE_GROUP>
struct MissingKeys {
    static_assert(KEYS % GROUP == 0 || GROUP % KEYS == 0, "a group is on one page");
    u32 groups = 0;  // a bit for each

    MissingKeys() = default;
    template <typename P>
    __device__ __forceinline__ MissingKeys(const P& p, const Head& head, int k_begin) {
        if constexpr (PAGED) {
#pragma unroll
            for (int k = 0; k < KEYS; k += GROUP)
                if (k_begin + k < head.key_length && find_page(p, head, k_begin + k) < 0)
                    groups |= 1u << k / GROUP;
        }
    }
    __device__ __forceinline__ bool any() const { return PAGED && groups != 0; }
    // Hides their scores, of the part of the tile from column `step` on.
    template <typename Tile, int ROWS, int COLUMNS, typename A>
    __device__ __forceinline__ void hide(A (&S)[ROWS][COLUMNS], const Tile& tile, int step) const {
        if constexpr (PAGED) {
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j)
                if (groups >> (step + tile.column(j)) / GROUP & 1)
#pragma unroll
                    for (int i = 0; i < ROWS; ++i) S[i][j] = -infinity<A>();
        }
    }
};
