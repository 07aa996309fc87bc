// What the parts of the emulator's runtime share: the state of blocks, warps and threads, the
// scheduler's services, and the checker's interface.
//
// fibers.cpp    threads as fibers, scheduling, block barriers, launch
// checker.cpp   vector clocks: races, bounds, never-written memory, proxy fences
// warp.cpp      what 32 lanes do together: shuffles, votes, ldmatrix, mma.sync
// copies.cpp    asynchronous copies: cp.async, mbarriers, bulk copies, TMA
// wgmma.cpp     warpgroup products
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

// Defined again by cuda_on_cpu.h for the kernels: the two must match.
struct emu_where {
    const char* file;
    int line;
};
struct Index3 {
    u32 x, y, z;
};
inline bool operator==(const emu_where& a, const emu_where& b) {
    return a.line == b.line && (a.file == b.file || !strcmp(a.file, b.file));
}

// ---------------------------------------------------------------------------- knowledge
// A vector clock: entry i is the last moment of agent i (thread, warp's wgmma unit, or channel of
// asynchronous copies) that is known to have happened before. Missing entries are 0.
typedef std::vector<u32> Clock;
typedef std::map<u32, std::shared_ptr<const Clock>> BlockClocks;

struct Knowledge {
    Clock own;                                  // about the agents of the own block
    Clock fenced;                               // the part of own that passed a proxy fence
    std::shared_ptr<const BlockClocks> others;  // about the agents of other blocks
    bool kernels_before = false;                // that they have ended: griddepcontrol.wait

    void join(const Knowledge& other);
};
// What a release publishes at an address, for an acquire of any block to find.
struct Published {
    u32 block;
    Knowledge knowledge;
};
inline u32 entry(const Clock& clock, size_t agent) {
    return agent < clock.size() ? clock[agent] : 0;
}
inline void raise_entry(Clock& clock, size_t agent, u32 value) {
    if (clock.size() <= agent) clock.resize(agent + 1, 0);
    if (clock[agent] < value) clock[agent] = value;
}
void join_clock(Clock& into, const Clock& from);

// ---------------------------------------------------------------------------- checked memory
struct Reader {
    u32 block, clock;
    u16 agent;
    u8 bytes;  // which of the cell's two bytes
    bool strong;
};
// The history of two bytes: the last write and up to three reads since.
struct Cell {
    u32 writer_block, writer_clock;  // block + 1; 0: not written in this launch
    u16 writer;
    u8 bytes;
    bool strong, async;  // the write was atomic; went through the async proxy
    u8 readers;
    Reader reader[3];
};
enum WindowKind { SHARED, GLOBAL };
struct Window {
    char *begin, *end;
    WindowKind kind;
    bool read_only;
    Cell* cells;
    std::vector<u8> written;  // one per cell; bit 1: holds a live mbarrier

    void allocate_cells();
    void forget_accesses();
    void free_cells();
};
enum Access { READ = 0, WRITE = 1, STRONG_READ = 2, STRONG_WRITE = 3 };
// Who accesses: an agent of a block at a moment, and what it knows.
struct Actor {
    u32 block, agent, clock;
    const Knowledge* knows;
    bool async;
};

// ---------------------------------------------------------------------------- threads
enum FiberState { READY, BLOCKED, POLLING, DONE };
struct Block;

// One copy in flight. Segments are at most 16 bytes; `valid` of them come from (or go to) global
// memory, the rest is zero fill.
struct Segment {
    u32 shared;  // offset
    char* global;
    u16 bytes, valid;
};
struct BulkCopy {
    enum Kind { LOAD, STORE, ADD } kind;
    std::vector<Segment> segments;
    u32 mbarrier, bytes;
    int thread;
    bool was_read, done;
    u32 channel, clock, write_channel, write_clock;
    std::vector<char> staged;  // a store's bytes once it has read shared memory
    emu_where where;
};
struct CpAsync {
    u32 target;
    const char* source;
    int bytes, source_bytes;
    bool done;
    u32 clock;
    emu_where where;
};
struct Fiber {
    Index3 thread_index;
    Block* block;
    void* stack_pointer;
    char* stack;
    int id, lane, warp;
    int votes;  // of those that met at its last barrier
    FiberState state;
    const char* waits_in;
    emu_where where;
    const void* caller;  // return address into the kernel, for the chain of calls

    const volatile void* polled;  // last strong load: address, value
    u64 polled_value;
    int polled_bytes;

    std::vector<CpAsync> cp_async_open;
    std::deque<std::vector<CpAsync>> cp_async_groups;
    std::vector<int> bulk_open;
    std::deque<std::vector<int>> bulk_groups;

    Knowledge knows;
    std::shared_ptr<Knowledge> released;                 // snapshot of the last __threadfence
    std::vector<std::shared_ptr<const Published>> seen;  // by relaxed loads since
    std::vector<std::pair<char*, char*>> in_flight;      // registers of unfinished wgmma
};

struct Warp;
// A warp collective that some lanes have entered.
struct Collective {
    u32 mask, arrived;
    int operation;
    emu_where where;
    void (*compute)(Collective&, Warp&);
    void* arguments[32];
};
struct WgmmaOp {
    std::vector<float*> d[32];
    u32 a[32][4];
    bool a_in_registers, is_half, accumulate, a_transposed, b_transposed;
    bool holds_saved, done;
    u64 a_descriptor, b_descriptor;
    int n;
    u32 clock;
    std::vector<float> saved;
    emu_where where;
};
struct Warp {
    u32 exist, exited, wgmma_clock;
    u32 wgmma_count;
    bool fenced;
    std::vector<Collective> open;
    std::vector<WgmmaOp> wgmma_open;
    std::deque<std::vector<WgmmaOp>> wgmma_groups;
};
struct NamedBarrier {
    int arrived = 0, count = 0, votes = 0;
    bool whole_block = false;
    u32 generation = 0;
    emu_where where{};
    std::vector<int> waiting, all;
};
struct MBarrier {
    int count, pending, phase;
    long bytes;
    u32 initialiser, init_clock;
    Knowledge collected, completed;
    std::vector<std::pair<int, int>> waiting;  // thread, parity
};
struct Block {
    u32 number;  // among those of the kernels that follow each other
    Index3 index;
    char* arena;
    char* shared;
    char* stacks;
    Window window;
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    NamedBarrier barriers[16];
    std::map<u32, MBarrier> mbarriers;
    std::map<u64, u32> channels;
    std::vector<u32> channel_clocks;
    std::vector<BulkCopy> copies;
    int alive;
};

// ---------------------------------------------------------------------------- services
extern Fiber* current;  // null while the scheduler itself runs
extern bool checking;
extern int seed;
extern u32 shared_bytes;
extern u32 first_block;  // the number of the launch's first one: those before are of kernels before
extern Index3 block_dim, grid_dim;
static const size_t STACK = 256 << 10;  // of a thread
// The shared window starts here, as on sm_90; so address 0 is never valid.
static const u32 SHARED_BASE = 1024;

struct Stats {
    u64 mma, ldmatrix, stmatrix, wgmma, bulk_copies, cp_async, barriers, atomics, bank_conflicts,
        switches, accesses, blocks;
};
extern Stats stats;

// Whether sums lose what tensor cores of sm_90 cut off, and such a sum of 16 products; b[k * step] is
// the k-th factor (wgmma.cpp).
extern bool truncates;
float truncated_sum(float before, const float* a, const float* b, int step);

// Source position and return address of the runtime call being executed.
#define ENTER(WHERE) (current->where = (WHERE), current->caller = __builtin_return_address(0))

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
extern const emu_where* issued;  // where the asynchronous operation being carried out was issued
u32 random_below(u32 n);
void block_here(const char* why);
void yield_here();
void wake(Fiber& fiber);
extern "C" void emu_yield(emu_where where);
extern "C" void emu_poll(const void* address, int bytes, u64 value);
char* shared_at(u32 address, u32 bytes, u32 align, const char* what);

// Lanes of `mask` park their arguments; the last to arrive runs `compute` for all.
void collective(u32 mask, int operation, const char* what, void* argument,
                void (*compute)(Collective&, Warp&), bool same_line);
// The current thread exits: warp collectives go on without it.
void leave_collectives();

// checker.cpp
void touch(Window& window, const char* address, size_t bytes, Access access, const Actor& actor,
           const void* caller);
void check_access(const void* address, size_t bytes, Access access, const void* caller);
Window* find_window(const char* address, size_t bytes);
Actor thread_actor();
bool in_module(const void* address);  // of the kernel being run
u32 channel_of(Block& block, int kind, u32 id);
void synchronise(Block& block, const std::vector<int>& all, const std::vector<int>& acquiring);
void mark_mbarrier(Block& block, u32 offset, bool live);
void forget_publications();
extern std::deque<Window> windows;

// copies.cpp
extern std::deque<std::pair<Block*, int>> pending_copies;
void run_copy(Block& block, int copy);
void finish_copies_of(Fiber& fiber);
void finish_copies_of(Block& block);

inline float half_to_float(u16 bits) {
    _Float16 h;
    memcpy(&h, &bits, 2);
    return (float)h;
}
inline float bfloat16_to_float(u16 bits) {
    u32 wide = (u32)bits << 16;
    float f;
    memcpy(&f, &wide, 4);
    return f;
}
