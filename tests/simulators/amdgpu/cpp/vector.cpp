// Vector instructions of 32 bits: integers, bits, floats, conversions.
#include "floats.h"
#include "operands.h"

namespace amdgpu {
namespace {

void integers(Table &t) {
    typedef u32 Two(u32, u32);
    typedef u32 Three(u32, u32, u32);
    typedef i32 SignedTwo(i32, i32);
    typedef i32 SignedThree(i32, i32, i32);
    vector<u32(u32)>(t, "v_mov_b32", [](u32 a) { return a; });
    vector<u32(u32)>(t, "v_not_b32", [](u32 a) { return ~a; });
    vector<u32(u32)>(t, "v_bfrev_b32", [](u32 a) {
        a = (a >> 1 & 0x55555555) | (a & 0x55555555) << 1;
        a = (a >> 2 & 0x33333333) | (a & 0x33333333) << 2;
        a = (a >> 4 & 0x0f0f0f0f) | (a & 0x0f0f0f0f) << 4;
        return __builtin_bswap32(a);
    });
    vector<u32(u32)>(t, "v_ffbh_u32", [](u32 a) { return a ? (u32)__builtin_clz(a) : ~0u; });
    vector<u32(u32)>(t, "v_ffbl_b32", [](u32 a) { return a ? (u32)__builtin_ctz(a) : ~0u; });
    vector<Two>(t, "v_add_u32", [](u32 a, u32 b) { return a + b; });
    vector<Two>(t, "v_sub_u32", [](u32 a, u32 b) { return a - b; });
    vector<Two>(t, "v_sub_clamped_u32", [](u32 a, u32 b) { return a > b ? a - b : 0; });
    vector<Two>(t, "v_subrev_u32", [](u32 a, u32 b) { return b - a; });
    vector<Two>(t, "v_and_b32", [](u32 a, u32 b) { return a & b; });
    vector<Two>(t, "v_or_b32", [](u32 a, u32 b) { return a | b; });
    vector<Two>(t, "v_xor_b32", [](u32 a, u32 b) { return a ^ b; });
    vector<Two>(t, "v_xnor_b32", [](u32 a, u32 b) { return ~(a ^ b); });
    vector<Two>(t, "v_lshlrev_b32", [](u32 a, u32 b) { return b << (a & 31); });
    vector<Two>(t, "v_lshrrev_b32", [](u32 a, u32 b) { return b >> (a & 31); });
    vector<i32(u32, i32)>(t, "v_ashrrev_i32", [](u32 a, i32 b) { return b >> (a & 31); });
    vector<Two>(t, "v_max_u32", [](u32 a, u32 b) { return a > b ? a : b; });
    vector<Two>(t, "v_min_u32", [](u32 a, u32 b) { return a < b ? a : b; });
    vector<SignedTwo>(t, "v_max_i32", [](i32 a, i32 b) { return a > b ? a : b; });
    vector<SignedTwo>(t, "v_min_i32", [](i32 a, i32 b) { return a < b ? a : b; });
    vector<Two>(t, "v_mul_lo_u32", [](u32 a, u32 b) { return a * b; });
    vector<Two>(t, "v_mul_hi_u32", [](u32 a, u32 b) { return (u32)((u64)a * b >> 32); });
    vector<SignedTwo>(t, "v_mul_hi_i32", [](i32 a, i32 b) { return (i32)((i64)a * b >> 32); });
    vector<Two>(t, "v_mul_u32_u24", [](u32 a, u32 b) { return (a & 0xffffff) * (b & 0xffffff); });
    vector<Two>(t, "v_mul_hi_u32_u24", [](u32 a, u32 b) { return (u32)((u64)(a & 0xffffff) * (b & 0xffffff) >> 32); });
    vector<Two>(t, "v_mul_i32_i24", [](u32 a, u32 b) { return (u32)(((i32)(a << 8) >> 8) * (i64)((i32)(b << 8) >> 8)); });
    vector<Three>(t, "v_mad_u32_u24", [](u32 a, u32 b, u32 c) { return (a & 0xffffff) * (b & 0xffffff) + c; });
    vector<Three>(t, "v_mad_i32_i24",
                  [](u32 a, u32 b, u32 c) { return (u32)(((i32)(a << 8) >> 8) * (i64)((i32)(b << 8) >> 8)) + c; });
    vector<Three>(t, "v_add3_u32", [](u32 a, u32 b, u32 c) { return a + b + c; });
    vector<Three>(t, "v_add_lshl_u32", [](u32 a, u32 b, u32 c) { return (a + b) << (c & 31); });
    vector<Three>(t, "v_lshl_add_u32", [](u32 a, u32 b, u32 c) { return (a << (b & 31)) + c; });
    vector<Three>(t, "v_lshl_or_b32", [](u32 a, u32 b, u32 c) { return a << (b & 31) | c; });
    vector<Three>(t, "v_and_or_b32", [](u32 a, u32 b, u32 c) { return (a & b) | c; });
    vector<Three>(t, "v_or3_b32", [](u32 a, u32 b, u32 c) { return a | b | c; });
    vector<Three>(t, "v_xor3_b32", [](u32 a, u32 b, u32 c) { return a ^ b ^ c; });
    vector<Three>(t, "v_xad_u32", [](u32 a, u32 b, u32 c) { return (a ^ b) + c; });
    vector<Three>(t, "v_bfe_u32", [](u32 a, u32 b, u32 c) { return a >> (b & 31) & ((1u << (c & 31)) - 1); });
    vector<Three>(t, "v_bfe_i32", [](u32 a, u32 b, u32 c) {
        const u32 width = c & 31, field = a >> (b & 31) & ((1u << width) - 1), sign = width ? 1u << (width - 1) : 0;
        return (field ^ sign) - sign;
    });
    vector<Three>(t, "v_bfi_b32", [](u32 a, u32 b, u32 c) { return (a & b) | (~a & c); });
    vector<Three>(t, "v_alignbit_b32", [](u32 a, u32 b, u32 c) { return (u32)(((u64)a << 32 | b) >> (c & 31)); });
    vector<Three>(t, "v_alignbyte_b32", [](u32 a, u32 b, u32 c) { return (u32)(((u64)a << 32 | b) >> (8 * (c & 3))); });
    vector<Three>(t, "v_perm_b32", [](u32 a, u32 b, u32 c) {
        const u64 both = (u64)a << 32 | b;
        u32 result = 0;
        for (int i = 0; i < 4; i++) {
            const u32 which = c >> (8 * i) & 255;
            u32 byte = which < 8 ? both >> (8 * which) & 255 : which == 12 ? 0 : 255;
            if (which >= 8 && which < 12) byte = both >> (16 * (which - 8) + 15) & 1 ? 255 : 0;
            result |= byte << (8 * i);
        }
        return result;
    });
    vector<SignedThree>(t, "v_min3_i32", [](i32 a, i32 b, i32 c) { return std::min(std::min(a, b), c); });
    vector<SignedThree>(t, "v_max3_i32", [](i32 a, i32 b, i32 c) { return std::max(std::max(a, b), c); });
    vector<SignedThree>(t, "v_med3_i32", [](i32 a, i32 b, i32 c) { return std::max(std::min(a, b), std::min(std::max(a, b), c)); });
    vector<Three>(t, "v_min3_u32", [](u32 a, u32 b, u32 c) { return std::min(std::min(a, b), c); });
    vector<Three>(t, "v_max3_u32", [](u32 a, u32 b, u32 c) { return std::max(std::max(a, b), c); });
    vector<Three>(t, "v_med3_u32", [](u32 a, u32 b, u32 c) { return std::max(std::min(a, b), std::min(std::max(a, b), c)); });
    vector<u32(u32, u32, Bit)>(t, "v_cndmask_b32", [](u32 a, u32 b, Bit c) { return c.set ? b : a; });
}

// With a carry out, and in.
void carries(Table &t) {
    typedef WithBit<u32> Out;
    vector<Out(u32, u32)>(t, "v_add_co_u32", [](u32 a, u32 b) { return Out{a + b, a + b < a}; });
    vector<Out(u32, u32)>(t, "v_sub_co_u32", [](u32 a, u32 b) { return Out{a - b, a < b}; });
    vector<Out(u32, u32)>(t, "v_subrev_co_u32", [](u32 a, u32 b) { return Out{b - a, b < a}; });
    vector<Out(u32, u32, Bit)>(t, "v_addc_co_u32", [](u32 a, u32 b, Bit c) {
        const u64 sum = (u64)a + b + c.set;
        return Out{(u32)sum, sum >> 32 != 0};
    });
    vector<Out(u32, u32, Bit)>(t, "v_subb_co_u32",
                               [](u32 a, u32 b, Bit c) { return Out{a - b - c.set, (u64)b + c.set > a}; });
    vector<Out(u32, u32, Bit)>(t, "v_subbrev_co_u32",
                               [](u32 a, u32 b, Bit c) { return Out{b - a - c.set, (u64)a + c.set > b}; });
    vector<Out(f32, f32, f32)>(t, "v_div_scale_f32", [](f32 a, f32 b, f32 c) {
        const Scaled<f32> one = scaled_for_division(a, b, c);
        return Out{bits_as<u32>(one.value), one.flag};
    });
}

void floats(Table &t) {
    typedef f32 One(f32);
    typedef f32 Two(f32, f32);
    typedef f32 Three(f32, f32, f32);
    vector<Two>(t, "v_add_f32", [](f32 a, f32 b) { return a + b; });
    vector<Two>(t, "v_sub_f32", [](f32 a, f32 b) { return a - b; });
    vector<Two>(t, "v_subrev_f32", [](f32 a, f32 b) { return b - a; });
    vector<Two>(t, "v_mul_f32", [](f32 a, f32 b) { return a * b; });
    vector<Two>(t, "v_max_f32", [](f32 a, f32 b) { return larger(a, b); });
    vector<Two>(t, "v_min_f32", [](f32 a, f32 b) { return smaller(a, b); });
    vector<Three>(t, "v_fma_f32", [](f32 a, f32 b, f32 c) { return __builtin_fmaf(a, b, c); });
    vector<Three>(t, "v_fmamk_f32", [](f32 a, f32 k, f32 b) { return __builtin_fmaf(a, k, b); });
    vector<Three>(t, "v_fmaak_f32", [](f32 a, f32 b, f32 k) { return __builtin_fmaf(a, b, k); });
    accumulate<Three>(t, "v_fmac_f32", [](f32 a, f32 b, f32 c) { return __builtin_fmaf(a, b, c); });
    vector<Three>(t, "v_max3_f32", [](f32 a, f32 b, f32 c) { return larger(larger(a, b), c); });
    vector<Three>(t, "v_min3_f32", [](f32 a, f32 b, f32 c) { return smaller(smaller(a, b), c); });
    vector<Three>(t, "v_med3_f32", [](f32 a, f32 b, f32 c) {
        if (a != a || b != b || c != c) return smaller(smaller(a, b), c);
        return larger(smaller(a, b), smaller(larger(a, b), c));
    });
    vector<One>(t, "v_rndne_f32", [](f32 a) { return __builtin_nearbyintf(a); });
    vector<One>(t, "v_trunc_f32", [](f32 a) { return __builtin_truncf(a); });
    vector<One>(t, "v_floor_f32", [](f32 a) { return __builtin_floorf(a); });
    vector<One>(t, "v_ceil_f32", [](f32 a) { return __builtin_ceilf(a); });
    vector<One>(t, "v_fract_f32", [](f32 a) { return smaller(a - __builtin_floorf(a), 0x1.fffffep-1f); });
    vector<One>(t, "v_exp_f32", [](f32 a) { return flushed((f32)exp2((f64)flushed(a))); });
    vector<One>(t, "v_log_f32", [](f32 a) { return flushed((f32)log2((f64)flushed(a))); });
    vector<One>(t, "v_rcp_f32", [](f32 a) { return flushed(1 / flushed(a)); });
    vector<One>(t, "v_rsq_f32", [](f32 a) { return flushed((f32)(1 / sqrt((f64)flushed(a)))); });
    vector<One>(t, "v_sqrt_f32", [](f32 a) { return (f32)sqrt((f64)flushed(a)); });
    vector<One>(t, "v_sin_f32", [](f32 a) { return (f32)sin(2 * M_PI * (f64)a); });
    vector<One>(t, "v_cos_f32", [](f32 a) { return (f32)cos(2 * M_PI * (f64)a); });
    t["v_rcp_iflag_f32"] = t["v_rcp_f32"];
    for (const char *name : {"exp", "log", "rcp", "rsq", "sqrt"})  // once for a wave: scalar to scalar, RDNA 4
        t[std::string("v_s_") + name + "_f32"] = {[](Wave &w, const Instruction &in) {
            const f32 a = modified(in.operands[1], scalar<f32>(w, in.operands[1]));
            const char which = in.name[4], next = in.name[5];
            f32 out = which == 'e' ? flushed((f32)exp2((f64)flushed(a)))
                      : which == 'l' ? flushed((f32)log2((f64)flushed(a)))
                      : which == 's' ? (f32)sqrt((f64)flushed(a))
                      : next == 'c' ? flushed(1 / flushed(a))
                                    : flushed((f32)(1 / sqrt((f64)flushed(a))));
            set_scalar(w, in.operands[0], out);
        }};
    vector<f32(f32, i32)>(t, "v_ldexp_f32", [](f32 a, i32 b) { return __builtin_ldexpf(a, b); });
    vector<One>(t, "v_frexp_mant_f32", [](f32 a) {
        int exponent;
        return std::isfinite(a) ? __builtin_frexpf(a, &exponent) : a;
    });
    vector<i32(f32)>(t, "v_frexp_exp_i32_f32", [](f32 a) {
        int exponent = 0;
        if (std::isfinite(a)) (void)__builtin_frexpf(a, &exponent);
        return exponent;
    });
    vector<f32(f32, f32, f32, Bit)>(t, "v_div_fmas_f32", [](f32 a, f32 b, f32 c, Bit vcc) {
        const f32 sum = __builtin_fmaf(a, b, c);
        return vcc.set ? sum * (exponent_of(c) > 127 ? 0x1p64f : 0x1p-64f) : sum;
    });
    vector<Three>(t, "v_div_fixup_f32", [](f32 a, f32 b, f32 c) { return fixed_after_division(a, b, c); });
}

void conversions(Table &t) {
    vector<f32(i32)>(t, "v_cvt_f32_i32", [](i32 a) { return (f32)a; });
    vector<f32(u32)>(t, "v_cvt_f32_u32", [](u32 a) { return (f32)a; });
    vector<i32(f32)>(t, "v_cvt_i32_f32", [](f32 a) { return whole<i32>(a); });
    vector<u32(f32)>(t, "v_cvt_u32_f32", [](f32 a) { return whole<u32>(a); });
    vector<f32(u32)>(t, "v_cvt_f32_ubyte0", [](u32 a) { return (f32)(a & 255); });
    vector<f32(u32)>(t, "v_cvt_f32_ubyte1", [](u32 a) { return (f32)(a >> 8 & 255); });
    vector<f32(u32)>(t, "v_cvt_f32_ubyte2", [](u32 a) { return (f32)(a >> 16 & 255); });
    vector<f32(u32)>(t, "v_cvt_f32_ubyte3", [](u32 a) { return (f32)(a >> 24); });
}

}  // namespace

void add_vector(Table &t) {
    integers(t);
    carries(t);
    floats(t);
    conversions(t);
    t["v_accvgpr_read_b32"] = t["v_accvgpr_write_b32"] = t["v_accvgpr_mov_b32"] = t["v_mov_b32"];
}

}  // namespace amdgpu
