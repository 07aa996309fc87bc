// FlashAttention-2 forward (Dao 2023, Algorithm 1) on Hopper, with the schedule of FlashAttention-3
// (Shah et al. 2024, Algorithm 2): O = softmax(Q K^T) V and its log-sum-exp.
//
// Grid: with algo fa2 one block per (head, query tile), longest tiles first. With fa3 the same code
// runs in as many blocks as multiprocessors have room for, mostly one each, which take one tile after the
// other. A block has a producer warpgroup and CONSUMERS others, which own 64 queries each. Of short
// sequences MIN_BLOCKS of one consumer work on a multiprocessor: while one begins or ends a tile, another
// multiplies.
//
//     thread 0      copies tiles by TMA      Q  [CONSUMERS][64][D]
//                                            K  [STAGES][BLOCK_K][D]     a ring, as V is
//                                            V  [STAGES][BLOCK_K][DV]
//     warps 1, 3    clear the NaN and infinities of those value tiles that are cut
//     thread 64     works out the items
//     consumers     compute S, softmax and O, which stay in registers
//
// A consumer starts S_i = Q K_i^T and O += P_i-1 V_i-1 together. When S_i is there it computes the
// softmax of S_i, while the sum into O still runs. It passes by the key tiles that none of its own
// queries sees, which a causal mask makes. With PING_PONG consumers take turns at starting
// products. The softmax goes without maxima (tiles/guarded_softmax.cuh).
//
// Each buffer has a barrier "full", which the copy completes, and one "empty", at which every warp
// arrives that has read the buffer. A value tile that is cut has another one: the copy completes
// "landed", and the clearing warps complete "full".
//
// From pages the warp of thread 0 copies K and V, a page's rows by a lane (hopper/paged_tiles.cuh).
// It tells the consumers in shared memory which keys of a tile are on no page. A mask's bits come with
// the keys, if there is room (hopper/staged_bits.cuh).
//
// Floor: for 64 x 128 scores the tensor cores take 4 (D + DV) clocks and the exponentials 512. At
// D = 64 both bound the loop, above it the products do. At the clock that its power allows an H200
// does products at 780 to 800 TFLOP/s. docs/hopper.md has what was measured.
#include "few_registers.cuh"
#include "numeric.cuh"
#include "tiles/guarded_softmax.cuh"
#include "seams/key_tiles.cuh"
#include "seams/score_line.cuh"
#include "seams/output.cuh"
#include "hopper/turns.cuh"
#include "hopper/begin_block.cuh"
#include "uniform.cuh"
#include "tiles/warpgroup.cuh"
#include "hopper/of_halves.cuh"
#include "hopper/block.cuh"
#include "ptx/overlap.cuh"

// O += weight * value for the infinities and NaN among the values that a row sees: the products saw
// some of them as zeros. O is a warp's rows of the result. Rare, hence slow and small.
template <typename Softmax>
__device__ __forceinline__ void add_nonfinite_values(const Params& p, const Item& item,
                                                     const Softmax& softmax, int row_begin,
                                                     int first_row) {
    const Head head = item.head;
    const KeyTiles<BLOCK_K>& keys = item.keys;
    const int lane = threadIdx.x % 32;
    const Accumulator totals[] = {softmax.total(0), softmax.total(1)};
#pragma unroll 1
    for (int i = 0; i < keys.count() * BLOCK_K; ++i) {
        const Visit visit = uniform(keys[i / BLOCK_K]);
        const int k = visit.tile * BLOCK_K + i % BLOCK_K;
        if (k >= head.key_length) continue;
        const Element* const values = find_value(p, head, k);
        if (PAGED && values == nullptr) continue;
        bool finite = true;
#pragma unroll 1
        for (int column = lane; column < HEAD_DIM_V; column += 32)
            finite &= is_finite(widen(values[column]));
        if (__all_sync(FULL_WARP, finite)) continue;
        const TileBits bits(p, head, visit.bits, first_row, row_begin, visit.tile * BLOCK_K);
#pragma unroll 1
        for (int row = 0; row < 16; ++row) {
            const int index = row_begin + row, q = query_of(index);
            const int owner = row % 8 * Tile::ROW_THREADS;
            const Accumulator origin =
                __shfl_sync(FULL_WARP, row < 8 ? softmax.origin[0] : softmax.origin[1], owner);
            const Accumulator total =
                __shfl_sync(FULL_WARP, row < 8 ? totals[0] : totals[1], owner);
            if (!row_exists(p, head, index) || q >= head.query_length) continue;
            if (total == Accumulator(0)) continue;
            if (!VisibleKeys(p, head, q).has(k) || !bits.has(row, i % BLOCK_K)) continue;
            const Accumulator weight = weight_alone(p, head, index, k, origin);
            if (SCORE_MAY_HIDE && is_negative_zero(weight)) continue;
#pragma unroll 1
            for (int column = lane; column < HEAD_DIM_V; column += 32) {
                const Accumulator value = widen(values[column]);
                if (is_finite(value)) continue;
                Result& x = item.output.out_row(p, index)[column];
                x = narrow<Result>(widen(x) + weight * value);
            }
        }
    }
}

// Whether dropout's calls of a lane's rows stay in registers from tile to tile: where sums, scores and
// weights leave enough of them. Packed heads have a call for each row.
constexpr int FREE_REGISTERS = CONSUMER_REGISTERS - 2 * Tile::VALUE_COLUMNS - 3 * Tile::COLUMNS;
constexpr bool HOLDS_CALLS = FREE_REGISTERS >= (PACKED > 1 ? 96 : 48);

// Where changed scores leave few registers: ways that are seldom taken work out anew what they need of a tile's
// first row, which the compiler would hold otherwise.
constexpr bool FEW_REGISTERS = HAS_NEAR_SCORES || CHANGES_EACH;
constexpr bool FEW_FOR_LINES = SCORE_IS_LINE && HEAD_DIM <= 64;

// Whether a mask's bits hide scores next to their exponentials: one waits less for the other so. Where products
// bound the loop it is no faster.
constexpr bool HIDES_LATE = STAGES_BITS && !SCORE_IS_MODIFIED && HEAD_DIM <= 64;

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    hopper_forward(const __grid_constant__ Params p, const __grid_constant__ Tables tables) {
    extern __shared__ __align__(1024) unsigned char bytes[];
    // Of pages and a mask's bits those who copy have no register for the address.
    constexpr bool KNOWS_ADDRESS = PAGED || STAGES_BITS;
    SharedMemory& smem = *static_cast<SharedMemory*>(
        KNOWS_ADDRESS ? __cvta_shared_to_generic(SHARED_BASE) : static_cast<void*>(bytes));
    Barriers& barriers = smem.barriers;
    const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / WARPGROUP, 0);
    if (KNOWS_ADDRESS) check_shared_base(bytes);
    constexpr bool FOLLOWS = VARLEN || CLEAN_PARTS > 0;  // else it is the first kernel
    // Of pages who copies has no register for more; with a line consumers would spill twice as much.
    begin_block<!FOLLOWS && !PAGED && !SCORE_IS_LINE>(
        tables, [&] { barriers.init(); }, [&] { smem.items.init(ITEM_READERS); });
    if (FOLLOWS) await_kernel_before();

    if (warpgroup == 0) {
        if constexpr (MOVES_REGISTERS) release_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == PLANNING_THREAD)
            plan_items(p, tables.order, smem);
        else if (is_copier())
            copy_tiles(p, tables, smem);
        else if (is_clearer())
            clear_tiles(p, smem);
        return;
    }
    if constexpr (MOVES_REGISTERS) claim_registers<CONSUMER_REGISTERS>();
    const int consumer = warpgroup - 1;
    const bool speaks = threadIdx.x % 32 == 0;  // for its warp
    const Tile tile(threadIdx.x % WARPGROUP);
    const u64 Q = Tile::Queries::descriptor(shared_address(smem.Q[consumer]));
    const u64 K = Tile::Keys::descriptor(shared_address(smem.K));
    const u64 V = Tile::Values::descriptor(shared_address(smem.V));
    const Accumulator multiplier = score_multiplier(p);
    const Turns turns(consumer);

    using Rows = RowsOfKeys<Tile, BLOCK_K>;  // of a captured array
    using Softmax = GuardedSoftmax<Accumulator, Tile::ROWS, Tile::ROW_THREADS, Rows::DOUBTS_NAN>;
    Softmax softmax;
    Accumulator S_regs[Tile::ROWS][Tile::COLUMNS], O_regs[Tile::ROWS][Tile::VALUE_COLUMNS];
    Accumulator rescale[Tile::ROWS];
    u32 P_regs[BLOCK_K / 16][4];
    ItemReader<Item> reader(smem.items);
    const Item* item;
    Head head;
    KeyTiles<BLOCK_K> keys{};  // of this consumer's queries
    int row_begin;
    u32 parity = 0;    // of the phase that Q's barriers are in
    Ring<STAGES> now;  // the slot of the tile of S; that of P is the one before
    MissingKeys<BLOCK_K, BOX_ROWS> missing;  // of the tile of S

    using Columns = Tile::FromFirstColumn;
    const Columns columns{tile};
    Rows rows(smem.rows, (threadIdx.x - WARPGROUP) / 32);
    LoadedBits<Columns, Tile::ROWS, Tile::COLUMNS> bits;  // of the mask
    ScoreLine<Tile> line;
    RowCalls<Tile::ROWS, HOLDS_CALLS> calls;  // of dropout
    const auto find_rows_of_warp = [&] { rows.find(tile, p, head, row_begin); };
    const auto bring_rows = [&](const Visit& visit) {
        if (DROPS) find_rows_of_warp();  // dropout leaves no registers to hold them
        rows.bring(tile, p, head, row_begin, visit.tile * BLOCK_K);
    };
    const auto take_rows = [&](const Visit& visit) {
        rows.take(tile, p, head, row_begin, visit.tile * BLOCK_K);
    };
    const auto bits_of = [&](const Visit& visit) {
        return TileBits(p, head, visit.bits, consumer * SLAB, row_begin, visit.tile * BLOCK_K);
    };
    const auto load_bits = [&](const Visit& visit) {
        if (!STAGES_BITS) bits.load(columns, bits_of(visit), tile.column(0));
    };
    const auto load_next_bits = [&](int i) {  // a tile ahead: they are few
        if (i + 1 < keys.count()) load_bits(keys[i + 1]);
    };
    const auto adjust_scores = [&](const Visit& visit, const auto& elements) {
        // With a number that is there no sooner than the scores the compiler cannot compute positions
        // while these are under way, for which there are no registers.
        const int k_begin = (SCORE_IS_MODIFIED ? uniform(visit.tile) : visit.tile) * BLOCK_K;
        rows.await();
        modify_scores(S_regs, tile, p, head, row_begin, k_begin, elements);
        if (keys.is_cut_by_band(visit))
            hide_outside_band(S_regs, columns, p, head,
                              FEW_REGISTERS ? afresh(row_begin) : row_begin,
                              k_begin + tile.column(0));
        if (STAGES_BITS && visit.bits >= 0)
            smem.staged[now.slot].bits.hide(S_regs, -infinity<Accumulator>(), tile,
                                            consumer * SLAB);
        if (MASKED && !STAGES_BITS && visit.bits >= 0)
            bits.hide(S_regs, -infinity<Accumulator>(), columns, bits_of(visit), tile.column(0));
        if (missing.any()) missing.hide(S_regs, columns, 0);
    };
    // The `i`-th visit, whose keys are in the slot at hand.
    const auto visit_at = [&](int i) {
        return STAGES_BITS ? smem.staged[now.slot].visit : keys[i];
    };
    // Turns the scores of the `i`-th visit into probabilities; returns whether O must be rescaled.
    const auto exponentiate = [&](int i, const Visit& visit) {
        if (i + 1 == keys.count() && speaks) barriers.Q_empty[consumer].arrive();
        // The first one is mostly cut: one way for it is less code.
        const bool whole = i > 0 && softmax.settled && !keys.is_cut(visit) && !missing.any();
        const NearScores given(p, S_regs, whole);
        const bool on_line =
            SCORE_IS_LINE && whole &&
            (!LINE_BENDS || line.is_beside_bend(tile, p, head, row_begin, visit.tile * BLOCK_K));
        const bool one_by_one = CHANGES_EACH && whole;
        const bool hides_late = HIDES_LATE && i > 0 && softmax.settled && visit.bits >= 0 &&
                                !keys.is_cut_by_band(visit) && !missing.any();
        // Scores that the softmax takes as they are, or adjusts itself, need none of it.
        if (!given.near && !on_line && !one_by_one && !hides_late) adjust_scores(visit, rows);
        load_next_bits(i);
        const auto score_again = [&] {
            tile.score_alone(
                S_regs,
                [&](int row) {
                    row += FEW_REGISTERS || FEW_FOR_LINES ? afresh(row_begin) : row_begin;
                    return row_exists(p, head, row) ? query_row(p, item->head, row) : nullptr;
                },
                shared_address(smem.K[now.slot]));
            __syncwarp();  // all lanes have read K
            rows.load(tile, p, head, row_begin, visit.tile * BLOCK_K);
            load_bits(visit);
            adjust_scores(visit, rows.exact());
            load_next_bits(i);
        };
        const auto adjust_late = [&](auto& S, const auto& subtracted, auto& sums) {
            if (on_line)
                line.exponentiate(S, subtracted, sums, tile, p, head, row_begin,
                                  visit.tile * BLOCK_K);
            const auto weigh = [&](int i, int j) {
                S[i][j] = exp2_of(multiply_add(S[i][j], multiplier, -subtracted[i]));
                sums[i] += S[i][j];
            };
            if (one_by_one) {
                rows.await();
                modify_scores(S, tile, p, head, row_begin, uniform(visit.tile) * BLOCK_K, rows,
                              false, weigh);
            }
            if (hides_late) {
                smem.staged[now.slot].bits.hide(S, -infinity<Accumulator>(), tile, consumer * SLAB);
#pragma unroll
                for (int i = 0; i < Tile::ROWS; ++i)
                    ::exponentiate(
                        S[i], [=](Accumulator) { return multiplier; }, subtracted[i], sums[i]);
            }
            return on_line || one_by_one || hides_late;
        };
        const auto align = [&](auto& origin, bool anew) {
            line.align(origin, anew, multiplier, tile);
        };
        const bool stale =
            softmax.update(S_regs, multiplier, rescale, score_again, given, adjust_late, align);
        if (i + 1 < keys.count()) bring_rows(keys[i + 1]);
        if constexpr (PAGED || STAGES_BITS) __syncwarp();  // all lanes have read what is hidden
        if (speaks) barriers.K_empty[now.slot].arrive();
        if (!HOLDS_CALLS) calls.find(tile, p, head, row_begin);
        settle(S_regs);
        now.advance();
        return stale;
    };
    // P for the product with V: what dropout leaves of it, which the softmax has summed before.
    const auto pack_kept = [&](const Visit& visit) {
        tile.pack_probabilities(P_regs, S_regs);
        if constexpr (DROPS)
            each_pair<Tile::COLUMNS>(calls, tile, p, row_begin, visit.tile * BLOCK_K,
                                     [&](int i, int j, const Neighbours& neighbours) {
                                         tile.pair_of(P_regs, i, j / 2) &= neighbours.mask();
                                     });
    };
    // Starts S = Q K^T for the tile at hand.
    const auto score = [&] {
        if constexpr (PAGED) missing.groups = smem.missing[now.slot];
        open_products();
        tile.score(S_regs, Q, K + now.slot * (Tile::Keys::BYTES >> 4));
    };
    // Starts O += P V for the tile visited before.
    const auto accumulate = [&] {
        const Ring<STAGES> before = now.previous();
        barriers.V_full[before.slot].wait(before.parity);
        open_products();
        tile.accumulate(O_regs, P_regs, V + before.slot * (Tile::Values::BYTES >> 4));
    };
    // Passes by so many key tiles: hands on the turns and gives back the buffers.
    const auto pass_by = [&](int count) {
#pragma unroll 1
        for (; count > 0; --count) {
            turns.await();
            turns.hand_over();
            barriers.K_full[now.slot].wait(now.parity);
            barriers.V_full[now.slot].wait(now.parity);
            __syncwarp();  // all lanes have found them full
            if (speaks) barriers.K_empty[now.slot].arrive(), barriers.V_empty[now.slot].arrive();
            now.advance();
        }
    };
    const auto finish = [&] {
        const bool nonfinite = item->nonfinite[0] | item->nonfinite[1];
        store_rows(O_regs, softmax, tile, p, item->head, row_begin, item->output);
        if (nonfinite) {
            const int row = threadIdx.x % WARPGROUP / 32 * 16;
            __syncwarp();  // all rows of the warp are written
            add_nonfinite_values(p, *item, softmax, row_begin + row, consumer * SLAB + row);
        }
        __syncwarp();  // all lanes have read the item
        if (speaks) reader.release(*item);
    };

    for (;;) {
        item = &reader.next();
        if (!item->exists) break;
        head = uniform(item->head);
        keys.list = uniform(item->keys.list);
        const Part part = uniform(item->parts[consumer]);
        static_cast<KeySpan&>(keys) = part.keys;
        row_begin = uniform(item->row_begin) + consumer * SLAB;
        softmax = Softmax();
        clear_rows(O_regs);
        line.find(tile, p, head, row_begin);
        if (!DROPS) find_rows_of_warp();
        if (HOLDS_CALLS) calls.find(tile, p, head, row_begin);
        const int passed_by = part.before + part.after;
        if (keys.count() + passed_by > 0) {
            barriers.Q_full[consumer].wait(parity);
            parity ^= 1;
            if (VARLEN) clear_foreign_rows(smem, p, *item, consumer);
        }
        pass_by(part.before);
        if (keys.count() > 0) {
            bring_rows(keys[0]);
            barriers.K_full[now.slot].wait(now.parity);
            turns.await();
            score();
            turns.hand_over();
            const Visit visit = visit_at(0);
            take_rows(visit);
            load_bits(visit);
            wait_products<0>(S_regs);
            exponentiate(0, visit);
            pack_kept(visit);
            if (keys.count() > 1) barriers.K_full[now.slot].wait(now.parity);

#pragma unroll 1
            for (int i = 1; i < keys.count(); ++i) {
                turns.await();
                score();
                accumulate();
                turns.hand_over();
                const Visit visit = visit_at(i);
                take_rows(visit);
                wait_products<1>(S_regs);
                const int freed = now.previous().slot;
                // Asks for the next keys ahead of the softmax, since the answer takes 40 clocks.
                // That also keeps the compiler from waiting for O before the softmax.
                const Ring<STAGES> next = now.next();
                const bool ready = barriers.K_full[next.slot].has_ended(next.parity);
                const bool stale = exponentiate(i, visit);
                if (!ready && i + 1 < keys.count()) barriers.K_full[next.slot].wait(next.parity);
                wait_products<0>(O_regs);
                if (speaks) barriers.V_empty[freed].arrive();
                if (stale) scale_rows(O_regs, rescale);
                pack_kept(visit);
            }
            accumulate();
            wait_products<0>(O_regs);
            if (speaks) barriers.V_empty[now.previous().slot].arrive();
        } else if (passed_by > 0 && speaks) {
            barriers.Q_empty[consumer].arrive();
        }
        pass_by(part.after);
        finish();
    }
    turns.end();
}
