// Gathers rows of a matrix of any type: the embeddings of tokens, or the activations to compute logits for.
// ops_numpy.take. And replaces tokens that the host does not know yet by what the sampler drew: ops_numpy.fill_drawn.
//
// `blocks` blocks share a row: grid rows * blocks.
//
// variants:
#include "common.h"

// table: rows of row_bytes bytes. numbers: [rows], not checked. out: [rows, row_bytes].
RF_KERNEL gather_rows(const u8 *table, const i32 *numbers, u8 *out, i64 row_bytes, i32 blocks) {
    const i64 row = blockIdx.x / blocks;
    const i64 first = (i64)(blockIdx.x % blocks) * blockDim.x + threadIdx.x;
    const u8 *source = table + numbers[row] * row_bytes;
    copy_bytes(source, out + row * row_bytes, row_bytes, first, (i64)blocks * blockDim.x);
}

// tokens: [count]; one that is negative, -1 - row, becomes drawn[row].
RF_KERNEL fill_drawn(i32 *tokens, const i32 *drawn, i32 count) {
    const i32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count && tokens[at] < 0) tokens[at] = drawn[-1 - tokens[at]];
}
