// Products of planes of halves (plane_range.cuh) by a warp on mma.sync m16n8k16. Tiles in shared memory
// have rows of high halves, then low ones: tiles/mma.cuh draws which lane holds what of them. Low planes
// are 2^VALUE_SHIFT times as large, so that a product is two sums: of what a low plane is part of, and of
// high planes. Of two low planes it is left out.
#pragma once
#include "planes/split_rows.cuh"
#include "ptx/mma.cuh"
#include "tiles/copies.cuh"

// A tile whose rows have two planes of WIDTH columns, of which D are summed over in scores.
template <int WIDTH, int D>
struct PlaneRows {
    static constexpr int PITCH = pitch<__half>(2 * WIDTH);
    static constexpr int DEPTHS = divide_up(D, 16);
    static_assert(WIDTH % 16 == 0, "sums of 16 columns at a time");

    // Where 16 columns of a plane begin, in bytes.
    static constexpr __device__ int at(int row, int column, int plane) {
        return (row * PITCH + column + plane * WIDTH) * int(sizeof(__half));
    }

    // 8 columns of 16 rows: C = or += A B.
    template <int COLUMNS>
    static __device__ __forceinline__ void multiply_group(float (&C)[2][COLUMNS], int group,
                                                          const u32 (&a)[4], u32 b0, u32 b1,
                                                          bool is_first) {
        const int j = 2 * group;
        if (is_first)
            multiply_first(C[0][j], C[0][j + 1], C[1][j], C[1][j + 1], a, b0, b1);
        else
            multiply(C[0][j], C[0][j + 1], C[1][j], C[1][j + 1], a, b0, b1, __half());
    }

    // S and `small` = A B^T: of 16 rows from A on, and of all columns' rows from B on.
    template <int COLUMNS>
    static __device__ __forceinline__ void score(float (&S)[2][COLUMNS], float (&small)[2][COLUMNS],
                                                 const __half* A, const __half* B) {
        const int lane = threadIdx.x % 32;
        const u32 A_address = shared_address(A + lane % 16 * PITCH + lane / 16 * 8);
        const u32 B_address =
            shared_address(B + (lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 8);
#pragma unroll
        for (int depth = 0; depth < DEPTHS; ++depth) {
            u32 a[2][4];
#pragma unroll
            for (int plane = 0; plane < 2; ++plane)
                load_matrices(a[plane], A_address + at(0, depth * 16, plane));
#pragma unroll
            for (int group = 0; group < COLUMNS / 4; ++group) {
                u32 b[2][4];
#pragma unroll
                for (int plane = 0; plane < 2; ++plane)
                    load_matrices(b[plane], B_address + at(group * 16, depth * 16, plane));
                multiply_planes(S, small, 2 * group, a[0], a[1], b, depth == 0);
            }
        }
    }

    // O += A B, each row times its unit: A in registers, as split_rows() leaves it, B from here on. Tensor
    // cores cut off what a sum has no digits for, so a long one drifts: these are of a tile's rows, and O
    // is added to in float32.
    template <int COLUMNS, int CHUNKS>
    static __device__ __forceinline__ void add(float (&O)[2][COLUMNS], const u32 (&A)[CHUNKS][4],
                                               const __half* B, const float (&units)[2]) {
        static_assert(COLUMNS == WIDTH / 4, "all columns of B");
        constexpr int ROWS = CHUNKS / 2, PART = 4;  // numbers of a lane's row at a time
        const int lane = threadIdx.x % 32;
        const u32 B_address = shared_address(B + lane % 16 * PITCH + lane / 16 * 8);
#pragma unroll
        for (int part = 0; part < COLUMNS / PART; ++part) {
            float sums[2][PART], small[2][PART];
#pragma unroll
            for (int rows = 0; rows < ROWS; ++rows) {
                u32 b[2][4];
#pragma unroll
                for (int plane = 0; plane < 2; ++plane)
                    load_matrices_transposed(b[plane], B_address + at(rows * 16, part * 16, plane));
                multiply_planes(sums, small, 0, A[rows], A[ROWS + rows], b, rows == 0);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int j = 0; j < PART; ++j) {
                    float& sum = O[i][part * PART + j];
                    sum = multiply_add(small[i][j], units[i] / (1 << VALUE_SHIFT), sum);
                    sum = multiply_add(sums[i][j], units[i], sum);
                }
        }
    }

  private:
    // The three products of 16 columns, which are two groups of 8 from the `first` one on.
    template <int COLUMNS>
    static __device__ __forceinline__ void multiply_planes(float (&sums)[2][COLUMNS],
                                                           float (&small)[2][COLUMNS], int first,
                                                           const u32 (&high)[4],
                                                           const u32 (&low)[4],
                                                           const u32 (&b)[2][4], bool is_first) {
        const auto both = [&](float (&C)[2][COLUMNS], const u32(&a)[4], int plane, bool is_first) {
#pragma unroll
            for (int i = 0; i < 2; ++i)
                multiply_group(C, first + i, a, b[plane][2 * i], b[plane][2 * i + 1], is_first);
        };
        both(small, low, 0, is_first);
        both(sums, high, 0, is_first);
        both(small, high, 1, false);
    }
};

// The same as the rows of a tile ask for them (row_scales.cuh).
template <typename Rows>
struct PlaneProducts {
    const __half* B;
    template <int COLUMNS, int CHUNKS>
    __device__ __forceinline__ void operator()(float (&O)[2][COLUMNS], const u32 (&A)[CHUNKS][4],
                                               const float (&units)[2]) const {
        Rows::add(O, A, B, units);
    }
};
