// All that differs between hipcc, HIPRTC (CuPy on ROCm), NVRTC (CuPy on CUDA) and the CPU executor of the tests; a
// kernel uses these names and no vendor's header or intrinsic. Values are stored as raw bits, so no half-precision type
// of any vendor is needed, and are computed with as float.
//
// The host defines, when it compiles a kernel: RF_WAVE, the lanes of a wave (32 or 64), as the device tells.
#pragma once

#if defined(RF_CPU)
// The executor was included before this file and defines the primitives below the same way.
#elif defined(__HIPCC__) || defined(__HIPCC_RTC__) || defined(__HIP__)
#define RF_HIP 1
#if !defined(__HIPCC_RTC__)
#include <hip/hip_runtime.h>
#endif
#elif defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define RF_CUDA 1
#else
#error "common.h: unknown compiler"
#endif

typedef signed char i8;
typedef unsigned char u8;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

#ifndef RF_WAVE
#if defined(RF_HIP) && defined(__GFX9__)
#define RF_WAVE 64
#else
#define RF_WAVE 32
#endif
#endif

#define RF_KERNEL extern "C" __global__ void
#define RF_INLINE __device__ __forceinline__
// One block's dynamic shared memory, 16-byte aligned, as an array of T. Static and dynamic together are at most 48 KB.
#if !defined(RF_CPU)
#define RF_DYNAMIC_SHARED(T, name) extern __shared__ __align__(16) unsigned char rf_shared_[]; T *name = (T *)rf_shared_
#endif

// --- waves: every lane of the wave calls these ---------------------------------------------------------------------

#if defined(RF_CUDA)
template <class T> RF_INLINE T shuffle_xor(T value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
template <class T> RF_INLINE T shuffle(T value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
template <class T> RF_INLINE T shuffle_down(T value, int by) { return __shfl_down_sync(0xffffffffu, value, by); }
template <class T> RF_INLINE T shuffle_up(T value, int by) { return __shfl_up_sync(0xffffffffu, value, by); }
RF_INLINE u64 ballot(bool predicate) { return (u64)__ballot_sync(0xffffffffu, predicate); }
RF_INLINE void sync_wave() { __syncwarp(); }
#elif defined(RF_HIP)
template <class T> RF_INLINE T shuffle_xor(T value, int mask) { return __shfl_xor(value, mask); }
template <class T> RF_INLINE T shuffle(T value, int lane) { return __shfl(value, lane); }
template <class T> RF_INLINE T shuffle_down(T value, int by) { return __shfl_down(value, by); }
template <class T> RF_INLINE T shuffle_up(T value, int by) { return __shfl_up(value, by); }
RF_INLINE u64 ballot(bool predicate) { return (u64)__ballot(predicate); }
// Lanes run in lockstep; what is needed is that the compiler moves no access to shared memory across.
RF_INLINE void sync_wave() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}
#endif

// --- numbers ---------------------------------------------------------------------------------------------------------

RF_INLINE u32 bits_of(float value) { return __float_as_uint(value); }
RF_INLINE float float_of(u32 bits) { return __uint_as_float(bits); }
#define RF_INFINITY float_of(0x7f800000u)

#if defined(RF_CUDA)
RF_INLINE float half_to_float(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
RF_INLINE u16 float_to_half(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#else
RF_INLINE float half_to_float(u16 bits) { return (float)__builtin_bit_cast(_Float16, bits); }
RF_INLINE u16 float_to_half(float value) { return __builtin_bit_cast(u16, (_Float16)value); }
#endif
RF_INLINE float bfloat_to_float(u16 bits) { return float_of((u32)bits << 16); }
// To the nearest, ties to even; a NaN stays one.
RF_INLINE u16 float_to_bfloat(float value) {
    u32 bits = bits_of(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (u16)((bits >> 16) | 0x40);
    return (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// How a number is stored. `Bits` is what lies in memory; `load` and `store` convert.
struct F32 {
    typedef float Bits;
    static RF_INLINE float load(Bits bits) { return bits; }
    static RF_INLINE Bits store(float value) { return value; }
};
struct F16 {
    typedef u16 Bits;
    static RF_INLINE float load(Bits bits) { return half_to_float(bits); }
    static RF_INLINE Bits store(float value) { return float_to_half(value); }
};
struct BF16 {
    typedef u16 Bits;
    static RF_INLINE float load(Bits bits) { return bfloat_to_float(bits); }
    static RF_INLINE Bits store(float value) { return float_to_bfloat(value); }
};
// Times a scale, which is kept elsewhere.
struct INT8 {
    typedef i8 Bits;
    static RF_INLINE float load(Bits bits) { return (float)bits; }
    static RF_INLINE Bits store(float value) { return (i8)rintf(fminf(fmaxf(value, -127.0f), 127.0f)); }
};

// `Count` numbers that lie together, aligned to their size, moved as one access: at most 16 bytes.
template <class Type, int Count> struct alignas(sizeof(typename Type::Bits) * Count) Pack {
    typename Type::Bits bits[Count];
};

// --- sums and maxima --------------------------------------------------------------------------------------------------

RF_INLINE float wave_sum(float value) {
#pragma unroll
    for (int mask = RF_WAVE / 2; mask > 0; mask >>= 1) value += shuffle_xor(value, mask);
    return value;
}
RF_INLINE float wave_max(float value) {
#pragma unroll
    for (int mask = RF_WAVE / 2; mask > 0; mask >>= 1) value = fmaxf(value, shuffle_xor(value, mask));
    return value;
}
// Of all threads of a block of whole waves, told to all of them. `scratch` is shared memory for 32 floats, free again
// after the call.
RF_INLINE float block_sum(float value, float *scratch) {
    value = wave_sum(value);
    if (threadIdx.x % RF_WAVE == 0) scratch[threadIdx.x / RF_WAVE] = value;
    __syncthreads();
    float total = 0.0f;
    for (int wave = 0; wave < (int)(blockDim.x / RF_WAVE); wave++) total += scratch[wave];
    __syncthreads();
    return total;
}
RF_INLINE float block_max(float value, float *scratch) {
    value = wave_max(value);
    if (threadIdx.x % RF_WAVE == 0) scratch[threadIdx.x / RF_WAVE] = value;
    __syncthreads();
    float most = -RF_INFINITY;
    for (int wave = 0; wave < (int)(blockDim.x / RF_WAVE); wave++) most = fmaxf(most, scratch[wave]);
    __syncthreads();
    return most;
}
