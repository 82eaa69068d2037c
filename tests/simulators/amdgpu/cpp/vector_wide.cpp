// Vector instructions of 64 bits, and of two f32 in a pair of registers.
#include "floats.h"
#include "operands.h"

namespace amdgpu {
namespace {

// Two results, each of a half of the sources: op_sel says which for the low one, op_sel_hi for the high one.
template <class F, int Sources> void packed(Wave &w, const Instruction &in) {
    f32 from[3][LANES], out[2][LANES];
    for (int half = 0; half < 2; half++) {
        for (int i = 0; i < Sources; i++) {
            const Operand &one = in.operands[1 + i];
            const bool high = (half ? in.op_sel_hi : in.op_sel) >> i & 1;
            const bool negative = (half ? in.neg_hi : in.neg_lo) >> i & 1;
            if (one.kind == Kind::VECTOR) {
                memcpy(from[i], w.v[one.index + high], sizeof from[i]);
            } else {
                // A constant is the low half; what the high one is, differs between GPUs.
                if (high && one.kind != Kind::SCALAR && !(one.kind == Kind::INTEGER && one.bits == 0))
                    fault("the high half of a constant");
                const f32 value = one.kind == Kind::SCALAR ? bits_as<f32>(w.s[one.index + high]) : scalar<f32>(w, one);
                for (int lane = 0; lane < LANES; lane++) from[i][lane] = value;
            }
            if (negative)
                for (int lane = 0; lane < LANES; lane++) from[i][lane] = -from[i][lane];
        }
        for (int lane = 0; lane < LANES; lane++) out[half][lane] = F{}(from[0][lane], from[1][lane], from[2][lane]);
    }
    if (in.clamp)
        for (auto &half : out)
            for (f32 &value : half) value = clamped(value);
    Operand to = in.operands[0];
    write_words(w, in, to, (const u32 *)out[0]);
    to.index++;
    write_words(w, in, to, (const u32 *)out[1]);
}
template <int Sources, class F> void add_packed(Table &t, const char *name, F) { t[name] = {packed<F, Sources>}; }

// A word of each of two sources: op_sel's first bit says which of the first, its second which of the second.
void pack_words(Wave &w, const Instruction &in) {
    u32 words[2][LANES];
    for (int i = 0; i < 2; i++) {
        const Operand &one = in.operands[1 + i];
        const int high = in.op_sel >> i & 1;
        if (one.kind == Kind::VECTOR) {
            memcpy(words[i], w.v[one.index + high], sizeof words[i]);
            continue;
        }
        const u32 value = one.kind == Kind::SCALAR ? w.s[one.index + high]
                          : high ? (u32)(constant<u64>(one) >> 32) : constant<u32>(one);
        for (u32 &word : words[i]) word = value;
    }
    Operand to = in.operands[0];
    write_words(w, in, to, words[0]);
    to.index++;
    write_words(w, in, to, words[1]);
}

// The hardware's has 24 bits or so; divisions refine it.
f64 rough_inverse(f64 a) {
    const f64 value = 1 / a;
    return std::isfinite(value) ? bits_as<f64>(bits_as<u64>(value) & ~((1ull << 28) - 1)) : value;
}

}  // namespace

void add_vector_64(Table &t) {
    typedef WithBit<u64> Out;
    typedef f64 Two(f64, f64);
    typedef f64 Three(f64, f64, f64);
    vector<u64(u64)>(t, "v_mov_b64", [](u64 a) { return a; });
    vector<u64(u32, u64)>(t, "v_lshlrev_b64", [](u32 a, u64 b) { return b << (a & 63); });
    vector<u64(u32, u64)>(t, "v_lshrrev_b64", [](u32 a, u64 b) { return b >> (a & 63); });
    vector<i64(u32, i64)>(t, "v_ashrrev_i64", [](u32 a, i64 b) { return b >> (a & 63); });
    vector<u64(u64, u32, u64)>(t, "v_lshl_add_u64", [](u64 a, u32 b, u64 c) { return (a << (b & 7)) + c; });
    vector<Out(u32, u32, u64)>(t, "v_mad_u64_u32", [](u32 a, u32 b, u64 c) {
        const u64 sum = (u64)a * b + c;
        return Out{sum, sum < c};
    });
    vector<Out(i32, i32, i64)>(t, "v_mad_i64_i32", [](i32 a, i32 b, i64 c) {
        i64 sum;
        const bool over = __builtin_add_overflow((i64)a * b, c, &sum);
        return Out{(u64)sum, over};
    });
    vector<Two>(t, "v_add_f64", [](f64 a, f64 b) { return a + b; });
    vector<Two>(t, "v_mul_f64", [](f64 a, f64 b) { return a * b; });
    vector<Two>(t, "v_max_f64", [](f64 a, f64 b) { return larger(a, b); });
    vector<Two>(t, "v_min_f64", [](f64 a, f64 b) { return smaller(a, b); });
    vector<Three>(t, "v_fma_f64", [](f64 a, f64 b, f64 c) { return __builtin_fma(a, b, c); });
    accumulate<Three>(t, "v_fmac_f64", [](f64 a, f64 b, f64 c) { return __builtin_fma(a, b, c); });
    vector<f64(f64)>(t, "v_rcp_f64", [](f64 a) { return rough_inverse(flushed(a)); });
    vector<f64(f64)>(t, "v_rndne_f64", [](f64 a) { return __builtin_nearbyint(a); });
    vector<f64(f64, i32)>(t, "v_ldexp_f64", [](f64 a, i32 b) { return __builtin_ldexp(a, b); });
    vector<Out(f64, f64, f64)>(t, "v_div_scale_f64", [](f64 a, f64 b, f64 c) {
        const Scaled<f64> one = scaled_for_division(a, b, c);
        return Out{bits_as<u64>(one.value), one.flag};
    });
    vector<f64(f64, f64, f64, Bit)>(t, "v_div_fmas_f64", [](f64 a, f64 b, f64 c, Bit vcc) {
        const f64 sum = __builtin_fma(a, b, c);
        return vcc.set ? sum * (exponent_of(c) > 1023 ? 0x1p128 : 0x1p-128) : sum;
    });
    vector<Three>(t, "v_div_fixup_f64", [](f64 a, f64 b, f64 c) { return fixed_after_division(a, b, c); });
    vector<f64(f32)>(t, "v_cvt_f64_f32", [](f32 a) { return (f64)a; });
    vector<f32(f64)>(t, "v_cvt_f32_f64", [](f64 a) { return (f32)a; });
    vector<f64(i32)>(t, "v_cvt_f64_i32", [](i32 a) { return (f64)a; });
    vector<f64(u32)>(t, "v_cvt_f64_u32", [](u32 a) { return (f64)a; });
    vector<i32(f64)>(t, "v_cvt_i32_f64", [](f64 a) { return whole<i32>(a); });
    vector<u32(f64)>(t, "v_cvt_u32_f64", [](f64 a) { return whole<u32>(a); });
    add_packed<2>(t, "v_pk_add_f32", [](f32 a, f32 b, f32) { return a + b; });
    add_packed<2>(t, "v_pk_mul_f32", [](f32 a, f32 b, f32) { return a * b; });
    add_packed<3>(t, "v_pk_fma_f32", [](f32 a, f32 b, f32 c) { return __builtin_fmaf(a, b, c); });
    t["v_pk_mov_b32"] = {pack_words};
}

}  // namespace amdgpu
