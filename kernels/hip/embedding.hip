// Gathers rows of a matrix of any type: the embeddings of tokens, or the activations to compute logits for.
// ops_numpy.take.
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
