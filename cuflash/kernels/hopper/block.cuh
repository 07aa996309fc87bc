// The block of hopper_forward.cu but for its consumers: its shared memory, its barriers, and the
// producer's threads. Reads the prelude, and hopper/of_halves.cuh or planes/of_planes.cuh.
#pragma once
#include "hopper/barriers.cuh"
#include "hopper/clean_values.cuh"
#include "few_registers.cuh"
#include "hopper/items.cuh"
#include "hopper/paged_tiles.cuh"
#include "hopper/producer.cuh"
#include "hopper/roles.cuh"
#include "hopper/staged_bits.cuh"
#include "hopper/staged_rows.cuh"
#include "hopper/tables.cuh"
#include "hopper/work_list.cuh"
#include "ptx/named_barrier.cuh"
#include "tiles/warpgroup.cuh"

// A value tile that is cut has "landed" when its copy is there, and is "full" when it is cleared.
// For "full" the copying thread or the clearing warps arrive, for "empty" the warps that read: 4 of
// them read a consumer's queries, all consumers' the keys and values.
struct Barriers {
    Barrier Q_full[CONSUMERS], Q_empty[CONSUMERS];
    Barrier K_full[STAGES], K_empty[STAGES];
    Barrier V_landed[STAGES], V_full[STAGES], V_empty[STAGES];

    __device__ __forceinline__ void init() {
        init_all(Q_full, 1), init_all(Q_empty, 4);
        init_all(K_full, 1), init_all(K_empty, WARPS);
        init_all(V_landed, 1), init_all(V_full, CLEARERS), init_all(V_empty, WARPS);
    }
};

// Where a mask's bits come with the keys, what they are of.
struct StagedVisit {
    Visit visit;
    StagedBits bits;
};

struct SharedMemory {
    unsigned char Q[CONSUMERS][Tile::Queries::BYTES];
    unsigned char K[STAGES][Tile::Keys::BYTES];
    unsigned char V[STAGES][Tile::Values::BYTES];
    Barriers barriers;
    alignas(16) ItemSlots<Item> items;
    StagedVisit staged[STAGES_BITS ? STAGES : 1];  // of the keys in the slot
    u32 missing[PAGED ? STAGES : 1];               // which boxes of a slot's keys are on no page
    TileFactors factors[STAGES];  // of the keys and values in the slot, with the keys
    alignas(16) unsigned char rows[STAGES_ROWS ? WARPS * StagedRows<BLOCK_K>::WARP_BYTES : 16];
};
static_assert(BLOCK_Q == CONSUMERS * SLAB, "a consumer has SLAB queries");
static_assert(CLEAN_PARTS == 0 || CLEAN_PARTS == CLEARERS, "each who clears has marks");
static_assert(sizeof(SharedMemory::Q) == shared_at::K &&
                  sizeof(SharedMemory::K) == shared_at::V - shared_at::K &&
                  sizeof(SharedMemory::V) == shared_at::barriers - shared_at::V,
              "the plan lays out shared memory alike");
static_assert(sizeof(SharedMemory) <= SHARED_BYTES, "barriers, items and rows");

// The planning thread works out the items of this block.
__device__ __forceinline__ void plan_items(const Params& p, const int* order, SharedMemory& smem) {
    ItemWriter<Item> writer(smem.items);
    bool more;
    WorkList list(p, order);
    do {
        Item& item = writer.next();
        item.exists = more = list.more();
        bool idle = false;
        if (more) idle = !item.work_out(p, list.piece()), list.advance();
        if (!idle) writer.hand_over();
    } while (more);
}

// Copies a slab of rows of queries from `row` on into a buffer. Of packed heads the tensor map counts these
// before the queries.
__device__ __forceinline__ void load_queries(unsigned char* buffer, Barrier& full,
                                             const TensorMap* map, int row, const Item& item) {
    MapPosition position = item.q_position;
    if constexpr (PACKED > 1) {
        position = {query_of(row) + query_origin(item.head), position.at[0], position.at[1]};
        row = item.first_head + head_of(row);
    } else {
        row += query_origin(item.head);
    }
    load_panels<Tile::Queries>(buffer, full, map, row, position);
}

constexpr int ROWS_CLEARED = 8;  // named barrier: this consumer has cleared rows, one for each

// With VARLEN the rows around a sequence are other sequences' queries. They become zeros, as rows
// outside an array are: so they have no part in what a warp decides for all its rows. For a consumer.
__device__ __forceinline__ void clear_foreign_rows(SharedMemory& smem, const Params& p,
                                                   const Item& item, int consumer) {
    constexpr int UNITS = Tile::Queries::ROW_BYTES / CHUNK_BYTES;  // of a row of a panel
    const int row_begin = item.row_begin + consumer * SLAB;
    if (row_begin >= 0 && row_begin + SLAB <= query_extent(p, item.head) * PACKED) return;
#pragma unroll 1
    for (int i = threadIdx.x % WARPGROUP; i < Tile::Queries::BYTES / CHUNK_BYTES; i += WARPGROUP)
        if (!row_exists(p, item.head, row_begin + i / UNITS % SLAB))
            *reinterpret_cast<Vector<u32, 4>*>(smem.Q[consumer] + i * CHUNK_BYTES) = {};
    publish_to_async_units();
    meet(ROWS_CLEARED + consumer, WARPGROUP);  // all have cleared theirs
}

// The copying thread fills the buffers as they become empty. With pages its warp copies keys and
// values, and it does the rest.
template <typename Maps>
__device__ __forceinline__ void copy_tiles(const Params& p, const Maps& tables,
                                           SharedMemory& smem) {
    Barriers& barriers = smem.barriers;
    const bool speaks = !PAGED || threadIdx.x == COPYING_THREAD;
    Ring<STAGES> ring;
    u32 Q_parity = 0;  // of the phase that Q's barriers are in
    ItemReader<Item> reader(smem.items);
    SourceTiles tiles;
    for (;;) {
        const Item& item = reader.next();
        if (!item.exists) return;
#pragma unroll 1
        for (int i = 0; i < item.keys.count(); ++i) {
            const Visit visit = item.keys[i];
            tiles.turn_to(p, item, i, reader);
            const int row = visit.tile * BLOCK_K + key_origin(item.head), slot = ring.slot;
            const bool cut = CLEARS && (SCORE_MAY_HIDE || item.keys.is_cut(visit));
            const TileFactors factors(p, item, visit.tile);
            barriers.K_empty[slot].wait(ring.parity ^ 1);
            const u32 missing = tiles.missing(i);
            if (PAGED && speaks) smem.missing[slot] = missing;
            if (HAS_FACTORS) smem.factors[slot] = factors;
            if (STAGES_BITS && speaks) {
                smem.staged[slot].visit = visit;
                smem.staged[slot].bits.load(p, visit.bits, barriers.K_full[slot]);
            }
            tiles.load<Tile::Keys>(i, smem.K[slot], barriers.K_full[slot], &tables.k, row,
                                   item.k_position);
            if constexpr (COPIES_QUERIES)
                if (i == 0 && speaks) {  // later than keys: this waits for the last item's scores
#pragma unroll 1
                    for (int slab = 0; slab < CONSUMERS; ++slab) {
                        const int consumer = PAGED ? afresh(slab) : slab;
                        barriers.Q_empty[consumer].wait(Q_parity ^ 1);
                        load_queries(smem.Q[consumer], barriers.Q_full[consumer], &tables.q,
                                     item.row_begin + consumer * SLAB, item);
                    }
                    Q_parity ^= 1;
                }
            barriers.V_empty[slot].wait(ring.parity ^ 1);
            if (!cut && speaks) barriers.V_full[slot].arrive();  // for the second warp that clears
            tiles.load<Tile::Values>(i, smem.V[slot],
                                     cut ? barriers.V_landed[slot] : barriers.V_full[slot],
                                     &tables.v, row, item.v_position);
            ring.advance();
        }
        if constexpr (PAGED) __syncwarp();  // all lanes have read the item
        if (speaks) reader.release(item);
    }
}

// The clearing warps clear the values of cut tiles.
template <typename P>
__device__ __forceinline__ void clear_tiles(const P& p, SharedMemory& smem) {
    Barriers& barriers = smem.barriers;
    Ring<STAGES> ring;
    u32 parities = 0;  // of the phases that V_landed are in, a bit per slot
    ItemReader<Item> reader(smem.items);
    for (;;) {
        Item& item = reader.next();
        if (!item.exists) return;
#pragma unroll 1
        for (int i = 0; i < item.keys.count(); ++i) {
            const int slot = ring.slot;
            ring.advance();
            if (!CLEARS || !SCORE_MAY_HIDE && !item.keys.is_cut(item.keys[i])) continue;
            u32* const mark = clean_mark(p, item.head, item.keys[i].tile, threadIdx.x / 64);
            const bool clean = mark != nullptr && __all_sync(FULL_WARP, is_clean(mark));
            barriers.V_landed[slot].wait(parities >> slot & 1);
            parities ^= 1 << slot;
            const auto note = [&](int part, bool any) {
                item.nonfinite[part] |= any;
                if (mark != nullptr && !any) mark_clean(mark);
            };
            clear_values<Tile::Values::BYTES>(smem.V[slot], barriers.V_full[slot], note, clean);
        }
        __syncwarp();  // all lanes have read the item
        if (threadIdx.x % 32 == 0) reader.release(item);
    }
}
