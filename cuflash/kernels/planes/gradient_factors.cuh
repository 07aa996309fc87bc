// What the planes of a head's operands mean to the kernels of backward, and which heads these leave to
// the kernels behind.
#pragma once
#include "planes/held_heads.cuh"
#include "planes/marks.cuh"
#include "seams/sequence.cuh"

// Whether a head is left to the kernels behind, and what leaves one: of packed sequences in one region.
template <typename P>
__device__ __forceinline__ bool is_marked(const P& p, int index, int region) {
    return p.again[region_head(p, region, index)] != 0;
}
// Several threads may do so at the same time.
template <typename P>
__device__ __forceinline__ void mark(const P& p, int index, int region) {
    atomicOr(&p.again[region_head(p, region, index)], 1u);
}

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

    // Of the head with this index among all, in a region, what is known of q and k, and of v and dO; where
    // planes do not hold it, it is marked. P is Params, a template's because not all have planes.
    template <typename P>
    __device__ __forceinline__ void find_scores(const P& p, int index, int region) {
        const int q_heads = p.q_planes_heads, k_heads = p.k_planes_heads;
        const HeldHead q = find(p, index, region, 0, q_heads, p.q_planes_stride);
        const HeldHead k = find(p, index, region, q_heads, k_heads, p.k_planes_stride);
        const int exponent = q.exponent + k.exponent;
        bool held = is_held(q) && is_held(k) && abs(exponent) <= 120;
        held = held && score_sum(power_of_two(-exponent), p.scale) <= LARGEST_SCORE_SUM;
        score_factor = held ? power_of_two(-exponent) : 0.0f;
        dQ_factor = power_of_two(-k.exponent), dK_factor = power_of_two(-q.exponent);
        of_q = flags(q), of_k = flags(k);
        if (!held) mark(p, index, region);
    }
    template <typename P>
    __device__ __forceinline__ void find_values(const P& p, int index, int region) {
        const int before = p.q_planes_heads + p.k_planes_heads, v_heads = p.v_planes_heads;
        const HeldHead v = find(p, index, region, before, v_heads, p.v_planes_stride);
        const HeldHead dO =
            find(p, index, region, before + v_heads, p.dout_planes_heads, p.dout_planes_stride);
        const int exponent = v.exponent + dO.exponent;
        bool held = is_held(v) && is_held(dO) && exponent <= 120 && exponent >= LEAST_OF_PRODUCT;
        // dP is held of a row that has a small number, and large ones, with one that has no zeros.
        held &= !(flags(v) & SPARSE && dO.small > 0) && !(flags(dO) & SPARSE && v.small > 0);
        dP_factor = held ? power_of_two(-exponent) : 0.0f;
        dV_factor = power_of_two(-dO.exponent);
        of_dO = flags(dO);
        if (!held) mark(p, index, region);
    }

  private:
    template <typename P>
    static __device__ __forceinline__ HeldHead find(const P& p, int index, int region, int before,
                                                    int heads, const long long* strides) {
        const i64 at = held_at(p, region, before, heads, find_row(p, index, strides));
        return static_cast<const HeldHead*>(p.held_heads)[at];
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
    __device__ __forceinline__ void find_scores(const P&, int, int) {}
    template <typename P>
    __device__ __forceinline__ void find_values(const P&, int, int) {}
};
