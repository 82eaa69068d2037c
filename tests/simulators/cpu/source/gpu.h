// What a kernel sees of a GPU, on a CPU: included before a kernel's own text. Each GPU thread of a block is a fiber, one
// runs at a time, and only these functions give way to another: a race can be seen, but is never undefined behaviour.
#pragma once
#define RF_CPU 1

// C's math.h and not C++'s, two thirds of the text of a kernel and half of its compilation: kernels call sqrtf and expf,
// whose code is the same with either.
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "calls.h"

#define __device__
#define __host__
#define __global__ __attribute__((executor_kernel))  // read, and taken out again, by executor.py
#define __launch_bounds__(...) __attribute__((executor_launch_bounds(__VA_ARGS__)))  // the same
#define __constant__ static const
// `used`: one that is never written would be taken for zeros. The worker finds these in the symbol table, to poison them.
#define __shared__ static __attribute__((used))
#define __forceinline__ inline
#define __align__(n) __attribute__((aligned(n)))

namespace executor {

template <class T> struct Described {
    static constexpr Parameter parameter = {'i', (int)sizeof(T)};
};
template <> struct Described<float> {
    static constexpr Parameter parameter = {'f', 4};
};
template <class T> struct Described<T *> {
    static constexpr Parameter parameter = {'p', (int)sizeof(T *)};
};

template <int... numbers> struct Numbers {};
template <int n, int... numbers> struct CountTo : CountTo<n - 1, n - 1, numbers...> {};
template <int... numbers> struct CountTo<0, numbers...> {
    typedef Numbers<numbers...> Type;
};

template <auto kernel> struct Caller;
template <class... Types, void (*kernel)(Types...)> struct Caller<kernel> {
    static constexpr Parameter parameters[] = {Described<Types>::parameter..., {0, 0}};
    static constexpr int count = sizeof...(Types);
    static void call(void **arguments) { with(arguments, typename CountTo<count>::Type()); }

  private:
    template <int... numbers> static void with([[maybe_unused]] void **arguments, Numbers<numbers...>) {
        kernel(*(Types *)arguments[numbers]...);
    }
};

template <class T> unsigned long long raw(T value) {
    static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
    unsigned long long bits = 0;
    memcpy(&bits, &value, sizeof(T));
    return bits;
}
template <class T> T cooked(unsigned long long bits) {
    T value;
    memcpy(&value, &bits, sizeof(T));
    return value;
}

}  // namespace executor

extern "C" __attribute__((visibility("default"), used)) const int executor_wave = RF_WAVE;

#define threadIdx executor::thread
#define blockIdx executor::block
#define blockDim executor::block_size
#define gridDim executor::grid_size

#define RF_DYNAMIC_SHARED(T, name) T *name = (T *)executor::dynamic_shared

#define EXECUTOR_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()
inline void __syncthreads(EXECUTOR_PLACE) { executor::wait_block(file, line); }
template <class T> inline T shuffle(T value, int from, EXECUTOR_PLACE) {
    return executor::cooked<T>(
        executor::wait_wave(executor::SHUFFLE, executor::raw(value), file, line)[from & (RF_WAVE - 1)]);
}
template <class T> inline T shuffle_xor(T value, int mask, EXECUTOR_PLACE) {
    const unsigned long long *all = executor::wait_wave(executor::SHUFFLE_XOR, executor::raw(value), file, line);
    int from = executor::lane ^ mask;
    return from >= 0 && from < RF_WAVE ? executor::cooked<T>(all[from]) : value;
}
template <class T> inline T shuffle_down(T value, int by, EXECUTOR_PLACE) {
    const unsigned long long *all = executor::wait_wave(executor::SHUFFLE_DOWN, executor::raw(value), file, line);
    int from = executor::lane + by;
    return from < RF_WAVE ? executor::cooked<T>(all[from]) : value;
}
template <class T> inline T shuffle_up(T value, int by, EXECUTOR_PLACE) {
    const unsigned long long *all = executor::wait_wave(executor::SHUFFLE_UP, executor::raw(value), file, line);
    int from = executor::lane - by;
    return from >= 0 ? executor::cooked<T>(all[from]) : value;
}
inline unsigned long long ballot(bool predicate, EXECUTOR_PLACE) {
    const unsigned long long *all = executor::wait_wave(executor::BALLOT, predicate, file, line);
    unsigned long long bits = 0;
    for (int i = 0; i < RF_WAVE; i++) bits |= all[i] << i;
    return bits;
}
inline void sync_wave(EXECUTOR_PLACE) { executor::wait_wave(executor::SYNC_WAVE, 0, file, line); }

// --- memory: one thread runs at a time, so every access is atomic ------------------------------------------------------

inline void __threadfence() {}
inline void __threadfence_block() {}
template <class T> inline T __ldg(const T *at) { return *at; }

template <class T> struct executor_same_ {
    typedef T Type;
};
template <class T> using executor_same = typename executor_same_<T>::Type;
#define EXECUTOR_ATOMIC(name, result)                                       \
    template <class T> inline T name(T *at, executor_same<T> value) {       \
        T old = *at;                                                        \
        *at = (T)(result);                                                  \
        return old;                                                         \
    }
EXECUTOR_ATOMIC(atomicAdd, old + value)
EXECUTOR_ATOMIC(atomicSub, old - value)
EXECUTOR_ATOMIC(atomicMax, value > old ? value : old)
EXECUTOR_ATOMIC(atomicMin, value < old ? value : old)
EXECUTOR_ATOMIC(atomicAnd, old & value)
EXECUTOR_ATOMIC(atomicOr, old | value)
EXECUTOR_ATOMIC(atomicXor, old ^ value)
EXECUTOR_ATOMIC(atomicExch, value)
template <class T> inline T atomicCAS(T *at, executor_same<T> expected, executor_same<T> value) {
    T old = *at;
    if (old == expected) *at = value;
    return old;
}

// --- numbers -----------------------------------------------------------------------------------------------------------

#define EXECUTOR_VECTOR2(name, T, bytes)         \
    struct alignas(bytes) name {                 \
        T x, y;                                  \
    };                                           \
    inline name make_##name(T x, T y) { return {x, y}; }
#define EXECUTOR_VECTOR4(name, T, bytes)         \
    struct alignas(bytes) name {                 \
        T x, y, z, w;                            \
    };                                           \
    inline name make_##name(T x, T y, T z, T w) { return {x, y, z, w}; }
EXECUTOR_VECTOR2(float2, float, 8)
EXECUTOR_VECTOR2(int2, int, 8)
EXECUTOR_VECTOR2(uint2, unsigned, 8)
EXECUTOR_VECTOR4(float4, float, 16)
EXECUTOR_VECTOR4(int4, int, 16)
EXECUTOR_VECTOR4(uint4, unsigned, 16)

inline unsigned __float_as_uint(float value) { return (unsigned)executor::raw(value); }
inline int __float_as_int(float value) { return (int)executor::raw(value); }
inline float __uint_as_float(unsigned bits) { return executor::cooked<float>(bits); }
inline float __int_as_float(int bits) { return executor::cooked<float>((unsigned)bits); }
inline float rsqrtf(float value) { return 1.0f / sqrtf(value); }
// glibc declares some of these names for itself.
#define __expf(value) expf(value)
#define __logf(value) logf(value)
#define __log2f(value) log2f(value)
#define __fdividef(a, b) ((a) / (b))
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __ffsll(long long value) { return __builtin_ffsll(value); }
inline int __clz(int value) { return value ? __builtin_clz((unsigned)value) : 32; }
inline int __clzll(long long value) { return value ? __builtin_clzll((unsigned long long)value) : 64; }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
template <class T> inline T min(T a, executor_same<T> b) { return b < a ? b : a; }
template <class T> inline T max(T a, executor_same<T> b) { return a < b ? b : a; }
