// All differences between hipcc, HIPRTC (CuPy on ROCm), NVRTC (CuPy on CUDA) and the tests' CPU executor: a kernel uses
// these names, and no vendor header or intrinsic. Values are stored as raw bits, so no vendor's half-precision type is
// needed; arithmetic is in float.
//
// When the host compiles a kernel, it defines RF_WAVE: the device's lanes per wave, 32 or 64.
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
// The block's dynamic shared memory, 16-byte aligned, as an array of T. Static and dynamic together are at most 48 KB.
#if !defined(RF_CPU)
#define RF_DYNAMIC_SHARED(T, name) extern __shared__ __align__(16) unsigned char rf_shared_[]; T *name = (T *)rf_shared_
#endif

// Whether a pointer is set before it is needed. If it is null until then, AMD's compiler does not see which memory it
// points to: each load through it is a flat one, which waits for LDS as well.
#if defined(RF_CUDA)
#define RF_POINTERS_FIRST 0
#else
#define RF_POINTERS_FIRST 1
#endif

// --- waves: every lane of the wave must call these -------------------------------------------------------------------

#if defined(RF_CUDA)
template <class T> RF_INLINE T shuffle_xor(T value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
template <class T> RF_INLINE T shuffle(T value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
template <class T> RF_INLINE T shuffle_down(T value, int by) { return __shfl_down_sync(0xffffffffu, value, by); }
template <class T> RF_INLINE T shuffle_up(T value, int by) { return __shfl_up_sync(0xffffffffu, value, by); }
#define ballot rf_ballot_  // NVRTC declares one of its own
RF_INLINE u64 ballot(bool predicate) { return (u64)__ballot_sync(0xffffffffu, predicate); }
RF_INLINE void sync_wave() { __syncwarp(); }
#elif defined(RF_HIP)
template <class T> RF_INLINE T shuffle_xor(T value, int mask) { return __shfl_xor(value, mask); }
template <class T> RF_INLINE T shuffle(T value, int lane) { return __shfl(value, lane); }
template <class T> RF_INLINE T shuffle_down(T value, int by) { return __shfl_down(value, by); }
template <class T> RF_INLINE T shuffle_up(T value, int by) { return __shfl_up(value, by); }
RF_INLINE u64 ballot(bool predicate) { return (u64)__ballot(predicate); }
// Lanes run in lockstep; this only keeps the compiler from moving accesses to shared memory across.
RF_INLINE void sync_wave() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}
#endif

// --- numbers -------------------------------------------------------------------------------------------------------

RF_INLINE u32 bits_of(float value) { return __float_as_uint(value); }
RF_INLINE float float_of(u32 bits) { return __uint_as_float(bits); }
#define RF_INFINITY float_of(0x7f800000u)
// Uses the hardware instruction if the compiler offers it: accurate to 2 units in the last place, denormals may be 0.
#if defined(RF_HIP)
#if __has_builtin(__builtin_amdgcn_exp2f)  // HIPRTC since ROCm 6
#define RF_EXP2(exponent) __builtin_amdgcn_exp2f(exponent)
#endif
#endif
#if !defined(RF_EXP2)
#define RF_EXP2(exponent) exp2f(exponent)
#endif
RF_INLINE float power_of_two(float exponent) {
#if defined(RF_CUDA)
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
    return power;
#else
    return RF_EXP2(exponent);
#endif
}

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
#if defined(RF_CUDA) && __CUDA_ARCH__ >= 800
    u16 rounded;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(value));
    return rounded;
#endif
    u32 bits = bits_of(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (u16)((bits >> 16) | 0x40);
    return (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Selects four of eight bytes: a has bytes 0 to 3, b 4 to 7; the hex digits of `selector` name them, lowest first.
RF_INLINE u32 bytes_of(u32 a, u32 b, u32 selector) {
#if defined(RF_CUDA)
    return __byte_perm(a, b, selector);
#elif defined(RF_HIP)
    u32 bytes = (selector & 0xf) | (selector & 0xf0) << 4 | (selector & 0xf00) << 8 | (selector & 0xf000) << 12;
    return __builtin_amdgcn_perm(b, a, bytes);
#else
    u64 both = (u64)b << 32 | a;
    u32 result = 0;
    for (int i = 0; i < 4; i++) result |= (u32)(both >> (8 * (selector >> (4 * i) & 7)) & 255) << (8 * i);
    return result;
#endif
}

// Storage types. `Bits` is the type in memory; `load` and `store` convert.
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

// Registers, moved as one access to or from where numbers of any type lie, aligned to their size: at most 16 bytes. An
// access as u32 through a cast pointer would do the same until a compiler orders it behind those of the numbers' type.
template <int Count> struct alignas(4 * Count) Registers {
    u32 of[Count];
} __attribute__((may_alias));

// Two 16-bit numbers in a register, the first in its low half.
template <class Type> RF_INLINE u32 two_of(float low, float high) {
    return (u32)Type::store(low) | (u32)Type::store(high) << 16;
}
#if defined(RF_CUDA) && __CUDA_ARCH__ >= 800
template <> RF_INLINE u32 two_of<F16>(float low, float high) {
    u32 two;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
    return two;
}
template <> RF_INLINE u32 two_of<BF16>(float low, float high) {
    u32 two;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
    return two;
}
#endif

// The same for numbers that are no NaN, or the one that arithmetic makes. BF16 on AMD, which has no instruction for it, is
// rounded to the nearest with ties away from zero: in half of the instructions.
template <class Type> RF_INLINE u32 two_near(float low, float high) { return two_of<Type>(low, high); }
#if !defined(RF_CUDA)
template <> RF_INLINE u32 two_near<BF16>(float low, float high) {
    return bytes_of(bits_of(low) + 0x8000u, bits_of(high) + 0x8000u, 0x7632u);
}
#endif

// 8 or 16 bytes as one access: for a structure of that size, a compiler may generate several.
#if defined(RF_CUDA)
RF_INLINE void store_words(void *at, const u32 (&words)[2]) {
    asm volatile("st.v2.b32 [%0], {%1, %2};" ::"l"(at), "r"(words[0]), "r"(words[1]) : "memory");
}
RF_INLINE void store_words(void *at, const u32 (&words)[4]) {
    asm volatile("st.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
}
#else
typedef u32 TwoWords __attribute__((vector_size(8), may_alias));
typedef u32 FourWords __attribute__((vector_size(16), may_alias));
RF_INLINE void store_words(void *at, const u32 (&words)[2]) { *(TwoWords *)at = TwoWords{words[0], words[1]}; }
RF_INLINE void store_words(void *at, const u32 (&words)[4]) {
    *(FourWords *)at = FourWords{words[0], words[1], words[2], words[3]};
}
#endif

// Register i of those that hold `values` as stored.
RF_INLINE u32 register_of(F32, const float *values, int i) { return bits_of(values[i]); }
RF_INLINE u32 register_of(F16, const float *values, int i) { return two_of<F16>(values[2 * i], values[2 * i + 1]); }
RF_INLINE u32 register_of(BF16, const float *values, int i) { return two_of<BF16>(values[2 * i], values[2 * i + 1]); }
RF_INLINE u32 register_of(INT8, const float *values, int i) {
    u32 four = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) four |= (u32)(u8)INT8::store(values[4 * i + j]) << (8 * j);
    return four;
}
template <class Type, int Count> RF_INLINE void store_pack(typename Type::Bits *at, const float *values) {
    const int registers = Count * (int)sizeof(typename Type::Bits) / 4;
    if constexpr (registers == 2 || registers == 4) {
        u32 words[registers];
#pragma unroll
        for (int i = 0; i < registers; i++) words[i] = register_of(Type(), values, i);
        store_words(at, words);
    } else {
        Pack<Type, Count> pack;
#pragma unroll
        for (int i = 0; i < Count; i++) pack.bits[i] = Type::store(values[i]);
        *(Pack<Type, Count> *)at = pack;
    }
}

// `Count` numbers at `at`, which is aligned to their total size, or to 16 bytes if that is less.
template <class Type, int Count> RF_INLINE void load_numbers(const typename Type::Bits *at, float *values) {
    const int each = Count * (int)sizeof(typename Type::Bits) > 16 ? 16 / (int)sizeof(typename Type::Bits) : Count;
#pragma unroll
    for (int i = 0; i < Count; i += each) {
        Pack<Type, each> pack = *(const Pack<Type, each> *)(at + i);
#pragma unroll
        for (int j = 0; j < each; j++) values[i + j] = Type::load(pack.bits[j]);
    }
}
template <class Type, int Count> RF_INLINE void store_numbers(typename Type::Bits *at, const float *values) {
    const int each = Count * (int)sizeof(typename Type::Bits) > 16 ? 16 / (int)sizeof(typename Type::Bits) : Count;
#pragma unroll
    for (int i = 0; i < Count; i += each) store_pack<Type, each>(at + i, values + i);
}

// `Count` numbers at `at` of x plus its residual, which may be null, rounded as when the sum is stored.
template <class Type, int Count>
RF_INLINE void load_sum(const typename Type::Bits *x, const typename Type::Bits *residual, i64 at, float *values) {
    load_numbers<Type, Count>(x + at, values);
    if (!residual) return;
    float more[Count];
    load_numbers<Type, Count>(residual + at, more);
#pragma unroll
    for (int i = 0; i < Count; i++) values[i] = Type::load(Type::store(values[i] + more[i]));
}

template <int Count> RF_INLINE float sum_of_squares(const float *values) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < Count; i++) sum += values[i] * values[i];
    return sum;
}

// exp(-gate) that is infinite gives the right limit, 0.
RF_INLINE float silu(float gate) { return gate / (1.0f + expf(-gate)); }

// Copies `bytes` from `source` to `target`, which do not overlap, as thread `first` of `threads` that share the work: in
// units of 16 bytes if both addresses and the size are multiples of that, else of 4 or 1.
template <class Unit> RF_INLINE void copy_units(const u8 *source, u8 *target, i64 bytes, i64 first, i64 threads) {
    const Unit *from = (const Unit *)source;
    Unit *to = (Unit *)target;
    const i64 units = bytes / (i64)sizeof(Unit);
    for (i64 at = first; at < units; at += 4 * threads) {
        Unit held[4];  // all loads are in flight before the first store
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (at + i * threads < units) held[i] = from[at + i * threads];
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (at + i * threads < units) to[at + i * threads] = held[i];
    }
}
RF_INLINE void copy_bytes(const u8 *source, u8 *target, i64 bytes, i64 first, i64 threads) {
    const u64 common = (u64)source | (u64)target | (u64)bytes;
    if (common % 16 == 0) copy_units<uint4>(source, target, bytes, first, threads);
    else if (common % 4 == 0) copy_units<u32>(source, target, bytes, first, threads);
    else copy_units<u8>(source, target, bytes, first, threads);
}

// --- sums and maxima -----------------------------------------------------------------------------------------------

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
// Over all threads of a block of whole waves, returned to all of them. `scratch` is shared memory for 32 floats, which
// may be reused after the call.
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

// --- matrix units: every lane of the wave must call these ------------------------------------------------------------

#if (defined(RF_CUDA) && __CUDA_ARCH__ >= 800) || (defined(RF_CPU) && RF_WAVE == 32)
// c[16][8] += a[16][16] b[16][8], laid out as in PTX's mma.m16n8k16. Lane 4 g + t holds, of a, two in a register:
// columns 2 t and 2 t + 1 of row g, of row g + 8, then columns 2 t + 8 and 2 t + 9 of row g, of row g + 8; of b, column
// g: rows 2 t and 2 t + 1, then 2 t + 8 and 2 t + 9; of c, columns 2 t and 2 t + 1 of row g, then of row g + 8.
template <class Type> RF_INLINE void multiply_16x8x16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]);
// Loads four tiles of 8 x 8 16-bit numbers from shared memory: lane l gives the address of row l % 8 of tile l / 8, 16
// bytes, and gets from each tile numbers 2 (l % 4) and the next of row l / 4; `transposed`: those rows of column l / 4.
RF_INLINE void load_tiles(u32 (&tiles)[4], const void *row);
RF_INLINE void load_tiles_transposed(u32 (&tiles)[4], const void *row);

#if defined(RF_CUDA)
#define RF_MULTIPLY_16X8X16(Type, name)                                                                               \
    template <> RF_INLINE void multiply_16x8x16<Type>(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {          \
        asm("mma.sync.aligned.m16n8k16.row.col.f32." name "." name ".f32 "                                            \
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                         \
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                          \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                                      \
    }
RF_MULTIPLY_16X8X16(F16, "f16")
RF_MULTIPLY_16X8X16(BF16, "bf16")
RF_INLINE void load_tiles(u32 (&tiles)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
                 : "r"((u32)__cvta_generic_to_shared(row))
                 : "memory");
}
RF_INLINE void load_tiles_transposed(u32 (&tiles)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
                 : "r"((u32)__cvta_generic_to_shared(row))
                 : "memory");
}
#else
template <class Type> RF_INLINE void multiply_16x8x16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    u64 rows[2] = {(u64)a[1] << 32 | a[0], (u64)a[3] << 32 | a[2]}, columns = (u64)b[1] << 32 | b[0];
    for (int part = 0; part < 4; part++) {
        u64 of_a[2], of_b[2];
        for (int i = 0; i < 2; i++) of_a[i] = shuffle(rows[i], 4 * g + part);
        for (int i = 0; i < 2; i++) of_b[i] = shuffle(columns, 4 * (2 * t + i) + part);
        for (int k = 0; k < 4; k++)
            for (int row = 0; row < 2; row++)
                for (int column = 0; column < 2; column++)
                    c[2 * row + column] += Type::load((u16)(of_a[k / 2] >> (32 * row + 16 * (k % 2)))) *
                                           Type::load((u16)(of_b[column] >> (16 * k)));
    }
}
RF_INLINE void load_tiles(u32 (&tiles)[4], const void *row) {
    int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; i++) tiles[i] = ((const u32 *)shuffle((u64)row, 8 * i + lane / 4))[lane % 4];
}
RF_INLINE void load_tiles_transposed(u32 (&tiles)[4], const void *row) {
    int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; i++) {
        u32 low = ((const u16 *)shuffle((u64)row, 8 * i + lane % 4 * 2))[lane / 4];
        tiles[i] = low | (u32)((const u16 *)shuffle((u64)row, 8 * i + lane % 4 * 2 + 1))[lane / 4] << 16;
    }
}
#endif
#endif

// c[16][16] += a[16][16] b[16][16] on AMD's matrix cores: MFMA of CDNA, WMMA of RDNA 3 and 4. With E = 256 / RF_WAVE,
// lane 16 u + i holds, two in a register, of a, columns E u to E u + E - 1 of row matrix_row(i); of b, those rows of
// column i; of c, rows E u to E u + E - 1 of column i.
#if defined(RF_CPU) || (defined(RF_HIP) && (defined(__gfx90a__) || defined(__gfx942__) || defined(__gfx950__) || \
                                            defined(__GFX11__) || defined(__GFX12__)))
#define RF_COLUMNS 1
#if (defined(RF_HIP) && defined(__GFX11__)) || defined(RF_CPU_GFX11)
// Its c has rows 2 e + u, so the rows of a are passed in another order.
RF_INLINE int matrix_row(int i) { return i % 2 * 8 + i / 2; }
#else
RF_INLINE int matrix_row(int i) { return i; }
#endif
template <class Type>
RF_INLINE void multiply_16x16x16(float (&c)[256 / RF_WAVE], const u32 (&a)[128 / RF_WAVE],
                                 const u32 (&b)[128 / RF_WAVE]);

#if defined(RF_CPU)
template <class Type>
RF_INLINE void multiply_16x16x16(float (&c)[256 / RF_WAVE], const u32 (&a)[128 / RF_WAVE],
                                 const u32 (&b)[128 / RF_WAVE]) {
    const int each = 256 / RF_WAVE, lane = threadIdx.x % RF_WAVE;
    for (int part = 0; part < RF_WAVE / 16; part++)
        for (int k = 0; k < each / 2; k += 2) {
            u64 of_b = shuffle((u64)b[k + 1] << 32 | b[k], 16 * part + lane % 16);
            for (int row = 0; row < each; row++) {
#if defined(RF_CPU_GFX11)
                int from = 2 * row + lane / 16;
#else
                int from = lane / 16 * each + row;
#endif
                u64 of_a = shuffle((u64)a[k + 1] << 32 | a[k], 16 * part + from);
                for (int i = 0; i < 64; i += 16) c[row] += Type::load((u16)(of_a >> i)) * Type::load((u16)(of_b >> i));
            }
        }
}
#else
// The builtins' vector types; for BF16, vectors of short or of __bf16, depending on the compiler's version.
template <int Words> struct Operand {
    typedef short Shorts __attribute__((ext_vector_type(2 * Words)));
    typedef _Float16 Halves __attribute__((ext_vector_type(2 * Words)));
    struct Words_ {
        u32 of[Words];
    } words;
    RF_INLINE operator Shorts() const { return __builtin_bit_cast(Shorts, words); }
#if __clang_major__ >= 17  // older ones have no __bf16 for these GPUs
    typedef __bf16 Bfloats __attribute__((ext_vector_type(2 * Words)));
    RF_INLINE operator Bfloats() const { return __builtin_bit_cast(Bfloats, words); }
#endif
    RF_INLINE Halves halves() const { return __builtin_bit_cast(Halves, words); }
};
typedef float Sums __attribute__((ext_vector_type(256 / RF_WAVE)));

#if defined(__GFX11__)
// Each half of a wave needs all columns of a, and gets the other half's from it.
RF_INLINE Operand<8> operand_of(const u32 (&part)[4]) {
    Operand<8> all;
    bool upper = threadIdx.x % 32 >= 16;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 other = __builtin_amdgcn_permlanex16(0, part[i], 0x76543210, 0xfedcba98, false, false);
        all.words.of[i] = upper ? other : part[i];
        all.words.of[i + 4] = upper ? part[i] : other;
    }
    return all;
}
#define RF_MULTIPLY_F16(a, b, c) __builtin_amdgcn_wmma_f32_16x16x16_f16_w32((a).halves(), (b).halves(), c)
#define RF_MULTIPLY_BF16(a, b, c) __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(a, b, c)
#else
RF_INLINE Operand<128 / RF_WAVE> operand_of(const u32 (&part)[128 / RF_WAVE]) {
    Operand<128 / RF_WAVE> all;
#pragma unroll
    for (int i = 0; i < 128 / RF_WAVE; i++) all.words.of[i] = part[i];
    return all;
}
#if defined(__GFX12__)
#define RF_MULTIPLY_F16(a, b, c) __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12((a).halves(), (b).halves(), c)
#define RF_MULTIPLY_BF16(a, b, c) __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12(a, b, c)
#else
#define RF_MULTIPLY_F16(a, b, c) __builtin_amdgcn_mfma_f32_16x16x16f16((a).halves(), (b).halves(), c, 0, 0, 0)
#define RF_MULTIPLY_BF16(a, b, c) __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a, b, c, 0, 0, 0)
#endif
#endif
#define RF_MULTIPLY_16X16X16(Type, name)                                                                              \
    template <>                                                                                                       \
    RF_INLINE void multiply_16x16x16<Type>(float (&c)[256 / RF_WAVE], const u32 (&a)[128 / RF_WAVE],                  \
                                           const u32 (&b)[128 / RF_WAVE]) {                                           \
        Sums sums;                                                                                                    \
        for (int i = 0; i < 256 / RF_WAVE; i++) sums[i] = c[i];                                                       \
        sums = name(operand_of(a), operand_of(b), sums);                                                              \
        for (int i = 0; i < 256 / RF_WAVE; i++) c[i] = sums[i];                                                       \
    }
RF_MULTIPLY_16X16X16(F16, RF_MULTIPLY_F16)
RF_MULTIPLY_16X16X16(BF16, RF_MULTIPLY_BF16)
#endif
#endif

// Loads data that will not be read again soon: caches need not keep it.
template <class T> RF_INLINE T load_once(const T *at) {
#if defined(RF_CUDA)
    return __ldcs(at);
#else
    return *at;
#endif
}

// Copies 16 bytes from global to shared memory, both aligned to 16. They are visible to this thread after wait_copies,
// and to the block after a barrier that follows it.
RF_INLINE void copy_16(void *shared, const void *global) {
#if defined(RF_CUDA) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 :
                 : "r"((u32)__cvta_generic_to_shared(shared)), "l"(global)
                 : "memory");
#else
    *(uint4 *)shared = *(const uint4 *)global;
#endif
}
RF_INLINE void wait_copies() {
#if defined(RF_CUDA) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" : : : "memory");
#endif
}
