// Atomic addition in device memory. Threads of a run never interrupt one another, so the plain
// operation is atomic; check mode is told that this one is meant to be.
#pragma once
extern "C" void msl_atomic(uintptr_t at, uint bytes);

namespace metal {
enum memory_order { memory_order_relaxed };
template <class T> struct atomic {
    static_assert(is_same_v<T, float> || is_same_v<T, int> || is_same_v<T, uint>, "no such atomic");
    T value;
};
template <class T>
UNSEEN T atomic_fetch_add_explicit(device atomic<T>* to, decltype(T()) x, memory_order) {
    msl_atomic(uintptr_t(to), sizeof(T));
    T before = to->value;
    to->value = before + x;
    return before;
}
}  // namespace metal
using namespace metal;
