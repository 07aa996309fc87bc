// Threads as fibers of one OS thread, the scheduler, block barriers and the launch.
//
// With seed 0 threads run in order and asynchronous copies happen only when no thread can run, that
// is at the latest legal moment. With seed -1 (EAGER) copies happen at once, and of the threads that
// can run the first does: warps that copy get as far ahead of the others as the kernel lets them.
// Other seeds pick threads, copies and the number of resident blocks at random. Blocks become
// resident one after another, and also whenever all resident threads wait for memory to change: so
// blocks that hand work to each other through flags run interleaved.
#include <algorithm>
#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <signal.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <ucontext.h>

#include "runtime.h"

Fiber* current;
bool checking;
int seed;
constexpr int EAGER = -1;
u32 shared_bytes, first_block;
Index3 block_dim, grid_dim;
Stats stats;
const emu_where* issued;

static const size_t PAGE = 4096, ARENA = 256 << 10;
// A fiber's stack is two memory maps (its guard page), of which a process may have 65,530.
static const size_t MAX_FIBERS = 16384;
static const size_t FUTILE_POLLS = 1 << 19;
static const int STUCK_SECONDS = 20, LAUNCH_SECONDS = 240;

static std::deque<Fiber*> ready, polling;
static std::vector<Block*> resident, idle;
static size_t threads;
static void* scheduler_stack;
static sigjmp_buf launch_failed;
static char message[8192];
static u64 random_state;
static void (*kernel)(void**);
static void** kernel_arguments;
static volatile u64 ticks, ticks_without_switch;
// Polls since a thread last read something new or ended, or a copy was made. That threads meet
// says nothing: a whole warp may poll together.
static size_t futile_polls;

u32 random_below(u32 n) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (u32)((random_state >> 11) % n);
}

// ---------------------------------------------------------------------------- failures
static void append(const char* format, ...) {
    size_t used = strlen(message);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message + used, sizeof message - used, format, arguments);
    va_end(arguments);
}

// A line of return addresses in the kernel, of the calls that a thread is in, from a frame outwards.
static void append_calls(const Fiber& fiber, void** frame) {
    append("\ncalls");
    for (void** last = (void**)fiber.stack; frame > last; frame = (void**)frame[0]) {
        if ((char*)(frame + 2) > fiber.stack + STACK) break;
        if (in_module(frame[1])) append(" %p", frame[1]);
        last = frame;
    }
}

static void** interrupted_frame;

// "@0x..." is replaced by the loader with the source lines of that return address, and of the calls
// around it, for which there is a line at the end.
void fail(const char* format, ...) {
    char text[2048];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    message[0] = 0;
    append("%s", text);
    if (current) {
        Index3 b = current->block->index, t = current->thread_index;
        bool located = strstr(text, "@0x");
        if (!located && current->where.file)
            append(" at %s:%d", current->where.file, current->where.line);
        if (!located && current->caller) append(" @%p", current->caller);
        append(" [block (%u,%u,%u), thread (%u,%u,%u) = warp %d lane %d]", b.x, b.y, b.z, t.x, t.y,
               t.z, current->warp, current->lane);
    }
    if (issued) append(" (asynchronous operation issued at %s:%d)", issued->file, issued->line);
    issued = nullptr;
    void** frame = interrupted_frame ? interrupted_frame : (void**)__builtin_frame_address(0);
    if (current) append_calls(*current, frame);
    siglongjmp(launch_failed, 1);
}

// Where the interrupted thread was, if that is in the kernel and not in the runtime.
static const void* interrupted_at(void* context) {
    const greg_t* registers = ((ucontext_t*)context)->uc_mcontext.gregs;
    interrupted_frame = (void**)registers[REG_RBP];
    char* at = (char*)registers[REG_RIP];
    return in_module(at) ? at + 1 : current ? current->caller : nullptr;
}

static void on_signal(int signal, siginfo_t* info, void* context) {
    const char* name = signal == SIGSEGV ? "SIGSEGV" : signal == SIGBUS ? "SIGBUS" : "SIGFPE";
    const void* at = interrupted_at(context);
    char* address = (char*)info->si_addr;
    if (current && address >= current->stack && address < current->stack + PAGE)
        fail("stack overflow: more than %zu KB of local arrays, or endless recursion @%p",
             STACK >> 10, at);
    if (signal == SIGFPE) fail("integer division by zero @%p", at);
    if (signal == SIGILL) fail("MISALIGNED: access to a type that has to be aligned @%p", at);
    fail("OUT OF BOUNDS: %s at address %p (guard page, wild pointer, misaligned vector) @%p", name,
         address, at);
}

static void on_timer(int, siginfo_t*, void* context) {
    if (++ticks_without_switch >= STUCK_SECONDS)
        fail("a thread ran %d s without synchronisation: endless, or waiting on plain memory @%p",
             STUCK_SECONDS, interrupted_at(context));
    if (++ticks >= LAUNCH_SECONDS)
        fail("a launch ran %d s: it never ends, or is too large", LAUNCH_SECONDS);
}

// ---------------------------------------------------------------------------- switching
// Saves the callee-saved registers on the old stack and takes up the new one where it stopped.
asm(R"(
.text
.local emu_switch
emu_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
)");
extern "C" void emu_switch(void** save, void* to);

void block_here(const char* why) {
    current->state = BLOCKED;
    current->waits_in = why;
    emu_switch(&current->stack_pointer, scheduler_stack);
}
void yield_here() {
    current->state = READY;
    ready.push_back(current);
    emu_switch(&current->stack_pointer, scheduler_stack);
}
void wake(Fiber& fiber) {
    fiber.state = READY;
    ready.push_back(&fiber);
}

static void complete_barrier(Block& block, NamedBarrier& barrier);

static void fiber_main() {
    kernel(kernel_arguments);
    Block& block = *current->block;
    leave_collectives();
    finish_copies_of(*current);
    current->state = DONE;
    futile_polls = 0;
    block.alive--;
    for (auto& barrier : block.barriers) complete_barrier(block, barrier);
    emu_switch(&current->stack_pointer, scheduler_stack);
    abort();
}

// ---------------------------------------------------------------------------- polling
static u64 memory_value(const volatile void* address, int bytes) {
    u64 value = 0;
    memcpy(&value, (const void*)address, bytes);
    return value;
}
// A thread that reads the same value from the same address again is waiting for another thread:
// it is put aside until that memory changes.
static void poll(const void* address, int bytes, u64 value) {
    if (current->polled != address || current->polled_value != value) {
        current->polled = address;
        current->polled_value = value;
        current->polled_bytes = bytes;
        futile_polls = 0;
        return;
    }
    current->state = POLLING;
    current->waits_in = "a loop polling memory";
    polling.push_back(current);
    emu_switch(&current->stack_pointer, scheduler_stack);
}
extern "C" void emu_poll(const void* address, int bytes, u64 value) { poll(address, bytes, value); }
extern "C" void emu_yield(emu_where where) {
    ENTER(where);
    current->state = POLLING;
    current->polled = nullptr;
    current->waits_in = "a waiting loop";
    polling.push_back(current);
    emu_switch(&current->stack_pointer, scheduler_stack);
}
static void wake_pollers(bool all) {
    for (size_t n = polling.size(); n--;) {
        Fiber* fiber = polling.front();
        polling.pop_front();
        bool changed = fiber->polled &&
                       memory_value(fiber->polled, fiber->polled_bytes) != fiber->polled_value;
        if (all || changed)
            wake(*fiber);
        else
            polling.push_back(fiber);
    }
}

// ---------------------------------------------------------------------------- block barriers
// A barrier of the whole block does not wait for threads that have exited. Counts are in whole
// warps: lanes that never existed count as arrived.
static void complete_barrier(Block& block, NamedBarrier& barrier) {
    if (!barrier.arrived) return;
    int full = (block.fibers.size() + 31) / 32 * 32, expected = barrier.count;
    if (expected == full) expected = block.fibers.size();
    if (barrier.whole_block) expected = block.alive;
    if (barrier.arrived < expected) return;
    if (checking) synchronise(block, barrier.all, barrier.waiting);
    std::vector<int> waiting = std::move(barrier.waiting);
    for (int thread : waiting) block.fibers[thread].votes = barrier.votes;
    u32 generation = barrier.generation + 1;
    barrier = NamedBarrier();
    barrier.generation = generation;
    for (int thread : waiting)
        if (block.fibers[thread].state == BLOCKED) wake(block.fibers[thread]);
}
static void arrive(int id, int count, bool wait, bool vote) {
    Block& block = *current->block;
    NamedBarrier& barrier = block.barriers[id & 15];
    stats.barriers++;
    bool whole_block = !count;
    if (!count) count = (block.fibers.size() + 31) / 32 * 32;
    if (id < 0 || id > 15 || count % 32 || count < 32)
        fail("barrier %d with %d threads: ids go from 0 to 15, counts are multiples of 32", id,
             count);
    int full = (block.fibers.size() + 31) / 32 * 32;
    if (count > full) fail("barrier %d expects %d threads, the block has %d", id, count, full);
    if (!barrier.arrived) {
        barrier.count = count;
        barrier.whole_block = whole_block;
        barrier.where = current->where;
    }
    if (barrier.count != count)
        fail("barrier %d used with counts %d and %d (the other at %s:%d)", id, count, barrier.count,
             barrier.where.file, barrier.where.line);
    if (wait && id == 0 && count == full && !(barrier.where == current->where))
        fail("DIVERGENT BARRIER: __syncthreads while other threads wait in the one at %s:%d",
             barrier.where.file, barrier.where.line);
    for (int thread : barrier.all)
        if (thread == current->id) fail("barrier %d: thread arrives twice in one phase", id);
    u32 generation = barrier.generation;
    barrier.arrived++;
    barrier.all.push_back(current->id);
    if (wait) barrier.waiting.push_back(current->id);
    barrier.votes += vote;
    complete_barrier(block, barrier);
    if (wait && block.barriers[id].generation == generation)
        block_here(id ? "a named barrier" : "__syncthreads");
}
extern "C" void emu_barrier(int id, int count, int wait, emu_where where) {
    ENTER(where);
    arrive(id, count, wait, false);
}
// How many of those that meet have voted.
extern "C" int emu_barrier_vote(int id, int count, int vote, emu_where where) {
    ENTER(where);
    arrive(id, count, true, vote != 0);
    return current->votes;
}
extern "C" int emu_barrier_reduce(int predicate, int kind, emu_where where) {
    ENTER(where);
    arrive(0, 0, true, predicate != 0);
    int count = current->votes, all = current->block->fibers.size();
    return kind == 0 ? count : kind == 1 ? count > 0 : count == all;
}

// ---------------------------------------------------------------------------- identity
extern "C" Index3 emu_thread_index() { return current->thread_index; }
extern "C" Index3 emu_block_index() { return current->block->index; }
extern "C" Index3 emu_block_dim() { return block_dim; }
extern "C" Index3 emu_grid_dim() { return grid_dim; }
extern "C" char* emu_shared_memory() { return current->block->shared; }
extern "C" u64 emu_clock() { return stats.switches; }
extern "C" void emu_trap(const char* text, emu_where where) {
    ENTER(where);
    fail("%s", text);
}
extern "C" u32 emu_shared_address(const void* pointer) {
    long offset = (const char*)pointer - current->block->shared;
    if (offset < 0 || offset > (long)shared_bytes)
        fail("address is not in dynamic shared memory @%p", __builtin_return_address(0));
    return SHARED_BASE + offset;
}
extern "C" void* emu_shared_pointer(u32 address) {
    return current->block->shared + (address - SHARED_BASE);
}
char* shared_at(u32 address, u32 bytes, u32 align, const char* what) {
    if (address < SHARED_BASE || address - SHARED_BASE + bytes > shared_bytes)
        fail("OUT OF BOUNDS: %s of %u bytes at shared+%ld (the block has %u)", what, bytes,
             (long)address - SHARED_BASE, shared_bytes);
    if (address % align)
        fail("%s at shared+%u is not aligned to %u bytes", what, address - SHARED_BASE, align);
    return current->block->shared + (address - SHARED_BASE);
}

// ---------------------------------------------------------------------------- blocks
static char* map_pages(size_t bytes) {
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? nullptr : (char*)p;
}
static Block* new_block() {
    Block* block = new Block();
    block->arena = map_pages(ARENA + PAGE);
    block->stacks = map_pages(threads * STACK);
    if (!block->arena || !block->stacks)
        fail("no memory for another block of %zu threads", threads);
    mprotect(block->arena + ARENA, PAGE, PROT_NONE);
    for (size_t i = 0; i < threads; i++) mprotect(block->stacks + i * STACK, PAGE, PROT_NONE);
    // The end lies at a guard page, the start on 1024 bytes, which swizzled tiles rely on.
    block->shared = block->arena + (ARENA - shared_bytes) / 1024 * 1024;
    block->window.begin = block->shared;
    block->window.end = block->shared + shared_bytes;
    block->window.kind = SHARED;
    block->window.read_only = false;
    block->window.cells = nullptr;
    if (checking) block->window.allocate_cells();
    return block;
}
static void delete_block(Block* block) {
    munmap(block->arena, ARENA + PAGE);
    munmap(block->stacks, threads * STACK);
    block->window.free_cells();
    delete block;
}

static void admit(u32 number) {
    if (idle.empty()) idle.push_back(new_block());
    Block& block = *idle.back();
    idle.pop_back();
    resident.push_back(&block);
    stats.blocks++;
    block.number = first_block + number;
    block.index = {number % grid_dim.x, number / grid_dim.x % grid_dim.y,
                   number / grid_dim.x / grid_dim.y};
    block.alive = threads;
    for (auto& barrier : block.barriers) barrier = NamedBarrier();
    block.mbarriers.clear();
    block.channels.clear();
    block.channel_clocks.clear();
    block.copies.clear();
    memset(block.shared, 0xff, shared_bytes);
    if (checking) {
        block.window.forget_accesses();
        std::fill(block.window.written.begin(), block.window.written.end(), 0);
    }
    block.warps.clear();
    block.warps.resize((threads + 31) / 32);
    block.fibers.clear();
    block.fibers.resize(threads);
    for (size_t i = 0; i < threads; i++) {
        Fiber& fiber = block.fibers[i];
        fiber.thread_index = {(u32)i % block_dim.x, (u32)i / block_dim.x % block_dim.y,
                              (u32)i / block_dim.x / block_dim.y};
        fiber.block = &block;
        fiber.id = i;
        fiber.lane = i % 32;
        fiber.warp = i / 32;
        fiber.stack = block.stacks + i * STACK;
        if (checking) {
            fiber.knows.own.assign(threads + block.warps.size(), 0);
            fiber.knows.own[i] = 1;
        }
        block.warps[i / 32].exist |= 1u << (i % 32);
        // A stack on which emu_switch "returns" into fiber_main, aligned as after a call.
        void** top = (void**)(fiber.stack + STACK) - 1;
        *--top = (void*)fiber_main;
        fiber.stack_pointer = top - 6;
        wake(fiber);
    }
}

static void retire(Block& block) {
    finish_copies_of(block);
    u32 number = block.number - first_block;
    if (checking && first_block &&
        std::none_of(block.fibers.begin(), block.fibers.end(),
                     [](const Fiber& fiber) { return fiber.knows.kernels_before; }))
        fail("block %u ends without griddepcontrol.wait: the next kernel might come too early",
             number);
    for (int i = 0; i < 16; i++)
        if (block.barriers[i].arrived)
            fail("block %u ends with %d arrivals on barrier %d (first at %s:%d)", number,
                 block.barriers[i].arrived, i, block.barriers[i].where.file,
                 block.barriers[i].where.line);
    for (auto& [address, barrier] : block.mbarriers)
        if (barrier.bytes)
            fail("block %u ends with the mbarrier at shared+%u expecting %ld more bytes", number,
                 address - SHARED_BASE, barrier.bytes);
    for (size_t w = 0; w + 3 < block.warps.size(); w += 4)
        for (size_t i = 1; i < 4; i++)
            if (block.warps[w + i].wgmma_count != block.warps[w].wgmma_count)
                fail("block %u ends with %u wgmma by warp %zu but %u by warp %zu of its warpgroup",
                     number, block.warps[w].wgmma_count, w, block.warps[w + i].wgmma_count, w + i);
}

[[noreturn]] static void deadlock(bool livelock) {
    message[0] = 0;
    std::map<std::pair<std::string, int>, std::pair<int, Fiber*>> groups;
    int exited = 0;
    for (Block* block : resident)
        for (auto& fiber : block->fibers) {
            if (fiber.state == DONE) {
                exited++;
                continue;
            }
            std::string place = fiber.where.file ? fiber.where.file : "?";
            auto& group = groups[{std::string(fiber.waits_in) + " at " + place, fiber.where.line}];
            if (!group.first++) group.second = &fiber;
        }
    std::string text;
    for (auto& [place, group] : groups) {
        char line[512], caller[32] = "";
        if (group.second->caller) snprintf(caller, sizeof caller, " @%p", group.second->caller);
        snprintf(line, sizeof line, " %d threads (first: block %u thread %d) in %s:%d%s;",
                 group.first, group.second->block->number - first_block, group.second->id,
                 place.first.c_str(), place.second, caller);
        text += line;
    }
    append("DEADLOCK:%s %d threads exited, %zu blocks resident%s", text.c_str(), exited,
           resident.size(), livelock ? " (they poll memory that nobody changes)" : "");
    for (auto& [place, group] :
         groups)  // emu_switch saves the frame last but for its return address
        append_calls(*group.second, (void**)((void**)group.second->stack_pointer)[5]);
    siglongjmp(launch_failed, 1);
}

// A copy, or else the first thread of those that can run.
static u32 first_choice(size_t copies) {
    if (copies) return ready.size();
    u32 first = 0;
    for (u32 i = 1; i < ready.size(); i++)
        if (ready[i]->id < ready[first]->id) first = i;
    return first;
}

static void run_grid() {
    u32 blocks = grid_dim.x * grid_dim.y * grid_dim.z, admitted = 0;
    size_t most = std::max<size_t>(1, MAX_FIBERS / threads);
    size_t wanted = seed > 0 ? 1 + random_below(3) : 1;
    for (;;) {
        while (admitted < blocks && resident.size() < std::min(wanted, most)) admit(admitted++);
        if (resident.empty()) return;
        size_t copies = pending_copies.size();
        if (ready.empty() && !polling.empty()) wake_pollers(false);
        if (ready.empty() && !copies) {
            if (admitted < blocks && resident.size() < most && !polling.empty()) {
                admit(admitted++);
                continue;
            }
            if (polling.empty() || (futile_polls += polling.size()) > FUTILE_POLLS)
                deadlock(!polling.empty());
            wake_pollers(true);
        }
        u32 choice = seed == EAGER ? first_choice(copies)
                     : seed        ? random_below(ready.size() + copies)
                                   : 0;
        if (choice >= ready.size()) {
            auto [block, copy] = pending_copies[choice - ready.size()];
            pending_copies.erase(pending_copies.begin() + (choice - ready.size()));
            current = nullptr;
            run_copy(*block, copy);
            futile_polls = 0;
            continue;
        }
        if (choice) std::swap(ready[choice], ready.front());
        Fiber& fiber = *ready.front();
        ready.pop_front();
        current = &fiber;
        stats.switches++;
        ticks_without_switch = 0;
        emu_switch(&scheduler_stack, fiber.stack_pointer);
        current = nullptr;
        if (!fiber.block->alive) {
            Block* block = fiber.block;
            retire(*block);
            for (size_t i = 0; i < resident.size(); i++)
                if (resident[i] == block) resident.erase(resident.begin() + i);
            idle.push_back(block);
        }
    }
}

// ---------------------------------------------------------------------------- interface to Python
extern "C" const char* emu_message() { return message; }
extern "C" const Stats* emu_stats() { return &stats; }

extern "C" int emu_launch(void (*entry_point)(void**), void** arguments, const u32* grid,
                          const u32* block, u32 shared, int schedule, int check, int follows) {
    first_block = follows ? first_block + grid_dim.x * grid_dim.y * grid_dim.z : 0;
    kernel = entry_point;
    kernel_arguments = arguments;
    grid_dim = {grid[0], grid[1], grid[2]};
    block_dim = {block[0], block[1], block[2]};
    threads = (size_t)block[0] * block[1] * block[2];
    shared_bytes = shared;
    seed = schedule;
    checking = check;
    random_state = 0x9E3779B97F4A7C15ull * (schedule + 1) | 1;
    stats = Stats();
    message[0] = 0;
    issued = nullptr;
    current = nullptr;
    interrupted_frame = nullptr;
    ticks = ticks_without_switch = futile_polls = 0;
    forget_publications();
    for (auto& window : windows)
        if (checking) {
            if (!window.cells) window.allocate_cells();
            if (!follows) window.forget_accesses();
        }

    // Failures inside a thread leave its stack at once, so signals need a stack of their own.
    static char signal_stack[1 << 16];
    stack_t own{signal_stack, 0, sizeof signal_stack}, previous_stack;
    sigaltstack(&own, &previous_stack);
    struct sigaction action{}, timer{}, previous[5];
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    timer.sa_sigaction = on_timer;
    timer.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
    sigaction(SIGSEGV, &action, &previous[0]);
    sigaction(SIGBUS, &action, &previous[1]);
    sigaction(SIGFPE, &action, &previous[2]);
    sigaction(SIGILL, &action, &previous[3]);  // what -fsanitize=alignment finds
    sigaction(SIGVTALRM, &timer, &previous[4]);
    itimerval every_second{{1, 0}, {1, 0}}, off{{0, 0}, {0, 0}};
    setitimer(ITIMER_VIRTUAL, &every_second, nullptr);

    int failed = 0;
    if (!sigsetjmp(launch_failed, 1))
        run_grid();
    else
        failed = 1;

    setitimer(ITIMER_VIRTUAL, &off, nullptr);
    sigaction(SIGSEGV, &previous[0], nullptr);
    sigaction(SIGBUS, &previous[1], nullptr);
    sigaction(SIGFPE, &previous[2], nullptr);
    sigaction(SIGILL, &previous[3], nullptr);
    sigaction(SIGVTALRM, &previous[4], nullptr);
    sigaltstack(&previous_stack, nullptr);
    current = nullptr;
    for (Block* b : resident) delete_block(b);
    for (Block* b : idle) delete_block(b);
    resident.clear();
    idle.clear();
    ready.clear();
    polling.clear();
    pending_copies.clear();
    return failed;
}
