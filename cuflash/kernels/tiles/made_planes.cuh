// Products of a warp's slab of rows in float32 on tensor cores, as FloatMmaTile has them, with planes of keys
// and values that were made before (tile_planes.cu). A row in shared memory has high halves, then low ones, and
// a tile's rows share a unit:
//
//     S = Ql Kh + Qh Kl + Qh Kh                          the softmax knows their unit
//     O += unit ((Ph Vl + Pl Vh) 2^-11 + Ph Vh)          the softmax has made P 2^14 times as large
#pragma once
#include "tiles/float_mma.cuh"

// As PlanesInPlace has it.
template <int WIDTH>
struct PlanesApart {
    static constexpr int NEXT = 4, LOW = WIDTH / 2;
};

template <int SLABS, int STEP_K, int D, int DV>
struct MadePlanesTile : FloatMmaTile<SLABS, STEP_K, D, DV> {
    using Base = FloatMmaTile<SLABS, STEP_K, D, DV>;
    using Base::ROWS, Base::COLUMNS, Base::VALUE_COLUMNS, Base::KEYS, Base::WEIGHT_EXPONENT,
        Base::ROW_THREADS, Base::unheld, Base::small, Base::kept;

    float unit = 1.0f;    // what scores lack
    float v_unit = 1.0f;  // and values
    bool sparse;          // whether small weights matter if none are dropped

    using Base::Base;

    // With dropout: how far the exponents of the head's values are apart.
    __device__ __forceinline__ void take_spread(int spread) {
        if (threadIdx.x % 32 == 0) largest_value() = power_of_two(spread);
    }
    // Beside one whose smallest is 1.
    __device__ __forceinline__ float& largest_value() const { return this->held[2 * 32 + 3]; }
    // Those of the next tile's keys and values.
    __device__ __forceinline__ void take_units(float of_keys, float of_values) {
        const Vector<float, 2> of_queries = this->units();
        unit = of_queries.at[0] * of_keys, v_unit = of_values;
        if (!(unit <= of_queries.at[1])) unheld = true;
        if (!SCORE_IS_MODIFIED) unit = larger(unit, least_unit());
    }
    // Of a smaller one the softmax's multiplier would make 0, which hides nothing; exponents are 0 as well with
    // this one.
    __device__ __forceinline__ float& least_unit() const { return this->held[2 * 32 + 2]; }

    // S = Q K^T but for what they lack.
    __device__ __forceinline__ void score(float (&S)[ROWS][COLUMNS], const float* K_smem) {
        this->template multiply_queries<PlanesApart<Base::PADDED_D>>(S, K_smem);
        if constexpr (SCORE_IS_MODIFIED) {
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j) S[i][j] *= unit;
        }
    }

    // O += P V, of weights that are 2^WEIGHT_EXPONENT times as large.
    __device__ __forceinline__ void accumulate(float (&O)[ROWS][VALUE_COLUMNS],
                                               const float (&P)[ROWS][COLUMNS],
                                               const float* V_smem) {
        kept.add(P);
        if constexpr (DROPS) {
            if (has_small_weights<WEIGHT_EXPONENT>(P)) small = true;
        } else {
            if (sparse && has_small_weights<WEIGHT_EXPONENT>(P)) unheld = true;
        }
        typename Base::Weights weights;
#pragma unroll
        for (int slab = 0; slab < SLABS; ++slab)
#pragma unroll
            for (int keys = 0; keys < KEYS; ++keys)
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    const int i = 2 * slab + r % 2, j = 4 * keys + r / 2 * 2;
                    split_pair(P[i][j], P[i][j + 1], weights[0][slab][keys][r],
                               weights[1][slab][keys][r]);
                }
        this->template add_values<PlanesApart<Base::PADDED_DV>>(
            O, weights, V_smem, v_unit * (1.0f / (1 << WEIGHT_EXPONENT)));
    }

    // As Base has it.
    __device__ __forceinline__ void finish_rows() {
        const float least = kept.least(1 << WEIGHT_EXPONENT);
        if (DROPS) unheld |= small && small_weights_matter(least, 1.0f, largest_value());
    }
    __device__ __forceinline__ bool leaves_out(u32*) const { return __syncthreads_or(unheld); }
};
