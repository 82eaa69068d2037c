// Root mean square normalisation of rows, optionally after adding a residual: ops_numpy.rms_norm.
//
// A block normalises a row: grid rows, block any whole number of waves, best one thread per 16 or 32 bytes of the row,
// chosen by the width alone, so that a row's bits depend on nothing else.
//
// defines: RF_TYPE=F32|F16|BF16
// variants: RF_TYPE=F32|F16|BF16
#include "common.h"

#if !defined(RF_TYPE)
#error "norm: RF_TYPE must be defined"
#endif

typedef RF_TYPE::Bits Bits;
// Packs of a row that a thread keeps in registers; the others are read again.
static const int HELD = 4;

template <int Count> RF_INLINE void scaled(const float *values, float scale, const Bits *weight, i64 at, Bits *out) {
    float factors[Count], results[Count];
    load_numbers<RF_TYPE, Count>(weight + at, factors);
#pragma unroll
    for (int i = 0; i < Count; i++) results[i] = values[i] * scale * factors[i];
    store_numbers<RF_TYPE, Count>(out + at, results);
}

// A thread processes packs of `Count` numbers, a block's width apart.
template <int Count>
RF_INLINE void norm_row(
    const Bits *x, const Bits *residual, const Bits *weight, Bits *out, Bits *sum, i32 width, float eps, float *scratch
) {
    const i32 packs = width / Count;
    float held[HELD][Count];
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        const i32 pack = i * blockDim.x + threadIdx.x;
        if (pack < packs) load_sum<RF_TYPE, Count>(x, residual, (i64)pack * Count, held[i]);
    }
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        const i32 pack = i * blockDim.x + threadIdx.x;
        if (pack >= packs) continue;
        if (sum) store_numbers<RF_TYPE, Count>(sum + (i64)pack * Count, held[i]);
        total += sum_of_squares<Count>(held[i]);
    }
    for (i32 pack = HELD * blockDim.x + threadIdx.x; pack < packs; pack += blockDim.x) {
        float values[Count];
        load_sum<RF_TYPE, Count>(x, residual, (i64)pack * Count, values);
        if (sum) store_numbers<RF_TYPE, Count>(sum + (i64)pack * Count, values);
        total += sum_of_squares<Count>(values);
    }

    const float scale = rsqrtf(block_sum(total, scratch) / (float)width + eps);
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        const i32 pack = i * blockDim.x + threadIdx.x;
        if (pack < packs) scaled<Count>(held[i], scale, weight, (i64)pack * Count, out);
    }
    for (i32 pack = HELD * blockDim.x + threadIdx.x; pack < packs; pack += blockDim.x) {
        float values[Count];
        // The residual may already have been overwritten by the sum.
        load_numbers<RF_TYPE, Count>((sum ? sum : x) + (i64)pack * Count, values);
        scaled<Count>(values, scale, weight, (i64)pack * Count, out);
    }
}

// x, residual, out and sum: [rows, width]. residual and sum are either both null or both given, and may be the same
// memory.
// weight: [width]. Uses packs of 16 bytes if the width and all arrays allow it.
RF_KERNEL rms_norm(
    const Bits *x, const Bits *residual, const Bits *weight, Bits *out, Bits *sum, i32 width, float eps
) {
    __shared__ float scratch[32];
    const int count = 16 / (int)sizeof(Bits);
    const i64 row = (i64)blockIdx.x * width;
    const Bits *residual_row = residual ? residual + row : nullptr;
    Bits *sum_row = sum ? sum + row : nullptr;
    const u64 places = (u64)x | (u64)residual | (u64)weight | (u64)out | (u64)sum;
    if (places % 16 == 0 && width % count == 0) {
        norm_row<count>(x + row, residual_row, weight, out + row, sum_row, width, eps, scratch);
    } else {
        norm_row<1>(x + row, residual_row, weight, out + row, sum_row, width, eps, scratch);
    }
}
