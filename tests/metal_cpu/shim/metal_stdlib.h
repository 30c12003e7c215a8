// What MSL has beyond C++17, as far as this project's kernels and the calibration kernels use it.
// Address spaces are OpenCL's type attributes: enforced by the compiler, ordinary memory in the code.
#pragma once
#define device __attribute__((opencl_global))
#define threadgroup __attribute__((opencl_local))
#define constant const __attribute__((opencl_constant))
#define thread
#define kernel

typedef __SIZE_TYPE__ size_t;
typedef __UINTPTR_TYPE__ uintptr_t;
typedef unsigned char uchar, uint8_t;
typedef signed char int8_t;
typedef unsigned short ushort, uint16_t;
typedef short int16_t;
typedef unsigned int uint, uint32_t;
typedef int int32_t;
typedef unsigned long ulong, uint64_t;
typedef long int64_t;
typedef _Float16 half, float16_t;
typedef __bf16 bfloat, bfloat16_t;
constexpr half operator""h(long double x) { return half(x); }
#define double metal_has_no_double
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")

extern "C" {
float expf(float), exp2f(float), logf(float), log2f(float), sinf(float), cosf(float), powf(float, float);
float tanhf(float), floorf(float), ceilf(float), sqrtf(float), fmaf(float, float, float);
void* msl_threadgroup_variable(int id, const char* name, size_t size, size_t granule);
}

namespace metal {
template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));
#define VECTORS(T)                                                                                     \
    typedef vec<T, 2> T##2;                                                                            \
    typedef vec<T, 3> T##3;                                                                            \
    typedef vec<T, 4> T##4;
VECTORS(float) VECTORS(half) VECTORS(bfloat) VECTORS(int) VECTORS(uint) VECTORS(short) VECTORS(ushort)
VECTORS(char) VECTORS(uchar) VECTORS(long) VECTORS(ulong)

template <class A, class B> struct is_same { static constexpr bool value = false; };
template <class A> struct is_same<A, A> { static constexpr bool value = true; };
template <class A, class B> constexpr bool is_same_v = is_same<A, B>::value;

template <class V> struct vector_traits { static constexpr int size = 0; };
template <class T, int N> struct vector_traits<T __attribute__((ext_vector_type(N)))> {
    static constexpr int size = N;
    typedef T element;
};

// MSL's vector constructors: one scalar or one vector, or one scalar for each component.
template <class V, class A> V make_vector(A a) {
    if constexpr (vector_traits<A>::size != 0) return __builtin_convertvector(a, V);
    else return V(typename vector_traits<V>::element(a));
}
template <class V, class A, class... More> V make_vector(A a, More... more) {
    static_assert(vector_traits<V>::size == 1 + sizeof...(More), "wrong number of components");
    typedef typename vector_traits<V>::element E;
    return V{E(a), E(more)...};
}

template <class To, class From> To as_type(From x) { return __builtin_bit_cast(To, x); }

// Overloads of exactly these types, so that Metal's ambiguities stay errors.
#define UNARY(name, f)                                                                                 \
    inline float name(float x) { return f(x); }                                                        \
    inline half name(half x) { return half(f(float(x))); }                                             \
    inline bfloat name(bfloat x) { return bfloat(f(float(x))); }
#define MATH                                                                                           \
    UNARY(exp, ::expf) UNARY(exp2, ::exp2f) UNARY(log, ::logf) UNARY(log2, ::log2f)                    \
    UNARY(sin, ::sinf) UNARY(cos, ::cosf) UNARY(tanh, ::tanhf) UNARY(sqrt, ::sqrtf)                    \
    UNARY(rsqrt, 1.0f / ::sqrtf)
MATH
namespace precise { MATH }
namespace fast { MATH }
UNARY(floor, ::floorf) UNARY(ceil, ::ceilf) UNARY(abs, __builtin_fabsf) UNARY(fabs, __builtin_fabsf)
inline int abs(int x) { return x < 0 ? -x : x; }
inline bool isnan(float x) { return x != x; }
inline float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
inline float pow(float a, float b) { return ::powf(a, b); }
#define MIN_MAX(T)                                                                                     \
    inline T min(T a, T b) { return b < a ? b : a; }                                                   \
    inline T max(T a, T b) { return a < b ? b : a; }                                                   \
    inline T clamp(T x, T low, T high) { return min(max(x, low), high); }
MIN_MAX(float) MIN_MAX(half) MIN_MAX(bfloat) MIN_MAX(int) MIN_MAX(uint) MIN_MAX(long) MIN_MAX(ulong)
MIN_MAX(short) MIN_MAX(ushort)
template <class T> T select(T a, T b, bool c) { return c ? b : a; }
template <class T, int N> float dot(vec<T, N> a, vec<T, N> b) {
    float sum = 0;
    for (int i = 0; i < N; i++) sum += a[i] * b[i];
    return sum;
}
}  // namespace metal
using namespace metal;

// Of the header that MLX puts in front of every kernel: where an element of a strided array lies.
template <class I> I elem_to_loc(I elem, constant int* shape, constant int64_t* strides, int ndim) {
    I at = 0;
    for (int axis = ndim - 1; axis >= 0; axis--) {
        at += elem % I(shape[axis]) * I(strides[axis]);
        elem /= I(shape[axis]);
    }
    return at;
}
#include "simd.h"
#include "atomic.h"
