// Seam 3, dropout: which probabilities are kept. The softmax's sum and lse count those that are not.
//
// A pair of query and key has 32 random bits, and is kept if they are at least p.dropout_threshold.
// They depend on the seed and on where the pair is, so that backward and other kernels find the same.
// docs/dropout.md has the generator, and how likely what is.
//
// One call makes the bits of 8 pairs: of a block of 16 queries and 16 keys, those of the queries r and
// r + 8 with the keys c, c + 1, c + 8 and c + 9, for an even c. That is what a lane holds of such a
// block of scores on tensor cores (tiles/mma.cuh). Each of the four words is of one key: query r
// takes it as it is, r + 8 with its halves exchanged.
//
// P is Params, a template's because only those of plans with dropout have its fields.
#pragma once
#include "few_registers.cuh"
#include "ptx/memory.cuh"
#include "seams/sequence.cuh"
#include "uniform.cuh"

using RandomWords = Vector<u32, 4>;

// Philox4x32 (Salmon et al. 2011): 128 random bits for a counter.
template <int ROUNDS>
__device__ __forceinline__ RandomWords philox(RandomWords counter, u64 key) {
    u32 low_key = u32(key), high_key = u32(key >> 32);
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        const u32 first = counter.at[0], second = counter.at[2];
        counter = {__umulhi(0xcd9e8d57u, second) ^ counter.at[1] ^ low_key, 0xcd9e8d57u * second,
                   __umulhi(0xd2511f53u, first) ^ counter.at[3] ^ high_key, 0xd2511f53u * first};
        low_key += 0x9e3779b9u, high_key += 0xbb67ae85u;
    }
    return counter;
}

// A number, or where it is on the device: there it may change between launches of a captured graph.
template <typename P>
__device__ __forceinline__ u64 find_seed(const P& p) {
    return p.seed == nullptr ? p.seed_number : __ldg(p.seed);
}

// The number of a query among those that have calls of their own, and of a key. 16 further on they are
// 8 and 4 more.
__device__ __forceinline__ u32 query_number(int q) { return u32(q) / 16 * 8 + u32(q) % 8; }
__device__ __forceinline__ u32 key_number(int k) { return u32(k) / 16 * 4 + u32(k) % 8 / 2; }

// The words of one call. Where the operands are part of a larger call's, p says where they begin in it.
template <typename P>
__device__ __forceinline__ RandomWords draw(const P& p, u64 seed, const Head& head, u32 of_query,
                                            u32 of_key) {
    return philox<DROPOUT_ROUNDS>(
        {of_query + u32(p.first_query_number), of_key + u32(p.first_key_number),
         u32(head.head) + u32(p.first_head), u32(head.batch)},
        seed);
}

// Which word is that of a key with these remainders by 2 and, divided by 8, by 2.
constexpr __host__ __device__ int word_of(int odd, int upper) { return 2 * odd + upper; }

// Whether the word of a key lets its pair with the first of the two queries stay, or with the other.
template <typename P>
__device__ __forceinline__ bool stays(const P& p, u32 word, bool is_other) {
    return (is_other ? word << 16 | word >> 16 : word) >= p.dropout_threshold;
}

// Whether the probability of (q, k) is kept.
template <typename P>
__device__ __forceinline__ bool keep(const P& p, const Head& head, int q, int k) {
    if constexpr (DROPS) {
        const RandomWords words = draw(p, find_seed(p), head, query_number(q), key_number(k));
        const bool upper = k / 8 % 2 != 0;  // no index, for which words would have to be in memory
        const u32 even_word = upper ? words.at[word_of(0, 1)] : words.at[word_of(0, 0)];
        const u32 odd_word = upper ? words.at[word_of(1, 1)] : words.at[word_of(1, 0)];
        return stays(p, k % 2 != 0 ? odd_word : even_word, q / 8 % 2 != 0);
    }
    return true;
}

// The share of probabilities that is kept. Forward divides by it at the end of a row.
template <typename P>
__device__ __forceinline__ Accumulator kept_share(const P& p) {
    if constexpr (DROPS) return p.kept_share;
    return Accumulator(1);
}

// Backward works with P / share throughout: dV = (P / share kept)^T dO, and
// dS = P / share (kept dP - share delta). So nothing but these two knows about the share: the logarithm
// of which P's exponent is lessened, and delta.
template <typename P>
__device__ __forceinline__ Accumulator log2_sum_of_kept(const P& p, Accumulator log2_sum) {
    if constexpr (DROPS) return log2_sum + p.kept_share_log2;
    return log2_sum;
}
template <typename P>
__device__ __forceinline__ Accumulator delta_of_kept(const P& p, Accumulator delta) {
    if constexpr (DROPS) return p.kept_share * delta;
    return delta;
}

// Calls use(i, j, kept) for each of a lane's pairs in a tile: row i is of the query of row
// row_begin + tile.row(i), column j of key k_begin + tile.column(j).
template <int ROWS, int COLUMNS, typename Tile, typename P, typename Use>
__device__ __forceinline__ void each_kept(const Tile& tile, const P& p, const Head& head,
                                          int row_begin, int k_begin, const Use& use) {
    const u64 seed = uniform(find_seed(p));
    const u32 first_key = key_number(k_begin + tile.column(0));
#pragma unroll
    for (int first = 0; first < ROWS; first += Tile::IS_OF_TENSOR_CORES ? 2 : 1)
#pragma unroll
        for (int j = 0; j < COLUMNS; j += Tile::IS_OF_TENSOR_CORES ? 4 : 1) {
            if constexpr (Tile::IS_OF_TENSOR_CORES) {
                RandomWords words;
#pragma unroll
                for (int i = first; i < first + 2; ++i) {
                    // Kept from tile to tile, its number and product would take registers.
                    const int row = afresh(row_begin + tile.row(i)), q = query_of(row);
                    // Packed heads lie between a lane's queries.
                    if (i == first || PACKED > 1)
                        words = draw(p, seed, row_head(head, row), query_number(q), first_key + j);
                    const bool is_other = PACKED > 1 ? q / 8 % 2 != 0 : i > first;
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        use(i, j + e, stays(p, words.at[word_of(e % 2, e / 2)], is_other));
                }
            } else {
                const int row = row_begin + tile.row(first);
                use(first, j,
                    keep(p, row_head(head, row), query_of(row), k_begin + tile.column(j)));
            }
        }
}

// The same of a tile that stands on its side: row i is of key k_begin + tile.row(i), column j of query
// q_begin + tile.column(j). All lanes of a warp take part.
template <int ROWS, int COLUMNS, typename Tile, typename P, typename Use>
__device__ __forceinline__ void each_kept_turned(const Tile& tile, const P& p, const Head& head,
                                                 int q_begin, int k_begin, const Use& use) {
    const u64 seed = uniform(find_seed(p));
#pragma unroll
    for (int i = 0; i < ROWS; i += Tile::IS_OF_TENSOR_CORES ? 2 : 1) {
        const int k = k_begin + tile.row(i);
        const bool odd = k % 2 != 0;
        const u32 first_query = query_number(q_begin + tile.column(0) + odd);
#pragma unroll
        for (int j = 0; j < COLUMNS; j += Tile::IS_OF_TENSOR_CORES ? 4 : 1) {
            if constexpr (Tile::IS_OF_TENSOR_CORES) {
                // The lane's keys are odd or even, its queries q and q + 1. It makes the bits of one
                // of these, its neighbour those of the other; each gives away what is not of its keys.
                RandomWords words = draw(p, seed, head, first_query + 2 * j, key_number(k));
#pragma unroll
                for (int upper = 0; upper < 2; ++upper) {
                    u32 &even_word = words.at[word_of(0, upper)],
                        &odd_word = words.at[word_of(1, upper)];
                    const u32 got = __shfl_xor_sync(FULL_WARP, odd ? even_word : odd_word, 4);
                    (odd ? even_word : odd_word) = got;  // now they are of q and q + 1
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        use(i + upper, j + e, stays(p, e % 2 ? odd_word : even_word, e / 2 != 0));
                }
            } else {
                use(i, j, keep(p, head, q_begin + tile.column(j), k));
            }
        }
    }
}

// Which of a lane's pairs are kept, a bit for each: drawn ahead of their use, while products are under
// way. All of them without dropout.
template <int ROWS, int COLUMNS>
struct KeptPairs {
    static constexpr int WORDS = DROPS ? round_up(ROWS * COLUMNS, 32) / 32 : 1;
    u32 bits[WORDS];

    // Of a tile whose rows are queries.
    template <typename Tile, typename P>
    __device__ __forceinline__ void draw(const Tile& tile, const P& p, const Head& head,
                                         int row_begin, int k_begin) {
        if constexpr (DROPS) {
            clear();
            each_kept<ROWS, COLUMNS>(tile, p, head, row_begin, k_begin, adding());
        }
    }
    // Of one that stands on its side.
    template <typename Tile, typename P>
    __device__ __forceinline__ void draw_turned(const Tile& tile, const P& p, const Head& head,
                                                int q_begin, int k_begin) {
        if constexpr (DROPS) {
            clear();
            each_kept_turned<ROWS, COLUMNS>(tile, p, head, q_begin, k_begin, adding());
        }
    }
    __device__ __forceinline__ bool has(int i, int j) const {
        const int number = i * COLUMNS + j;
        return !DROPS || (bits[number / 32] >> number % 32 & 1) != 0;
    }

  private:
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) bits[i] = 0;
    }
    __device__ __forceinline__ auto adding() {
        return [this](int i, int j, bool kept) {
            const int number = i * COLUMNS + j;
            bits[number / 32] |= kept ? 1u << number % 32 : 0;
        };
    }
};
