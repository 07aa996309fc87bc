// Seam 3, dropout: which probabilities are kept. The softmax's sum and lse count those that are not.
//
// A pair of query and key has 32 random bits, and is kept if they are at least p.dropout_threshold.
// They depend on the seed and on where the pair is, so that backward and other kernels find the same.
// docs/dropout.md has the generator, and how likely what is.
//
// One call makes the bits of 16 pairs: of a block of 16 queries and 32 keys, those of the queries r and
// r + 8 with the keys c, c + 1, c + 8, c + 9 and these + 16, for an even c < 8. That is what a lane holds of
// such a block of scores on tensor cores (tiles/mma.cuh). Four pairs share each of the four words,
// turned by 0, 8, 16 and 24 bits: so the 8 bits that mostly decide are each one's own.
//
// Calls are dear where products run: beside wgmma a multiplication of 32 by 32 bits takes 12 clocks of a
// quadrant, any other instruction of these 3 or 4, and holds the products up (docs/dropout.md).
//
// P is Params, a template's because only those of plans with dropout have its fields.
#pragma once
#include "few_registers.cuh"
#include "ptx/memory.cuh"
#include "seams/sequence.cuh"
#include "uniform.cuh"

using RandomWords = Vector<u32, 4>;

// mul.wide.u32: a product of 64 bits. Of one whose halves are used far apart, or shifted, the compiler
// would make two.
struct WideProduct {
    u32 low, high;

    __device__ __forceinline__ WideProduct(u32 a, u32 b) {
        u64 product;
        asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
        low = u32(product), high = u32(product >> 32);
    }
};

// Philox4x32 (Salmon et al. 2011): 128 random bits for a counter. These are its rounds from the FIRST on.
constexpr u32 FIRST_FACTOR = 0xd2511f53u, THIRD_FACTOR = 0xcd9e8d57u;
__device__ __forceinline__ u32 low_key(u64 key, int round) {
    return u32(key) + round * 0x9e3779b9u;
}
__device__ __forceinline__ u32 high_key(u64 key, int round) {
    return u32(key >> 32) + round * 0xbb67ae85u;
}
template <int ROUNDS, int FIRST>
__device__ __forceinline__ RandomWords philox(RandomWords counter, u64 key) {
#pragma unroll
    for (int round = FIRST; round < ROUNDS; ++round) {
        const WideProduct first(FIRST_FACTOR, counter.at[0]), third(THIRD_FACTOR, counter.at[2]);
        counter = {third.high ^ counter.at[1] ^ low_key(key, round), third.low,
                   first.high ^ counter.at[3] ^ high_key(key, round), first.low};
    }
    return counter;
}

// A number, or where it is on the device: there it may change between launches of a captured graph.
template <typename P>
__device__ __forceinline__ u64 find_seed(const P& p) {
    return p.seed == nullptr ? p.seed_number : __ldg(p.seed);
}

// The number of a query among those that have calls of their own, and of a key. 16 queries further on it
// is 8 more, 32 keys further on 4 more. Where the operands are part of a larger call's, p says where they
// begin in it.
template <typename P>
__device__ __forceinline__ u32 query_number(const P& p, int q) {
    return u32(q) / 16 * 8 + u32(q) % 8 + u32(p.first_query_number);
}
template <typename P>
__device__ __forceinline__ u32 key_number(const P& p, int k) {
    return u32(k) / 32 * 4 + u32(k) % 8 / 2 + u32(p.first_key_number);
}

// The calls of a query: what their first three rounds have in common. Of six products that leaves two, one
// of which depends on the key alone.
struct QueryCalls {
    static constexpr int ROUNDS = 3;
    u64 seed;
    // What the products of these rounds are xored with, by the round and the word; and the last word.
    u32 first_of_1, third_of_2, first_of_3, third_of_3, fourth_of_3;

    QueryCalls() = default;
    template <typename P>
    __device__ __forceinline__ QueryCalls(const P& p, u64 seed, const Head& head, u32 of_query)
        : seed(seed) {
        const WideProduct of_head(THIRD_FACTOR, u32(head.head) + u32(p.first_head));
        const WideProduct one(FIRST_FACTOR, of_query);
        const WideProduct two(THIRD_FACTOR, one.high ^ u32(head.batch) ^ high_key(seed, 0));
        const WideProduct three(FIRST_FACTOR, two.high ^ of_head.low ^ low_key(seed, 1));
        first_of_1 = of_head.high ^ low_key(seed, 0);
        third_of_2 = one.low ^ high_key(seed, 1);
        first_of_3 = two.low ^ low_key(seed, 2);
        third_of_3 = three.high ^ high_key(seed, 2);
        fourth_of_3 = three.low;
    }

    // The words of the call with this key.
    __device__ __forceinline__ RandomWords draw(u32 of_key) const {
        const WideProduct first(FIRST_FACTOR, first_of_1 ^ of_key);
        const WideProduct third(THIRD_FACTOR, third_of_2 ^ first.high);
        return philox<DROPOUT_ROUNDS, ROUNDS>(
            {first_of_3 ^ third.high, third.low, third_of_3 ^ first.low, fourth_of_3}, seed);
    }
};

// Which word is that of a key with these remainders by 2 and, divided by 8, by 2.
constexpr __host__ __device__ int word_of(int odd, int upper) { return 2 * odd + upper; }

// By how many bits a word is turned for a pair in the upper 8 of 16 queries, and the upper 16 of 32 keys.
constexpr __host__ __device__ int turn_of(bool upper_query, bool upper_key) {
    return 16 * upper_query + 8 * upper_key;
}
__device__ __forceinline__ u32 turned(u32 word, int bits) {
    return word << bits | word >> (-bits & 31);
}

// Whether a pair whose turned word this is stays.
template <typename P>
__device__ __forceinline__ bool stays(const P& p, u32 word) {
    return word >= p.dropout_threshold;
}

// Whether the probability of (q, k) is kept.
template <typename P>
__device__ __forceinline__ bool keep(const P& p, const Head& head, int q, int k) {
    if constexpr (DROPS) {
        const QueryCalls calls(p, find_seed(p), head, query_number(p, q));
        const RandomWords words = calls.draw(key_number(p, k));
        const bool upper = k / 8 % 2 != 0;  // no index, for which words would have to be in memory
        const u32 even_word = upper ? words.at[word_of(0, 1)] : words.at[word_of(0, 0)];
        const u32 odd_word = upper ? words.at[word_of(1, 1)] : words.at[word_of(1, 0)];
        const int turn = turn_of(q / 8 % 2 != 0, k / 16 % 2 != 0);
        return stays(p, turned(k % 2 != 0 ? odd_word : even_word, turn));
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

// The calls of a lane's rows in tiles on tensor cores: of each of them, or of two that are 8 apart, but
// where packed heads lie between them.
template <int ROWS>
struct RowCalls {
    static constexpr int SHARING = PACKED > 1 ? 1 : 2;
    QueryCalls calls[DROPS && ROWS >= SHARING ? ROWS / SHARING : 1];
    u32 first_key;  // the number of the lane's first key, in a tile that begins at key 0

    template <typename Tile, typename P>
    __device__ __forceinline__ void find(const Tile& tile, const P& p, const Head& head,
                                         int row_begin) {
        if constexpr (DROPS) {
            const u64 seed = uniform(find_seed(p));
            first_key = key_number(p, tile.column(0));
#pragma unroll
            for (int i = 0; i < ROWS; i += SHARING) {
                // Kept from tile to tile where nobody holds them, they would take registers.
                const int row = afresh(row_begin + tile.row(i));
                calls[i / SHARING] =
                    QueryCalls(p, seed, row_head(head, row), query_number(p, query_of(row)));
            }
        }
    }
    __device__ __forceinline__ const QueryCalls& operator[](int i) const {
        return calls[i / SHARING];
    }
};

// Calls use(i, j, kept) for each of a lane's pairs in a tile on tensor cores, of which column 0 is in
// the lower 16 of 32 keys or, with UPPER_FIRST, in the upper ones.
template <bool UPPER_FIRST, int ROWS, int COLUMNS, typename Tile, typename P, typename Use>
__device__ __forceinline__ void each_drawn(const RowCalls<ROWS>& calls, const Tile& tile,
                                           const P& p, int row_begin, int k_begin, const Use& use) {
    const u32 first_key = calls.first_key + u32(k_begin) / 32 * 4;
#pragma unroll
    for (int first = 0; first < ROWS; first += 2)
#pragma unroll
        for (int block = 0; 8 * block < COLUMNS + 4 * UPPER_FIRST; ++block) {
            RandomWords words;
#pragma unroll
            for (int i = first; i < first + 2; ++i) {
                if (i == first || PACKED > 1) words = calls[i].draw(first_key + 4 * block);
                const bool upper_query =
                    PACKED > 1 ? query_of(row_begin + tile.row(i)) / 8 % 2 != 0 : i > first;
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    const int j = 8 * block - 4 * UPPER_FIRST + e;
                    const u32 word = words.at[word_of(e % 2, e / 2 % 2)];
                    if (j >= 0 && j < COLUMNS)
                        use(i, j, stays(p, turned(word, turn_of(upper_query, e >= 4))));
                }
            }
        }
}

// The same in a tile of 8 keys, a fourth of those of a call.
template <int ROWS, typename Tile, typename P, typename Use>
__device__ __forceinline__ void each_of_8_keys(const RowCalls<ROWS>& calls, const Tile& tile,
                                               const P& p, int row_begin, int k_begin,
                                               const Use& use) {
    const bool upper = k_begin / 8 % 2 != 0, upper_key = k_begin / 16 % 2 != 0;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const RandomWords words = calls[i].draw(calls.first_key + u32(k_begin) / 32 * 4);
        const int turn = turn_of(query_of(row_begin + tile.row(i)) / 8 % 2 != 0, upper_key);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const u32 word = upper ? words.at[word_of(j, 1)] : words.at[word_of(j, 0)];
            use(i, j, stays(p, turned(word, turn)));
        }
    }
}

// Calls use(i, j, kept) for each of a lane's pairs in a tile on tensor cores: row i is of the query of row
// row_begin + tile.row(i), column j of key k_begin + tile.column(j). Tiles begin at multiples of their
// width.
template <int ROWS, int COLUMNS, typename Tile, typename P, typename Use>
__device__ __forceinline__ void each_kept(const RowCalls<ROWS>& calls, const Tile& tile, const P& p,
                                          const Head&, int row_begin, int k_begin, const Use& use) {
    if constexpr (COLUMNS == 2)
        each_of_8_keys(calls, tile, p, row_begin, k_begin, use);
    else if (COLUMNS % 8 == 0 || k_begin / 16 % 2 == 0)
        each_drawn<false, ROWS, COLUMNS>(calls, tile, p, row_begin, k_begin, use);
    else
        each_drawn<true, ROWS, COLUMNS>(calls, tile, p, row_begin, k_begin, use);
}

// The same in any tile.
template <int ROWS, int COLUMNS, typename Tile, typename P, typename Use>
__device__ __forceinline__ void each_kept(const Tile& tile, const P& p, const Head& head,
                                          int row_begin, int k_begin, const Use& use) {
    if constexpr (Tile::IS_OF_TENSOR_CORES) {
        RowCalls<ROWS> calls;
        calls.find(tile, p, head, row_begin);
        each_kept<ROWS, COLUMNS>(calls, tile, p, head, row_begin, k_begin, use);
    } else {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int row = row_begin + tile.row(i);
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j)
                use(i, j, keep(p, row_head(head, row), query_of(row), k_begin + tile.column(j)));
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
            // Added: the compiler puts sums together at once, and of what is joined by | it keeps each
            // bit in a register until its use.
            each_kept<ROWS, COLUMNS>(tile, p, head, row_begin, k_begin,
                                     [this](int i, int j, bool kept) {
                                         const int number = i * COLUMNS + j;
                                         bits[number / 32] += kept ? 1u << number % 32 : 0;
                                     });
        }
    }
    // Of one that stands on its side: row i is of key k_begin + tile.row(i), column j of query
    // q_begin + tile.column(j). All lanes of a warp take part.
    template <typename Tile, typename P>
    __device__ __forceinline__ void draw_turned(const Tile& tile, const P& p, const Head& head,
                                                int q_begin, int k_begin) {
        if constexpr (DROPS) {
            clear();
            if constexpr (Tile::IS_OF_TENSOR_CORES) {
                draw_on_side(tile, p, head, q_begin, k_begin);
                if (MASKED || SCORE_IS_MODIFIED) put_together();
            } else {
                const auto add = adding();
#pragma unroll
                for (int i = 0; i < ROWS; ++i)
#pragma unroll
                    for (int j = 0; j < COLUMNS; ++j)
                        add(i, j, keep(p, head, q_begin + tile.column(j), k_begin + tile.row(i)));
            }
        }
    }
    __device__ __forceinline__ bool has(int i, int j) const {
        const int number = i * COLUMNS + j;
        return !DROPS || (bits[number / 32] >> number % 32 & 1) != 0;
    }

  private:
    // On tensor cores a lane's keys are all odd or all even, its queries come in pairs q, q + 1. It makes
    // the bits of q if its keys are even, else of q + 1, also those of the neighbours of its keys; the
    // lane that has these makes the bits of the other query. Each gives away what is not of its keys. A tile
    // of 8 queries may be in the lower or in the upper half of 16.
    template <typename Tile, typename P>
    __device__ __forceinline__ void draw_on_side(const Tile& tile, const P& p, const Head& head,
                                                 int q_begin, int k_begin) {
        static_assert(COLUMNS == 2 || COLUMNS % 4 == 0, "one block of 8 queries, or pairs of them");
        constexpr int OF_CALL = COLUMNS == 2 ? 2 : 4;  // columns
        const u64 seed = uniform(find_seed(p));
        const auto add = adding();
        const bool upper_queries = OF_CALL == 2 && q_begin / 8 % 2 != 0;
#pragma unroll
        for (int i = 0; i < ROWS; i += 2) {
            const int k = k_begin + tile.row(i);
            const bool odd = k % 2 != 0;
            const u32 first_query = query_number(p, q_begin + tile.column(0) + odd);
            const int turn = turn_of(upper_queries, k / 16 % 2 != 0);
#pragma unroll
            for (int j = 0; j < COLUMNS; j += OF_CALL) {
                const QueryCalls calls(p, seed, head, first_query + 2 * j);
                const RandomWords words = calls.draw(key_number(p, k));
#pragma unroll
                for (int upper = 0; upper < 2; ++upper) {
                    const u32 of_even = words.at[word_of(0, upper)],
                              of_odd = words.at[word_of(1, upper)];
                    const u32 got = __shfl_xor_sync(FULL_WARP, odd ? of_even : of_odd, 4);
                    const u32 even_query = turned(odd ? got : of_even, turn);
                    const u32 odd_query = turned(odd ? of_odd : got, turn);
#pragma unroll
                    for (int e = 0; e < OF_CALL; ++e)
                        add(i + upper, j + e,
                            stays(p,
                                  turned(e % 2 ? odd_query : even_query, turn_of(e / 2, false))));
                }
            }
        }
    }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) bits[i] = 0;
    }
    // Here: until their use bits that are apart would take a register each. Where there are registers for
    // them, it would take 1 % of the time at D = 64.
    __device__ __forceinline__ void put_together() {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) bits[i] = afresh(bits[i]);
    }
    __device__ __forceinline__ auto adding() {
        return [this](int i, int j, bool kept) {
            const int number = i * COLUMNS + j;
            bits[number / 32] |= kept ? 1u << number % 32 : 0;
        };
    }
};
