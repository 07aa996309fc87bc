// Copies that run beside the threads: cp.async, bulk copies and TMA, and the mbarriers that count
// their bytes.
//
// With seed 0 a copy happens at the latest legal moment, and until then its target holds NaN bytes.
// For the checker a copy writes (and reads) at the moment it is issued, as an agent of its own
// whose clock only those know who waited for it.
#include <algorithm>

#include "runtime.h"

std::deque<std::pair<Block*, int>> pending_copies;
enum ChannelKind { CP_ASYNC, MBARRIER, BULK_READ, BULK_WRITE };

static Actor channel_actor(int kind, u32 id, bool async, u32& channel, u32& clock) {
    Block& block = *current->block;
    channel = channel_of(block, kind, id);
    u32 first = block.fibers.size() + block.warps.size();
    clock = ++block.channel_clocks[channel - first];
    return {block.number, channel, clock, &current->knows, async};
}

// ---------------------------------------------------------------------------- cp.async
static void run_cp_async(CpAsync& copy) {
    if (copy.done) return;
    copy.done = true;
    char* target = current->block->shared + (copy.target - SHARED_BASE);
    memcpy(target, copy.source, copy.source_bytes);
    memset(target + copy.source_bytes, 0, copy.bytes - copy.source_bytes);
}
extern "C" void emu_cp_async(u32 target, const void* source, int bytes, int source_bytes,
                             emu_where where) {
    ENTER(where);
    stats.cp_async++;
    char* to = shared_at(target, bytes, bytes, "cp.async target");
    if (source_bytes < 0 || source_bytes > bytes)
        fail("cp.async of %d bytes with a source size of %d", bytes, source_bytes);
    if ((u64)source % bytes) fail("MISALIGNED: cp.async source is not aligned to %d bytes", bytes);
    CpAsync copy{target, (const char*)source, bytes, source_bytes, false, 0, where};
    if (checking) {
        if (source_bytes) check_access(source, source_bytes, READ, current->caller);
        u32 channel;
        Actor actor = channel_actor(CP_ASYNC, current->id, false, channel, copy.clock);
        touch(current->block->window, to, bytes, WRITE, actor, current->caller);
    }
    // Reading now finds a bad source address at the instruction that names it.
    static char probe[16];
    memcpy(probe, source, source_bytes);
    asm volatile("" ::"r"(probe) : "memory");
    memset(to, 0xff, bytes);
    if (seed && random_below(2)) run_cp_async(copy);
    current->cp_async_open.push_back(copy);
}
extern "C" void emu_cp_async_commit() {
    current->cp_async_groups.push_back(std::move(current->cp_async_open));
    current->cp_async_open.clear();
}
static void retire_cp_async(std::vector<CpAsync>& group) {
    for (auto& copy : group) {
        run_cp_async(copy);
        if (checking)
            raise_entry(current->knows.own, channel_of(*current->block, CP_ASYNC, current->id),
                        copy.clock);
    }
}
extern "C" void emu_cp_async_wait(int pending, emu_where where) {
    ENTER(where);
    if (pending < 0) {  // wait_all: committed or not
        emu_cp_async_commit();
        pending = 0;
    }
    while ((int)current->cp_async_groups.size() > pending) {
        retire_cp_async(current->cp_async_groups.front());
        current->cp_async_groups.pop_front();
    }
}

// ---------------------------------------------------------------------------- mbarriers
static MBarrier& mbarrier_at(u32 address) {
    Block& block = *current->block;
    auto found = block.mbarriers.find(address);
    if (found == block.mbarriers.end())
        fail("mbarrier at shared+%ld was never initialised", (long)address - SHARED_BASE);
    MBarrier& barrier = found->second;
    if (checking && entry(current->knows.own, barrier.initialiser) < barrier.init_clock)
        fail("RACE: mbarrier at shared+%u used without a barrier after its initialisation",
             address - SHARED_BASE);
    return barrier;
}
static void complete_phase(Block& block, MBarrier& barrier) {
    if (barrier.pending || barrier.bytes) return;
    barrier.phase ^= 1;
    barrier.pending = barrier.count;
    if (checking) barrier.completed = barrier.collected;
    auto waiting = std::move(barrier.waiting);
    barrier.waiting.clear();
    for (auto& [thread, parity] : waiting) {
        if (parity != barrier.phase)
            wake(block.fibers[thread]);
        else
            barrier.waiting.push_back({thread, parity});
    }
}
extern "C" void emu_mbarrier_init(u32 address, u32 count, emu_where where) {
    ENTER(where);
    char* cells = shared_at(address, 8, 8, "mbarrier");
    Block& block = *current->block;
    if (!count || count >= 1u << 20) fail("mbarrier with a count of %u", count);
    if (block.mbarriers.count(address))
        fail("mbarrier at shared+%u is initialised again without mbarrier.inval",
             address - SHARED_BASE);
    MBarrier barrier{};
    barrier.count = barrier.pending = count;
    barrier.initialiser = current->id;
    if (checking) {
        check_access(cells, 8, WRITE, current->caller);
        mark_mbarrier(block, address - SHARED_BASE, true);
        barrier.init_clock = current->knows.own[current->id];
    }
    block.mbarriers[address] = barrier;
}
extern "C" void emu_mbarrier_invalidate(u32 address, emu_where where) {
    ENTER(where);
    mbarrier_at(address);
    current->block->mbarriers.erase(address);
    if (checking) mark_mbarrier(*current->block, address - SHARED_BASE, false);
}
extern "C" void emu_mbarrier_expect(u32 address, u32 bytes, emu_where where) {
    ENTER(where);
    mbarrier_at(address).bytes += bytes;
}
// The returned state's lowest bit is the parity of the phase that was arrived in.
extern "C" u64 emu_mbarrier_arrive(u32 address, u32 count, u32 bytes, emu_where where) {
    ENTER(where);
    MBarrier& barrier = mbarrier_at(address);
    u64 state = barrier.phase;
    if ((int)count > barrier.pending)
        fail("mbarrier at shared+%u: more arrivals than its count of %d", address - SHARED_BASE,
             barrier.count);
    if (checking) {
        barrier.collected.join(current->knows);
        current->knows.own[current->id]++;
    }
    barrier.bytes += bytes;
    barrier.pending -= count;
    complete_phase(*current->block, barrier);
    return state;
}
extern "C" int emu_mbarrier_wait(u32 address, u32 parity, int may_block, emu_where where) {
    ENTER(where);
    parity &= 1;
    MBarrier& barrier = mbarrier_at(address);
    if ((u32)barrier.phase == parity) {
        if (!may_block) {
            emu_yield(where);
            if ((u32)mbarrier_at(address).phase == parity) return 0;
        } else {
            barrier.waiting.push_back({current->id, (int)parity});
            block_here("mbarrier wait");
        }
    }
    if (checking) current->knows.join(mbarrier_at(address).completed);
    return 1;
}
// Arrives when the thread's earlier cp.async are done: here, at once, by doing them.
extern "C" void emu_cp_async_arrive(u32 address, int increment, emu_where where) {
    ENTER(where);
    Fiber& me = *current;
    MBarrier& barrier = mbarrier_at(address);
    Knowledge mine = me.knows;
    for (auto& group : me.cp_async_groups) retire_cp_async(group);
    retire_cp_async(me.cp_async_open);
    if (increment) barrier.pending++;
    if (barrier.pending < 1)
        fail("mbarrier at shared+%u: more arrivals than its count of %d", address - SHARED_BASE,
             barrier.count);
    if (checking) barrier.collected.join(me.knows);
    // The thread itself still has to wait, only the barrier knows that the copies are done.
    me.knows = mine;
    if (checking) me.knows.own[me.id]++;
    barrier.pending--;
    complete_phase(*me.block, barrier);
}
extern "C" void emu_fence_async() {
    if (!checking) return;
    join_clock(current->knows.fenced, current->knows.own);
    current->knows.own[current->id]++;
}

// ---------------------------------------------------------------------------- bulk copies
static void read_store(Block& block, BulkCopy& copy) {
    if (copy.was_read) return;
    copy.was_read = true;
    for (auto& s : copy.segments)
        copy.staged.insert(copy.staged.end(), block.shared + s.shared,
                           block.shared + s.shared + s.valid);
}
static void write_store(BulkCopy& copy) {
    const char* from = copy.staged.data();
    for (auto& s : copy.segments) {
        if (copy.kind == BulkCopy::ADD) {
            for (u32 i = 0; i < s.valid; i += 4) {
                float sum, term;
                memcpy(&sum, s.global + i, 4);
                memcpy(&term, from + i, 4);
                sum += term;
                memcpy(s.global + i, &sum, 4);
            }
        } else if (s.valid) {
            memcpy(s.global, from, s.valid);
        }
        from += s.valid;
    }
}
void run_copy(Block& block, int number) {
    BulkCopy& copy = block.copies[number];
    if (copy.done) return;
    issued = &copy.where;
    copy.done = true;
    if (copy.kind == BulkCopy::LOAD) {
        for (auto& s : copy.segments) {
            if (s.valid) memcpy(block.shared + s.shared, s.global, s.valid);
            memset(block.shared + s.shared + s.valid, 0, 16 - s.valid);
        }
        auto found = block.mbarriers.find(copy.mbarrier);
        if (found == block.mbarriers.end())
            fail("a bulk load completes on an mbarrier that was invalidated");
        MBarrier& barrier = found->second;
        if (checking) raise_entry(barrier.collected.own, copy.channel, copy.clock);
        barrier.bytes -= copy.bytes;
        complete_phase(block, barrier);
    } else {
        read_store(block, copy);
        write_store(copy);
    }
    issued = nullptr;
}
static void unqueue(Block& block, int number) {
    for (size_t i = 0; i < pending_copies.size(); i++)
        if (pending_copies[i].first == &block && pending_copies[i].second == number) {
            pending_copies.erase(pending_copies.begin() + i);
            return;
        }
}
static void issue(BulkCopy&& copy) {
    Block& block = *current->block;
    stats.bulk_copies++;
    copy.thread = current->id;
    copy.where = current->where;
    bool load = copy.kind == BulkCopy::LOAD;
    if (load) {
        MBarrier& barrier = mbarrier_at(copy.mbarrier);
        if (checking && entry(current->knows.fenced, barrier.initialiser) < barrier.init_clock)
            fail(
                "missing fence.proxy.async (or fence.mbarrier_init) between mbarrier.init and "
                "the first bulk copy that completes on it");
    }
    if (checking) {
        Actor reader, writer;
        if (load) {
            writer = channel_actor(MBARRIER, copy.mbarrier, true, copy.channel, copy.clock);
            reader = writer;
        } else {
            reader = channel_actor(BULK_READ, current->id, true, copy.channel, copy.clock);
            writer =
                channel_actor(BULK_WRITE, current->id, true, copy.write_channel, copy.write_clock);
        }
        for (auto& s : copy.segments) {
            touch(block.window, block.shared + s.shared, load ? 16 : std::max<int>(s.valid, 1),
                  load ? WRITE : READ, load ? writer : reader, current->caller);
            if (!s.valid) continue;
            Window* window = find_window(s.global, s.valid);
            if (!window)
                fail("OUT OF BOUNDS: a bulk copy of %u bytes reaches outside its buffer",
                     copy.bytes);
            touch(*window, s.global, s.valid,
                  load                         ? READ
                  : copy.kind == BulkCopy::ADD ? STRONG_WRITE
                                               : WRITE,
                  load ? reader : writer, current->caller);
        }
    }
    if (load)
        for (auto& s : copy.segments) memset(block.shared + s.shared, 0xff, 16);
    block.copies.push_back(std::move(copy));
    int number = block.copies.size() - 1;
    pending_copies.push_back({&block, number});
    if (!load) current->bulk_open.push_back(number);
}
static std::vector<Segment> line_segments(u32 shared, char* global, u32 bytes) {
    std::vector<Segment> segments;
    for (u32 i = 0; i < bytes; i += 16)
        segments.push_back({shared - SHARED_BASE + i, global + i, 16, 16});
    return segments;
}
static void check_line(const void* global, u32 bytes) {
    if (bytes % 16 || !bytes) fail("bulk copy of %u bytes: must be a multiple of 16", bytes);
    if ((u64)global % 16)
        fail("MISALIGNED: bulk copy with a global address not aligned to 16 bytes");
}
static void check_line(u32 shared, const void* global, u32 bytes) {
    shared_at(shared, bytes, 16, "bulk copy");
    check_line(global, bytes);
}
// A prefetch changes no memory: only what it is asked for is looked at.
extern "C" void emu_bulk_prefetch(const void* source, u32 bytes, emu_where where) {
    ENTER(where);
    check_line(source, bytes);
    if (checking && !find_window((char*)source, bytes))
        fail("OUT OF BOUNDS: a prefetch of %u bytes reaches outside its buffer", bytes);
}
extern "C" void emu_bulk_load(u32 target, const void* source, u32 bytes, u32 barrier,
                              emu_where where) {
    ENTER(where);
    check_line(target, source, bytes);
    BulkCopy copy{};
    copy.kind = BulkCopy::LOAD;
    copy.segments = line_segments(target, (char*)source, bytes);
    copy.bytes = bytes;
    copy.mbarrier = barrier;
    issue(std::move(copy));
}
extern "C" void emu_bulk_store(void* target, u32 source, u32 bytes, int add, emu_where where) {
    ENTER(where);
    check_line(source, target, bytes);
    BulkCopy copy{};
    copy.kind = add ? BulkCopy::ADD : BulkCopy::STORE;
    copy.segments = line_segments(source, (char*)target, bytes);
    copy.bytes = bytes;
    issue(std::move(copy));
}
extern "C" void emu_bulk_commit() {
    current->bulk_groups.push_back(std::move(current->bulk_open));
    current->bulk_open.clear();
}
extern "C" void emu_bulk_wait(int pending, int read_only, emu_where where) {
    ENTER(where);
    Block& block = *current->block;
    int finish = (int)current->bulk_groups.size() - pending;
    for (int g = 0; g < finish; g++)
        for (int number : current->bulk_groups[g]) {
            BulkCopy& copy = block.copies[number];
            if (checking) raise_entry(current->knows.own, copy.channel, copy.clock);
            if (read_only) {
                read_store(block, copy);
                continue;
            }
            run_copy(block, number);
            unqueue(block, number);
            if (checking) raise_entry(current->knows.own, copy.write_channel, copy.write_clock);
        }
    // Groups whose reads alone are done stay queued: a later full wait may want them.
    if (!read_only)
        for (int g = 0; g < finish; g++) current->bulk_groups.pop_front();
}

// ---------------------------------------------------------------------------- TMA
// Software stand-in for CUtensorMap, packed by memory.py. Dimensions innermost first.
struct TensorMap {
    u64 base;
    u32 magic;
    u8 rank, item_size, swizzle, is_float32;
    u32 dims[5];
    u32 reserved;
    u64 strides[4];
    u16 box[5];
};
static const u32 TENSOR_MAP_MAGIC = 0x7ab1e;

// Swizzle 1, 2, 3: spans of 128, 64, 32 bytes; on addresses of the shared window.
static u32 swizzled(u32 address, int mode) {
    static const u32 masks[] = {0, 7, 3, 1};
    return address ^ (address >> 7 & masks[mode]) << 4;
}
static u32 box_bytes(const TensorMap& map) {
    u32 bytes = map.item_size;
    for (int i = 0; i < map.rank; i++) bytes *= map.box[i];
    return bytes;
}
static TensorMap read_map(const void* address, int rank, const int* coordinates) {
    static const int spans[] = {0, 128, 64, 32};
    TensorMap map;
    memcpy(&map, address, sizeof map);
    if (map.magic != TENSOR_MAP_MAGIC) fail("the operand of a TMA copy is not a tensor map");
    if (map.rank != rank)
        fail("tensor map of rank %d in an instruction of rank %d", map.rank, rank);
    if (map.swizzle && map.box[0] * map.item_size > spans[map.swizzle])
        fail("TMA box is %d bytes wide, more than its swizzle span of %d",
             map.box[0] * map.item_size, spans[map.swizzle]);
    if (coordinates[0] * map.item_size % 16)
        fail("TMA innermost coordinate %d is not a multiple of 16 bytes (an H200 traps: error 715)",
             coordinates[0]);
    return map;
}
static TensorMap read_map(const void* address, int rank, u32 shared, const int* coordinates) {
    TensorMap map = read_map(address, rank, coordinates);
    shared_at(shared, box_bytes(map), 128, "TMA tile");
    return map;
}
static std::vector<Segment> box_segments(const TensorMap& map, u32 shared, const int* c) {
    std::vector<Segment> segments;
    u32 row_bytes = map.box[0] * map.item_size, rows = box_bytes(map) / row_bytes;
    for (u32 r = 0; r < rows; r++) {
        u32 rest = r;
        long offset = 0;
        bool inside = true;
        for (int d = 1; d < map.rank; d++) {
            long position = c[d] + (long)(rest % map.box[d]);
            rest /= map.box[d];
            inside &= position >= 0 && position < (long)map.dims[d];
            offset += position * (long)map.strides[d - 1];
        }
        for (u32 b = 0; b < row_bytes; b += 16) {
            long at = (long)c[0] * map.item_size + b;
            long left = (long)map.dims[0] * map.item_size - at;
            u16 valid = !inside || at < 0 || left <= 0 ? 0 : left < 16 ? left : 16;
            u32 to = swizzled(shared + r * row_bytes + b, map.swizzle) - SHARED_BASE;
            segments.push_back({to, (char*)map.base + offset + at, 16, valid});
        }
    }
    return segments;
}
extern "C" void emu_tensor_load(u32 target, const void* address, u32 barrier, int rank,
                                const int* coordinates, emu_where where) {
    ENTER(where);
    TensorMap map = read_map(address, rank, target, coordinates);
    BulkCopy copy{};
    copy.kind = BulkCopy::LOAD;
    copy.segments = box_segments(map, target, coordinates);
    copy.bytes = box_bytes(map);
    copy.mbarrier = barrier;
    issue(std::move(copy));
}
extern "C" void emu_tensor_prefetch(const void* address, int rank, const int* coordinates,
                                    emu_where where) {
    ENTER(where);
    read_map(address, rank, coordinates);
}
extern "C" void emu_tensor_store(const void* address, u32 source, int rank, const int* coordinates,
                                 int add, emu_where where) {
    ENTER(where);
    TensorMap map = read_map(address, rank, source, coordinates);
    if (add && !map.is_float32) fail("a TMA reduction is modelled for float32 tensor maps only");
    BulkCopy copy{};
    copy.kind = add ? BulkCopy::ADD : BulkCopy::STORE;
    copy.segments = box_segments(map, source, coordinates);
    copy.bytes = box_bytes(map);
    issue(std::move(copy));
}

// ---------------------------------------------------------------------------- the end
void finish_copies_of(Fiber& fiber) {
    auto& groups = fiber.cp_async_groups;
    groups.push_back(fiber.cp_async_open);
    for (auto& group : groups)
        for (auto& copy : group)
            if (copy.bytes)
                fail("thread exits with the cp.async of %s:%d not waited for", copy.where.file,
                     copy.where.line);
    fiber.bulk_groups.push_back(fiber.bulk_open);
    for (auto& group : fiber.bulk_groups)
        for (int number : group) {
            BulkCopy& copy = fiber.block->copies[number];
            if (!copy.was_read || (checking && entry(fiber.knows.own, copy.channel) < copy.clock))
                fail("thread exits with the bulk store of %s:%d not waited for", copy.where.file,
                     copy.where.line);
        }
}
void finish_copies_of(Block& block) {
    for (size_t i = 0; i < block.copies.size(); i++) {
        BulkCopy& copy = block.copies[i];
        if (copy.done) continue;
        if (copy.kind == BulkCopy::LOAD)
            fail("block %u ends with the bulk load of %s:%d in flight", block.number,
                 copy.where.file, copy.where.line);
        run_copy(block, i);
        unqueue(block, i);
    }
}
