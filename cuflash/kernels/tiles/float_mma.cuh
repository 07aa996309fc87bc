// Products of a warp's slab of rows in float32 on tensor cores: each number is two halves, its planes
// (planes/plane_range.cuh), and a product three products of planes on mma.sync m16n8k16 (sm_80 on).
//
// Tiles arrive in shared memory as floats. There they become planes, in place: of every 8 floats of a
// row the first 16 bytes take the high halves, the next 16 the low ones. So ldmatrix finds rows of 8
// halves, as tiles/mma.cuh draws them. Keys and values are split by all threads of a block, each row
// with an exponent of its own, by shuffles; queries by their warp, with one exponent for its rows. The
// padding behind a row holds its unit, 2^-exponent:
//
//     S[q][k] = unit(Q) unit(k) (Ql Kh + Qh Kl + Qh Kh)
//     O += unit (Ph Vl + Pl Vh) 2^-11 + unit Ph Vh       with P[q][k] unit(k) / unit as planes,
//                                                        unit the largest of the step's
//
// O is added to in float32: tensor cores cut off what a sum has no digits for, so a long one drifts.
//
// What planes do not hold the tile remembers: the kernel leaves such rows to the one behind it.
#pragma once
#include "numeric.cuh"
#include "planes/small_weights.cuh"
#include "planes/split_rows.cuh"
#include "ptx/mma.cuh"
#include "tiles/copies.cuh"
#include "tiles/softmax.cuh"

constexpr int LAZINESS_OF_PLANES = 1;  // of the softmax: a weight's planes end at 2^2

// Eight floats times a power of two, as planes.
struct SplitFloats {
    Vector<u32, 4> high, low;
    __device__ __forceinline__ SplitFloats(const float (&x)[8], float factor, float shifted) {
#pragma unroll
        for (int e = 0; e < 8; e += 2) {
            const float a = x[e] * factor, b = x[e + 1] * factor;
            const u32 pair = pack(a, b, __half());
            high.at[e / 2] = pair;
            low.at[e / 2] = pack((a - widen(__ushort_as_half(pair & 0xffff))) * shifted,
                                 (b - widen(__ushort_as_half(pair >> 16))) * shifted, __half());
        }
    }
};

__device__ __forceinline__ void load_floats(float (&x)[8], const float* source) {
    const auto first = *reinterpret_cast<const Vector<float>*>(source);
    const auto second = *reinterpret_cast<const Vector<float>*>(source + 4);
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = first.at[e], x[4 + e] = second.at[e];
}

// The largest magnitude of eight floats, or NaN.
__device__ __forceinline__ float largest_of(const float (&x)[8]) {
    float most = fabsf(x[0]);
#pragma unroll
    for (int e = 1; e < 8; ++e) most = larger_or_nan(most, fabsf(x[e]));
    return most;
}

// The exponent of a row's planes, or of a slab's. 0 is as if it were very small.
__device__ __forceinline__ int plane_exponent(float most) {
    return min(LARGEST_EXPONENT - exponent_of(__float_as_uint(most)), HeldHead::SMALL_EXPONENT);
}

// How the lanes of a warp walk over rows of GROUPS times 8 floats: LANES share a row, a power of two.
// Four adjacent lanes and the next four have different rows where they can, since rows are an odd
// number of 16 bytes apart: then they meet no bank conflict.
template <int GROUPS>
struct RowLanes {
    static constexpr int LANES = GROUPS <= 2    ? 2
                                 : GROUPS <= 4  ? 4
                                 : GROUPS <= 8  ? 8
                                 : GROUPS <= 16 ? 16
                                                : 32;
    static_assert(GROUPS <= LANES, "a row has at most 256 columns");
    static constexpr int ROWS = 32 / LANES;
    static constexpr bool SPREAD = LANES == 4 || LANES == 8 || LANES == 16;

    static __device__ __forceinline__ int group(int lane) {
        return SPREAD ? lane % 4 + lane / 8 % (LANES / 4) * 4 : lane % LANES;
    }
    static __device__ __forceinline__ int row(int lane) {
        return SPREAD ? lane / 4 % 2 + lane / 8 / (LANES / 4) * 2 : lane / LANES;
    }
    // Of what the lanes of a row hold, to all of them.
    static __device__ __forceinline__ float largest(float x) {
#pragma unroll
        for (int step = 1; step < LANES; step *= 2)
            x = larger_or_nan(x,
                              __shfl_xor_sync(FULL_WARP, x, SPREAD && step >= 4 ? 2 * step : step));
        return x;
    }
};

// How the planes of a row lie in shared memory, in floats: from 8 columns to the next ones, and from high
// halves to low ones.
struct PlanesInPlace {
    static constexpr int NEXT = 8, LOW = 4;
};

// As MmaTile (tiles/mma.cuh), of floats.
template <int SLABS, int STEP_K, int D, int DV>
struct FloatMmaTile {
    static constexpr bool IS_OF_TENSOR_CORES = true;
    using Shared = float;
    using InPlace = PlanesInPlace;
    static constexpr int ROWS = 2 * SLABS, COLUMNS = STEP_K / 4, WARP_ROWS = 16 * SLABS;
    static constexpr int PADDED_D = round_up(D, 16), PADDED_DV = round_up(DV, 16);
    static constexpr int ROW_THREADS = 4, HOLDERS = 1, VALUE_COLUMNS = PADDED_DV / 4;
    static constexpr int PITCH = pitch<float>(PADDED_D), VALUE_PITCH = pitch<float>(PADDED_DV);
    static_assert(PITCH > PADDED_D && VALUE_PITCH > PADDED_DV, "a row's unit has its place");
    static constexpr int DEPTHS = PADDED_D / 16, KEYS = STEP_K / 16;
    static constexpr int TOGETHER = 2;  // groups of 16 keys whose scores are summed together
    // And of 8 columns of O. Products with one group would run in too few chains, so these are more then; and
    // so they are where the compiler would spill a thousand bytes.
    static constexpr int PART = SLABS == 1 || KEYS > 2 ? 2 : 1;
    static constexpr bool SPILLS = DV > 128 && PACKED > 1 && SPLIT;
    static constexpr int CHAINS = PART == 1 || SPILLS ? 2 : 1;
    static constexpr int COLUMN_GROUP = 2;
    static constexpr int EXCHANGE =
        2 * 32 + 4;  // of each lane two numbers, of the warp two, and two of made_planes.cuh
    using Weights = u32[2][SLABS][KEYS][4];     // planes
    static constexpr int WEIGHT_EXPONENT = 14;  // of a weight of 1 as planes hold it
    static_assert(STEP_K % 32 == 0 && STEP_K <= 128,
                  "a sum in tensor cores is of 128 keys at most");

    const int lane;
    float* const held;  // what would take registers
    u32 Q_address;
    bool unheld = false;  // something that planes do not hold
    bool small = false;   // some weight that they do not hold to 2^-20 of itself
    bool has_zeros;       // whether weights of the next step may be 0 for keys that are hidden
    KeptWeights<ROWS, ROW_THREADS> kept;
    float least_kept = 1.0f;  // of rows that are done

    __device__ __forceinline__ FloatMmaTile(int lane, float* exchange)
        : lane(lane), held(exchange) {
        own_range() = {infinity<float>(), 0.0f};
        kept.clear();
    }
    // The least and the largest magnitude of the values that a lane has split.
    __device__ __forceinline__ Vector<float, 2>& own_range() const {
        return reinterpret_cast<Vector<float, 2>*>(held)[threadIdx.x % 32];
    }
    // The unit of the warp's queries, and that of scores from which on planes do not hold them.
    __device__ __forceinline__ Vector<float, 2>& units() const {
        return reinterpret_cast<Vector<float, 2>*>(held)[32];
    }
    __device__ __forceinline__ void limit_scores(float limit) const {
        if (lane == 0) units().at[1] = limit;
    }

    __device__ __forceinline__ int row(int i) const { return i / 2 * 16 + i % 2 * 8 + lane / 4; }
    __device__ __forceinline__ int column(int j) const { return j / 2 * 8 + lane % 4 * 2 + j % 2; }
    __device__ __forceinline__ int value_column(int j) const { return column(j); }

    // Q_slab: the warp's rows in shared memory, which become planes. Call when they have arrived.
    __device__ __forceinline__ void take_queries(float* Q_slab) {
        using Lanes = RowLanes<PADDED_D / 8>;
        const bool has_group = Lanes::group(lane) < PADDED_D / 8;
        float* const own = Q_slab + Lanes::row(lane) * PITCH + Lanes::group(lane) * 8;
        float x[8], largest = 0.0f;
#pragma unroll 2
        for (int row = 0; row < WARP_ROWS && has_group; row += Lanes::ROWS) {
            load_floats(x, own + row * PITCH);
            largest = larger_or_nan(largest, largest_of(x));
        }
#pragma unroll
        for (int step = 1; step < 32; step *= 2)
            largest = larger_or_nan(largest, __shfl_xor_sync(FULL_WARP, largest, step));
        unheld |= !is_held(largest);
        const int exponent = plane_exponent(largest);
        if (lane == 0) units().at[0] = power_of_two(-exponent);
#pragma unroll 2
        for (int row = 0; row < WARP_ROWS && has_group; row += Lanes::ROWS) {
            load_floats(x, own + row * PITCH);
            const SplitFloats planes(x, power_of_two(exponent), 1.0f);
            store_planes(own + row * PITCH, planes);
        }
        __syncwarp();  // planes of all rows, and units
        Q_address = shared_address(Q_slab + lane % 16 * PITCH + lane / 16 * 8);
    }

    // Planes of a tile of keys, by THREADS threads. Call when the tile has arrived for all, and meet
    // before it is used.
    template <int TILE_ROWS, int THREADS>
    __device__ __forceinline__ void split_keys(float* K_smem) {
        each_row<TILE_ROWS, THREADS, PADDED_D>(
            K_smem, [&](float* own, const float (&x)[8], float largest, bool is_first, int) {
                unheld |= !is_held(largest);
                const int exponent = plane_exponent(largest);
                store_planes(own, SplitFloats(x, power_of_two(exponent), 1.0f));
                if (is_first) own[PADDED_D] = power_of_two(-exponent);
            });
    }

    // The same of values, of which `valid_rows` exist. The unit of a row of zeros is 0.
    template <int TILE_ROWS, int THREADS>
    __device__ __forceinline__ void split_values(float* V_smem, int valid_rows) {
        Vector<float, 2> range = own_range();
        each_row<TILE_ROWS, THREADS, PADDED_DV>(
            V_smem, [&](float* own, const float (&x)[8], float largest, bool is_first, int row) {
                const int exponent = plane_exponent_of_values(largest);
                const float factor = power_of_two(exponent);
                unheld |= !is_held(largest) || (largest > 0.0f && largest < SMALLEST_VALUES);
                store_planes(own, SplitFloats(x, factor, 1 << VALUE_SHIFT));
                if (is_first) own[PADDED_DV] = largest > 0.0f ? power_of_two(-exponent) : 0.0f;
                if (row < valid_rows)
                    look_at_values(x, largest, factor, (own - V_smem) % VALUE_PITCH, range);
            });
        own_range() = range;
    }

    // S = Q K^T for the STEP_K keys from K_smem on.
    __device__ __forceinline__ void score(float (&S)[ROWS][COLUMNS], const float* K_smem) {
        multiply_queries<InPlace>(S, K_smem);
        const Vector<float, 2> of_queries = units();
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            const float unit = K_smem[column(j) * PITCH + PADDED_D] * of_queries.at[0];
            unheld |= !(unit <= of_queries.at[1]);
#pragma unroll
            for (int i = 0; i < ROWS; ++i) S[i][j] *= unit;
        }
    }

    // O += P V for the STEP_K values from V_smem on.
    __device__ __forceinline__ void accumulate(float (&O)[ROWS][VALUE_COLUMNS],
                                               const float (&P)[ROWS][COLUMNS],
                                               const float* V_smem) {
        kept.add(P);
        Weights weights;
        const float unit = split_weights(weights, P, V_smem);
        add_values<InPlace>(O, weights, V_smem, unit);
    }

    // The warp's rows have seen all their keys.
    __device__ __forceinline__ void finish_rows() { least_kept = fminf(least_kept, kept.least()); }

    // Whether the rows of a block must be worked on in another way, to all its threads: their planes
    // do not hold something, or do not hold weights where these matter. `words` are three of shared
    // memory that nobody uses any more.
    __device__ __forceinline__ bool leaves_out(u32* words) const {
        if (__syncthreads_or(unheld)) return true;
        if (!__syncthreads_or(small)) return false;
        if (threadIdx.x == 0) {
            words[0] = __float_as_uint(infinity<float>()), words[1] = 0;
            words[2] = __float_as_uint(1.0f);
        }
        __syncthreads();  // the words are there
        const Vector<float, 2> range = own_range();
        atomicMin(words, __float_as_uint(range.at[0]));
        atomicMax(words + 1, __float_as_uint(range.at[1]));
        if (DROPS && small) atomicMin(words + 2, __float_as_uint(least_kept));
        __syncthreads();  // all threads have added theirs
        return small_weights_matter(__uint_as_float(words[2]), __uint_as_float(words[0]),
                                    __uint_as_float(words[1]));
    }

  protected:
    // S = Q K^T but for the units of both. K lies as Layout says.
    template <typename Layout>
    __device__ __forceinline__ void multiply_queries(float (&S)[ROWS][COLUMNS],
                                                     const float* K_smem) const {
        const int thread = threadIdx.x;  // not `lane`, which would hold one more register
        const u32 K_address = shared_address(K_smem + (thread % 8 + thread / 16 % 2 * 8) * PITCH +
                                             thread / 8 % 2 * Layout::NEXT);
#pragma unroll
        for (int depth = 0; depth < DEPTHS; ++depth) {
            u32 a[2][SLABS][4];
#pragma unroll
            for (int slab = 0; slab < SLABS; ++slab) {
                const u32 address = Q_address + (slab * 16 * PITCH + depth * 16) * 4;
                load_matrices(a[0][slab], address);
                load_matrices(a[1][slab], address + InPlace::LOW * 4);
            }
#pragma unroll
            for (int keys = 0; keys < KEYS; keys += TOGETHER) {
                u32 b[2][TOGETHER][4];
#pragma unroll
                for (int i = 0; i < TOGETHER; ++i) {
                    const u32 address =
                        K_address + ((keys + i) * 16 * PITCH + depth * 2 * Layout::NEXT) * 4;
                    load_matrices(b[0][i], address);
                    load_matrices(b[1][i], address + Layout::LOW * 4);
                }
                // Small products come first: they are rounded to a smaller sum.
#pragma unroll
                for (int pair = 0; pair < 3; ++pair) {
#pragma unroll
                    for (int i = 0; i < TOGETHER; ++i)
#pragma unroll
                        for (int slab = 0; slab < SLABS; ++slab)
#pragma unroll
                            for (int half = 0; half < 2; ++half)
                                add_product(S, slab, 2 * (keys + i) + half, a[pair == 0][slab],
                                            b[pair == 1][i][2 * half],
                                            b[pair == 1][i][2 * half + 1], depth == 0 && pair == 0);
                }
            }
        }
    }

    // O += P V times `unit`, with the weights' planes.
    template <typename Layout>
    __device__ __forceinline__ void add_values(float (&O)[ROWS][VALUE_COLUMNS],
                                               const Weights& weights, const float* V_smem,
                                               float unit) const {
        // Matrices of one load: 32 keys, 8 columns.
        const u32 V_address = shared_address(V_smem + threadIdx.x % 32 * VALUE_PITCH);
#pragma unroll
        for (int columns = 0; columns < PADDED_DV / 8; columns += PART) {
            // Of low weights and of low values, one chain of products or two, and of neither.
            float small[CHAINS][ROWS][2 * PART], sums[ROWS][2 * PART];
#pragma unroll
            for (int keys = 0; keys < KEYS; keys += 2) {
                u32 high[PART][4], low[PART][4];
#pragma unroll
                for (int c = 0; c < PART; ++c) {
                    const u32 address =
                        V_address + (keys * 16 * VALUE_PITCH + (columns + c) * Layout::NEXT) * 4;
                    load_matrices_transposed(high[c], address);
                    load_matrices_transposed(low[c], address + Layout::LOW * 4);
                }
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const bool is_first = keys + i == 0;
                    const auto add = [&](float (&C)[ROWS][2 * PART], int plane,
                                         const u32(&b)[PART][4], bool is_first) {
#pragma unroll
                        for (int c = 0; c < PART; ++c)
#pragma unroll
                            for (int slab = 0; slab < SLABS; ++slab)
                                add_product(C, slab, c, weights[plane][slab][keys + i], b[c][2 * i],
                                            b[c][2 * i + 1], is_first);
                    };
                    add(small[0], 1, high, is_first);
                    add(sums, 0, high, is_first);
                    add(small[CHAINS - 1], 0, low, CHAINS > 1 && is_first);
                }
            }
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
#pragma unroll
                for (int j = 0; j < 2 * PART; ++j) {
                    float& sum = O[i][2 * columns + j];
                    float low = small[0][i][j];
                    if (CHAINS > 1) low += small[1][i][j];
                    sum = multiply_add(low, unit / (1 << VALUE_SHIFT), sum);
                    sum = multiply_add(sums[i][j], unit, sum);
                }
        }
    }

    // C[slab's 16 rows][8 columns from 8 * group on] = or += A B.
    template <int COLS>
    static __device__ __forceinline__ void add_product(float (&C)[ROWS][COLS], int slab, int group,
                                                       const u32 (&a)[4], u32 b0, u32 b1,
                                                       bool is_first) {
        const int i = 2 * slab, j = 2 * group;
        if (is_first)
            multiply_first(C[i][j], C[i][j + 1], C[i + 1][j], C[i + 1][j + 1], a, b0, b1);
        else
            multiply(C[i][j], C[i][j + 1], C[i + 1][j], C[i + 1][j + 1], a, b0, b1, __half());
    }

  private:
    static constexpr float SMALLEST_VALUES = 1.0f / (1ull << 40) / (1ull << 40);  // of a row
    static constexpr float SMALLEST_VALUE = 1.0f / (1 << 16);  // as planes hold it
    static_assert(HeldHead::SMALLEST == -80 && HeldHead::LEAST_VALUE == -16, "the same bounds");

    static __device__ __forceinline__ bool is_held(float largest) {
        return largest < 2.0f * power_of_two(HeldHead::LARGEST);
    }
    static __device__ __forceinline__ int plane_exponent_of_values(float largest) {
        return min(LARGEST_EXPONENT - exponent_of(__float_as_uint(largest)),
                   LARGEST_EXPONENT - HeldHead::SMALLEST);
    }
    static __device__ __forceinline__ void store_planes(float* own, const SplitFloats& planes) {
        *reinterpret_cast<Vector<u32, 4>*>(own) = planes.high;
        *reinterpret_cast<Vector<u32, 4>*>(own + InPlace::LOW) = planes.low;
    }

    // split(own, x, largest, is_first, row) for each 8 floats x of a tile, at `own`, of a row whose
    // largest magnitude is known. Some are on their way together.
    template <int TILE_ROWS, int THREADS, int PADDED, typename Split>
    static __device__ __forceinline__ void each_row(float* tile, const Split& split) {
        using Lanes = RowLanes<PADDED / 8>;
        constexpr int STEP = THREADS / 32 * Lanes::ROWS, TRIPS = (TILE_ROWS + STEP - 1) / STEP;
        constexpr int BATCH = TRIPS % 4 == 0 ? 4 : TRIPS % 2 == 0 ? 2 : 1;
        static_assert(TILE_ROWS % Lanes::ROWS == 0, "a warp's lanes have a row each, or none");
        const int lane = threadIdx.x % 32, group = Lanes::group(lane);
        const int first = threadIdx.x / 32 * Lanes::ROWS + Lanes::row(lane);
#pragma unroll 1
        for (int trip = 0; trip < TRIPS; trip += BATCH) {
            float* const own = tile + (first + trip * STEP) * pitch<float>(PADDED) + group * 8;
            float x[BATCH][8] = {}, largest[BATCH];
            const auto has = [&](int i) {
                const bool has_row = TILE_ROWS % STEP == 0 || first + (trip + i) * STEP < TILE_ROWS;
                return has_row && (Lanes::LANES * 8 == PADDED || group < PADDED / 8);
            };
#pragma unroll
            for (int i = 0; i < BATCH; ++i)
                if (has(i)) load_floats(x[i], own + i * STEP * pitch<float>(PADDED));
#pragma unroll
            for (int i = 0; i < BATCH; ++i) largest[i] = Lanes::largest(largest_of(x[i]));
#pragma unroll
            for (int i = 0; i < BATCH; ++i)
                if (has(i))
                    split(own + i * STEP * pitch<float>(PADDED), x[i], largest[i], group == 0,
                          first + (trip + i) * STEP);
        }
    }

    // Remembers the range of values, and whether some are too small beside the others of their row.
    __device__ __forceinline__ void look_at_values(const float (&x)[8], float largest, float factor,
                                                   int first_column, Vector<float, 2>& range) {
        float smallest = largest;
#pragma unroll
        for (int e = 0; e < 8; ++e)
            if (DV == PADDED_DV || first_column + e < DV) smallest = fminf(smallest, fabsf(x[e]));
        range = {fminf(range.at[0], smallest), fmaxf(range.at[1], largest)};
        if (smallest * factor >= SMALLEST_VALUE) return;
#pragma unroll
        for (int e = 0; e < 8; ++e) unheld |= x[e] != 0.0f && fabsf(x[e]) * factor < SMALLEST_VALUE;
    }

    // P as planes of A operands; returns the unit of their products with values.
    __device__ __forceinline__ float split_weights(Weights& weights,
                                                   const float (&P)[ROWS][COLUMNS],
                                                   const float* V_smem) {
        float factors[COLUMNS], unit = 0.0f;
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            factors[j] = V_smem[column(j) * VALUE_PITCH + PADDED_DV];
            unit = larger(unit, factors[j]);
        }
        unit = row_maximum<ROW_THREADS>(unit);
        const int exponent = unit > 0.0f ? exponent_of(__float_as_uint(unit)) : 0;
        const float to_weights = power_of_two(WEIGHT_EXPONENT - exponent);
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j)
            factors[j] = factors[j] > 0.0f ? factors[j] * to_weights : float(1 << WEIGHT_EXPONENT);
#pragma unroll
        for (int i = 0; i < ROWS && has_zeros; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) small |= is_small(P[i][j] * factors[j]);
        u32 normal = SIGNS;
#pragma unroll
        for (int slab = 0; slab < SLABS; ++slab)
#pragma unroll
            for (int keys = 0; keys < KEYS; ++keys)
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    const int i = 2 * slab + r % 2, j = 4 * keys + r / 2 * 2;
                    u32& high = weights[0][slab][keys][r];
                    split_pair(P[i][j] * factors[j], P[i][j + 1] * factors[j + 1], high,
                               weights[1][slab][keys][r]);
                    normal &= high + EXPONENTS;  // carries into the sign of a normal number
                }
        small |= !has_zeros && normal != SIGNS;
        return power_of_two(exponent - WEIGHT_EXPONENT);
    }
    // Two halves' bits.
    static constexpr u32 SIGNS = 0x80008000, EXPONENTS = 0x7c007c00;
    // Subnormal as a half and not 0, of a number that is not negative.
    static __device__ __forceinline__ bool is_small(float x) {
        return __float_as_uint(x) - 1 < (127u - 14 << 23) - 1;
    }
};
