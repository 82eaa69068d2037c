// Scalar instructions: once for a wave.
#include <cmath>

#include "floats.h"
#include "operands.h"

namespace amdgpu {
namespace {

// F(scc, sources...) gives the result and may set SCC.
template <class F, class R, class... A> struct Scalar {
    template <size_t... I> static void go(Wave &w, const Instruction &in, std::index_sequence<I...>) {
        constexpr int first = std::is_same_v<R, void> ? 0 : 1;
        auto sources = std::make_tuple(modified(in.operands[first + I], scalar<A>(w, in.operands[first + I]))...);
        if constexpr (std::is_same_v<R, void>) F{}(w.scc, std::get<I>(sources)...);
        else set_scalar(w, in.operands[0], F{}(w.scc, std::get<I>(sources)...));
    }
    static void run(Wave &w, const Instruction &in) { go(w, in, std::index_sequence_for<A...>{}); }
};
template <class Form> struct Shape;
template <class R, class... A> struct Shape<R(A...)> {
    template <class F> static constexpr Handler handler = &Scalar<F, R, A...>::run;
};
template <class Form, class F> void add(Table &t, const std::string &name, F) {
    t[name] = {Shape<Form>::template handler<F>};
}
// The destination is a source, too: the last.
template <class Form, class F> void onto(Table &t, const std::string &name, F) {
    t[name] = {Shape<Form>::template handler<F>, 0, 1};
}

template <class T, class S> void of_bits(Table &t, const std::string &width) {
    typedef T Two(T, T);
    add<Two>(t, "s_and_" + width, [](bool &scc, T a, T b) { return scc = (a & b) != 0, a & b; });
    add<Two>(t, "s_or_" + width, [](bool &scc, T a, T b) { return scc = (a | b) != 0, a | b; });
    add<Two>(t, "s_xor_" + width, [](bool &scc, T a, T b) { return scc = (a ^ b) != 0, a ^ b; });
    add<Two>(t, "s_andn2_" + width, [](bool &scc, T a, T b) { return scc = (a & ~b) != 0, a & ~b; });
    add<Two>(t, "s_orn2_" + width, [](bool &scc, T a, T b) { return scc = (a | ~b) != 0, a | ~b; });
    add<Two>(t, "s_nand_" + width, [](bool &scc, T a, T b) { return scc = (T) ~(a & b) != 0, (T) ~(a & b); });
    add<Two>(t, "s_nor_" + width, [](bool &scc, T a, T b) { return scc = (T) ~(a | b) != 0, (T) ~(a | b); });
    add<Two>(t, "s_xnor_" + width, [](bool &scc, T a, T b) { return scc = (T) ~(a ^ b) != 0, (T) ~(a ^ b); });
    add<T(T)>(t, "s_mov_" + width, [](bool &, T a) { return a; });
    add<T(T)>(t, "s_not_" + width, [](bool &scc, T a) { return scc = ~a != 0, (T)~a; });
    add<T(T, T)>(t, "s_cselect_" + width, [](bool &scc, T a, T b) { return scc ? a : b; });
    onto<T(T, T)>(t, "s_cmov_" + width, [](bool &scc, T a, T old) { return scc ? a : old; });
    add<T(T)>(t, "s_brev_" + width, [](bool &, T a) {
        T reversed = 0;
        for (int i = 0; i < (int)sizeof(T) * 8; i++) reversed |= (a >> i & 1) << (sizeof(T) * 8 - 1 - i);
        return reversed;
    });
    constexpr u32 last = sizeof(T) * 8 - 1;
    add<T(T, u32)>(t, "s_lshl_" + width, [](bool &scc, T a, u32 b) { return a <<= (b & last), scc = a != 0, a; });
    add<T(T, u32)>(t, "s_lshr_" + width, [](bool &scc, T a, u32 b) { return a >>= (b & last), scc = a != 0, a; });
    const std::string sign = sizeof(T) == 8 ? "i64" : "i32", plain = sizeof(T) == 8 ? "u64" : "u32";
    add<S(S, u32)>(t, "s_ashr_" + sign, [](bool &scc, S a, u32 b) { return a >>= (b & last), scc = a != 0, a; });
    add<T(T, u32)>(t, "s_bfe_" + plain, [](bool &scc, T a, u32 b) {
        const u32 width = b >> 16 & 0x7f;
        a = a >> (b & last) & (width > last ? ~(T)0 : ((T)1 << width) - 1);
        return scc = a != 0, a;
    });
    add<T(u32, u32)>(t, "s_bfm_" + width, [](bool &, u32 a, u32 b) { return (((T)1 << (a & last)) - 1) << (b & last); });
    add<u32(T)>(t, "s_bcnt1_i32_" + width, [](bool &scc, T a) {
        const u32 count = (u32)__builtin_popcountll(a);
        return scc = count != 0, count;
    });
    add<u32(T)>(t, "s_ff1_i32_" + width, [](bool &, T a) { return a ? (u32)__builtin_ctzll(a) : ~0u; });
    add<u32(T)>(t, "s_flbit_i32_" + width, [](bool &, T a) { return a ? (u32)__builtin_clzll(a) - (63 - last) : ~0u; });
    onto<T(u32, T)>(t, "s_bitset1_" + width, [](bool &, u32 a, T old) { return old | (T)1 << (a & last); });
    onto<T(u32, T)>(t, "s_bitset0_" + width, [](bool &, u32 a, T old) { return old & ~((T)1 << (a & last)); });
    add<void(T, u32)>(t, "s_bitcmp1_" + width, [](bool &scc, T a, u32 b) { scc = a >> (b & last) & 1; });
    add<void(T, u32)>(t, "s_bitcmp0_" + width, [](bool &scc, T a, u32 b) { scc = !(a >> (b & last) & 1); });
    add<void(T, T)>(t, "s_cmp_eq_" + plain, [](bool &scc, T a, T b) { scc = a == b; });
    add<void(T, T)>(t, "s_cmp_lg_" + plain, [](bool &scc, T a, T b) { scc = a != b; });
}

template <class T> void of_order(Table &t, const std::string &type) {
    for (const std::string form : {"s_cmp_", "s_cmpk_"}) {
        add<void(T, T)>(t, form + "eq_" + type, [](bool &scc, T a, T b) { scc = a == b; });
        add<void(T, T)>(t, form + "lg_" + type, [](bool &scc, T a, T b) { scc = a != b; });
        add<void(T, T)>(t, form + "gt_" + type, [](bool &scc, T a, T b) { scc = a > b; });
        add<void(T, T)>(t, form + "ge_" + type, [](bool &scc, T a, T b) { scc = a >= b; });
        add<void(T, T)>(t, form + "lt_" + type, [](bool &scc, T a, T b) { scc = a < b; });
        add<void(T, T)>(t, form + "le_" + type, [](bool &scc, T a, T b) { scc = a <= b; });
    }
    add<T(T, T)>(t, "s_min_" + type, [](bool &scc, T a, T b) { return scc = a < b, a < b ? a : b; });
    add<T(T, T)>(t, "s_max_" + type, [](bool &scc, T a, T b) { return scc = a > b, a > b ? a : b; });
}

void sums(Table &t) {
    typedef u32 Two(u32, u32);
    add<Two>(t, "s_add_u32", [](bool &scc, u32 a, u32 b) { return scc = a + b < a, a + b; });
    add<Two>(t, "s_addc_u32", [](bool &scc, u32 a, u32 b) {
        const u64 sum = (u64)a + b + scc;
        return scc = sum >> 32 != 0, (u32)sum;
    });
    add<Two>(t, "s_sub_u32", [](bool &scc, u32 a, u32 b) { return scc = a < b, a - b; });
    add<Two>(t, "s_subb_u32", [](bool &scc, u32 a, u32 b) {
        const u32 result = a - b - scc;
        return scc = (u64)b + scc > a, result;
    });
    add<i32(i32, i32)>(t, "s_add_i32", [](bool &scc, i32 a, i32 b) {
        i32 sum;
        return scc = __builtin_add_overflow(a, b, &sum), sum;
    });
    add<i32(i32, i32)>(t, "s_sub_i32", [](bool &scc, i32 a, i32 b) {
        i32 sum;
        return scc = __builtin_sub_overflow(a, b, &sum), sum;
    });
    add<u64(u64, u64)>(t, "s_add_u64", [](bool &, u64 a, u64 b) { return a + b; });
    add<u64(u64, u64)>(t, "s_sub_u64", [](bool &, u64 a, u64 b) { return a - b; });
    add<u64(u64, u64)>(t, "s_mul_u64", [](bool &, u64 a, u64 b) { return a * b; });
    add<Two>(t, "s_mul_i32", [](bool &, u32 a, u32 b) { return a * b; });
    add<Two>(t, "s_mul_hi_u32", [](bool &, u32 a, u32 b) { return (u32)((u64)a * b >> 32); });
    add<i32(i32, i32)>(t, "s_mul_hi_i32", [](bool &, i32 a, i32 b) { return (i32)((i64)a * b >> 32); });
    add<u32(u32)>(t, "s_abs_i32", [](bool &scc, u32 a) {
        const u32 result = a >> 31 ? 0 - a : a;
        return scc = result != 0, result;
    });
    for (u32 by = 1; by <= 4; by++)
        t["s_lshl" + std::to_string(by) + "_add_u32"] = {[](Wave &w, const Instruction &in) {
            const u64 sum = ((u64)scalar<u32>(w, in.operands[1]) << (in.name[6] - '0')) + scalar<u32>(w, in.operands[2]);
            w.scc = sum >> 32 != 0;
            set_scalar(w, in.operands[0], (u32)sum);
        }};
    add<Two>(t, "s_pack_ll_b32_b16", [](bool &, u32 a, u32 b) { return (a & 0xffff) | b << 16; });
    add<Two>(t, "s_pack_lh_b32_b16", [](bool &, u32 a, u32 b) { return (a & 0xffff) | (b & 0xffff0000); });
    add<Two>(t, "s_pack_hh_b32_b16", [](bool &, u32 a, u32 b) { return a >> 16 | (b & 0xffff0000); });
    add<i32(u32)>(t, "s_sext_i32_i8", [](bool &, u32 a) { return (i32)(i8)a; });
    add<i32(u32)>(t, "s_sext_i32_i16", [](bool &, u32 a) { return (i32)(i16)a; });
    // An immediate of 16 bits, with its sign.
    add<i32(u32)>(t, "s_movk_i32", [](bool &, u32 a) { return (i32)(i16)a; });
    onto<i32(u32, i32)>(t, "s_addk_i32", [](bool &scc, u32 a, i32 old) {
        i32 sum;
        return scc = __builtin_add_overflow((i32)(i16)a, old, &sum), sum;
    });
    onto<u32(u32, u32)>(t, "s_mulk_i32", [](bool &, u32 a, u32 old) { return (u32)(i32)(i16)a * old; });
}

void floats(Table &t) {
    typedef f32 Two(f32, f32);
    add<Two>(t, "s_add_f32", [](bool &, f32 a, f32 b) { return a + b; });
    add<Two>(t, "s_sub_f32", [](bool &, f32 a, f32 b) { return a - b; });
    add<Two>(t, "s_mul_f32", [](bool &, f32 a, f32 b) { return a * b; });
    add<Two>(t, "s_max_f32", [](bool &, f32 a, f32 b) { return larger(a, b); });
    add<Two>(t, "s_min_f32", [](bool &, f32 a, f32 b) { return smaller(a, b); });
    onto<f32(f32, f32, f32)>(t, "s_fmac_f32", [](bool &, f32 a, f32 b, f32 c) { return __builtin_fmaf(a, b, c); });
    add<f32(f32, f32, f32)>(t, "s_fmamk_f32", [](bool &, f32 a, f32 k, f32 b) { return __builtin_fmaf(a, k, b); });
    add<f32(f32, f32, f32)>(t, "s_fmaak_f32", [](bool &, f32 a, f32 b, f32 k) { return __builtin_fmaf(a, b, k); });
    add<f32(i32)>(t, "s_cvt_f32_i32", [](bool &, i32 a) { return (f32)a; });
    add<f32(u32)>(t, "s_cvt_f32_u32", [](bool &, u32 a) { return (f32)a; });
    add<i32(f32)>(t, "s_cvt_i32_f32", [](bool &, f32 a) { return whole<i32>(a); });
    add<u32(f32)>(t, "s_cvt_u32_f32", [](bool &, f32 a) { return whole<u32>(a); });
    add<f32(u32)>(t, "s_cvt_f32_f16", [](bool &, u32 a) { return (f32)bits_as<f16>((u16)a); });
    add<u32(f32)>(t, "s_cvt_f16_f32", [](bool &, f32 a) { return (u32)bits_as<u16>((f16)a); });
    add<f32(f32)>(t, "s_rndne_f32", [](bool &, f32 a) { return __builtin_nearbyintf(a); });
    add<f32(f32)>(t, "s_floor_f32", [](bool &, f32 a) { return __builtin_floorf(a); });
    add<f32(f32)>(t, "s_ceil_f32", [](bool &, f32 a) { return __builtin_ceilf(a); });
    add<f32(f32)>(t, "s_trunc_f32", [](bool &, f32 a) { return __builtin_truncf(a); });
    typedef void Compare(f32, f32);
    add<Compare>(t, "s_cmp_lt_f32", [](bool &scc, f32 a, f32 b) { scc = a < b; });
    add<Compare>(t, "s_cmp_eq_f32", [](bool &scc, f32 a, f32 b) { scc = a == b; });
    add<Compare>(t, "s_cmp_le_f32", [](bool &scc, f32 a, f32 b) { scc = a <= b; });
    add<Compare>(t, "s_cmp_gt_f32", [](bool &scc, f32 a, f32 b) { scc = a > b; });
    add<Compare>(t, "s_cmp_lg_f32", [](bool &scc, f32 a, f32 b) { scc = a < b || a > b; });
    add<Compare>(t, "s_cmp_ge_f32", [](bool &scc, f32 a, f32 b) { scc = a >= b; });
    add<Compare>(t, "s_cmp_o_f32", [](bool &scc, f32 a, f32 b) { scc = a == a && b == b; });
    add<Compare>(t, "s_cmp_u_f32", [](bool &scc, f32 a, f32 b) { scc = a != a || b != b; });
    add<Compare>(t, "s_cmp_nge_f32", [](bool &scc, f32 a, f32 b) { scc = !(a >= b); });
    add<Compare>(t, "s_cmp_nlg_f32", [](bool &scc, f32 a, f32 b) { scc = !(a < b || a > b); });
    add<Compare>(t, "s_cmp_ngt_f32", [](bool &scc, f32 a, f32 b) { scc = !(a > b); });
    add<Compare>(t, "s_cmp_nle_f32", [](bool &scc, f32 a, f32 b) { scc = !(a <= b); });
    add<Compare>(t, "s_cmp_neq_f32", [](bool &scc, f32 a, f32 b) { scc = !(a == b); });
    add<Compare>(t, "s_cmp_nlt_f32", [](bool &scc, f32 a, f32 b) { scc = !(a < b); });
}

// The destination gets EXEC, and EXEC what F makes of the source and itself.
template <class F, bool Wide> void save_exec(Wave &w, const Instruction &in) {
    const u64 old = Wide ? w.scalar64(EXEC) : w.s[EXEC];
    const u64 source = Wide ? scalar<u64>(w, in.operands[1]) : scalar<u32>(w, in.operands[1]);
    const u64 now = F{}(source, old) & (Wide ? ~0ull : 0xffffffffull);
    if (Wide) set_scalar<u64>(w, in.operands[0], old);
    else set_scalar<u32>(w, in.operands[0], (u32)old);
    w.s[EXEC] = (u32)now;
    if (Wide) w.s[EXEC + 1] = (u32)(now >> 32);
    w.scc = now != 0;
}
template <class F> void add_save(Table &t, const std::string &name, F) {
    t["s_" + name + "_saveexec_b64"] = {save_exec<F, true>};
    t["s_" + name + "_saveexec_b32"] = {save_exec<F, false>};
}

}  // namespace

void add_scalar(Table &t) {
    of_bits<u32, i32>(t, "b32");
    of_bits<u64, i64>(t, "b64");
    of_order<i32>(t, "i32");
    of_order<u32>(t, "u32");
    sums(t);
    floats(t);
    add_save(t, "and", [](u64 source, u64 exec) { return source & exec; });
    add_save(t, "or", [](u64 source, u64 exec) { return source | exec; });
    add_save(t, "xor", [](u64 source, u64 exec) { return source ^ exec; });
    add_save(t, "andn2", [](u64 source, u64 exec) { return source & ~exec; });
    add_save(t, "andn1", [](u64 source, u64 exec) { return ~source & exec; });
    add_save(t, "orn2", [](u64 source, u64 exec) { return source | ~exec; });
    add_save(t, "orn1", [](u64 source, u64 exec) { return ~source | exec; });
}

}  // namespace amdgpu
