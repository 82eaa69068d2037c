// Combines the partial results of rows whose keys attention_decode.hip or attention_prefill.hip split into items.
//
// defines: RF_TYPE=F32|F16|BF16 RF_HEAD_DIM=64|80|96|128|256 RF_GROUP=1..
// variants: RF_TYPE=F32|BF16 RF_HEAD_DIM=80|256 RF_GROUP=4
#include "common.h"

#if !defined(RF_TYPE) || !defined(RF_HEAD_DIM) || !defined(RF_GROUP)
#error "attention_combine: RF_TYPE, RF_HEAD_DIM and RF_GROUP must be defined"
#endif

static const int DIM = RF_HEAD_DIM;
static const int THREADS = 128;
static const int LANES = DIM / 4, TEAMS = THREADS / LANES;  // a team sums some of the results, four numbers per lane
#define LOWEST -3.0e38f                                     // the maximum of a team without results
static const int ENTRY = 5;  // row, first query, queries, index of their first partial result, number of results

// Block (x, y): kv head x % kv_heads of entry x / kv_heads, query y. Other arguments as in attention_decode.
RF_KERNEL __launch_bounds__(THREADS)
    attention_combine(const float *__restrict__ partials, const float *__restrict__ stats,
                      const i32 *__restrict__ entries, i32 kv_heads, const i32 *__restrict__ offsets,
                      RF_TYPE::Bits *__restrict__ out) {
    __shared__ float mosts[TEAMS], totals[TEAMS];
    __shared__ float4 sums[TEAMS][LANES];
    int head = blockIdx.x % kv_heads, number = blockIdx.y;
    const i32 *entry = entries + (i64)(blockIdx.x / kv_heads) * ENTRY;
    int query = entry[1] + number, count = entry[2], splits = entry[4];
    if (number >= count) return;
    i64 first = ((i64)entry[3] + number) * kv_heads + head, stride = (i64)count * kv_heads;

    // Each team has its own maximum, so that no load waits for another.
    int team = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float most = LOWEST, total = 0.0f;
    if (team < TEAMS) {
#pragma unroll 4
        for (int split = team; split < splits; split += TEAMS) {
            i64 at = first + split * stride;
            float2 stat = *(const float2 *)(stats + at * 2);
            float4 four = *(const float4 *)(partials + at * DIM + lane * 4);
            float now = fmaxf(most, stat.x), shrink = power_of_two(most - now), weight = power_of_two(stat.x - now);
            most = now;
            total = fmaf(total, shrink, weight * stat.y);
            sum.x = fmaf(sum.x, shrink, weight * four.x);
            sum.y = fmaf(sum.y, shrink, weight * four.y);
            sum.z = fmaf(sum.z, shrink, weight * four.z);
            sum.w = fmaf(sum.w, shrink, weight * four.w);
        }
        sums[team][lane] = sum;
        if (lane == 0) mosts[team] = most, totals[team] = total;
    }
    __syncthreads();
    if (team > 0) return;
    for (int other = 1; other < TEAMS; other++) most = fmaxf(most, mosts[other]);
    total = 0.0f;
    sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int other = 0; other < TEAMS; other++) {
        float4 four = sums[other][lane];
        float weight = power_of_two(mosts[other] - most);
        total = fmaf(weight, totals[other], total);
        sum.x = fmaf(weight, four.x, sum.x);
        sum.y = fmaf(weight, four.y, sum.y);
        sum.z = fmaf(weight, four.z, sum.z);
        sum.w = fmaf(weight, four.w, sum.w);
    }
    i64 to = ((((i64)offsets[entry[0]] + query / RF_GROUP) * kv_heads + head) * RF_GROUP + query % RF_GROUP) * DIM;
    float values[4] = {sum.x / total, sum.y / total, sum.z / total, sum.w / total};
    store_numbers<RF_TYPE, 4>(out + to + lane * 4, values);
}
