// Copies arrays row by row to others whose rows lie elsewhere or are wider: columns that only a target
// has become 0.
//
// Grid: as many blocks for each array as its rows have chunks for their threads. A thread copies a
// chunk, 16 bytes of the wider row. Where these lie side by side on a multiple of 16, they are read,
// or written, at once; else element by element, of which neighbours share the lines of the cache.
//
// The floor is memory: each byte is read and written once.
//
// Reads the prelude: Element, an unsigned integer, and Params.

constexpr int CHUNK = 16 / sizeof(Element);

union Chunk {
    uint4 whole;
    Element elements[CHUNK];
};

__device__ __forceinline__ bool is_whole(const Element* address, int column, int columns) {
    return column + CHUNK <= columns && reinterpret_cast<unsigned long long>(address) % 16 == 0;
}

extern "C" __global__ void __launch_bounds__(THREADS) copy_rows(const __grid_constant__ Params p) {
    int array = 0;
    while (array + 1 < ARRAYS && int(blockIdx.x) >= p.first_block[array + 1]) ++array;
    const unsigned unit = (blockIdx.x - p.first_block[array]) * THREADS + threadIdx.x;
    if (unit >= unsigned(p.units[array])) return;
    const int chunks = p.chunks[array], column = int(unit % chunks) * CHUNK;
    unsigned rest = unit / chunks;
    const long long step = p.from_column[array], to_step = p.to_column[array];
    long long from = column * step, to = column * to_step;
    for (int axis = AXES - 1; rest != 0; --axis) {
        const unsigned size = p.sizes[array * AXES + axis], position = rest % size;
        rest /= size;
        from += position * p.from_stride[array * AXES + axis];
        to += position * p.to_stride[array * AXES + axis];
    }
    const Element* const source = p.sources[array] + from;
    Element* const target = p.targets[array] + to;
    const int columns = p.from_columns[array], wide = p.to_columns[array];

    Chunk chunk;
    if (step == 1 && is_whole(source, column, columns)) {
        chunk.whole = *reinterpret_cast<const uint4*>(source);
    } else {
#pragma unroll
        for (int e = 0; e < CHUNK; ++e)
            chunk.elements[e] = column + e < columns ? source[e * step] : Element(0);
    }
    if (to_step == 1 && is_whole(target, column, wide)) {
        *reinterpret_cast<uint4*>(target) = chunk.whole;
    } else {
#pragma unroll
        for (int e = 0; e < CHUNK; ++e)
            if (column + e < wide) target[e * to_step] = chunk.elements[e];
    }
}
