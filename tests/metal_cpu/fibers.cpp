// Runs a kernel's threads as fibers, one threadgroup after another, with barriers, SIMD collectives
// and Metal's limits. The order of threads is a parameter: a correct kernel gives the same bits in all.
#include "runtime.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

char* arena;
Region* slots[SLOTS];
Fiber* current;
Epochs epochs;
uint32_t group_number;
bool checking;

namespace {
constexpr size_t STACK = 128 << 10, PAGE = 4096, SLOT = size_t(1) << SLOT_BITS;
struct Posts {
    alignas(16) uint8_t values[32][16];
    uint32_t mask;
};
struct HostBuffer {
    void* data;
    uint64_t size;
    uint32_t granule, misalignment, writable, initialised;
    char name[48];
};
typedef void (*Entry)(void* const*, const Thread*);

Fiber fibers[MAX_THREADS];
Posts posts[32];
char* stacks;
void* scheduler_stack;
Entry entry;
void* bases[SLOTS];
int buffers, used_slots;
Region regions[SLOTS];
size_t threadgroup_bytes;
char text[1024];
const void* pcs[2];
bool failed;
uint64_t random_state;
int schedule;

uint32_t random_below(uint32_t n) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return uint32_t(random_state >> 33) % n;
}

extern "C" void msl_switch(void** from, void* to);
asm(R"(
.text
.globl msl_switch
msl_switch:
    push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp
    ret
)");

void to_scheduler() { msl_switch(&current->stack_pointer, scheduler_stack); }

void fiber_body() {
    entry(bases, &current->thread);
    if (checking) flush_write();
    current->state = RETURNED;
    to_scheduler();
    __builtin_trap();
}

void prepare(Fiber* fiber, int index) {
    void** top = reinterpret_cast<void**>(stacks + (index + 1) * STACK - 64);
    *--top = nullptr;  // the return address of fiber_body, so that its stack is aligned
    *--top = reinterpret_cast<void*>(fiber_body);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    fiber->stack_pointer = top;
    fiber->state = RUNNABLE;
}

void run(Fiber* fiber) {
    current = fiber;
    msl_switch(&scheduler_stack, fiber->stack_pointer);
}

const char* place(State state) {
    return state == AT_COLLECTIVE     ? "a SIMD function"
           : state == AT_SIMD_BARRIER ? "a simdgroup barrier"
           : state == RETURNED        ? "the end"
                                      : "a threadgroup barrier";
}

// The thread that is elsewhere than `first`, or none. Who returned counts only for `all`.
Fiber* stray(Fiber* first, Fiber* begin, Fiber* end, bool all) {
    for (Fiber* f = begin; f < end; f++) {
        if (f->state == RETURNED && !all) continue;
        if (f->state != first->state || f->line != first->line || f->column != first->column)
            return f;
    }
    return nullptr;
}

[[noreturn]] void diverged(const char* what, Fiber* a, Fiber* b) {
    fail(nullptr, nullptr, "%s divergence: thread %u is at %s (line %d), thread %u at %s (line %d)", what,
         a->thread.index, place(a->state), a->line, b->thread.index, place(b->state), b->line);
}

bool release_simd(Fiber* begin, Fiber* end) {
    Fiber* first = begin;
    while (first < end && first->state == RETURNED) first++;
    if (first == end) return false;
    for (Fiber* f = first; f < end; f++)
        if (f->state != RETURNED && f->state != AT_GROUP_BARRIER) first = f;
    if (first->state == AT_GROUP_BARRIER) return false;
    if (Fiber* other = stray(first, begin, end, false)) diverged("SIMD", first, other);
    uint32_t simd = first->thread.simd;
    if (first->state == AT_SIMD_BARRIER)
        for (int space = 0; space < 2; space++) epochs.simd[simd][space] += first->flags >> space & 1;
    posts[simd].mask = 0;
    for (Fiber* f = begin; f < end; f++) {
        if (f->state == RETURNED) continue;
        if (f->state == AT_COLLECTIVE) memcpy(posts[simd].values[f - begin], f->posted, f->bytes);
        posts[simd].mask |= 1u << (f - begin);
        f->state = RUNNABLE;
    }
    return true;
}

void run_lanes(Fiber* begin, int count) {
    for (int i = 0; i < count; i++) {
        int lane = schedule == 1 ? count - 1 - i : i;
        if (begin[lane].state == RUNNABLE) run(begin + lane);
    }
}

void run_lanes_shuffled(Fiber* begin, int count) {
    int order[32];
    for (int i = 0; i < count; i++) {
        int at = random_below(i + 1);
        order[i] = order[at];
        order[at] = i;
    }
    for (int i = 0; i < count; i++)
        if (begin[order[i]].state == RUNNABLE) run(begin + order[i]);
}

void run_group(int count) {
    int simds = (count + 31) / 32;
    for (;;) {
        int start = schedule > 1 ? random_below(simds) : 0;
        for (int i = 0; i < simds; i++) {
            int simd = schedule == 1 ? simds - 1 - i : (i + start) % simds;
            Fiber* begin = fibers + 32 * simd;
            int lanes = count - 32 * simd < 32 ? count - 32 * simd : 32;
            do
                schedule > 1 ? run_lanes_shuffled(begin, lanes) : run_lanes(begin, lanes);
            while (release_simd(begin, begin + lanes));
        }
        Fiber* waiting = nullptr;
        for (Fiber* f = fibers; f < fibers + count; f++)
            if (f->state == AT_GROUP_BARRIER) waiting = f;
        if (!waiting) return;
        if (Fiber* other = stray(waiting, fibers, fibers + count, true))
            diverged("barrier", waiting, other);
        for (int space = 0; space < 2; space++) epochs.group[space] += waiting->flags >> space & 1;
        for (Fiber* f = fibers; f < fibers + count; f++) f->state = RUNNABLE;
    }
}

// Memory that ends at a page which cannot be touched, `misalignment` bytes off a 16-byte boundary.
char* place_in_slot(int slot, size_t size, size_t misalignment) {
    if (slot >= SLOTS || size + SLOT / 4 > SLOT)
        fail(nullptr, nullptr, "the harness has no room for %zu bytes", size);
    char* end = arena + slot * SLOT + SLOT / 2 + SLOT / 4;
    char* base = end - ((size + misalignment + 15) / 16 * 16 - misalignment);
    char* page = reinterpret_cast<char*>(uintptr_t(base) / PAGE * PAGE);
    if (mprotect(page, end - page, PROT_READ | PROT_WRITE))
        fail(nullptr, nullptr, "mprotect failed");
    memset(page, 0xFF, end - page);
    return base;
}

void add_region(int slot, const char* name, size_t size, uint32_t granule, Space space, bool writable) {
    Region* region = &regions[slot];
    *region = {reinterpret_cast<char*>(bases[slot]), size, granule, space, writable, {}, nullptr};
    strncpy(region->name, name, sizeof region->name - 1);
    slots[slot] = region;
}

void start_group(const uint32_t grid[3], const uint32_t size[3], const uint32_t at[3]) {
    uint32_t here[3];
    for (int d = 0; d < 3; d++)
        here[d] = grid[d] - at[d] * size[d] < size[d] ? grid[d] - at[d] * size[d] : size[d];
    int count = here[0] * here[1] * here[2];
    for (int slot = buffers; slot < used_slots; slot++) {
        memset(regions[slot].base, 0xFF, regions[slot].size);
        if (checking) forget_cells(&regions[slot]);
    }
    for (int i = 0; i < count; i++) {
        Thread& t = fibers[i].thread;
        uint32_t in[3] = {i % here[0], i / here[0] % here[1], i / (here[0] * here[1])};
        for (int d = 0; d < 3; d++) {
            t.position_in_grid[d] = at[d] * size[d] + in[d];
            t.group[d] = at[d], t.position_in_group[d] = in[d], t.group_size[d] = here[d];
            t.grid[d] = grid[d], t.groups[d] = (grid[d] + size[d] - 1) / size[d];
        }
        t.index = i, t.lane = i % 32, t.simd = i / 32, t.simds = (count + 31) / 32;
        prepare(&fibers[i], i);
    }
    group_number++;
    run_group(count);
}

// The scheduler itself runs on a fiber-sized stack of its own, so that `fail` can leave it, too.
struct Launch {
    const HostBuffer* host;
    const uint32_t *grid, *size;
} launch;
void* caller_stack;

void run_launch() {
    for (int i = 0; i < buffers; i++) {
        const HostBuffer& b = launch.host[i];
        bases[i] = place_in_slot(i, b.size, b.misalignment);
        if (b.initialised) memcpy(bases[i], b.data, b.size);
        add_region(i, b.name, b.size, b.granule, DEVICE, b.writable);
        if (checking && b.writable) make_cells(&regions[i], b.initialised);
    }
    const uint32_t *grid = launch.grid, *size = launch.size;
    uint32_t groups[3], at[3];
    for (int d = 0; d < 3; d++) groups[d] = (grid[d] + size[d] - 1) / size[d];
    uint32_t total = groups[0] * groups[1] * groups[2];
    uint32_t offset = schedule > 1 ? random_below(total) : 0;
    for (uint32_t i = 0; i < total; i++) {
        uint32_t group = schedule == 1 ? total - 1 - i : (i + offset) % total;
        at[0] = group % groups[0], at[1] = group / groups[0] % groups[1];
        at[2] = group / (groups[0] * groups[1]);
        start_group(grid, size, at);
    }
    for (int i = 0; i < buffers; i++) {
        if (!regions[i].writable) continue;
        if (checking) require_written(&regions[i]);
        memcpy(launch.host[i].data, regions[i].base, regions[i].size);
    }
}

void scheduler_body() {
    run_launch();
    void* unused;
    msl_switch(&unused, caller_stack);
    __builtin_trap();
}

void on_signal(int number, siginfo_t* info, void* context) {
    auto pc = reinterpret_cast<const void*>(static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]);
    if (number == SIGVTALRM) fail(pc, nullptr, "the time limit passed: an endless loop?");
    if (number == SIGFPE) fail(pc, nullptr, "integer division by zero");
    fail(pc, nullptr, "access to memory that is nobody's, at %p", info->si_addr);
}

constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGVTALRM};
struct sigaction previous[4];
stack_t previous_stack;
timer_t timer;

void watch_signals(double seconds) {
    static char stack[64 << 10];
    stack_t alternate = {stack, 0, sizeof stack};
    sigaltstack(&alternate, &previous_stack);
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < 4; i++) sigaction(SIGNALS[i], &action, &previous[i]);
    sigevent event = {};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = SIGVTALRM;
    event._sigev_un._tid = int(syscall(SYS_gettid));
    timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer);
    itimerspec limit = {{0, 0}, {time_t(seconds), long((seconds - time_t(seconds)) * 1e9)}};
    timer_settime(timer, 0, &limit, nullptr);
}

void unwatch_signals() {
    timer_delete(timer);
    for (int i = 0; i < 4; i++) sigaction(SIGNALS[i], &previous[i], nullptr);
    sigaltstack(&previous_stack, nullptr);
}

void wait_at(State state, int flags, int line, int column) {
    if (checking) flush_write();
    current->state = state, current->flags = flags, current->line = line, current->column = column;
    to_scheduler();
}
}  // namespace

void fail(const void* pc, const void* earlier, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    pcs[0] = pc, pcs[1] = earlier, failed = true;
    void* unused;
    msl_switch(&unused, caller_stack);
    __builtin_trap();
}

extern "C" {
void msl_barrier(int simd, int flags, int line, int column) {
    wait_at(simd ? AT_SIMD_BARRIER : AT_GROUP_BARRIER, flags, line, column);
}

const Posts* msl_gather(const void* value, uint32_t bytes, int line, int column) {
    memcpy(current->posted, value, bytes);
    current->bytes = bytes;
    wait_at(AT_COLLECTIVE, 0, line, column);
    return &posts[current->thread.simd];
}

const Thread* msl_current() { return &current->thread; }

void msl_fail(const char* what, int line) {
    fail(nullptr, nullptr, "%s (line %d, thread %u)", what, line, current->thread.index);
}

void* msl_threadgroup_variable(int id, const char* name, size_t size, size_t granule) {
    int slot = buffers + id;
    if (slot < SLOTS && slots[slot]) return bases[slot];
    threadgroup_bytes += (size + 15) / 16 * 16;
    if (threadgroup_bytes > THREADGROUP_LIMIT)
        fail(nullptr, nullptr, "%zu bytes of threadgroup memory; Metal has %d", threadgroup_bytes,
             THREADGROUP_LIMIT);
    bases[slot] = place_in_slot(slot, size, 0);
    add_region(slot, name, size, granule, THREADGROUP, true);
    if (checking) make_cells(&regions[slot], false);
    if (slot >= used_slots) used_slots = slot + 1;
    return bases[slot];
}

// Returns 0, or 1 with a message and up to two code addresses.
int msl_launch(Entry kernel, const HostBuffer* host, int count, const uint32_t* grid,
               const uint32_t* size, int check, int order, double seconds, char* message,
               const void** addresses) {
    static char* scheduler = nullptr;
    if (!arena) {
        auto reserve = [](size_t bytes) {
            return static_cast<char*>(
                mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        };
        arena = reserve(SLOTS * SLOT);
        stacks = reserve(MAX_THREADS * STACK);
        scheduler = reserve(STACK);
        if (arena == MAP_FAILED || stacks == MAP_FAILED || scheduler == MAP_FAILED) abort();
        for (int i = 0; i < MAX_THREADS; i++)  // the lowest page of every stack stays closed
            if (mprotect(stacks + i * STACK + PAGE, STACK - PAGE, PROT_READ | PROT_WRITE)) abort();
        if (mprotect(scheduler, STACK, PROT_READ | PROT_WRITE)) abort();
    }
    entry = kernel, buffers = used_slots = count, checking = check, schedule = order;
    random_state = 977 * order + 1, threadgroup_bytes = 0, group_number = 0, failed = false;
    launch = {host, grid, size};
    memset(slots, 0, sizeof slots);
    memset(&epochs, 0, sizeof epochs);
    watch_signals(seconds);
    void** top = reinterpret_cast<void**>(scheduler + STACK - 64);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(scheduler_body);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    msl_switch(&caller_stack, top);
    unwatch_signals();
    for (int i = 0; i < SLOTS; i++) {
        if (!slots[i]) continue;
        free(regions[i].cells);
        madvise(arena + i * SLOT, SLOT, MADV_DONTNEED);
        mprotect(arena + i * SLOT, SLOT, PROT_NONE);
    }
    strcpy(message, failed ? text : "");
    addresses[0] = failed ? pcs[0] : nullptr, addresses[1] = failed ? pcs[1] : nullptr;
    return failed;
}
}
