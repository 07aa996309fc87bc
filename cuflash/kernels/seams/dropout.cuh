// Seam 3, dropout: which probabilities are kept. The softmax's sum and lse count those that are not.
//
// A weight has 15 random bits, and mostly is kept if they are at least p.dropout_threshold. They depend on
// the seed and on where the weight is, so that backward and other kernels find the same. docs/dropout.md has
// the generator, and how likely what is.
//
// One call makes the bits of 128 weights: of a block of 32 queries and 128 keys, those of the queries r, r + 8,
// r + 16 and r + 24 with the keys c, c + 1 and these + 8, + 16, ... + 120, for r < 8 and an even c < 8. Of the
// call's four words two are for the first 64 keys, two for the others: x and y. Two neighbours, the keys c and
// c + 1 of a query, share a number that PairWords makes of these: c has the lower half of it, c + 1 the upper
// one. Where rows are queries a lane on tensor cores has such neighbours side by side (tiles/mma.cuh).
//
// Calls are dear where products run: beside wgmma a multiplication of 32 by 32 bits to 64 takes 12 clocks of a
// quadrant, any other instruction of these 3 or 4, and holds the products up (docs/dropout.md). So a call
// serves many weights, and two neighbours are compared at once, as halves.
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

// The number of a query among those that have calls of their own, and of a key. 32 queries further on it
// is 8 more, 128 keys further on 4 more. Where the operands are part of a larger call's, p says where they
// begin in it.
template <typename P>
__device__ __forceinline__ u32 query_number(const P& p, int q) {
    return u32(q) / 32 * 8 + u32(q) % 8 + u32(p.first_query_number);
}
constexpr int KEYS_OF_CALL = 128;
template <typename P>
__device__ __forceinline__ u32 key_number(const P& p, int k) {
    return u32(k) / KEYS_OF_CALL * 4 + u32(k) % 8 / 2 + u32(p.first_key_number);
}

// The number of two neighbours among those that share words: 8 queries further on it is 8 more, 8 keys
// further on 1 more.
constexpr __host__ __device__ u32 pair_number(u32 q, u32 k) { return q / 8 % 4 * 8 + k / 8 % 8; }

// PAIR_STEP^n for n below 32.
constexpr u32 PAIR_STEP = 0xac564b05u;
__device__ __forceinline__ u32 step_power(u32 n) {
    u32 power = 1, square = PAIR_STEP;
#pragma unroll
    for (u32 bit = 1; bit < 32; bit *= 2) {
        if (n & bit) power *= square;
        square *= square;
    }
    return power;
}

// Two words of a call, x and y: the bits of neighbours, by their number n. Each number has a word,
// PAIR_STEP^n x + y. To the word of the neighbours 8 keys away the upper half of their own is added: lower
// halves of words depend on the lower halves of x and y alone, and so four of them on each other.
struct PairWords {
    u32 factor, added;
    __device__ __forceinline__ u32 bits(u32 n) const { return word(n ^ 1) + (word(n) >> 16); }
    // Of pairs whose numbers are so much larger, an even number.
    __device__ __forceinline__ PairWords from(u32 n) const {
        return {factor * step_power(n), added};
    }

  private:
    __device__ __forceinline__ u32 word(u32 n) const { return factor * step_power(n) + added; }
};
__device__ __forceinline__ PairWords words_of(const RandomWords& words, int k) {
    return k / 64 % 2 == 0 ? PairWords{words.at[0], words.at[1]}
                           : PairWords{words.at[2], words.at[3]};
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

// Which of two neighbours stay, by their bits. These are compared as halves without a sign, which are in the
// order of their bits but for NaN; and a threshold is 2 at most, since with p.dropout_keeps_below the
// weights stay whose bits are below it.
struct Neighbours {
    u32 bits, threshold, keeps_below;

    template <typename P>
    __device__ __forceinline__ Neighbours(const P& p, u32 bits)
        : bits(bits), threshold(p.dropout_threshold), keeps_below(p.dropout_keeps_below) {}
    // Ones where they stay: in the lower half for the first, in the upper one for the other.
    __device__ __forceinline__ u32 mask() const {
        u32 result;
        asm("{\n"
            ".reg .b32 size;\n"
            ".reg .pred below;\n"
            "abs.f16x2 size, %1;\n"
            "setp.ne.u32 below, %3, 0;\n"
            "set.geu.xor.u32.f16x2 %0, size, %2, below;\n"
            "}"
            : "=r"(result)
            : "r"(bits), "r"(threshold), "r"(keeps_below));
        return result;
    }
    __device__ __forceinline__ void read(bool& first, bool& second) const {
        u32 a, b;
        asm("{\n"
            ".reg .b32 size;\n"
            ".reg .pred below, a, b;\n"
            "abs.f16x2 size, %2;\n"
            "setp.ne.u32 below, %4, 0;\n"
            "setp.geu.xor.f16x2 a|b, size, %3, below;\n"
            "selp.u32 %0, 1, 0, a;\n"
            "selp.u32 %1, 1, 0, b;\n"
            "}"
            : "=r"(a), "=r"(b)
            : "r"(bits), "r"(threshold), "r"(keeps_below));
        first = a != 0, second = b != 0;
    }
    // Of one of them.
    __device__ __forceinline__ bool has(bool second) const {
        const u32 size = (second ? bits >> 16 : bits) & 0x7fff;
        return (size >= (threshold & 0xffff)) != (keeps_below != 0);
    }
};

// Whether the probability of (q, k) is kept.
template <typename P>
__device__ __forceinline__ bool keep(const P& p, const Head& head, int q, int k) {
    if constexpr (DROPS) {
        const QueryCalls calls(p, find_seed(p), head, query_number(p, q));
        const PairWords words = words_of(calls.draw(key_number(p, k)), k);
        return Neighbours(p, words.bits(pair_number(q, k))).has(k % 2 != 0);
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
// where packed heads lie between them. With HOLDS the words of the last ones stay, since a tile may have
// half of a call's keys.
template <int ROWS, bool HOLDS = false>
struct RowCalls {
    static constexpr int SHARING = PACKED > 1 ? 1 : 2;
    static constexpr int COUNT = DROPS && ROWS >= SHARING ? ROWS / SHARING : 1;
    QueryCalls calls[COUNT];
    RandomWords words[COUNT];
    u32 drawn[COUNT];  // where the words' keys begin: at so many times KEYS_OF_CALL
    u32 first_key;     // the number of the lane's first key, in a tile that begins at key 0

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
                drawn[i / SHARING] = ~0u;
            }
        }
    }
    // The words of row i for the keys from k on. A call is made if these keys `may_begin` one, and it is not
    // held.
    __device__ __forceinline__ PairWords at(int i, int k, bool may_begin) {
        i /= SHARING;
        const u32 block = u32(k) / KEYS_OF_CALL;
        if (may_begin && (!HOLDS || block != drawn[i])) {
            words[i] = calls[i].draw(first_key + block * 4);
            drawn[i] = block;
        }
        return words_of(words[i], k);
    }
};

// Calls use(i, j, neighbours) for each two of a lane's weights in a tile on tensor cores: row i is of the
// query of row row_begin + tile.row(i), columns j and j + 1 are of the keys k_begin + tile.column(j) and the
// one behind. Tiles begin at multiples of their width.
template <int COLUMNS, int ROWS, bool HOLDS, typename Tile, typename P, typename Use>
__device__ __forceinline__ void each_pair(RowCalls<ROWS, HOLDS>& calls, const Tile& tile,
                                          const P& p, int row_begin, int k_begin, const Use& use) {
    // Columns that share words: parts of 64 keys, or of as many as all tiles begin at multiples of.
    constexpr int PART = COLUMNS % 16 == 0 ? 16 : COLUMNS % 8 == 0 ? 8 : COLUMNS % 4 == 0 ? 4 : 2;
    constexpr int KEYS = 4 * COLUMNS;
    constexpr bool MAY_CROSS = KEYS_OF_CALL % KEYS != 0 && KEYS % KEYS_OF_CALL != 0;
#pragma unroll
    for (int first = 0; first < ROWS; first += 2)
#pragma unroll
        for (int begin = 0; begin < COLUMNS; begin += PART) {
            const int k = k_begin + 4 * begin;
            const u32 odd = PART == 2 ? k / 8 % 2 : 0;  // of 16 keys the part is the second half
            PairWords words;
#pragma unroll
            for (int i = first; i < first + 2; ++i) {
                if (i == first || PACKED > 1) {
                    const int q = query_of(row_begin + tile.row(i));
                    // Afresh: powers of it would be held from tile to tile.
                    const u32 number = afresh(
                        pair_number(PACKED > 1 ? q : q & ~15, k & (PART == 2 ? ~15 : -4 * PART)));
                    const bool may_begin = 4 * begin % KEYS_OF_CALL == 0 ||
                                           (MAY_CROSS && (HOLDS || u32(k) % KEYS_OF_CALL == 0));
                    words = calls.at(i, k, may_begin).from(number);
                }
#pragma unroll
                for (int e = 0; e < PART; e += 2) {
                    const u32 number = pair_number(PACKED > 1 ? 0 : 8 * (i - first), e / 2 * 8);
                    use(i, begin + e, Neighbours(p, words.bits(number | odd)));
                }
            }
        }
}

// The same, with calls of its own.
template <int ROWS, int COLUMNS, typename Tile, typename P, typename Use>
__device__ __forceinline__ void each_pair(const Tile& tile, const P& p, const Head& head,
                                          int row_begin, int k_begin, const Use& use) {
    RowCalls<ROWS> calls;
    calls.find(tile, p, head, row_begin);
    each_pair<COLUMNS>(calls, tile, p, row_begin, k_begin, use);
}

// Calls use(i, j, kept) for each of a lane's weights in any tile whose rows are queries. Wide heads of floats
// leave no registers for two answers at a time.
template <int ROWS, int COLUMNS, typename Tile, typename P, typename Use>
__device__ __forceinline__ void each_kept(const Tile& tile, const P& p, const Head& head,
                                          int row_begin, int k_begin, const Use& use) {
    constexpr bool ONE_BY_ONE = sizeof(Element) > 2 && HEAD_DIM > 128;
    if constexpr (Tile::IS_OF_TENSOR_CORES) {
        each_pair<ROWS, COLUMNS>(
            tile, p, head, row_begin, k_begin, [&](int i, int j, const Neighbours& neighbours) {
                bool first = neighbours.has(false), second = neighbours.has(true);
                if (!ONE_BY_ONE) neighbours.read(first, second);
                use(i, j, first), use(i, j + 1, second);
            });
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

// Which of a lane's weights are kept, a bit for each: drawn ahead of their use, while products are under
// way. All of them without dropout.
template <int ROWS, int COLUMNS>
struct KeptPairs {
    static constexpr int WORDS = DROPS ? divide_up(ROWS * COLUMNS, 32) : 1;
    u32 bits[WORDS];

    // Of a tile whose rows are queries.
    template <typename Tile, typename P>
    __device__ __forceinline__ void draw(const Tile& tile, const P& p, const Head& head,
                                         int row_begin, int k_begin) {
        if constexpr (DROPS) {
            clear();
            if constexpr (Tile::IS_OF_TENSOR_CORES) {
                each_pair<ROWS, COLUMNS>(tile, p, head, row_begin, k_begin,
                                         [this](int i, int j, const Neighbours& neighbours) {
                                             add_pair(i, j, neighbours.mask());
                                         });
            } else {
                each_kept<ROWS, COLUMNS>(tile, p, head, row_begin, k_begin,
                                         [this](int i, int j, bool kept) { add(i, j, kept); });
            }
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
        return !DROPS || (bits[number / 32] >> place(number) & 1) != 0;
    }

  private:
    // The bit of a weight in its word: of neighbours in different halves.
    static constexpr __host__ __device__ int place(int number) {
        return number % 32 / 2 + number % 2 * 16;
    }
    __device__ __forceinline__ void add(int i, int j, bool kept) {
        const int number = i * COLUMNS + j;
        bits[number / 32] |= kept ? 1u << place(number) : 0;
    }
    __device__ __forceinline__ void add_pair(int i, int j, u32 mask) {
        const int number = i * COLUMNS + j;
        bits[number / 32] |= mask & 0x10001u << place(number);
    }
    // On tensor cores a lane's keys are all odd or all even, its queries come in pairs q, q + 1. It finds out
    // about q if its keys are even, else about q + 1, for its keys and their neighbours; the lane that has
    // these does so for the other query. Each gives away what is not of its keys. Tiles that are not of
    // whole blocks of 32 queries make words again for each 16, or 8.
    template <typename Tile, typename P>
    __device__ __forceinline__ void draw_on_side(const Tile& tile, const P& p, const Head& head,
                                                 int q_begin, int k_begin) {
        constexpr int OF_CALL = COLUMNS % 8 == 0 ? 8 : COLUMNS % 4 == 0 ? 4 : 2;  // columns
        static_assert(COLUMNS % OF_CALL == 0, "pairs of queries");
        const u64 seed = uniform(find_seed(p));
        const bool odd = tile.row(0) % 2 != 0;
#pragma unroll
        for (int i = 0; i < ROWS; i += 2) {
            const int k = k_begin + tile.row(i);  // of the lower 8 of 16
#pragma unroll
            for (int j = 0; j < COLUMNS; j += OF_CALL) {
                // The first of those that share words.
                const int q = (q_begin + 4 * j) & -(4 * OF_CALL);
                const u32 own = query_number(p, q + tile.column(0) + odd);
                const RandomWords drawn = QueryCalls(p, seed, head, own).draw(key_number(p, k));
                const PairWords words = words_of(drawn, k).from(pair_number(q, k & ~15));
#pragma unroll
                for (int upper = 0; upper < 2; ++upper)
#pragma unroll
                    for (int e = 0; e < OF_CALL; e += 2) {
                        const u32 number = pair_number(e / 2 * 8, 8 * upper);
                        add_pair(i + upper, j + e, Neighbours(p, words.bits(number)).mask());
                    }
            }
        }
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
            const u32 got = __shfl_xor_sync(FULL_WARP, bits[w], 4);
            bits[w] = __byte_perm(bits[w], got, odd ? 0x3276 : 0x5410);
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
};
