// FlashAttention-2 forward (Dao 2023, Algorithm 1) of float32 on Hopper's tensor cores: each number
// is two halves (planes/plane_range.cuh), and a product of tiles three products of planes.
//
// Grid, producer and buffers are those of hopper_forward.cu: one block per (head, query tile) with
// algo fa2, one per multiprocessor with fa3, CONSUMERS warpgroups of 64 queries each. A tile in
// shared memory is two, of either plane. Those of keys and values are copied; a consumer makes those
// of its queries (planes/query_planes.cuh), and then does one step after the other:
//
//     S = Ql Kh^T + Qh Kl^T + Qh Kh^T        as one group of products; the softmax knows their units
//     P = softmax's weights of S, in two planes, in registers
//     O += (Ph Vl + Pl Vh) 2^-11 + Ph Vh     each from 0, some columns at a time, added in float32
//
// Meanwhile the tensor cores work for another consumer. Heads whose keys or values planes do not hold
// are passed by. Marked are queries that they do not hold, and rows with small weights where values
// are sparse. fa2_forward.cu, which is launched behind, works on all these. Where a line along the keys
// is added to scores, as ALiBi's, small weights take turns of their own (planes/small_weights.cuh).
//
// docs/exact.md derives what planes hold, and the floor.
#include "numeric.cuh"
#include "tiles/softmax.cuh"
#include "seams/key_tiles.cuh"
#include "seams/score.cuh"
#include "seams/output.cuh"
#include "uniform.cuh"
#include "planes/of_planes.cuh"
#include "planes/query_planes.cuh"
#include "planes/small_weights.cuh"
#include "hopper/begin_block.cuh"
#include "hopper/block.cuh"
#include "ptx/overlap.cuh"

// A weight is at most 2^LAZY of its row's origin, and half precision ends at 2^16.
constexpr int LAZY = 1;
static_assert(LAZY + Tile::WEIGHT_EXPONENT < 16, "planes of weights are finite");

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_planes_forward(const __grid_constant__ Params p,
                          const __grid_constant__ KeyTables tables) {
    extern __shared__ __align__(1024) unsigned char bytes[];
    SharedMemory& smem = *reinterpret_cast<SharedMemory*>(bytes);
    Barriers& barriers = smem.barriers;
    const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / WARPGROUP, 0);
    begin_block(tables, [&] { smem.barriers.init(), smem.items.init(ITEM_READERS); });
    admit_kernel_behind();
    await_kernel_before();

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
    // Of less the multiplier would make 0, which hides nothing; exponents are 0 as well with this one.
    const float least_unit = power_of_two(-125) / multiplier;

    OnlineSoftmax<Accumulator, Tile::ROWS, Tile::ROW_THREADS, LAZY> softmax;
    Accumulator O_regs[Tile::ROWS][Tile::VALUE_COLUMNS];
    ItemReader<Item> reader(smem.items);
    const Item* item;
    KeyTiles<BLOCK_K> keys{};  // of this consumer's queries
    // What else it has to know of its item: held in registers, or read again where these are few.
    Head held_head;
    int held_row;
    const auto head = [&]() -> const Head& { return REREADS_ITEM ? item->head : held_head; };
    const auto row_begin = [&] {
        return REREADS_ITEM ? item->row_begin + consumer * SLAB : held_row;
    };
    Ring<STAGES> now;
    Vector<float, 2> q_units{};
    bool looks = false, small = false;  // for small weights, which may matter; whether there is one
    KeptWeights<Tile::ROWS, Tile::ROW_THREADS> kept;
    const auto any = [&](bool says_so) {
        return meet_and_count(CONSUMER_BARRIER + consumer, WARPGROUP, says_so) > 0;
    };

    using Columns = Tile::FromFirstColumn;
    const Columns columns{tile};
    LoadedRows<Tile, Tile::ROWS, Tile::COLUMNS> rows;     // of captured arrays
    LoadedBits<Columns, Tile::ROWS, Tile::COLUMNS> bits;  // of the mask
    // Passes by so many key tiles: gives back the buffers.
    const auto pass_by = [&](int count) {
#pragma unroll 1
        for (; count > 0; --count) {
            barriers.K_full[now.slot].wait(now.parity);
            barriers.V_full[now.slot].wait(now.parity);
            __syncwarp();  // all lanes have found them full
            if (speaks) barriers.K_empty[now.slot].arrive(), barriers.V_empty[now.slot].arrive();
            now.advance();
        }
    };
    const auto visit_keys = [&](int i) {
        Visit visit;
        if (!STAGES_BITS) visit = keys[i];
        Accumulator S_regs[Tile::ROWS][Tile::COLUMNS], rescale[Tile::ROWS];
        barriers.K_full[now.slot].wait(now.parity);
        if (STAGES_BITS) visit = smem.staged[now.slot].visit;
        open_products();
        const TileUnits units = smem.factors[now.slot];
        tile.score(S_regs, Q, K + now.slot * (Tile::Keys::BYTES >> 4));
        rows.load(tile, p, head(), row_begin(), visit.tile * BLOCK_K);
        const TileBits tile_bits = find_bits(smem.staged[now.slot].bits, p, head(), visit.bits,
                                             consumer * SLAB, row_begin(), visit.tile * BLOCK_K);
        bits.load(columns, tile_bits, tile.column(0));
        wait_products<0>(S_regs);
        __syncwarp();  // all lanes have read the units and the mask's bits
        if (speaks) barriers.K_empty[now.slot].arrive();
        Accumulator score_units[] = {q_units.at[0] * units.k, q_units.at[1] * units.k};
        if (SCORE_IS_MODIFIED) scale_rows(S_regs, score_units);
        const int k_begin = (SCORE_IS_MODIFIED ? uniform(visit.tile) : visit.tile) * BLOCK_K;
        modify_scores(S_regs, tile, p, head(), row_begin(), k_begin, rows);
        if (REREADS_ITEM) forget(), keys.KeySpan::operator=(item->parts[consumer].keys);
        if (keys.is_cut_by_band(visit))
            hide_outside_band(S_regs, columns, p, head(), row_begin(), k_begin + tile.column(0));
        if (MASKED && visit.bits >= 0)
            bits.hide(S_regs, -infinity<Accumulator>(), columns, tile_bits, tile.column(0));
        // What the scores still lack.
        for (float& unit : score_units) unit = SCORE_IS_MODIFIED ? 1.0f : larger(unit, least_unit);
        constexpr float EXPONENT = Tile::WEIGHT_EXPONENT;
        if (softmax.update_scaled(S_regs, multiplier, score_units, EXPONENT, rescale))
            scale_rows(O_regs, rescale), kept.rescale(rescale);
        drop_probabilities(S_regs, tile, p, head(), row_begin(), k_begin);
        kept.add(S_regs);
        const auto accumulate = [&] {
            u32 P_regs[2 * Tile::CHUNKS][4];
            tile.split_probabilities(P_regs, S_regs);
            barriers.V_full[now.slot].wait(now.parity);
            tile.accumulate(O_regs, P_regs, V + now.slot * (Tile::Values::BYTES >> 4),
                            units.v / (1 << Tile::WEIGHT_EXPONENT));
        };
        if constexpr (TAKES_TURNS) {
            if (looks && any(has_small_weights<Tile::WEIGHT_EXPONENT>(S_regs))) {
                barriers.V_full[now.slot].wait(now.parity);
                tile.accumulate_in_turns(O_regs, S_regs, V + now.slot * (Tile::Values::BYTES >> 4),
                                         units.v / (1 << Tile::WEIGHT_EXPONENT), any);
            } else {
                accumulate();
            }
        } else {
            if (looks && has_small_weights<Tile::WEIGHT_EXPONENT>(S_regs)) small = true;
            accumulate();
        }
        if (speaks) barriers.V_empty[now.slot].arrive();
        now.advance();
    };

    for (;;) {
        item = &reader.next();
        if (!item->exists) break;
        held_head = uniform(item->head);
        keys.list = uniform(item->keys.list);
        const Part& part = item->parts[consumer];
        static_cast<KeySpan&>(keys) = uniform(part.keys);
        held_row = uniform(item->row_begin) + consumer * SLAB;
        looks = DROPS || item->sparse, small = false;
        kept.clear();
        softmax = {};
        clear_rows(O_regs);
        if (keys.count() > 0)
            q_units =
                make_query_planes(p, head(), item->k_unit, row_begin(), smem.Q[consumer], consumer);
        pass_by(part.before);
#pragma unroll 1
        for (int i = 0; i < keys.count(); ++i) visit_keys(i);
        pass_by(part.after);
        for (float& sum : softmax.sum) sum /= 1 << Tile::WEIGHT_EXPONENT;
        store_rows(O_regs, softmax, tile, p, item->head, row_begin(), item->output);
        if constexpr (DROPS) {
            const float least = kept.least(1 << Tile::WEIGHT_EXPONENT);
            small = small && small_weights_matter(least, item->spread);
        }
        if (__any_sync(FULL_WARP, small) && speaks)
            leave_out(p, head(), row_begin(), row_begin() + SLAB);
        __syncwarp();  // all lanes have read the item
        if (speaks) reader.release(*item);
    }
}
