// The partial results of rows whose keys were more than one item of attention_decode.hip or attention_prefill.hip.
//
// defines: RF_TYPE=F32|F16|BF16 RF_HEAD_DIM=64|80|96|128|256 RF_GROUP=1..
// variants: RF_TYPE=F32|F16|BF16 RF_HEAD_DIM=80|128|256 RF_GROUP=4
#include "common.h"

#if !defined(RF_TYPE) || !defined(RF_HEAD_DIM) || !defined(RF_GROUP)
#error "attention_combine: RF_TYPE, RF_HEAD_DIM and RF_GROUP must be defined"
#endif

static const int DIM = RF_HEAD_DIM;
static const int THREADS = 2 * RF_WAVE;
static const int ENTRY = 5;  // row, first query, queries, number of their first partial result, how many of them

// Block (x, y): kv head x % kv_heads of entry x / kv_heads, query y. The rest as attention_decode has it.
RF_KERNEL __launch_bounds__(THREADS) attention_combine(
    const float *__restrict__ partials, const float *__restrict__ stats, const i32 *__restrict__ entries, i32 kv_heads,
    const i32 *__restrict__ offsets, RF_TYPE::Bits *__restrict__ out) {
    int head = blockIdx.x % kv_heads;
    const i32 *entry = entries + (i64)(blockIdx.x / kv_heads) * ENTRY;
    int query = entry[1] + blockIdx.y, count = entry[2], splits = entry[4];
    if ((int)blockIdx.y >= count) return;
    i64 place = ((i64)entry[3] + blockIdx.y) * kv_heads + head, stride = (i64)count * kv_heads;

    // A thread looks at every split of its own numbers: few enough, and no barrier.
    float most = stats[place * 2];
    for (int split = 1; split < splits; split++) most = fmaxf(most, stats[(place + split * stride) * 2]);
    i64 to = (((i64)offsets[entry[0]] + query / RF_GROUP) * kv_heads + head) * RF_GROUP + query % RF_GROUP;
    for (int d = threadIdx.x; d < DIM; d += THREADS) {
        float sum = 0.0f, total = 0.0f;
#pragma unroll 4
        for (int split = 0; split < splits; split++) {
            i64 at = place + split * stride;
            float weight = exp2f(stats[at * 2] - most);
            total = fmaf(weight, stats[at * 2 + 1], total);
            sum = fmaf(weight, partials[at * DIM + d], sum);
        }
        out[to * DIM + d] = RF_TYPE::store(sum / total);
    }
}
