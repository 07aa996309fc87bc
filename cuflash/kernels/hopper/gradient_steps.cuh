// Steps of a kernel that holds a tile of keys and lets tiles of queries pass by: how they are
// numbered, how the producer's threads bring their tiles, and what is done to tiles that hold
// infinities or NaN. Reads the prelude.
#pragma once
#include "hopper/gradient_items.cuh"
#include "hopper/gradient_panels.cuh"
#include "hopper/producer.cuh"
#include "hopper/tables.cuh"
#include "hopper/tile_checks.cuh"
#include "ptx/overlap.cuh"
#include "row_stats.cuh"

// A step's slot, and the parity of its phase, follow from its number.
struct StepCount {
    u32 count = 0;
    __device__ __forceinline__ int slot() const { return slot_of<STAGES>(count); }
    __device__ __forceinline__ u32 parity() const { return parity_of<STAGES>(count); }
    __device__ __forceinline__ void advance() { ++count; }
};

// What the copying thread tells of a step beside its tiles.
struct StepFacts {
    Visit visit;
    int is_cut;
};

// Brings what backward_rows has worked out of the queries of a step.
template <typename SharedMemory>
__device__ __forceinline__ void load_row_stats(const Params& p, SharedMemory& smem,
                                               const Head& head, int query_tile, int slot) {
    const i64 tile = query_tiles_at<BLOCK_Q>(p, head) + query_tile;
    load_bytes(smem.row_stats[slot], p.row_stats + tile * ROW_STATS, ROW_STATS * sizeof(float),
               smem.barriers.Q_full[slot]);
}

// The copying thread works out the items and fills the buffers as they become empty.
template <typename SharedMemory>
__device__ __forceinline__ void copy_steps(const Params& p, const GradientTables& tables,
                                           SharedMemory& smem) {
    auto& barriers = smem.barriers;
    StepCount step;
    u32 K_parity = 0;
    KeyItemWriter items(smem.items, barriers.head_full);
    for (;;) {
        items.take_ticket(p.tickets + 1);
        const KeyItem& item = items.next(p, p.key_tiles);
        if (!item.exists) return;
        const int count = item.queries.count;
        const Head& head = item.located.head;
        const auto load_keys = [&] {
            barriers.K_empty.wait(K_parity ^ 1);
            K_parity ^= 1;
            barriers.K_full.arrive_and_expect(KeyRows::BYTES + ValueRows::BYTES);
            const int row = key_origin(head) + item.key_tile * BLOCK_K;
            load_expected_panels<KeyRows>(smem.K, barriers.K_full, &tables.k, row,
                                          item.located.k_position);
            load_expected_panels<ValueRows>(smem.V, barriers.K_full, &tables.v, row,
                                            item.located.v_position);
        };
        if (item.opens && count == 0) load_keys();
#pragma unroll 1
        for (int i = 0; i < count; ++i, step.advance()) {
            const Visit visit = item.queries[i];
            const int row = query_origin(head) + visit.tile * BLOCK_Q, slot = step.slot();
            barriers.Q_empty[slot].wait(step.parity() ^ 1);
            smem.facts[slot] = {visit, item.queries.is_cut(visit)};
            Barrier& Q_full = barriers.Q_full[slot];
            if (STAGES_BITS) smem.bits[slot].load(p, visit.bits, Q_full);
            Q_full.arrive_and_expect(QueryRows::BYTES + ROW_STATS * sizeof(float));
            load_expected_panels<QueryRows>(smem.Q[slot], Q_full, &tables.q, row,
                                            item.located.q_position);
            if (!SIDE_BY_SIDE) load_row_stats(p, smem, head, visit.tile, slot);
            if (item.opens && i == 0)
                load_keys();  // later than queries: it waits for the last item
            barriers.dO_empty[slot].wait(step.parity() ^ 1);
            load_panels<GradientRows>(smem.dO[slot], barriers.dO_full[slot], &tables.dout, row,
                                      item.located.dout_position);
        }
    }
}

// With SIDE_BY_SIDE another thread does so with what backward_rows works out: it waits for that, and
// Q, K, V and dO do not.
template <typename SharedMemory>
__device__ __forceinline__ void copy_row_stats(const Params& p, SharedMemory& smem) {
    await_kernel_before();
    ItemReader<KeyItem> reader(smem.items);
    StepCount step;
    for (;;) {
        const KeyItem& item = reader.next();
        if (!item.exists) return;
#pragma unroll 1
        for (int i = 0; i < item.queries.count; ++i, step.advance()) {
            smem.barriers.Q_empty[step.slot()].wait(step.parity() ^ 1);
            load_row_stats(p, smem, item.located.head, item.queries[i].tile, step.slot());
        }
        reader.release(item);
    }
}

// The checking warp looks for infinities and NaN among the keys of a tile. It tells the consumers,
// once for a tile that heads share, and leaves word for a later kernel.
template <typename SharedMemory>
__device__ __forceinline__ void check_keys(const Params& p, SharedMemory& smem) {
    auto& barriers = smem.barriers;
    const int lane = threadIdx.x % 32;
    u32 parity = 0;
    bool found = false;
    ItemReader<KeyItem> reader(smem.items);
    for (;;) {
        const KeyItem& item = reader.next();
        if (!item.exists) return;
        if (item.opens) {
            barriers.K_full.wait(parity);
            parity ^= 1;
            found = has_nonfinite_units<KeyRows::BYTES>(smem.K, lane);
        }
        __syncwarp();  // all lanes have read the keys and the item
        if (lane == 0) {
            const i64 first_tile = key_tiles_at<BLOCK_K>(p, item.located.head);
            if (!SIDE_BY_SIDE) p.nonfinite_keys[first_tile + item.key_tile] = found;
            if (item.opens) {
                smem.nonfinite_keys = found;
                barriers.K_checked.arrive();
            }
            reader.release(item);
        }
    }
}
