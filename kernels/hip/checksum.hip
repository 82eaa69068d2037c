// Checksums of whole pages of the arena. kernels/device/checksum.py.
//
// `blocks` blocks share a page: grid pages * blocks, in blocks of whole waves. Page p begins at p * page_bytes; numbers of
// pages are not checked. partials: [pages, blocks]; the checksum of a page is the sum of its own, modulo 2^64.
//
// variants:
#include "common.h"

#define GAMMA 0x9e3779b97f4a7c15ull

// SplitMix64's output for a counter: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators" (2014), with
// the constants of Stafford's mix 13.
RF_INLINE u64 mixed(u64 z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

RF_KERNEL checksum_pages(const u8 *pages, const i32 *numbers, u64 *partials, i64 page_bytes, i32 blocks) {
    __shared__ u64 of_waves[32];
    const u8 *page = pages + numbers[blockIdx.x / blocks] * page_bytes;
    const i64 first = (i64)(blockIdx.x % blocks) * blockDim.x + threadIdx.x;
    const i64 threads = (i64)blocks * blockDim.x;
    u64 sum = 0;
    if (((u64)page | (u64)page_bytes) % 16 == 0) {
        const uint4 *pairs = (const uint4 *)page;  // of words
        for (i64 at = first; at < page_bytes / 16; at += 4 * threads) {
            uint4 held[4];  // all loads are under way before the first is needed
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (at + i * threads < page_bytes / 16) held[i] = pairs[at + i * threads];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const u64 place = 2 * (u64)(at + i * threads);
                if (at + i * threads < page_bytes / 16) {
                    sum += mixed(((u64)held[i].y << 32 | held[i].x) + (place + 1) * GAMMA);
                    sum += mixed(((u64)held[i].w << 32 | held[i].z) + (place + 2) * GAMMA);
                }
            }
        }
    } else {
        for (i64 at = first; at < (page_bytes + 7) / 8; at += threads) {
            u64 word = 0;
            for (int i = 0; i < 8; i++)
                if (8 * at + i < page_bytes) word |= (u64)page[8 * at + i] << (8 * i);
            sum += mixed(word + (u64)(at + 1) * GAMMA);
        }
    }
#pragma unroll
    for (int mask = RF_WAVE / 2; mask > 0; mask >>= 1) sum += shuffle_xor(sum, mask);
    if (threadIdx.x % RF_WAVE == 0) of_waves[threadIdx.x / RF_WAVE] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int wave = 1; wave < (int)(blockDim.x / RF_WAVE); wave++) sum += of_waves[wave];
        partials[blockIdx.x] = sum;
    }
}
