// silu(gate) * up: ops_numpy.silu_mul.
//
// Each thread computes 16 bytes of a row's result: grid (rows, ceil(width / (block * 16 / bytes of a number))).
//
// defines: RF_TYPE=F32|F16|BF16
// variants: RF_TYPE=F32|F16|BF16
#include "common.h"

#if !defined(RF_TYPE)
#error "activation: RF_TYPE must be defined"
#endif

typedef RF_TYPE::Bits Bits;
static const int COUNT = 16 / (int)sizeof(Bits);

// gate_up: [rows, 2 width], the gate in the first half. out: [rows, width].
RF_KERNEL silu_mul(const Bits *__restrict__ gate_up, Bits *__restrict__ out, i32 width) {
    const Bits *gate = gate_up + (i64)blockIdx.x * 2 * width, *up = gate + width;
    Bits *result = out + (i64)blockIdx.x * width;
    const i64 begin = (i64)blockIdx.y * blockDim.x * COUNT;
    if (((u64)gate_up | (u64)out) % 16 == 0 && width % COUNT == 0) {
        const i64 at = begin + threadIdx.x * COUNT;
        if (at >= width) return;
        float gates[COUNT], ups[COUNT];
        load_numbers<RF_TYPE, COUNT>(gate + at, gates);
        load_numbers<RF_TYPE, COUNT>(up + at, ups);
#pragma unroll
        for (int i = 0; i < COUNT; i++) gates[i] = silu(gates[i]) * ups[i];
        store_numbers<RF_TYPE, COUNT>(result + at, gates);
        return;
    }
    for (int i = 0; i < COUNT; i++) {
        const i64 at = begin + i * (int)blockDim.x + threadIdx.x;
        if (at < width) result[at] = RF_TYPE::store(silu(RF_TYPE::load(gate[at])) * RF_TYPE::load(up[at]));
    }
}
