// Products of matrices: MFMA of CDNA, WMMA of RDNA. EXEC is nothing to them.
//
// `argument` is the number of the shape in SHAPES. A wave's lanes are groups of as many as there are rows: a lane holds, of
// row (of a) or column (of b) lane % rows, the numbers along k that are its group's; of c, its column's rows.
#include "floats.h"
#include "operands.h"

namespace amdgpu {
namespace {

enum Type { HALF, BFLOAT, FLOAT, BYTE };
struct Shape {
    const char *name;
    int rows, depth;
    Type type;
};
const Shape MFMA[] = {
    {"v_mfma_f32_16x16x16_f16", 16, 16, HALF},   {"v_mfma_f32_16x16x16_bf16", 16, 16, BFLOAT},
    {"v_mfma_f32_32x32x8_f16", 32, 8, HALF},     {"v_mfma_f32_32x32x8_bf16", 32, 8, BFLOAT},
    {"v_mfma_f32_16x16x4_f32", 16, 4, FLOAT},    {"v_mfma_f32_32x32x2_f32", 32, 2, FLOAT},
    {"v_mfma_i32_16x16x32_i8", 16, 32, BYTE},    {"v_mfma_i32_32x32x16_i8", 32, 16, BYTE},
    {"v_mfma_i32_16x16x16_i8", 16, 16, BYTE},    {"v_mfma_i32_32x32x8_i8", 32, 8, BYTE},
};
const Shape WMMA[] = {
    {"v_wmma_f32_16x16x16_f16", 16, 16, HALF},
    {"v_wmma_f32_16x16x16_bf16", 16, 16, BFLOAT},
};

int bits_of(Type type) { return type == FLOAT ? 32 : type == BYTE ? 8 : 16; }

// Number i of those that a lane holds in the registers from `index`.
f64 number(const Wave &w, int index, int lane, Type type, int i, bool flush) {
    const int bits = bits_of(type), each = 32 / bits;
    const u32 word = w.v[index + i / each][lane] >> (bits * (i % each));
    f32 value = type == FLOAT ? bits_as<f32>(word)
                : type == BYTE ? (f32)(i8)word
                : type == HALF ? (f32)bits_as<f16>((u16)word) : float_of_bfloat((u16)word);
    // CDNA 2 takes 16-bit numbers below the normal ones for 0.
    if (flush && bits == 16 && std::fabs(value) < (type == HALF ? 0x1p-14f : 0x1p-126f)) value = 0;
    return value;
}

void multiply(Wave &w, const Instruction &in, const Shape &shape, f64 (&sum)[32][32]) {
    const int n = shape.rows, groups = w.lanes / n, each = shape.depth / groups;
    static thread_local f64 a[32][32], b[32][32];
    for (int lane = 0; lane < w.lanes; lane++)
        for (int i = 0; i < each; i++) {
            const int k = lane / n * each + i;
            a[lane % n][k] = number(w, in.operands[1].index, lane, shape.type, i, in.flushes);
            b[k][lane % n] = number(w, in.operands[2].index, lane, shape.type, i, in.flushes);
        }
    for (int row = 0; row < n; row++)
        for (int column = 0; column < n; column++) sum[row][column] = 0;
    for (int row = 0; row < n; row++)
        for (int k = 0; k < shape.depth; k++)
            for (int column = 0; column < n; column++) sum[row][column] += a[row][k] * b[k][column];
}

// c and the result, number i of a lane. A constant c is alike for all.
void add_up(Wave &w, const Instruction &in, const Shape &shape, int i, int lane, f64 product, u32 *out) {
    const Operand &c = in.operands[3];
    const u32 old = c.kind == Kind::VECTOR ? w.v[c.index + i][lane] : shape.type == BYTE ? scalar<u32>(w, c) : bits_as<u32>(scalar<f32>(w, c));
    out[lane] = shape.type == BYTE ? old + (u32)(i32)product : bits_as<u32>((f32)((f64)bits_as<f32>(old) + product));
}

void plain_modifiers(const Instruction &in) {
    if (in.neg_lo || in.neg_hi || in.op_sel) fault("a product with modifiers");
}

void mfma(Wave &w, const Instruction &in) {
    plain_modifiers(in);
    const Shape &shape = MFMA[in.argument];
    f64 product[32][32];
    multiply(w, in, shape, product);
    // Of a column, a lane has four rows together; of 32 rows, the next four that are its group's lie eight further.
    const int n = shape.rows, registers = n * n / w.lanes;
    u32 out[16][LANES];
    for (int i = 0; i < registers; i++)
        for (int lane = 0; lane < w.lanes; lane++) {
            const int row = i / 4 * (4 * w.lanes / n) + lane / n * 4 + i % 4;
            add_up(w, in, shape, i, lane, product[row][lane % n], out[i]);
        }
    for (int i = 0; i < registers; i++) memcpy(w.v[in.operands[0].index + i], out[i], sizeof out[i]);
}

// RDNA 3: each half of a wave holds all of a and b, alike, and of c every second row. RDNA 4: halves as MFMA's groups.
void wmma(Wave &w, const Instruction &in) {
    plain_modifiers(in);
    if (w.lanes != 32) fault("WMMA in a wave of 64 lanes");
    const Shape &shape = WMMA[in.argument];
    const bool both = in.operands[1].words == 8;
    f64 product[32][32];
    if (both) {
        for (int i = 0; i < 16; i++)
            for (int lane = 0; lane < 16; lane++) {
                const u32 *word = w.v[in.operands[1 + i / 8].index + i % 8];
                if (word[lane] != word[lane + 16]) fault("WMMA: lane %d and lane %d hold different numbers", lane, lane + 16);
            }
        for (int row = 0; row < 16; row++)
            for (int column = 0; column < 16; column++) {
                f64 &sum = product[row][column] = 0;
                for (int k = 0; k < 16; k++)
                    sum += number(w, in.operands[1].index, row, shape.type, k, false) *
                           number(w, in.operands[2].index, column, shape.type, k, false);
            }
    } else {
        multiply(w, in, shape, product);
    }
    u32 out[8][LANES];
    for (int i = 0; i < 8; i++)
        for (int lane = 0; lane < 32; lane++) {
            const int row = both ? 2 * i + lane / 16 : i + lane / 16 * 8;
            add_up(w, in, shape, i, lane, product[row][lane % 16], out[i]);
        }
    for (int i = 0; i < 8; i++) memcpy(w.v[in.operands[0].index + i], out[i], 32 * sizeof(u32));
}

}  // namespace

void add_matrix(Table &t) {
    int number = 0;
    for (const Shape &shape : MFMA) t[shape.name] = {mfma, number++};
    number = 0;
    for (const Shape &shape : WMMA) t[shape.name] = {wmma, number++};
}

}  // namespace amdgpu
