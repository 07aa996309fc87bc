// A bool array cut into tiles: what it shows of each, as bits, and whether that is all or nothing.
//
// Grid: one block per tile of every list. A thread packs up to 32 columns of a row into a word, where
// these lie side by side in memory 16 bytes at a time. mask_lists runs after this kernel and makes lists of it.
// Tiles are as large as the attention kernel scores them at a time; for backward, which walks over
// the mask's transpose, the strides of its rows and columns are exchanged.
//
// Reads every element of the array once, where that is broadcast every element of what is there.
#include "ptx/overlap.cuh"
#include "seams/tile_lists.cuh"

// Where the elements of a list begin.
__device__ __forceinline__ i64 locate_list(const Params& p, int list) {
    i64 offset = 0;
    for (int axis = p.list_axes - 1; axis >= 0; --axis) {
        offset += list % p.list_axis_size[axis] * p.list_axis_stride[axis];
        list /= p.list_axis_size[axis];
    }
    return offset;
}

// The elements of one load, as bits: those that are not 0.
__device__ __forceinline__ u32 bits_of(const uint4& bytes) {
    const u32 words[] = {bytes.x, bytes.y, bytes.z, bytes.w};
    u32 bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 high = ((words[i] & 0x7f7f7f7f) + 0x7f7f7f7f) | words[i];
        const u32 ones = high >> 7 & 0x01010101;
        bits |= (ones * 0x10204080 >> 28) << 4 * i;  // a byte's bit to its place among four
    }
    return bits;
}

extern "C" __global__ void __launch_bounds__(THREADS) mask_tiles(const __grid_constant__ Params p) {
    admit_kernel_behind();
    await_kernel_before();
    static_assert(is_laid_out<u32>(tile_bytes::mask_bits, MASK_ROWS * TileBits::WORDS) &&
                      is_laid_out<unsigned char>(tile_bytes::mask_states, 1),
                  "the plan's tiles in the workspace are those of the kernel");
    constexpr int WORDS = TileBits::WORDS, WIDTH = MASK_COLUMNS < 32 ? MASK_COLUMNS : 32;
    const int column_tile = blockIdx.x % p.mask_columns, row = blockIdx.x / p.mask_columns;
    const int row_tile = row % p.mask_rows;
    const unsigned char* const mask = p.mask + locate_list(p, row / p.mask_rows);
    bool some = false, all = true;
    for (int unit = threadIdx.x; unit < MASK_ROWS * WORDS; unit += THREADS) {
        const int r = unit / WORDS, word = unit % WORDS;
        const i64 first = i64(column_tile) * MASK_COLUMNS + word * 32;
        const i64 q = i64(row_tile) * MASK_ROWS + r;
        const int width = q < p.mask_height ? int(min(i64(WIDTH), p.mask_width - first)) : 0;
        const unsigned char* source = mask + q * p.mask_row_stride + first * p.mask_column_stride;
        const bool whole = p.mask_column_stride == 1 && width == 32 &&
                           reinterpret_cast<u64>(source) % sizeof(uint4) == 0;
        u32 bits = 0;
        if (whole) {
            const uint4* const loads = reinterpret_cast<const uint4*>(source);
            bits = bits_of(loads[0]) | bits_of(loads[1]) << 16;
        }
        for (int c = whole ? width : 0; c < width; ++c, source += p.mask_column_stride)
            bits |= u32(*source != 0) << c;
        p.mask_bits[(i64(blockIdx.x) * MASK_ROWS + r) * WORDS + word] = bits;
        some |= bits != 0;
        all &= width <= 0 || bits == (width == 32 ? ~0u : (1u << width) - 1);
    }
    some = __syncthreads_or(some);
    all = __syncthreads_and(all);
    if (threadIdx.x == 0) p.mask_states[blockIdx.x] = some ? (all ? FULL : PARTIAL) : EMPTY;
}
