// Vector comparisons: to a mask of lanes, and (v_cmpx) to EXEC.
#include "floats.h"
#include "operands.h"

namespace amdgpu {
namespace {

// The last two operands are compared. v_cmpx writes EXEC, on CDNA besides a mask that is the first of three operands.
template <class F, class A, class B, bool ToExec> void compare(Wave &w, const Instruction &in) {
    Lane<A> left;
    Lane<B> right;
    const A *a = lanes_of<A>(w, in, in.count - 2, 0, left.of);
    const B *b = lanes_of<B>(w, in, in.count - 1, 1, right.of);
    u64 mask = 0;
    for (int i = 0; i < w.lanes; i++) mask |= (u64)F{}(a[i], b[i]) << i;
    mask &= w.exec();
    if (in.count == 3) set_mask(w, in.operands[0], mask);
    else if (!ToExec) fault("a comparison without a destination");
    if (ToExec) w.set_mask(EXEC, mask);
}

template <class A, class B = A, class F> void both(Table &t, const std::string &name, F) {
    t["v_cmp_" + name] = {compare<F, A, B, false>};
    t["v_cmpx_" + name] = {compare<F, A, B, true>};
}

template <class T> void of_integers(Table &t, const std::string &type) {
    both<T>(t, "lt_" + type, [](T a, T b) { return a < b; });
    both<T>(t, "eq_" + type, [](T a, T b) { return a == b; });
    both<T>(t, "le_" + type, [](T a, T b) { return a <= b; });
    both<T>(t, "gt_" + type, [](T a, T b) { return a > b; });
    both<T>(t, "ne_" + type, [](T a, T b) { return a != b; });
    both<T>(t, "ge_" + type, [](T a, T b) { return a >= b; });
}
template <class T> void of_floats(Table &t, const std::string &type) {
    both<T>(t, "lt_" + type, [](T a, T b) { return a < b; });
    both<T>(t, "eq_" + type, [](T a, T b) { return a == b; });
    both<T>(t, "le_" + type, [](T a, T b) { return a <= b; });
    both<T>(t, "gt_" + type, [](T a, T b) { return a > b; });
    both<T>(t, "lg_" + type, [](T a, T b) { return a < b || a > b; });
    both<T>(t, "ge_" + type, [](T a, T b) { return a >= b; });
    both<T>(t, "o_" + type, [](T a, T b) { return a == a && b == b; });
    both<T>(t, "u_" + type, [](T a, T b) { return a != a || b != b; });
    both<T>(t, "nge_" + type, [](T a, T b) { return !(a >= b); });
    both<T>(t, "nlg_" + type, [](T a, T b) { return !(a < b || a > b); });
    both<T>(t, "ngt_" + type, [](T a, T b) { return !(a > b); });
    both<T>(t, "nle_" + type, [](T a, T b) { return !(a <= b); });
    both<T>(t, "neq_" + type, [](T a, T b) { return !(a == b); });
    both<T>(t, "nlt_" + type, [](T a, T b) { return !(a < b); });
}

}  // namespace

void add_compares(Table &t) {
    of_integers<i16>(t, "i16");
    of_integers<u16>(t, "u16");
    of_integers<i32>(t, "i32");
    of_integers<u32>(t, "u32");
    of_integers<i64>(t, "i64");
    of_integers<u64>(t, "u64");
    of_floats<f16>(t, "f16");
    of_floats<f32>(t, "f32");
    of_floats<f64>(t, "f64");
    both<f32, u32>(t, "class_f32", [](f32 a, u32 b) { return (class_of(a) & b) != 0; });
    both<f64, u32>(t, "class_f64", [](f64 a, u32 b) { return (class_of(a) & b) != 0; });
}

}  // namespace amdgpu
