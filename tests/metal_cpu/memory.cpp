// Every load and store of a kernel in check mode ends here, through ThreadSanitizer's calls: bounds,
// races by barrier epochs, uninitialised reads, unwritten outputs. Needs no sanitizer library.
#include "runtime.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Who touched an element, and after how many barriers.
struct Access {
    uint32_t group;  // 0: nobody
    uint16_t thread;
    uint8_t simd;
    bool atomic;
    uint32_t group_epoch, simd_epoch;
    const void* pc;
};

struct Cell {
    Access writer, readers[2];
    bool initialised;
};

namespace {
struct Write {
    char* at;  // null: none is open
    uint32_t bytes;
    uint8_t before[16];
    Access by;
    Region* region;
} open_write;

Access access_here(const Region* region, const void* pc) {
    const Thread& t = current->thread;
    return {group_number,
            uint16_t(t.index),
            uint8_t(t.simd),
            false,
            epochs.group[region->space],
            epochs.simd[t.simd][region->space],
            pc};
}

bool ordered(const Access& before, const Access& now) {
    if (!before.group || (before.atomic && now.atomic)) return true;
    if (before.group != now.group) return false;
    return before.thread == now.thread || before.group_epoch < now.group_epoch ||
           (before.simd == now.simd && before.simd_epoch < now.simd_epoch);
}

[[noreturn]] void race(const Region* r, size_t index, const Access& a, const Access& b, const char* what) {
    fail(b.pc, a.pc, "race: %s[%zu] %s by thread %u (group %u) and thread %u (group %u) without a barrier between",
         r->name, index, what, a.thread, a.group - 1, b.thread, b.group - 1);
}

void remember_reader(Cell& cell, const Access& by) {
    if (ordered(cell.readers[0], by)) {
        cell.readers[0] = by;
    } else if (ordered(cell.readers[1], by) || cell.readers[1].simd == cell.readers[0].simd) {
        cell.readers[1] = by;  // of another simdgroup where there is one: it is ordered with fewer
    }
}

Region* region_of(char* at, uint32_t bytes, bool write, const void* pc) {
    size_t offset = at - arena;
    if (at < arena || offset >= size_t(SLOTS) << SLOT_BITS) return nullptr;  // the thread's own memory
    Region* region = slots[offset >> SLOT_BITS];
    if (!region) fail(pc, nullptr, "out of bounds: far from any buffer");
    if (at < region->base || at + bytes > region->base + region->size)
        fail(pc, nullptr, "out of bounds: %s of %s[%ld], which has %zu elements",
             write ? "write" : "read", region->name, long(at - region->base) / long(region->granule),
             region->size / region->granule);
    return region;
}

void on_read(void* address, uint32_t bytes, const void* pc) {
    flush_write();
    char* at = static_cast<char*>(address);
    Region* region = region_of(at, bytes, false, pc);
    if (!region || !region->cells) return;
    Access by = access_here(region, pc);
    size_t first = (at - region->base) / region->granule;
    size_t last = (at + bytes - 1 - region->base) / region->granule;
    for (size_t i = first; i <= last; i++) {
        Cell& cell = region->cells[i];
        if (!cell.initialised)
            fail(pc, nullptr, "uninitialised: %s[%zu] is read before it is written", region->name, i);
        if (!ordered(cell.writer, by)) race(region, i, cell.writer, by, "written and read");
        for (Access& other : cell.readers)
            if (other.atomic && !ordered(other, by)) race(region, i, other, by, "written and read");
        remember_reader(cell, by);
    }
}

void on_write(void* address, uint32_t bytes, const void* pc) {
    flush_write();
    char* at = static_cast<char*>(address);
    Region* region = region_of(at, bytes, true, pc);
    if (!region) return;
    if (!region->cells) fail(pc, nullptr, "write to the input %s", region->name);
    open_write = {at, bytes, {}, access_here(region, pc), region};
    memcpy(open_write.before, at, bytes);
}

// Reads and writes at once, in order with every other atomic access. What the last writer did before
// is remembered as a reader: plain accesses may race with it, or it was plain itself.
void on_atomic(char* at, uint32_t bytes, const void* pc) {
    flush_write();
    Region* region = region_of(at, bytes, true, pc);
    if (!region || !region->cells) fail(pc, nullptr, "atomic change of what is no output");
    Access by = access_here(region, pc);
    by.atomic = true;
    size_t i = (at - region->base) / region->granule;
    Cell& cell = region->cells[i];
    if (!cell.initialised)
        fail(pc, nullptr, "uninitialised: %s[%zu] is added to before it is written", region->name, i);
    if (!ordered(cell.writer, by)) race(region, i, cell.writer, by, "written and added to");
    for (Access& reader : cell.readers)
        if (!ordered(reader, by)) race(region, i, reader, by, "read and added to");
    const bool same = cell.writer.group == by.group && cell.writer.thread == by.thread;
    if (cell.writer.group && !(cell.writer.atomic && same)) remember_reader(cell, cell.writer);
    cell.writer = by;
}
}  // namespace

// A write is judged when it is done: the same bytes again, as when all lanes store zero, harm nobody.
void flush_write() {
    if (!open_write.at) return;
    Write w = open_write;
    open_write.at = nullptr;
    bool changed = memcmp(w.before, w.at, w.bytes) != 0;
    size_t first = (w.at - w.region->base) / w.region->granule;
    size_t last = (w.at + w.bytes - 1 - w.region->base) / w.region->granule;
    for (size_t i = first; i <= last; i++) {
        Cell& cell = w.region->cells[i];
        if (!changed && cell.initialised) {
            remember_reader(cell, w.by);
            continue;
        }
        if (!ordered(cell.writer, w.by)) race(w.region, i, cell.writer, w.by, "written twice");
        for (Access& reader : cell.readers)
            if (!ordered(reader, w.by)) race(w.region, i, reader, w.by, "read and written");
        cell.writer = w.by;
        cell.readers[0] = cell.readers[1] = {};
        cell.initialised = true;
    }
}

void make_cells(Region* region, bool initialised) {
    size_t count = (region->size + region->granule - 1) / region->granule;
    region->cells = static_cast<Cell*>(calloc(count ? count : 1, sizeof(Cell)));
    for (size_t i = 0; i < count; i++) region->cells[i].initialised = initialised;
    open_write.at = nullptr;
}

void forget_cells(Region* region) {
    memset(region->cells, 0, (region->size + region->granule - 1) / region->granule * sizeof(Cell));
}

void require_written(Region* region) {
    for (size_t i = 0; i < region->size / region->granule; i++)
        if (!region->cells[i].initialised)
            fail(nullptr, nullptr, "unwritten: %s[%zu] is left as it was", region->name, i);
}

#define PC __builtin_return_address(0)
extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
#define ACCESS(n)                                                                                      \
    void __tsan_read##n(void* a) { on_read(a, n, PC); }                                                \
    void __tsan_write##n(void* a) { on_write(a, n, PC); }                                              \
    void __tsan_unaligned_read##n(void* a) { on_read(a, n, PC); }                                      \
    void __tsan_unaligned_write##n(void* a) { on_write(a, n, PC); }                                    \
    void __tsan_read_write##n(void* a) { on_read(a, n, PC), on_write(a, n, PC); }                      \
    void __tsan_unaligned_read_write##n(void* a) { on_read(a, n, PC), on_write(a, n, PC); }
ACCESS(1) ACCESS(2) ACCESS(4) ACCESS(8) ACCESS(16)

void msl_atomic(uintptr_t at, uint32_t bytes) {
    if (checking) on_atomic(reinterpret_cast<char*>(at), bytes, PC);
}

void* __tsan_memcpy(void* to, const void* from, size_t n) {
    for (size_t i = 0; i < n; i++) {
        on_read(const_cast<char*>(static_cast<const char*>(from)) + i, 1, PC);
        on_write(static_cast<char*>(to) + i, 1, PC);
        static_cast<volatile char*>(to)[i] = static_cast<const char*>(from)[i];
    }
    return to;
}
void* __tsan_memset(void* to, int value, size_t n) {
    for (size_t i = 0; i < n; i++) {
        on_write(static_cast<char*>(to) + i, 1, PC);
        static_cast<volatile char*>(to)[i] = char(value);
    }
    return to;
}

struct SourcePlace {
    const char* file;
    uint32_t line, column;
};
#define UNDEFINED(name, what)                                                                          \
    void __ubsan_handle_##name##_abort(const SourcePlace* place) {                                     \
        fail(nullptr, nullptr, what " (line %u, thread %u)", place->line, current->thread.index);      \
    }
UNDEFINED(out_of_bounds, "out of bounds: index of a private or nested array")
UNDEFINED(divrem_overflow, "integer division by zero")
UNDEFINED(type_mismatch_v1, "misaligned: access that is not aligned to its type")
UNDEFINED(float_cast_overflow, "a float does not fit the integer it is converted to")

// 16-bit conversions that x86-64 compilers call; nothing else in the process has them.
static uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
__bf16 __truncsfbf2(float x) {
    uint32_t bits = bits_of(x);
    uint32_t rounded = x != x ? bits | 0x400000 : bits + 0x7FFF + (bits >> 16 & 1);
    return __builtin_bit_cast(__bf16, uint16_t(rounded >> 16));
}
float __extendhfsf2(_Float16 x) {
    uint16_t h = __builtin_bit_cast(uint16_t, x);
    uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
    if (exponent == 31) return __builtin_bit_cast(float, sign | 0x7F800000 | fraction << 13);
    if (exponent == 0) {
        float small = float(fraction) * 0x1p-24f;
        return sign ? -small : small;
    }
    return __builtin_bit_cast(float, sign | (exponent + 112) << 23 | fraction << 13);
}
_Float16 __truncsfhf2(float x) {
    uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, size = bits & 0x7FFFFFFF;
    uint32_t half;
    if (size > 0x7F800000) half = 0x7E00;
    else if (size >= 0x477FF000) half = 0x7C00;  // rounds beyond 65504
    else if (size < 0x38800000)  // subnormal: let the addition round
        half = bits_of(__builtin_bit_cast(float, size) + 0.5f) - bits_of(0.5f);
    else half = (size - 0x38000000 + 0xFFF + (size >> 13 & 1)) >> 13;
    return __builtin_bit_cast(_Float16, uint16_t(sign | half));
}
}
