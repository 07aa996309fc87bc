// The checker: which accesses are ordered, inside which memory, and whether anything was written
// there before.
//
// Kernels are compiled with -fsanitize=thread, but libtsan is never linked: the hooks the compiler
// inserts before every load and store are defined here. Each two bytes of shared and global memory
// have a cell with their last write and last reads; each thread has a vector clock. Two accesses
// conflict unless the later one's thread knows that the earlier has happened. Barriers, mbarriers,
// waits for asynchronous copies and release/acquire pairs are what passes knowledge on.
#include <sys/mman.h>

#include <unordered_map>

#include "runtime.h"

std::deque<Window> windows;
static Window* last_window;

// ---------------------------------------------------------------------------- knowledge
void join_clock(Clock& into, const Clock& from) {
    if (into.size() < from.size()) into.resize(from.size(), 0);
    u32* mine = into.data();  // in words that the compiler makes vector instructions of
    const u32* theirs = from.data();
    for (size_t i = 0, count = from.size(); i < count; i++) mine[i] = std::max(mine[i], theirs[i]);
}
static std::shared_ptr<const BlockClocks> join_blocks(const std::shared_ptr<const BlockClocks>& a,
                                                      const std::shared_ptr<const BlockClocks>& b) {
    if (!b || a == b) return a;
    if (!a) return b;
    auto joined = std::make_shared<BlockClocks>(*a);
    for (auto& [number, clock] : *b) {
        auto& mine = (*joined)[number];
        if (!mine) {
            mine = clock;
        } else if (mine != clock) {
            auto both = std::make_shared<Clock>(*mine);
            join_clock(*both, *clock);
            mine = both;
        }
    }
    return joined;
}
void Knowledge::join(const Knowledge& other) {
    join_clock(own, other.own);
    join_clock(fenced, other.fenced);
    kernels_before |= other.kernels_before;
    others = join_blocks(others, other.others);
}
static bool knows_other_block(const Actor& actor, u32 block, u32 agent, u32 clock) {
    if (!actor.knows->others) return false;
    auto found = actor.knows->others->find(block);
    return found != actor.knows->others->end() && entry(*found->second, agent) >= clock;
}
static inline bool knows(const Actor& actor, u32 block, u32 agent, u32 clock) {
    if (block < first_block) return actor.knows->kernels_before;
    if (block == actor.block) return entry(actor.knows->own, agent) >= clock;
    return knows_other_block(actor, block, agent, clock);
}
Actor thread_actor() {
    return {current->block->number, (u32)current->id, current->knows.own[current->id],
            &current->knows, false};
}
// Agents beyond threads and warps: one per asynchronous queue, numbered as they are first used.
u32 channel_of(Block& block, int kind, u32 id) {
    u32 first = block.fibers.size() + block.warps.size();
    auto [place, added] =
        block.channels.insert({(u64)kind << 32 | id, first + block.channels.size()});
    if (added) block.channel_clocks.resize(block.channels.size(), 0);
    return place->second;
}
// Everyone in `acquiring` learns what everyone in `all` knew; the others only start a new moment.
void synchronise(Block& block, const std::vector<int>& all, const std::vector<int>& acquiring) {
    Knowledge joined = block.fibers[all[0]].knows;
    for (size_t i = 1; i < all.size(); i++) joined.join(block.fibers[all[i]].knows);
    for (int thread : acquiring) {
        Knowledge& mine = block.fibers[thread].knows;
        u32 clock = mine.own[thread];
        mine = joined;
        mine.own[thread] = clock;
    }
    for (int thread : all) block.fibers[thread].knows.own[thread]++;
}

// ---------------------------------------------------------------------------- windows
static size_t cell_count(const Window& w) { return (w.end - w.begin) / 2 + 2; }
void Window::allocate_cells() {
    // Fresh pages are zero: only cells that are touched cost memory.
    cells = (Cell*)mmap(nullptr, cell_count(*this) * sizeof(Cell), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    written.resize(cell_count(*this), 0);
}
void Window::forget_accesses() {
    size_t bytes = cell_count(*this) * sizeof(Cell);
    if (bytes <= 1 << 16)
        memset((void*)cells, 0, bytes);
    else
        madvise(cells, bytes, MADV_DONTNEED);
}
void Window::free_cells() {
    if (cells) munmap(cells, cell_count(*this) * sizeof(Cell));
    cells = nullptr;
}
Window* find_window(const char* a, size_t bytes) {
    if (current) {
        Window& shared = current->block->window;
        if (a >= shared.begin && a + bytes <= shared.end) return &shared;
    }
    if (last_window && a >= last_window->begin && a + bytes <= last_window->end) return last_window;
    for (auto& window : windows)
        if (a >= window.begin && a + bytes <= window.end) return last_window = &window;
    return nullptr;
}

// ---------------------------------------------------------------------------- the check itself
static const char* window_name(const Window& w) { return w.kind == SHARED ? "shared" : "global"; }

static std::string agent_name(u32 block, u32 agent, const Actor& me) {
    if (block < first_block) return "a kernel before, which griddepcontrol.wait awaits";
    std::string name;
    size_t threads = (size_t)block_dim.x * block_dim.y * block_dim.z, warps = (threads + 31) / 32;
    if (agent < threads)
        name = "thread " + std::to_string(agent);
    else if (agent < threads + warps)
        name = "wgmma of warp " + std::to_string(agent - threads);
    else
        name = "an asynchronous copy";
    if (block != me.block) name += " of block " + std::to_string(block - first_block);
    return name;
}
[[noreturn]] static void report_race(const char* what, const Window& w, long offset,
                                     const char* other, u32 block, u32 agent, const Actor& me,
                                     const void* caller) {
    fail("RACE: %s of %s+%ld is not ordered after a %s by %s @%p", what, window_name(w), offset,
         other, agent_name(block, agent, me).c_str(), caller);
}

[[noreturn]] static void report_uninitialised(const Window& w, long offset, const void* caller) {
    fail("UNINITIALISED: read of never-written %s memory at %s+%ld @%p", window_name(w),
         window_name(w), offset, caller);
}

// The access must be ordered after the cell's last write.
static inline void check_writer(const Window& w, const Cell& c, u8 mask, bool strong, long offset,
                                const char* what, const Actor& me, const void* caller) {
    if (!c.writer_block || !(c.bytes & mask)) return;
    u32 block = c.writer_block - 1;
    if (strong && c.strong && block >= first_block) return;
    if (!knows(me, block, c.writer, c.writer_clock))
        report_race(what, w, offset, c.strong ? "atomic write" : "write", block, c.writer, me,
                    caller);
    if (me.async && !c.async && block == me.block && w.kind == SHARED &&
        entry(me.knows->fenced, c.writer) < c.writer_clock)
        fail("missing fence.proxy.async: asynchronous %s of shared+%ld, which %s wrote @%p", what,
             offset, agent_name(block, c.writer, me).c_str(), caller);
}

static void write_cell(const Window& w, Cell& c, u8 mask, bool strong, long offset,
                       const char* what, const Actor& me, const void* caller) {
    for (int k = 0; k < c.readers; k++) {
        const Reader& r = c.reader[k];
        if (strong && r.strong && r.block >= first_block) continue;
        if ((r.bytes & mask) && !knows(me, r.block, r.agent, r.clock))
            report_race(what, w, offset, "read", r.block, r.agent, me, caller);
    }
    c.writer_block = me.block + 1;
    c.writer_clock = me.clock;
    c.writer = me.agent;
    c.bytes = mask;
    c.strong = strong;
    c.async = me.async;
    c.readers = 0;
}

// Remembers a read. Of a cell read by many, three reads are kept: one per warp if possible, so that
// a later write by any warp meets a read that it may not be ordered after.
static void read_cell(Cell& c, u8 mask, bool strong, const Actor& me) {
    int slot = -1;
    for (int k = 0; k < c.readers; k++) {
        Reader& r = c.reader[k];
        bool mine = r.block == me.block && r.agent == me.agent;
        if (mine && r.clock == me.clock) {
            r.bytes |= mask;
            r.strong &= strong;
            return;
        }
        // A read by the same warp, or known to be over, may be forgotten for this one.
        bool covered = !(r.bytes & ~mask) && (r.strong || !strong);
        bool same_warp = r.block == me.block && r.agent / 32 == me.agent / 32;
        if (covered && (same_warp || knows(me, r.block, r.agent, r.clock))) slot = k;
    }
    if (slot < 0) slot = c.readers < 3 ? c.readers++ : (int)random_below(3);
    c.reader[slot] = {me.block, me.clock, (u16)me.agent, mask, strong};
}

void touch(Window& w, const char* address, size_t bytes, Access access, const Actor& me,
           const void* caller) {
    static const char* names[] = {"read", "write", "atomic read", "atomic write"};
    bool write = access & WRITE, strong = access & STRONG_READ;
    long first = address - w.begin, last = first + bytes - 1;
    if (write && w.read_only) fail("write to a read-only array at global+%ld @%p", first, caller);
    Cell before, *previous = nullptr;
    for (long i = first / 2; i <= last / 2; i++) {
        Cell& c = w.cells[i];
        u8& state = w.written[i];
        u8 mask = (2 * i >= first ? 1 : 0) | (2 * i + 1 <= last ? 2 : 0);
        if (state != 1) {
            if (state & 2)
                fail("ordinary %s of shared+%ld, which holds a live mbarrier @%p", names[access],
                     2 * i, caller);
            if (!write) report_uninitialised(w, 2 * i, caller);
            state = 1;
        }
        // Neighbouring cells mostly have the same history, and then the same future.
        if (previous && mask == 3 && !memcmp(&c, &before, sizeof c)) {
            c = *previous;
            continue;
        }
        before = c;
        check_writer(w, c, mask, strong, 2 * i, names[access], me, caller);
        if (write)
            write_cell(w, c, mask, strong, 2 * i, names[access], me, caller);
        else
            read_cell(c, mask, strong, me);
        previous = mask == 3 ? &c : nullptr;
    }
}

void mark_mbarrier(Block& block, u32 offset, bool live) {
    for (u32 i = offset / 2; i < offset / 2 + 4; i++)
        block.window.written[i] = live ? block.window.written[i] | 2 : 0;
}

extern "C" char __ehdr_start[] __attribute__((visibility("hidden")));
extern "C" char _end[] __attribute__((visibility("hidden")));
static const char *module_begin, *module_end;
extern "C" void emu_module_range(const char* begin, const char* end) {
    module_begin = begin;
    module_end = end;
}

bool in_module(const void* address) {
    return (const char*)address >= module_begin && (const char*)address < module_end;
}

[[noreturn]] static void report_wild(const char* a, size_t bytes, bool write, const void* caller) {
    const char* what = write ? "write" : "read";
    for (auto& w : windows)
        if (a + bytes > w.begin - 4096 && a < w.end + 4096)
            fail("OUT OF BOUNDS: %s of %zu bytes at offset %ld of a global buffer of %ld bytes @%p",
                 what, bytes, (long)(a - w.begin), (long)(w.end - w.begin), caller);
    Window& shared = current->block->window;
    if (a + bytes > shared.begin - 65536 && a < shared.end + 65536)
        fail("OUT OF BOUNDS: %s of %zu bytes at shared+%ld (the block has %u) @%p", what, bytes,
             (long)(a - shared.begin), shared_bytes, caller);
    fail("OUT OF BOUNDS: %s of %zu bytes at wild address %p @%p", what, bytes, (void*)a, caller);
}

void check_access(const void* address, size_t bytes, Access access, const void* caller) {
    if (!checking || !current) return;
    const char* a = (const char*)address;
    if (a >= current->stack && a < current->stack + STACK) {
        for (auto& [begin, end] : current->in_flight)
            if (a < end && a + bytes > begin)
                fail("register of an unfinished wgmma %s before wgmma.wait_group @%p",
                     access & WRITE ? "written" : "read", caller);
        return;
    }
    stats.accesses++;
    Window* window = find_window(a, bytes);
    if (window) return touch(*window, a, bytes, access, thread_actor(), caller);
    char* stacks = current->block->stacks;
    if (a >= stacks && a < stacks + current->block->fibers.size() * STACK)
        fail("access to another thread's local memory @%p", caller);
    if (a >= __ehdr_start && a < _end) return;
    if (in_module(a)) {
        if (access & WRITE)
            fail("write to a variable at namespace scope is not modelled @%p", caller);
        return;
    }
    report_wild(a, bytes, access & WRITE, caller);
}

#define CALLER __builtin_return_address(0)
#define HOOKS(BYTES)                                                                        \
    extern "C" void __tsan_read##BYTES(void* p) { check_access(p, BYTES, READ, CALLER); }   \
    extern "C" void __tsan_write##BYTES(void* p) { check_access(p, BYTES, WRITE, CALLER); } \
    extern "C" void __tsan_unaligned_read##BYTES(void* p) {                                 \
        check_access(p, BYTES, READ, CALLER);                                               \
    }                                                                                       \
    extern "C" void __tsan_unaligned_write##BYTES(void* p) {                                \
        check_access(p, BYTES, WRITE, CALLER);                                              \
    }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
extern "C" void __tsan_read_range(void* p, u64 bytes) { check_access(p, bytes, READ, CALLER); }
extern "C" void __tsan_write_range(void* p, u64 bytes) { check_access(p, bytes, WRITE, CALLER); }
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_init() {}
extern "C" void __tsan_vptr_update(void*, void*) {}

// ---------------------------------------------------------------------------- release and acquire
static std::unordered_map<u64, std::shared_ptr<const Published>> publications;
void forget_publications() {
    publications.clear();
    last_window = nullptr;
}

static void learn(const Published& p) {
    Knowledge& mine = current->knows;
    u32 here = current->block->number;
    mine.kernels_before |= p.knowledge.kernels_before;
    if (p.block == here) {
        mine.join(p.knowledge);
        return;
    }
    auto theirs = std::make_shared<BlockClocks>();
    if (p.knowledge.others) *theirs = *p.knowledge.others;
    auto about_here = theirs->find(here);
    if (about_here != theirs->end()) {
        join_clock(mine.own, *about_here->second);
        theirs->erase(about_here);
    }
    (*theirs)[p.block] = std::make_shared<Clock>(p.knowledge.own);
    mine.others = join_blocks(mine.others, theirs);
}
static void acquire_from(const void* address, bool acquire) {
    auto found = publications.find((u64)address);
    if (found == publications.end() || !found->second) return;
    if (acquire)
        learn(*found->second);
    else
        current->seen.push_back(found->second);
}
// A read-modify-write keeps what earlier releases published there; a store replaces it.
static void release_to(const void* address, bool release, bool keep) {
    auto published = std::make_shared<Published>();
    auto& place = publications[(u64)address];
    published->block = current->block->number;
    if (release)
        published->knowledge = current->knows;
    else if (current->released)
        published->knowledge = *current->released;
    else if (keep)
        return;
    if (keep && place) {
        Knowledge before = place->knowledge;
        if (place->block != published->block) {
            auto others = std::make_shared<BlockClocks>();
            if (before.others) *others = *before.others;
            (*others)[place->block] = std::make_shared<Clock>(before.own);
            published->knowledge.others = join_blocks(published->knowledge.others,
                                                      std::shared_ptr<const BlockClocks>(others));
        } else {
            published->knowledge.join(before);
        }
    }
    place = published;
    current->knows.own[current->id]++;
}
// What kernels before have written and read is over, and can be seen.
extern "C" void emu_await_kernels() { current->knows.kernels_before = true; }
extern "C" void emu_thread_fence(int) {
    if (!checking) return;
    for (auto& p : current->seen) learn(*p);
    current->seen.clear();
    current->released = std::make_shared<Knowledge>(current->knows);
    current->knows.own[current->id]++;
}

extern "C" void emu_vector_aligned(const void* address, int bytes, emu_where where) {
    ENTER(where);
    if ((u64)address % bytes)
        fail("MISALIGNED: vector operation on %d bytes at %p", bytes, address);
}
extern "C" void emu_load_strong(const void* address, void* value, int bytes, int acquire,
                                emu_where where) {
    ENTER(where);
    u64 bits = 0;
    if ((u64)address % bytes) fail("MISALIGNED: strong load of %d bytes at %p", bytes, address);
    memcpy(&bits, address, bytes);
    emu_poll(address, bytes, bits);
    ENTER(where);
    check_access(address, bytes, STRONG_READ, current->caller);
    memcpy(value, address, bytes);
    if (checking) acquire_from(address, acquire);
}
extern "C" void emu_store_strong(void* address, const void* value, int bytes, int release,
                                 emu_where where) {
    ENTER(where);
    if ((u64)address % bytes) fail("MISALIGNED: strong store of %d bytes at %p", bytes, address);
    check_access(address, bytes, STRONG_WRITE, current->caller);
    if (checking) release_to(address, release, false);
    memcpy(address, value, bytes);
}

template <class T>
static void apply(int operation, void* address, const void* value, void* old, const void* compare) {
    T a, v, c = 0;
    memcpy(&a, address, sizeof a);
    memcpy(&v, value, sizeof v);
    if (compare) memcpy(&c, compare, sizeof c);
    memcpy(old, &a, sizeof a);
    T result = a;
    switch (operation) {
        case 0:
            result = a + v;
            break;
        case 1:
            result = a < v ? v : a;
            break;
        case 2:
            result = v < a ? v : a;
            break;
        case 3:
            result = v;
            break;
        case 4:
            result = a == c ? v : a;
            break;
    }
    if constexpr (T(1) / 2 == 0) {
        if (operation == 5) result = a | v;
        if (operation == 6) result = a & v;
        if (operation == 7) result = a ^ v;
    }
    memcpy(address, &result, sizeof result);
}
static void apply_16bit_add(void* address, const void* value, void* old, bool bfloat16) {
    u16 a, v;
    memcpy(&a, address, 2);
    memcpy(&v, value, 2);
    memcpy(old, &a, 2);
    float sum = bfloat16 ? bfloat16_to_float(a) + bfloat16_to_float(v)
                         : half_to_float(a) + half_to_float(v);
    u16 result;
    if (bfloat16) {
        u32 bits;
        memcpy(&bits, &sum, 4);
        result = sum != sum ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    } else {
        _Float16 h = (_Float16)sum;
        memcpy(&result, &h, 2);
    }
    memcpy(address, &result, 2);
}
// Orders: 0 relaxed, 1 acquire, 2 release, 3 both.
extern "C" void emu_atomic(void* address, int operation, int type, const void* value, void* old,
                           const void* compare, int order, emu_where where) {
    static const int sizes[] = {4, 4, 4, 8, 8, 8, 2, 2};
    ENTER(where);
    int bytes = sizes[type];
    stats.atomics++;
    if ((u64)address % bytes) fail("MISALIGNED: atomic of %d bytes at %p", bytes, address);
    check_access(address, bytes, STRONG_WRITE, current->caller);
    if (checking) {
        acquire_from(address, order & 1);
        release_to(address, order & 2, true);
    }
    u64 before = 0, after = 0;
    memcpy(&before, address, bytes);
    switch (type) {
        case 0:
            apply<float>(operation, address, value, old, compare);
            break;
        case 1:
            apply<int>(operation, address, value, old, compare);
            break;
        case 2:
            apply<u32>(operation, address, value, old, compare);
            break;
        case 3:
            apply<double>(operation, address, value, old, compare);
            break;
        case 4:
            apply<u64>(operation, address, value, old, compare);
            break;
        case 5:
            apply<int64_t>(operation, address, value, old, compare);
            break;
        default:
            apply_16bit_add(address, value, old, type == 7);
    }
    memcpy(&after, address, bytes);
    // Adding nothing to an integer, or a failed exchange, is how some loops poll.
    bool polls = type != 0 && type != 3 && type < 6 && (operation == 0 || operation == 4);
    if (polls && before == after) emu_poll(address, bytes, after);
}

// ---------------------------------------------------------------------------- global buffers
static const size_t PAGE = 4096;
// The buffer's end, rounded up to 16 bytes for vector loads, touches a page that traps.
extern "C" void* emu_allocate(size_t bytes, int initialised, int read_only) {
    size_t rounded = bytes ? (bytes + 15) / 16 * 16 : 16;
    size_t pages = (rounded + PAGE - 1) / PAGE * PAGE;
    char* map = (char*)mmap(nullptr, pages + 2 * PAGE, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) return nullptr;
    mprotect(map, PAGE, PROT_NONE);
    mprotect(map + PAGE + pages, PAGE, PROT_NONE);
    char* begin = map + PAGE + pages - rounded;
    if (!initialised) memset(begin, 0xff, bytes);
    windows.push_back({begin, begin + bytes, GLOBAL, (bool)read_only, nullptr, {}});
    windows.back().written.assign((bytes + 1) / 2 + 2, initialised);
    return begin;
}
extern "C" void emu_release(char* begin) {
    for (size_t i = 0; i < windows.size(); i++) {
        Window& w = windows[i];
        if (w.begin != begin) continue;
        size_t rounded = w.end > w.begin ? (w.end - w.begin + 15) / 16 * 16 : 16;
        size_t pages = (rounded + PAGE - 1) / PAGE * PAGE;
        w.free_cells();
        munmap(begin + rounded - pages - PAGE, pages + 2 * PAGE);
        windows.erase(windows.begin() + i);
        break;
    }
    last_window = nullptr;
}
// After a launch in fast mode nobody knows what was written.
extern "C" void emu_assume_written() {
    for (auto& w : windows) std::fill(w.written.begin(), w.written.end(), 1);
}
