// Barriers, SIMD functions and simdgroup matrices, all made of two calls of the runtime. Call sites
// are told apart by line and column: threads must meet at the same one.
#pragma once
#define HERE int line = __builtin_LINE(), int column = __builtin_COLUMN()
#define UNSEEN __attribute__((no_sanitize("thread")))

struct msl_posts {
    alignas(16) uchar values[32][16];
    uint mask;
};
struct msl_thread {
    uint position_in_grid[3], group[3], position_in_group[3], group_size[3], grid[3], groups[3];
    uint index, lane, simd, simds;
};
extern "C" {
void msl_barrier(int simd, int flags, int line, int column);
const msl_posts* msl_gather(const void* value, uint bytes, int line, int column);
[[noreturn]] void msl_fail(const char* what, int line);
const msl_thread* msl_current();
}

namespace metal {
enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
inline mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
inline void threadgroup_barrier(mem_flags flags, HERE) { msl_barrier(0, int(flags), line, column); }
inline void simdgroup_barrier(mem_flags flags, HERE) { msl_barrier(1, int(flags), line, column); }

template <class T> UNSEEN T posted(const msl_posts* posts, uint lane, int line) {
    if (lane > 31 || !(posts->mask >> lane & 1)) msl_fail("SIMD function reads a lane that is not there", line);
    T x;
    __builtin_memcpy_inline(&x, posts->values[lane], sizeof(T));
    return x;
}
template <class T> UNSEEN const msl_posts* gather(T x, int line, int column) {
    static_assert(sizeof(T) <= 16, "too wide for a SIMD function");
    return msl_gather(&x, sizeof(T), line, column);
}
// The tree Apple's reductions are said to be lowered to: partners at distance 1, 2, 4, 8, 16.
template <class T, class F> UNSEEN T reduce(T x, F both, int line, int column) {
    static_assert(sizeof(T) <= 4 && !is_same_v<T, bool>, "Metal reduces 8 to 32 bits, no bool");
    const msl_posts* posts = gather(x, line, column);
    T lanes[32];
    for (uint i = 0; i < 32; i++) lanes[i] = posts->mask >> i & 1 ? posted<T>(posts, i, line) : T(0);
    if (posts->mask != 0xFFFFFFFFu) {  // the last simdgroup of a small threadgroup
        bool any = false;
        T sum = T(0);
        for (uint i = 0; i < 32; i++)
            if (posts->mask >> i & 1) sum = any ? both(sum, lanes[i]) : lanes[i], any = true;
        return sum;
    }
    for (uint step = 1; step < 32; step *= 2)
        for (uint i = 0; i < 32; i += 2 * step) lanes[i] = both(lanes[i], lanes[i + step]);
    return lanes[0];
}
template <class T> T simd_sum(T x, HERE) { return reduce(x, [](T a, T b) { return T(a + b); }, line, column); }
template <class T> T simd_max(T x, HERE) { return reduce(x, [](T a, T b) { return a < b ? b : a; }, line, column); }
template <class T> T simd_min(T x, HERE) { return reduce(x, [](T a, T b) { return b < a ? b : a; }, line, column); }

template <class T> T simd_shuffle(T x, ushort lane, HERE) { return posted<T>(gather(x, line, column), lane, line); }
template <class T> T simd_broadcast(T x, ushort lane, HERE) { return simd_shuffle(x, lane, line, column); }
template <class T> T simd_broadcast_first(T x, HERE) {
    const msl_posts* posts = gather(x, line, column);
    return posted<T>(posts, __builtin_ctz(posts->mask), line);
}
template <class T> T simd_shuffle_xor(T x, ushort mask, HERE) {
    return posted<T>(gather(x, line, column), msl_current()->lane ^ mask, line);
}
template <class T> T simd_shuffle_down(T x, ushort delta, HERE) {
    uint lane = msl_current()->lane;
    const msl_posts* posts = gather(x, line, column);
    return lane + delta > 31 ? x : posted<T>(posts, lane + delta, line);
}
template <class T> T simd_shuffle_up(T x, ushort delta, HERE) {
    uint lane = msl_current()->lane;
    const msl_posts* posts = gather(x, line, column);
    return lane < delta ? x : posted<T>(posts, lane - delta, line);
}

// Two elements of an 8x8 matrix a lane: row and first column as MLX's own kernels rely on them.
template <class T, int R, int C> struct simdgroup_matrix {
    static_assert(R == 8 && C == 8, "Metal has 8x8 simdgroup matrices");
    static_assert(is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>, "no such simdgroup matrix");
    vec<T, 2> pair;
    simdgroup_matrix() = default;
    explicit simdgroup_matrix(T x) : pair{x, x} {}
    vec<T, 2>& thread_elements() { return pair; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class T, int C, int R = C> simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T x) {
    return simdgroup_matrix<T, C, R>(x);
}

inline uint element_row(uint lane) { return (lane / 4 & 4) + lane / 2 % 4; }
inline uint element_column(uint lane) { return (lane / 4 & 2) * 2 + lane % 2 * 2; }
constexpr uint element_lane(uint row, uint column) {
    return (row & 4) << 2 | (column & 4) << 1 | (row & 3) << 1 | (column >> 1 & 1);
}

struct matrix_address {
    uintptr_t at;
    ulong stride;
};
UNSEEN inline void require_uniform(uintptr_t at, ulong stride, int line, int column) {
    const msl_posts* posts = gather(matrix_address{at, stride}, line, column);
    for (uint lane = 0; lane < 32; lane++) {
        matrix_address other = posted<matrix_address>(posts, lane, line);
        if (other.at != at || other.stride != stride) msl_fail("simdgroup matrix at different addresses", line);
    }
}
#ifdef MSL_CHECK
#define REQUIRE_UNIFORM require_uniform(uintptr_t(from), stride, line, column)
#else
#define REQUIRE_UNIFORM
#endif
// Each lane touches its own two elements, so that the accesses are seen as whose they are.
#define MATRIX_MEMORY(SPACE)                                                                           \
    template <class T>                                                                                 \
    void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const SPACE T* from, ulong stride = 8,           \
                        ulong2 origin = ulong2(0), bool transpose = false, HERE) {                     \
        REQUIRE_UNIFORM;                                                                               \
        uint lane = msl_current()->lane, row = element_row(lane), col = element_column(lane);            \
        from += origin.y * stride + origin.x;                                                          \
        m.pair.x = transpose ? from[col * stride + row] : from[row * stride + col];                    \
        m.pair.y = transpose ? from[(col + 1) * stride + row] : from[row * stride + col + 1];          \
    }                                                                                                  \
    template <class T>                                                                                 \
    void simdgroup_store(simdgroup_matrix<T, 8, 8> m, SPACE T* from, ulong stride = 8,                 \
                         ulong2 origin = ulong2(0), bool transpose = false, HERE) {                    \
        REQUIRE_UNIFORM;                                                                               \
        uint lane = msl_current()->lane, row = element_row(lane), col = element_column(lane);            \
        from += origin.y * stride + origin.x;                                                          \
        from[transpose ? col * stride + row : row * stride + col] = m.pair.x;                          \
        from[transpose ? (col + 1) * stride + row : row * stride + col + 1] = m.pair.y;                \
    }
MATRIX_MEMORY(device)
MATRIX_MEMORY(threadgroup)

// Sums in float, rounded once; Metal mixes no element types.
template <class T>
UNSEEN void simdgroup_multiply_accumulate(simdgroup_matrix<T, 8, 8>& d, simdgroup_matrix<T, 8, 8> a,
                                          simdgroup_matrix<T, 8, 8> b, simdgroup_matrix<T, 8, 8> c, HERE) {
    struct Pairs {
        float2 a, b;
    } mine = {__builtin_convertvector(a.pair, float2), __builtin_convertvector(b.pair, float2)};
    uint lane = msl_current()->lane, row = element_row(lane), col = element_column(lane);
    const msl_posts* posts = gather(mine, line, column);
    if (posts->mask != 0xFFFFFFFFu) msl_fail("simdgroup matrix of an incomplete simdgroup", line);
    float2 sum = __builtin_convertvector(c.pair, float2);
    for (uint k = 0; k < 8; k += 2) {
        const Pairs* left = (const Pairs*)posts->values[element_lane(row, k)];
        for (uint j = 0; j < 2; j++)
            sum += left->a[j] * ((const Pairs*)posts->values[element_lane(k + j, col)])->b;
    }
    d.pair = __builtin_convertvector(sum, vec<T, 2>);
}
template <class T>
void simdgroup_multiply(simdgroup_matrix<T, 8, 8>& d, simdgroup_matrix<T, 8, 8> a,
                        simdgroup_matrix<T, 8, 8> b, HERE) {
    simdgroup_multiply_accumulate(d, a, b, simdgroup_matrix<T, 8, 8>(T(0)), line, column);
}
}  // namespace metal
using namespace metal;
