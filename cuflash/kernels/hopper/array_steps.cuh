// The producer of hopper_array_gradients.cu: what a block does step by step, and the copies. Reads the prelude.
#pragma once
#include "few_registers.cuh"
#include "hopper/array_block.cuh"
#include "hopper/array_elements.cuh"
#include "hopper/array_stores.cuh"
#include "hopper/producer.cuh"
#include "hopper/tables.cuh"
#include "shared_rows.cuh"

// The warp that works out steps. Blocks take items by tickets, each the next one when it has planned
// its last. Of an item that shows nothing this warp writes the zeros, and nobody else knows. A lane has
// a head.
struct StepWriter {
    const Params& p;
    SharedMemory& smem;
    u32 count = 0;  // of steps

    __device__ __forceinline__ StepWriter(const Params& p, SharedMemory& smem) : p(p), smem(smem) {}
    static __device__ __forceinline__ int lane() { return afresh(threadIdx.x) % 32; }

    // Lane 0 has the next item's ticket, some time later.
    __device__ __forceinline__ int draw_ticket() const {
        return lane() == 0 ? int(atomicAdd(p.tickets + TICKET, 1u)) : 0;
    }
    // The next slot, once all have read what was in it. By one lane.
    __device__ __forceinline__ ArrayStep& slot() const {
        smem.barriers.step_empty[slot_of<STEP_SLOTS>(count)].wait(parity_of<STEP_SLOTS>(count) ^ 1);
        return smem.steps[slot_of<STEP_SLOTS>(count)];
    }
    __device__ __forceinline__ ArrayStep& slot_before() const {
        return smem.steps[slot_of<STEP_SLOTS>(count - 1)];
    }
    __device__ __forceinline__ const GradientHead* located() const {
        return reinterpret_cast<const GradientHead*>(p.located);
    }
    // What all steps have; `elements` as of the step.
    __device__ __forceinline__ ArrayStep& write(u32 flags, u64 elements) {
        ArrayStep& step = slot();
        step.item = smem.item, step.elements = elements;
        step.follow(slot_before(), flags);
        return step;
    }
    // A step without tiles.
    __device__ __forceinline__ void write_end(u32 flags) {
        __syncwarp();  // the step before is there for all lanes
        if (lane() == 0) {
            write(flags, ArrayStep::NO_ELEMENTS);
            smem.barriers.step_full[slot_of<STEP_SLOTS>(count)].arrive();
        }
        ++count;
    }
    // The steps of up to 32 heads, of which this lane's has that index; -1 for none. Returns how many
    // there are. With the last of an item's heads the item may end.
    __device__ __forceinline__ int write_heads(int index, bool are_last) {
        u64 elements = 0;
        int bits[ITEM_TILES];
        u32 shown = 0, cut = 0, nonfinite = 0;
        if (index >= 0) {
            elements = elements_of(p, located()[index].head);
            const QueryTiles<BLOCK_Q> tiles(p, located()[index].head, smem.item.key_tile, BLOCK_K,
                                            0);
#pragma unroll
            for (int t = 0; t < ITEM_TILES; ++t) {
                const int i = tiles.end - 1 - tiles.list.find(smem.item.first_query + t);
                if (i < 0 || i >= tiles.count) continue;
                const Visit visit = tiles[i];
                if (visit.tile != smem.item.first_query + t) continue;
                bits[t] = visit.bits;
                shown |= 1u << t;
                cut |= u32(tiles.is_cut(visit)) << t;
            }
            if (shown != 0)  // else nobody has looked at the keys
                nonfinite = p.nonfinite_keys[i64(index) * p.key_tiles + smem.item.key_tile];
        }
        const u32 showing = __ballot_sync(FULL_WARP, shown != 0);
#pragma unroll 1
        for (u32 left = showing; left != 0; left &= left - 1) {
            __syncwarp();                             // the step before is there for all lanes
            if (left << (31 - lane()) == 1u << 31) {  // this lane is the next one
                const bool closes = are_last && (left & left - 1) == 0;
                ArrayStep& step = write(StepFacts::EXISTS | closes * StepFacts::CLOSES |
                                            nonfinite * StepFacts::IS_CAREFUL |
                                            shown << StepFacts::SHOWN | cut << StepFacts::CUT,
                                        elements);
#pragma unroll
                for (int t = 0; t < ITEM_TILES; ++t)
                    if (shown >> t & 1) step.bits[t] = bits[t];
                Barrier& full = smem.barriers.step_full[slot_of<STEP_SLOTS>(count)];
                full.arrive_and_expect(sizeof(GradientHead));
                load_bytes(&step.located, located() + index, sizeof(GradientHead), full);
            }
            ++count;
        }
        return __popc(showing);
    }
    // This lane's of the heads that share an entry's elements, from the `first` on; -1 for none. It takes
    // divisions.
    __device__ __forceinline__ int find_head(const SharedRows& heads, int first) const {
        const int i = first + lane();
        return i < heads.count ? heads[i] : -1;
    }
    __device__ __forceinline__ void write_all() {
        if (lane() == 0) slot_before().begin(), smem.item = {}, smem.entry_end = 0;
        int head = -1;  // the first of this lane's
        int drawn = draw_ticket();
#pragma unroll 1
        for (;;) {
            const int ticket = __shfl_sync(FULL_WARP, drawn, 0);
            const int across = divide_up(p.query_tiles, ITEM_TILES),
                      of_entry = p.key_tiles * across;
            __syncwarp();  // all lanes have done with the item before
            if (ticket >= smem.entry_end) {
                const int entry = ticket / of_entry;
                if (entry >= ARRAY_ENTRIES) break;
                const SharedRows heads(p, array_axis_strides(p), entry);
                head = find_head(heads, 0);
                __syncwarp();  // all lanes have read where the entry ends
                if (lane() == 0) {
                    smem.item.offset = heads.offset, smem.shared_heads = heads.count;
                    smem.entry_end = (entry + 1) * of_entry;
                }
                __syncwarp();  // the entry is there
            }
            drawn = draw_ticket();  // of the next item, while this one's steps are worked out
            const int tile = ticket - (smem.entry_end - of_entry);
            if (lane() == 0) {
                smem.item.key_tile = tile / across;
                smem.item.first_query = tile % across * ITEM_TILES;
            }
            __syncwarp();  // the item is there
            bool are_last = smem.shared_heads <= 32;
            int steps = write_heads(head, are_last), of_last = steps;
#pragma unroll 1
            for (int first = 32; !are_last; first += 32) {
                are_last = first + 32 >= smem.shared_heads;
                of_last = write_heads(
                    find_head({p, array_axis_strides(p), smem.entry_end / of_entry - 1}, first),
                    are_last);
                steps += of_last;
            }
            if (steps == 0)
                store_zeros(p, array_gradient(p) + smem.item.offset,
                            smem.item.first_query * BLOCK_Q, smem.item.key_tile * BLOCK_K, lane());
            else if (of_last == 0)
                write_end(StepFacts::EXISTS | StepFacts::CLOSES);
        }
        write_end(0);
    }
};

// The copying thread fills the buffers as they become empty.
__device__ __forceinline__ void copy_steps(const Params& p, const GradientTables& tables,
                                           SharedMemory& smem) {
    Barriers& barriers = smem.barriers;
    for (ArrayStepReader reader(smem);; reader.advance()) {
        const ArrayStep& step = reader.next();
        const StepFacts facts = step.facts;
        if (!facts.has(StepFacts::EXISTS)) return;
        const u32 shown = facts.shown(), heads = facts.heads;
        const int k_begin = step.item.key_tile * BLOCK_K;
        bool is_first = true;
#pragma unroll 1
        for (int t = 0; shown >> t != 0; ++t) {
            if (!(shown >> t & 1)) continue;
            const u32 tiles = facts.tile_number(t);
            const int q_tile = step.item.first_query + t, slot = slot_of<STAGES>(tiles);
            const u32 parity = parity_of<STAGES>(tiles);
            if (is_first) {
                const int slot = slot_of<K_STAGES>(heads);
                barriers.K_empty[slot].wait(parity_of<K_STAGES>(heads) ^ 1);
                load_panels<KeyRows>(smem.K[slot], barriers.K_full[slot], &tables.k, k_begin,
                                     step.located.k_position);
            }
            barriers.Q_empty[slot].wait(parity ^ 1);
            Barrier& Q_full = barriers.Q_full[slot];
            Q_full.arrive_and_expect(QueryRows::BYTES + ROW_STATS * sizeof(float));
            load_expected_panels<QueryRows>(smem.Q[slot], Q_full, &tables.q, q_tile * BLOCK_Q,
                                            step.located.q_position);
            const i64 stats = query_tiles_at<BLOCK_Q>(p, step.located.head) + q_tile;
            load_bytes(smem.row_stats[slot_of<STATS_SLOTS>(tiles)], p.row_stats + stats * ROW_STATS,
                       ROW_STATS * sizeof(float), Q_full);
            barriers.dO_empty[slot].wait(parity ^ 1);
            load_panels<GradientRows>(smem.dO[slot], barriers.dO_full[slot], &tables.dout,
                                      q_tile * BLOCK_Q, step.located.dout_position);
            if (is_first) {  // last, since the values before are read longest
                const int slot = slot_of<V_STAGES>(heads);
                barriers.V_empty[slot].wait(parity_of<V_STAGES>(heads) ^ 1);
                load_panels<ValueRows>(smem.V[slot], barriers.V_full[slot], &tables.v, k_begin,
                                       step.located.v_position);
            }
            is_first = false;
        }
        reader.release();
    }
}

// A side warp brings elements of a captured array, and writes what a consumer has staged of the gradient.
// The next item's elements come first, since the consumers wait for them.
__device__ __forceinline__ void serve_steps(const Params& p, SharedMemory& smem, int part) {
    ArrayItem staged = {};
    bool is_staged = false;
    const auto write_last = [&] {
        if (is_staged)
            write_staged(p, array_gradient(p) + staged.offset, staged.first_query * BLOCK_Q,
                         staged.key_tile * BLOCK_K + part * SLAB, smem, part);
        is_staged = false;
    };
    if (LEAVES_STAGED) pass(STAGING_FREE + part, STAGING_THREADS);
    for (ArrayStepReader reader(smem);; reader.advance()) {
        const ArrayStep& step = reader.next();
        const StepFacts facts = step.facts;
        if (!facts.has(StepFacts::EXISTS)) break;
        if constexpr (READS_ROWS) {
            if (facts.has(StepFacts::IS_FRESH)) {
#pragma unroll 1
                for (int t = 0; t < ITEM_TILES; ++t) {
                    smem.barriers.elements_empty[t].wait(facts.brought % 2 ^ 1);
                    load_elements(p, smem, step.located.head, t,
                                  (step.item.first_query + t) * BLOCK_Q,
                                  step.item.key_tile * BLOCK_K, part);
                }
            }
        }
        if constexpr (LEAVES_STAGED) {
            write_last();
            is_staged = facts.has(StepFacts::CLOSES), staged = step.item;
        }
        __syncwarp();  // all lanes have read the step
        if (threadIdx.x % 32 == 0) reader.release();
    }
    if constexpr (LEAVES_STAGED) write_last();
}
