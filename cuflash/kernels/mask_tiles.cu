// A bool array cut into tiles: what it shows of each, as bits, and whether that is all or nothing.
//
// Grid: one block per tile of every list. A thread packs up to 32 columns of a row into a word. Where
// columns lie side by side in memory it reads 16 bytes at a time; where rows do, a warp reads 32 rows and
// columns so. mask_lists runs after this kernel and makes lists of it.
// Tiles are as large as the attention kernel scores them at a time; for backward, which walks over
// the mask's transpose, the strides of its rows and columns are exchanged. Where a tile has rows of
// PACKED heads side by side, which share the mask, each row of it stands there so many times.
//
// Reads every element of the array once, where that is broadcast every element of what is there; but not
// tiles that the band hides.
#include "ptx/overlap.cuh"
#include "seams/tile_lists.cuh"

constexpr int AT_ONCE = 2;  // runs of a thread that are under way

// Whether the band hides a tile from all heads: where these have the arrays' own lengths.
__device__ __forceinline__ bool is_hidden(const Params& p, int tile_row, i64 column_begin) {
    if (VARLEN || p.q_lengths != nullptr || p.kv_lengths != nullptr || p.q_offset != nullptr)
        return false;
    Head head;
    find_lengths(p, head, 0, 0, 0);
    const i64 row_begin = query_of(tile_row), row_last = query_of(tile_row + MASK_ROWS - 1);
    const i64 column_last = column_begin + MASK_COLUMNS - 1;
    const i64 nearest = ROWS_ARE_KEYS ? row_begin - column_last : column_begin - row_last;
    const i64 farthest = ROWS_ARE_KEYS ? row_last - column_begin : column_last - row_begin;
    return nearest > i64(head.shift) + p.band_right || farthest < i64(head.shift) - p.band_left;
}

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

// A word of a row, and how many of its columns exist.
struct Word {
    u32 bits;
    int width;
    __device__ __forceinline__ bool is_full() const {
        return bits == (width >= 32 ? ~0u : (1u << width) - 1);
    }
};

// `width` elements of a row, so far apart.
__device__ __forceinline__ Word read_row(const unsigned char* source, i64 stride, int width) {
    u32 bits = 0;
    for (int c = 0; c < width; ++c, source += stride) bits |= u32(*source != 0) << c;
    return {bits, width};
}

// 32 elements that lie side by side, or the first 16 of them, or none.
struct Run {
    uint4 halves[2];
    __device__ __forceinline__ void load(const unsigned char* source, int width) {
        const uint4* const loads = reinterpret_cast<const uint4*>(source);
#pragma unroll
        for (int half = 0; half < 2; ++half)
            halves[half] = 16 * half < width ? loads[half] : uint4{};
    }
    __device__ __forceinline__ u32 bits() const {
        return bits_of(halves[0]) | bits_of(halves[1]) << 16;
    }
};

// The words of 32 rows, of each lane its own, where a lane has the rows' elements in a column.
__device__ __forceinline__ u32 turn(u32 column, int lane) {
    u32 own = 0;
#pragma unroll
    for (int row = 0; row < 32; ++row) {
        const u32 bits = __ballot_sync(~0u, column >> row & 1);
        if (row == lane) own = bits;
    }
    return own;
}

// visit(i, unit) for all COUNT units, of which as many as AT_ONCE have been given to load(i, unit) before.
template <int COUNT, int STEP, int AT_ONCE, typename Load, typename Visit>
__device__ __forceinline__ void each_unit(int first, const Load& load, const Visit& visit) {
#pragma unroll 1
    for (; first < COUNT; first += STEP * AT_ONCE) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (first + i * STEP < COUNT) load(i, first + i * STEP);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (first + i * STEP < COUNT) visit(i, first + i * STEP);
    }
}

extern "C" __global__ void __launch_bounds__(MASK_TILE_THREADS)
    mask_tiles(const __grid_constant__ Params p) {
    admit_kernel_behind();
    await_kernel_before();
    static_assert(is_laid_out<u32>(tile_bytes::mask_bits, MASK_ROWS * TileBits::WORDS) &&
                      is_laid_out<unsigned char>(tile_bytes::mask_states, 1),
                  "the plan's tiles in the workspace are those of the kernel");
    constexpr int WORDS = TileBits::WORDS, WIDTH = MASK_COLUMNS < 32 ? MASK_COLUMNS : 32;
    const int column_tile = blockIdx.x % p.mask_columns, row = blockIdx.x / p.mask_columns;
    const int row_tile = row % p.mask_rows, lane = threadIdx.x % 32;
    const i64 column_begin = i64(column_tile) * MASK_COLUMNS;
    const int row_begin = row_tile * MASK_ROWS;
    if (is_hidden(p, row_begin, column_begin)) {
        if (threadIdx.x == 0) p.mask_states[blockIdx.x] = OUTSIDE;
        return;
    }
    const unsigned char* const mask = p.mask + locate_list(p, row / p.mask_rows) +
                                      query_of(row_begin) * p.mask_row_stride +
                                      column_begin * p.mask_column_stride;
    bool some = false, all = true;
    const auto store = [&](int r, int word, const Word& found) {
        p.mask_bits[(i64(blockIdx.x) * MASK_ROWS + r) * WORDS + word] = found.bits;
        some |= found.bits != 0;
        all &= found.is_full();
    };
    // Rows and columns that exist.
    const int rows = int(min(i64(MASK_ROWS), i64(p.mask_height) * PACKED - row_begin));
    const int columns = int(min(i64(MASK_COLUMNS), p.mask_width - column_begin));
    const auto width_of = [&](int word) { return max(0, min(WIDTH, columns - word * 32)); };
    const auto width_in_row = [&](int r, int word) { return r < rows ? width_of(word) : 0; };
    const auto is_aligned = [&](i64 stride) {
        return stride % i64(sizeof(uint4)) == 0 && u64(mask) % sizeof(uint4) == 0;
    };
    constexpr int WARPS_OF_TILE = MASK_TILE_THREADS / 32;
    Run runs[AT_ONCE];
    // Of backward's tiles rows lie side by side, not columns.
    if (PACKED == 1 && MASK_ROWS % 32 == 0 && p.mask_row_stride == 1 && rows == MASK_ROWS &&
        is_aligned(p.mask_column_stride)) {
        each_unit<MASK_ROWS / 32 * WORDS, WARPS_OF_TILE, AT_ONCE>(
            threadIdx.x / 32,
            [&](int i, int unit) {
                const int word = unit % WORDS, column = word * 32 + lane;
                runs[i].load(mask + unit / WORDS * 32 + column * p.mask_column_stride,
                             lane < width_of(word) ? 32 : 0);
            },
            [&](int i, int unit) {
                const int word = unit % WORDS;
                store(unit / WORDS * 32 + lane, word, {turn(runs[i].bits(), lane), width_of(word)});
            });
    } else if (columns % 16 == 0 && p.mask_column_stride == 1 && is_aligned(p.mask_row_stride)) {
        const auto width = [&](int unit) { return width_in_row(unit / WORDS, unit % WORDS); };
        each_unit<MASK_ROWS * WORDS, MASK_TILE_THREADS, AT_ONCE>(
            threadIdx.x,
            [&](int i, int unit) {
                runs[i].load(mask + query_of(unit / WORDS) * p.mask_row_stride + unit % WORDS * 32,
                             width(unit));
            },
            [&](int i, int unit) {
                store(unit / WORDS, unit % WORDS, {runs[i].bits(), width(unit)});
            });
    } else {
        for (int unit = threadIdx.x; unit < MASK_ROWS * WORDS; unit += MASK_TILE_THREADS) {
            const int r = unit / WORDS, word = unit % WORDS;
            const unsigned char* const source =
                mask + query_of(r) * p.mask_row_stride + word * 32 * p.mask_column_stride;
            store(r, word, read_row(source, p.mask_column_stride, width_in_row(r, word)));
        }
    }
    some = __syncthreads_or(some);
    all = __syncthreads_and(all);
    if (threadIdx.x == 0) p.mask_states[blockIdx.x] = some ? (all ? FULL : PARTIAL) : EMPTY;
}
