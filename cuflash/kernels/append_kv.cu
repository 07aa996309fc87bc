// Appends tokens to a cache: copies rows of k and v to the positions from `start` on.
//
// Grid: for each batch entry and each p.block_tokens tokens two blocks, one for k and one for v.
// Threads stand side by side along the rows of a token's heads. Each copies a unit: the largest
// power of two of bytes, up to 16, that divides rows, strides and addresses. Strides count units.
//
// The host has not seen what is on the device. A token beyond the entry's length is not appended,
// and none is where the cache has no such position or the pool no such page.
//
// Reads the prelude: UnitOfK, UnitOfV, Start, Length, PageNumber and Params.

// A row of the cache's first head: of a batch entry or, with a page table, of a page.
struct Place {
    bool exists;
    long long entry, row;
};

__device__ __forceinline__ Place find_place(const Params& p, int batch, int token) {
    const long long start = p.start == nullptr ? p.first : p.start[batch * p.start_stride];
    const long long count = p.lengths == nullptr ? p.count : p.lengths[batch * p.lengths_stride];
    if (token >= count || start < -token || start >= p.capacity - token) return {false, 0, 0};
    const int position = int(start + token);
    if (p.page_table == nullptr) return {true, batch, position};
    const long long page = p.page_table[batch * p.page_table_stride[0] +
                                        position / p.page_size * p.page_table_stride[1]];
    return {page >= 0 && page < p.pages, page, position % p.page_size};
}

// Copies units of the tokens [first, first + p.block_tokens). Strides are those of batch entries or
// pages, heads, rows and columns.
template <typename Unit>
__device__ __forceinline__ void copy_rows(const Params& p, Unit* cache, const long long* to,
                                          const Unit* tokens, const long long* from, int columns,
                                          int batch, int first) {
    const int count = min(p.block_tokens, p.tokens - first);
    for (int unit = threadIdx.x; unit < count * p.heads * columns; unit += THREADS) {
        const int column = unit % columns, row = unit / columns;
        const int head = row % p.heads, token = first + row / p.heads;
        const Place place = find_place(p, batch, token);
        if (place.exists)
            cache[place.entry * to[0] + head * to[1] + place.row * to[2] + column * to[3]] =
                tokens[batch * from[0] + head * from[1] + token * from[2] + column * from[3]];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) append_kv(const __grid_constant__ Params p) {
    const int block = blockIdx.x / 2, batch = block / p.tiles;
    const int first = block % p.tiles * p.block_tokens;
    if (blockIdx.x % 2 == 0)
        copy_rows(p, p.k_cache, p.k_cache_stride, p.k, p.k_stride, p.k_columns, batch, first);
    else
        copy_rows(p, p.v_cache, p.v_cache_stride, p.v, p.v_stride, p.v_columns, batch, first);
}
