// Seam 3, the hooks: where a feature enters that is more than a change of the score. Each does
// nothing here and compiles away. docs/adding-a-score.md says how a feature gives it a body.
//
// A hook may be called for rows and keys that do not exist, unless it says otherwise: it reads no
// array there. It knows its head by head.index: head.batch and head.head are valid only where the
// score is modified or dropout is on. P is Params: a template's body may read fields that only some plans have.
#pragma once
#include "seams/dropout.cuh"
#include "seams/sequence.cuh"

// Whether store_dscore does something. Where it does not, backward does not compute the positions that
// it would tell it: code that is removed later moves registers all the same.
constexpr bool STORES_DSCORE = false;

// Attention sinks: the score of one more key, whose value is 0, for every row of the head;
// -infinity for none. Called where a row ends. Backward finds it in lse.
template <typename P>
__device__ __forceinline__ Accumulator sink_score(const P& p, const Head& head) {
    if constexpr (HAS_SINKS) return read_sink(p, batch_of(p, head), head.index % p.heads);
    return -infinity<Accumulator>();
}

// Bias gradients: takes the derivative of the loss by the modified score of (q, k), which both
// exist. Called in backward, once for each pair of a tile that is visited: 0 for those that the band
// or the mask hides. Pairs of other tiles are not told of: their derivatives are 0.
template <typename P>
__device__ __forceinline__ void store_dscore(const P&, const Head&, int q, int k,
                                             Accumulator dscore) {}
