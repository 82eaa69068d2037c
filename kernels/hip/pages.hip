// Copies, zeroes, packs and unpacks whole pages of the arena. ops_numpy.copy_page, zero_page,
// pack_pages, unpack_pages.
//
// `blocks` blocks share a page: grid pages * blocks, best 64 bytes per thread. Page p begins at
// p * page_bytes; numbers of pages are not checked.
//
// variants:
#include "common.h"

// The index of the page in the list, and of this thread among those that share the page.
struct Share {
    i64 page, first, threads;
    RF_INLINE Share(i32 blocks)
        : page(blockIdx.x / blocks),
          first((i64)(blockIdx.x % blocks) * blockDim.x + threadIdx.x),
          threads((i64)blocks * blockDim.x) {}
};

// pairs: [pages, 2], source and target. No target is a source or a target of another pair.
RF_KERNEL copy_pages(u8 *pages, const i32 *pairs, i64 page_bytes, i32 blocks) {
    const Share share(blocks);
    const u8 *source = pages + pairs[2 * share.page] * page_bytes;
    copy_bytes(source, pages + pairs[2 * share.page + 1] * page_bytes, page_bytes, share.first, share.threads);
}

// numbers: [pages]; may repeat.
RF_KERNEL zero_pages(u8 *pages, const i32 *numbers, i64 page_bytes, i32 blocks) {
    const Share share(blocks);
    u8 *page = pages + numbers[share.page] * page_bytes;
    if (((u64)page | (u64)page_bytes) % 16 == 0) {
        const uint4 zero = {0, 0, 0, 0};
        for (i64 at = share.first; at < page_bytes / 16; at += share.threads) ((uint4 *)page)[at] = zero;
    } else {
        for (i64 at = share.first; at < page_bytes; at += share.threads) page[at] = 0;
    }
}

// buffer: [pages, page_bytes], the pages of `numbers`, concatenated.
RF_KERNEL pack_pages(const u8 *pages, const i32 *numbers, u8 *buffer, i64 page_bytes, i32 blocks) {
    const Share share(blocks);
    const u8 *source = pages + numbers[share.page] * page_bytes;
    copy_bytes(source, buffer + share.page * page_bytes, page_bytes, share.first, share.threads);
}

// The inverse; numbers must be distinct.
RF_KERNEL unpack_pages(u8 *pages, const i32 *numbers, const u8 *buffer, i64 page_bytes, i32 blocks) {
    const Share share(blocks);
    u8 *target = pages + numbers[share.page] * page_bytes;
    copy_bytes(buffer + share.page * page_bytes, target, page_bytes, share.first, share.threads);
}
