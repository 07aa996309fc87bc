// What the planes of a head's operands mean to the kernels of backward, and which heads these leave to
// the kernels behind.
#pragma once
#include "planes/plane_range.cuh"
#include "seams/sequence.cuh"

// By which a head's products are multiplied, and whether planes hold it.
struct GradientFactors {
    float score_factor, dP_factor;  // S and dP; one of them is 0 if planes do not hold the head
    float dQ_factor, dK_factor, dV_factor;  // sums of products with k, q and dO
    int of_q, of_k, of_dO;                  // flags of these: SPARSE, SMALL

    static constexpr int SPARSE = HeldHead::SPARSE;  // some numbers are 0 or far below the largest
    static constexpr int SMALL = 4;                  // some are too small for planes

    __device__ __forceinline__ bool is_held() const {
        return score_factor != 0.0f && dP_factor != 0.0f;
    }

    // Of the head with this index among all, what is known of q and k, and of v and dO; where planes do
    // not hold it, it is marked. P is Params, a template's because not all have planes.
    template <typename P>
    __device__ __forceinline__ void find_scores(const P& p, int index) {
        const auto* heads = static_cast<const HeldHead*>(p.held_heads);
        const HeldHead q = heads[find_row(p, index, p.q_planes_stride)];
        heads += p.q_planes_heads;
        const HeldHead k = heads[find_row(p, index, p.k_planes_stride)];
        const int exponent = q.exponent + k.exponent;
        bool held = is_held(q) && is_held(k) && abs(exponent) <= 120;
        held = held && score_sum(power_of_two(-exponent), p.scale) <= LARGEST_SCORE_SUM;
        score_factor = held ? power_of_two(-exponent) : 0.0f;
        dQ_factor = power_of_two(-k.exponent), dK_factor = power_of_two(-q.exponent);
        of_q = flags(q), of_k = flags(k);
        if (!held) p.again[index] = 1;
    }
    template <typename P>
    __device__ __forceinline__ void find_values(const P& p, int index) {
        const auto* heads = static_cast<const HeldHead*>(p.held_heads);
        heads += p.q_planes_heads + p.k_planes_heads;
        const HeldHead v = heads[find_row(p, index, p.v_planes_stride)];
        heads += p.v_planes_heads;
        const HeldHead dO = heads[find_row(p, index, p.dout_planes_stride)];
        const int exponent = v.exponent + dO.exponent;
        bool held = is_held(v) && is_held(dO) && exponent <= 120 && exponent >= LEAST_OF_PRODUCT;
        // dP is held of a row that has a small number, and large ones, with one that has no zeros.
        held &= !(flags(v) & SPARSE && dO.small > 0) && !(flags(dO) & SPARSE && v.small > 0);
        dP_factor = held ? power_of_two(-exponent) : 0.0f;
        dV_factor = power_of_two(-dO.exponent);
        of_dO = flags(dO);
        if (!held) p.again[index] = 1;
    }

  private:
    // As locate(), in few registers.
    template <typename P>
    static __device__ __forceinline__ int find_row(const P& p, int index,
                                                   const long long* strides) {
        int row = 0;
#pragma unroll 1
        for (int axis = p.axes - 1; axis >= 0; --axis) {
            row += index % p.axis_size[axis] * int(strides[axis]);
            index /= p.axis_size[axis];
        }
        return row;
    }
    static __device__ __forceinline__ bool is_held(const HeldHead& head) {
        return !(head.flags & HeldHead::UNHELD) && head.small <= MOST_SMALL;
    }
    static __device__ __forceinline__ int flags(const HeldHead& head) {
        return head.flags & SPARSE | (head.small > 0 ? SMALL : 0);
    }
    // The largest value times the largest number of dO is then below 2^70, and dS below 2^80: sums of it
    // times numbers of planes are finite. Weights that dropout leaves are up to 2^32 times as large.
    static constexpr int LEAST_OF_PRODUCT = DROPS ? -8 : -40;
};

// Where operands are no planes there is nothing to know.
struct NoFactors {
    static constexpr __device__ bool is_held() { return true; }
    template <typename P>
    __device__ __forceinline__ void find_scores(const P&, int) {}
    template <typename P>
    __device__ __forceinline__ void find_values(const P&, int) {}
};

// Whether a head is left to the kernels behind, and what leaves one.
template <typename P>
__device__ __forceinline__ bool is_marked(const P& p, int index) {
    return p.again[index] != 0;
}
template <typename P>
__device__ __forceinline__ void mark(const P& p, const Head& head) {
    p.again[head.index] = 1;
}
