// What the planes of a head's operands mean to the kernels of backward, and which heads these leave to
// the kernels behind.
#pragma once
#include "planes/plane_range.cuh"
#include "seams/sequence.cuh"

// By which a head's products are multiplied, and whether planes hold it.
struct GradientFactors {
    float score_factor, dP_factor;          // S and dP
    float dQ_factor, dK_factor, dV_factor;  // sums of products with k, q and dO
    int held;
    int sparse_keys, sparse_queries;  // some numbers of k, of q or dO are 0 or small

    __device__ __forceinline__ bool is_held() const { return held; }

    // Of the head with this index among all; where planes do not hold it, it is marked. P is Params, a
    // template's because not all have planes.
    template <typename P>
    __device__ __forceinline__ void find(const P& p, int index) {
        const auto* heads = static_cast<const HeldHead*>(p.held_heads);
        const HeldHead q = heads[locate(p, index, p.q_planes_stride)];
        heads += p.q_planes_heads;
        const HeldHead k = heads[locate(p, index, p.k_planes_stride)];
        heads += p.k_planes_heads;
        const HeldHead v = heads[locate(p, index, p.v_planes_stride)];
        heads += p.v_planes_heads;
        const HeldHead dout = heads[locate(p, index, p.dout_planes_stride)];
        const int of_scores = q.exponent + k.exponent, of_dP = v.exponent + dout.exponent;
        held = !((q.flags | k.flags | v.flags | dout.flags) & HeldHead::UNHELD) &&
               abs(of_scores) <= 120 && of_dP <= 120 && of_dP >= LEAST_OF_PRODUCT;
        score_factor = held ? power_of_two(-of_scores) : 0.0f;
        dP_factor = held ? power_of_two(-of_dP) : 0.0f;
        dQ_factor = held ? power_of_two(-k.exponent) : 0.0f;
        dK_factor = held ? power_of_two(-q.exponent) : 0.0f;
        dV_factor = held ? power_of_two(-dout.exponent) : 0.0f;
        sparse_keys = k.flags & HeldHead::SPARSE;
        sparse_queries = (q.flags | dout.flags) & HeldHead::SPARSE;
        held &= score_sum(score_factor, p.scale) <= LARGEST_SCORE_SUM;
        p.again[index] = !held;
    }

  private:
    // The largest value times the largest number of dO is then below 2^70, and dS below 2^80: sums of it
    // times numbers of planes are finite.
    static constexpr int LEAST_OF_PRODUCT = -40;
};

// Where operands are no planes there is nothing to know.
struct NoFactors {
    static constexpr __device__ bool is_held() { return true; }
    template <typename P>
    __device__ __forceinline__ void find(const P&, int) {}
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
