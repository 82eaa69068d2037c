// The steps between a layer's projection and its attention: the projection's bias and the norms of the heads of q and k,
// if the model has them, the rotation of q and k (NeoX order), and the storing of K and V in their pages.
// ops_numpy.rms_norm of heads, rope, write_kv and write_kv_int8.
//
// LANES lanes share a head; each processes a pack of its first half and the pack that it is rotated with.
//
// defines: RF_TYPE=F32|F16|BF16 RF_KV=F32|F16|BF16|INT8 RF_HEAD_DIM=64|80|96|128|256
// variants: RF_TYPE=F16|BF16 RF_KV=F16|BF16|INT8 RF_HEAD_DIM=128
// variants: RF_TYPE=F32|BF16 RF_KV=F32|INT8 RF_HEAD_DIM=80|256
#include "common.h"

#if !defined(RF_TYPE) || !defined(RF_KV) || !defined(RF_HEAD_DIM)
#error "rope: RF_TYPE, RF_KV and RF_HEAD_DIM must be defined"
#endif

typedef RF_TYPE::Bits Bits;
typedef RF_KV::Bits Stored;
static const int DIM = RF_HEAD_DIM;
static const int HALF = DIM / 2;
static const int COUNT = 16 / (int)sizeof(Bits);
static const int PACKS = HALF / COUNT;
// A power of two, so that the lanes of a head are in one wave; the last ones may be idle.
static const int LANES = PACKS <= 4 ? 4 : PACKS <= 8 ? 8 : PACKS <= 16 ? 16 : 32;
static_assert(HALF % COUNT == 0 && PACKS <= LANES, "a head is whole packs, and at most 32 in each half");
static const bool SCALED = sizeof(Stored) == 1;

// A lane's part of a head.
struct Part {
    float first[COUNT], second[COUNT];
};

RF_INLINE Part load_part(const Bits *head, int at) {
    Part part;
    load_numbers<RF_TYPE, COUNT>(head + at, part.first);
    load_numbers<RF_TYPE, COUNT>(head + HALF + at, part.second);
    return part;
}

// The projection's bias of a head, or null.
#if RF_POINTERS_FIRST
struct Bias {
    const Bits *all;
    i64 offset;
    RF_INLINE Bias(const Bits *bias, i32 head) : all(bias), offset((i64)head * DIM) {}
    RF_INLINE operator const Bits *() const { return all; }
    RF_INLINE const Bits *numbers() const { return all + offset; }
};
#else
struct Bias {
    const Bits *own;
    RF_INLINE Bias(const Bits *bias, i32 head) : own(bias ? bias + (i64)head * DIM : bias) {}
    RF_INLINE operator const Bits *() const { return own; }
    RF_INLINE const Bits *numbers() const { return own; }
};
#endif

// Loads it and adds its bias.
RF_INLINE Part load_part(const Bits *head, const Bias &bias, int at) {
    Part part = load_part(head, at);
    if (bias) {
        const Part added = load_part(bias.numbers(), at);
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            part.first[i] += added.first[i];
            part.second[i] += added.second[i];
        }
    }
    return part;
}

// The root mean square norm of a head; all lanes of the wave call it. weight: [DIM].
RF_INLINE void norm_part(Part &part, const Bits *weight, int at, bool active, float eps) {
    float sum = 0.0f;
    if (active) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) sum += part.first[i] * part.first[i] + part.second[i] * part.second[i];
    }
#pragma unroll
    for (int mask = LANES / 2; mask > 0; mask >>= 1) sum += shuffle_xor(sum, mask);
    if (!active) return;
    const float scale = rsqrtf(sum / (float)DIM + eps);
    const Part factors = load_part(weight, at);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        part.first[i] *= scale * factors.first[i];
        part.second[i] *= scale * factors.second[i];
    }
}

// Rotates by the angles of a position. cosine and sine: [HALF].
RF_INLINE void rotate_part(Part &part, const float *cosine, const float *sine, int at) {
    float cosines[COUNT], sines[COUNT];
    load_numbers<F32, COUNT>(cosine + at, cosines);
    load_numbers<F32, COUNT>(sine + at, sines);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const float first = part.first[i], second = part.second[i];
        part.first[i] = first * cosines[i] - second * sines[i];
        part.second[i] = second * cosines[i] + first * sines[i];
    }
}

// The offset, in numbers, of K (which = 0) or V (1) of a head in a page.
RF_INLINE i64 values_at(i32 layer, i32 which, i32 kv_heads, i32 kv_head, i32 page_size) {
    return (((i64)layer * 2 + which) * kv_heads + kv_head) * page_size * DIM;
}

// qkv: [n, q_heads + 2 * kv_heads, DIM], 16-byte aligned as all arrays here. q: [n, q_heads, DIM], q_stride numbers from
// a token to the next, a multiple of 16; it may be qkv itself. bias: [q_heads + 2 * kv_heads, DIM], or null.
// q_weight, k_weight: [DIM], the norm of each head, or null.
// cosine, sine: [positions, HALF], or [n, HALF] if positions is null. positions, page, slot: [n]. page_bytes is a
// multiple of 16, unless RF_KV is INT8.
// With INT8, only q is processed here; write_int8 does the rest. The K and V of a token whose page is negative are not
// stored.
// Grid (n, ceil(heads * LANES / block)); heads includes those of k and v, unless RF_KV is INT8.
RF_KERNEL rope_write(
    const Bits *qkv, Bits *q, i64 q_stride, const Bits *bias, const Bits *q_weight, const Bits *k_weight, float eps,
    const float *cosine, const float *sine, const i32 *positions, const i32 *page, const i32 *slot, u8 *pages,
    i64 page_bytes, i32 layer, i32 page_size, i32 q_heads, i32 kv_heads
) {
    const i64 token = blockIdx.x;
    const i32 item = blockIdx.y * blockDim.x + threadIdx.x;
    const i32 head = item / LANES;
    const int at = item % LANES * COUNT;
    const i32 which = head < q_heads ? -1 : (head - q_heads) / kv_heads;  // q, k = 0, v = 1
    const i32 kv_head = (head - q_heads) % kv_heads;
    const bool active = at < HALF && (SCALED ? which < 0 : which < 2);

    Part part;
    const Bias added(bias, head);
    if (active) part = load_part(qkv + (token * (q_heads + 2 * kv_heads) + head) * DIM, added, at);
    if (q_weight) norm_part(part, which < 0 ? q_weight : k_weight, at, active && which < 1, eps);
    if (!active) return;
    if (which < 1) {
        const i64 row = positions ? positions[token] : token;
        rotate_part(part, cosine + row * HALF, sine + row * HALF, at);
    }
    if (SCALED || which < 0) {
        Bits *target = q + token * q_stride + head * DIM + at;
        store_numbers<RF_TYPE, COUNT>(target, part.first);
        store_numbers<RF_TYPE, COUNT>(target + HALF, part.second);
    } else {
        const i64 number = page[token];
        if (number < 0) return;
        Stored *values = (Stored *)(pages + number * page_bytes);
        Stored *target = values + values_at(layer, which, kv_heads, kv_head, page_size) + (i64)slot[token] * DIM + at;
        store_numbers<RF_KV, COUNT>(target, part.first);
        store_numbers<RF_KV, COUNT>(target + HALF, part.second);
    }
}

RF_INLINE void store_scaled(i8 *target, const float *values, float inverse) {
    float scaled[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) scaled[i] = values[i] * inverse;
    // The numbers of a page, like its scales, are aligned to 4 bytes.
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) store_numbers<INT8, 4>(target + i, scaled + i);
}

// Stores the K and V of a launch in INT8 pages. Tokens segments[i] to segments[i + 1] - 1 go to consecutive slots of one
// page, after those already written; slot 0 is written first. A block stores K or V of one head of one segment, so no
// other block uses its scale. When the scale grows, the existing numbers are requantised.
// Grid (segments, 2 * kv_heads), block any whole number of waves. Other arguments as in rope_write; layers: the model's.
RF_KERNEL write_int8(
    const Bits *qkv, const Bits *bias, const Bits *k_weight, float eps, const float *cosine, const float *sine,
    const i32 *positions, const i32 *page, const i32 *slot, const i32 *segments, u8 *pages, i64 page_bytes, i32 layer,
    i32 layers, i32 page_size, i32 q_heads, i32 kv_heads
) {
    __shared__ float scratch[32];
    const i32 begin = segments[blockIdx.x], end = segments[blockIdx.x + 1];
    const i32 which = blockIdx.y / kv_heads, kv_head = blockIdx.y % kv_heads;
    const int lane = threadIdx.x % LANES, at = lane * COUNT;
    const i32 together = blockDim.x / LANES;  // tokens at a time
    u8 *memory = pages + page[begin] * page_bytes;
    i8 *values = (i8 *)memory + values_at(layer, which, kv_heads, kv_head, page_size);
    float *scales = (float *)(memory + values_at(layers, 0, kv_heads, 0, page_size));
    float *scale = scales + ((i64)layer * 2 + which) * kv_heads + kv_head;
    const i32 written = slot[begin];
    const i32 head = q_heads + blockIdx.y;
    const Bias added(bias, head);

    Part part;
    // Two passes: to find the largest, then to store. All threads make the same number of iterations.
    float most = 0.0f, before = 0.0f, now = 0.0f, inverse = 0.0f;
    for (int storing = 0; storing < 2; storing++) {
        for (i32 first = begin; first < end; first += together) {
            const i32 token = first + threadIdx.x / LANES;
            const bool active = token < end && at < HALF;
            if (active) part = load_part(qkv + ((i64)token * (q_heads + 2 * kv_heads) + head) * DIM, added, at);
            if (which == 0) {
                if (k_weight) norm_part(part, k_weight, at, active, eps);
                if (active) {
                    const i64 row = positions ? positions[token] : token;
                    rotate_part(part, cosine + row * HALF, sine + row * HALF, at);
                }
            }
            if (!active) continue;
            if (storing) {
                i8 *target = values + (i64)slot[token] * DIM + at;
                store_scaled(target, part.first, inverse);
                store_scaled(target + HALF, part.second, inverse);
            } else {
#pragma unroll
                for (int i = 0; i < COUNT; i++) most = fmaxf(most, fmaxf(fabsf(part.first[i]), fabsf(part.second[i])));
            }
        }
        if (storing) break;
        before = written ? *scale : 0.0f;
        now = fmaxf(block_max(most, scratch) / 127.0f, before);
        // 1 / now must be finite.
        inverse = now > 1e-37f ? 1.0f / now : 0.0f;
    }
    if (now > before) {
        const float ratio = before * inverse;
        for (i32 i = threadIdx.x * 4; i < written * DIM; i += blockDim.x * 4) {
            float old[4];
            load_numbers<INT8, 4>(values + i, old);
#pragma unroll
            for (int j = 0; j < 4; j++) old[j] *= ratio;
            store_numbers<INT8, 4>(values + i, old);
        }
    }
    if (threadIdx.x == 0 && (now > before || written == 0)) *scale = now;
}
