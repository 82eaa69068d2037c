// Vector instructions of 16 bits, of two of them in a register, and of f32 mixed with f16.
#include "floats.h"
#include "operands.h"

namespace amdgpu {
namespace {

f16 fused(f16 a, f16 b, f16 c) { return (f16)((f64)a * (f64)b + (f64)c); }

// f32 sources, or by op_sel_hi f16: then the half that op_sel says.
void mixed_source(Wave &w, const Instruction &in, int i, f32 *out) {
    const Operand &one = in.operands[1 + i];
    if (!(in.op_sel_hi >> i & 1)) {
        f32 buffer[LANES];
        memcpy(out, lanes_of<f32>(w, in, 1 + i, i, buffer), sizeof buffer);
        return;
    }
    f16 buffer[LANES];
    const f16 *halves = lanes_of<f16>(w, in, 1 + i, i, buffer);
    for (int lane = 0; lane < LANES; lane++) out[lane] = (f32)halves[lane];
    (void)one;
}
void mixed(Wave &w, const Instruction &in, f32 *out) {
    f32 from[3][LANES];
    for (int i = 0; i < 3; i++) mixed_source(w, in, i, from[i]);
    for (int lane = 0; lane < LANES; lane++) out[lane] = __builtin_fmaf(from[0][lane], from[1][lane], from[2][lane]);
}
void mix(Wave &w, const Instruction &in) {
    f32 out[LANES];
    mixed(w, in, out);
    write_lanes(w, in, in.operands[0], out);
}
// To a half of the destination; the other stays.
void mix_half(Wave &w, const Instruction &in) {
    f32 sums[LANES];
    mixed(w, in, sums);
    const Operand &to = in.operands[0];
    u32 words[LANES];
    for (int lane = 0; lane < LANES; lane++) {
        f16 half = (f16)sums[lane];
        if (in.clamp) half = clamped(half);
        const u32 bits = bits_as<u16>(half), old = w.v[to.index][lane];
        words[lane] = in.argument ? (old & 0xffff) | bits << 16 : (old & 0xffff0000) | bits;
    }
    write_words(w, in, to, words);
}

// Two 16-bit results: of the halves that op_sel says, the low one; that op_sel_hi says, the high one.
template <class F, class T, int Sources> void packed(Wave &w, const Instruction &in) {
    u32 out[LANES] = {};
    for (int half = 0; half < 2; half++) {
        T from[3][LANES] = {};
        for (int i = 0; i < Sources; i++) {
            const Operand &one = in.operands[1 + i];
            const bool high = (half ? in.op_sel_hi : in.op_sel) >> i & 1;
            const bool negative = (half ? in.neg_hi : in.neg_lo) >> i & 1;
            for (int lane = 0; lane < LANES; lane++) {
                u32 word = one.kind == Kind::VECTOR ? w.v[one.index][lane]
                           : one.kind == Kind::SCALAR ? w.s[one.index]
                           : one.kind == Kind::FLOAT ? bits_as<u16>(constant<T>(one)) : constant<u32>(one);
                u16 bits = (u16)(high ? word >> 16 : word);
                from[i][lane] = bits_as<T>((u16)(negative ? bits ^ 0x8000 : bits));
            }
        }
        for (int lane = 0; lane < LANES; lane++) {
            T one = F{}(from[0][lane], from[1][lane], from[2][lane]);
            if (in.clamp) one = clamped(one);
            out[lane] |= (u32)bits_as<u16>(one) << (16 * half);
        }
    }
    write_words(w, in, in.operands[0], out);
}
template <class T, int Sources, class F> void add_packed(Table &t, const char *name, F) {
    t[name] = {packed<F, T, Sources>};
}

// Two sources as 16-bit numbers in one register.
template <class F, class From> void packed_pair(Wave &w, const Instruction &in) {
    From a[LANES], b[LANES];
    const From *low = lanes_of<From>(w, in, 1, 0, a), *high = lanes_of<From>(w, in, 2, 1, b);
    u32 out[LANES];
    for (int lane = 0; lane < LANES; lane++) out[lane] = F{}(low[lane]) | (u32)F{}(high[lane]) << 16;
    write_words(w, in, in.operands[0], out);
}
template <class From, class F> void add_pair(Table &t, const char *name, F) { t[name] = {packed_pair<F, From>}; }

u16 towards_zero(f32 value) {
    f16 half = (f16)value;
    u16 bits = bits_as<u16>(half);
    if (std::isfinite(value) && std::fabs((f32)half) > std::fabs(value)) bits--;
    return bits;
}
u16 bfloat_of(f32 value) {
    const u32 bits = bits_as<u32>(value);
    if (value != value) return (u16)(bits >> 16 | 0x40);
    return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace

void add_vector_16(Table &t) {
    typedef f16 Two(f16, f16);
    typedef u16 Integers(u16, u16);
    vector<f16(f32)>(t, "v_cvt_f16_f32", [](f32 a) { return (f16)a; });
    vector<f32(f16)>(t, "v_cvt_f32_f16", [](f16 a) { return (f32)a; });
    vector<f16(u16)>(t, "v_cvt_f16_u16", [](u16 a) { return (f16)a; });
    vector<f16(i16)>(t, "v_cvt_f16_i16", [](i16 a) { return (f16)a; });
    vector<Two>(t, "v_add_f16", [](f16 a, f16 b) { return (f16)(a + b); });
    vector<Two>(t, "v_sub_f16", [](f16 a, f16 b) { return (f16)(a - b); });
    vector<Two>(t, "v_mul_f16", [](f16 a, f16 b) { return (f16)(a * b); });
    vector<Two>(t, "v_max_f16", [](f16 a, f16 b) { return larger(a, b); });
    vector<Two>(t, "v_min_f16", [](f16 a, f16 b) { return smaller(a, b); });
    vector<f16(f16, f16, f16)>(t, "v_fma_f16", [](f16 a, f16 b, f16 c) { return fused(a, b, c); });
    vector<Integers>(t, "v_add_u16", [](u16 a, u16 b) { return (u16)(a + b); });
    vector<Integers>(t, "v_sub_u16", [](u16 a, u16 b) { return (u16)(a - b); });
    vector<Integers>(t, "v_mul_lo_u16", [](u16 a, u16 b) { return (u16)((u32)a * b); });
    vector<Integers>(t, "v_lshlrev_b16", [](u16 a, u16 b) { return (u16)(b << (a & 15)); });
    vector<Integers>(t, "v_lshrrev_b16", [](u16 a, u16 b) { return (u16)(b >> (a & 15)); });
    vector<i16(u16, i16)>(t, "v_ashrrev_i16", [](u16 a, i16 b) { return (i16)(b >> (a & 15)); });
    vector<u32(u16, u16)>(t, "v_pack_b32_f16", [](u16 a, u16 b) { return (u32)a | (u32)b << 16; });
    add_packed<f16, 2>(t, "v_pk_add_f16", [](f16 a, f16 b, f16) { return (f16)(a + b); });
    add_packed<f16, 2>(t, "v_pk_mul_f16", [](f16 a, f16 b, f16) { return (f16)(a * b); });
    add_packed<f16, 2>(t, "v_pk_max_f16", [](f16 a, f16 b, f16) { return larger(a, b); });
    add_packed<f16, 2>(t, "v_pk_min_f16", [](f16 a, f16 b, f16) { return smaller(a, b); });
    add_packed<f16, 3>(t, "v_pk_fma_f16", [](f16 a, f16 b, f16 c) { return fused(a, b, c); });
    add_pair<f32>(t, "v_cvt_pkrtz_f16_f32", [](f32 a) { return towards_zero(a); });
    add_pair<f32>(t, "v_cvt_pk_bf16_f32", [](f32 a) { return bfloat_of(a); });
    t["v_fma_mix_f32"] = {mix};
    t["v_fma_mixlo_f16"] = {mix_half, 0};
    t["v_fma_mixhi_f16"] = {mix_half, 1};
}

}  // namespace amdgpu
