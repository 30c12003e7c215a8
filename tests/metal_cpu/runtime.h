// Shared by the two halves of the runtime: fibers.cpp runs threadgroups, memory.cpp watches accesses.
#pragma once
#include <stddef.h>
#include <stdint.h>

enum Space { DEVICE = 0, THREADGROUP = 1 };
enum State : uint8_t { RUNNABLE, AT_COLLECTIVE, AT_SIMD_BARRIER, AT_GROUP_BARRIER, RETURNED };

// What a kernel may ask about a thread; shim/thread.h has the same struct.
struct Thread {
    uint32_t position_in_grid[3], group[3], position_in_group[3], group_size[3], grid[3], groups[3];
    uint32_t index, lane, simd, simds;
};

struct Fiber {
    void* stack_pointer;
    Thread thread;
    State state;
    int flags, line, column;  // of the barrier or collective it waits at
    uint32_t bytes;
    alignas(16) uint8_t posted[16];
};

// One buffer or threadgroup variable; it has an arena slot of its own.
struct Region {
    char* base;
    size_t size;
    uint32_t granule;  // bytes of an element
    Space space;
    bool writable;
    char name[48];
    struct Cell* cells;  // one an element, of what can be written
};

// Bit i of a barrier's flags orders memory of Space i.
struct Epochs {
    uint32_t group[2], simd[32][2];
};

constexpr int SLOT_BITS = 26, SLOTS = 48, MAX_THREADS = 1024, THREADGROUP_LIMIT = 32768;

extern char* arena;
extern Region* slots[SLOTS];
extern Fiber* current;
extern Epochs epochs;
extern uint32_t group_number;
extern bool checking;

// Ends the launch with a message; `pcs` of the kernel become lines of its source.
[[noreturn]] void fail(const void* pc, const void* earlier, const char* format, ...)
    __attribute__((format(printf, 3, 4)));
void flush_write();
void make_cells(Region* region, bool initialised);
void forget_cells(Region* region);
void require_written(Region* region);
