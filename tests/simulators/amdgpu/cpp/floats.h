// What floats do on these GPUs where C++ leaves it open or has nothing like it.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "machine.h"

namespace amdgpu {

template <class T> struct Form;
template <> struct Form<f32> {
    typedef u32 Bits;
    static constexpr int MANTISSA = 23, MOST = 255, FAR = 96, BY = 64, TINY = 23, NONE = 150;
};
template <> struct Form<f64> {
    typedef u64 Bits;
    static constexpr int MANTISSA = 52, MOST = 2047, FAR = 768, BY = 128, TINY = 53, NONE = 1075;
};

// As it is stored, with its bias.
template <class T> int exponent_of(T value) {
    return (int)(bits_as<typename Form<T>::Bits>(value) >> Form<T>::MANTISSA) & Form<T>::MOST;
}
template <class T> bool denormal(T value) { return value != 0 && exponent_of(value) == 0; }
template <class T> T flushed(T value) { return denormal(value) ? std::copysign((T)0, value) : value; }

// maxNum and minNum: the number, if the other is none; -0 is less than +0.
template <class T> T larger(T a, T b) {
    return a != a ? b : b != b ? a : a == b ? (std::signbit((f32)a) ? b : a) : a > b ? a : b;
}
template <class T> T smaller(T a, T b) {
    return a != a ? b : b != b ? a : a == b ? (std::signbit((f32)a) ? a : b) : a < b ? a : b;
}

// Towards 0, to the nearest that To has; a NaN is 0.
template <class To, class From> To whole(From value) {
    if (value != value) return 0;
    const f64 low = (f64)std::numeric_limits<To>::min(), high = (f64)std::numeric_limits<To>::max();
    const f64 cut = std::trunc((f64)value);
    return cut <= low ? std::numeric_limits<To>::min() : cut >= high ? std::numeric_limits<To>::max() : (To)cut;
}

template <class T> struct Scaled {
    T value;
    bool flag;
};
// v_div_scale: `value` is the denominator or the numerator, scaled so that no step of a division leaves the range.
template <class T> Scaled<T> scaled_for_division(T value, T denominator, T numerator) {
    typedef Form<T> F;
    typedef typename F::Bits Bits;
    const bool of_denominator = bits_as<Bits>(value) == bits_as<Bits>(denominator);
    const bool of_numerator = bits_as<Bits>(value) == bits_as<Bits>(numerator);
    if (denominator == 0 || numerator == 0) return {std::numeric_limits<T>::quiet_NaN(), false};
    const T up = std::ldexp(value, F::BY);
    if (exponent_of(numerator) - exponent_of(denominator) >= F::FAR) return {of_denominator ? up : value, true};
    if (denormal(denominator)) return {up, false};
    const bool small_inverse = denormal((T)1 / denominator), small_quotient = denormal(numerator / denominator);
    if (small_inverse && small_quotient) return {of_denominator ? up : value, true};
    if (small_inverse) return {std::ldexp(value, -F::BY), false};
    if (small_quotient) return {of_numerator ? up : value, true};
    if (exponent_of(numerator) <= F::TINY) return {up, false};
    return {value, false};
}
// v_div_fixup: what a division gives that needs no computing, or the quotient with its sign.
template <class T> T fixed_after_division(T quotient, T denominator, T numerator) {
    typedef Form<T> F;
    const T infinity = std::numeric_limits<T>::infinity();
    const T sign = std::signbit(denominator) != std::signbit(numerator) ? (T)-1 : (T)1;
    if (numerator != numerator) return numerator;
    if (denominator != denominator) return denominator;
    if ((denominator == 0 && numerator == 0) || (std::isinf(denominator) && std::isinf(numerator)))
        return -std::numeric_limits<T>::quiet_NaN();
    if (denominator == 0 || std::isinf(numerator)) return sign * infinity;
    if (std::isinf(denominator) || numerator == 0) return sign * (T)0;
    if (exponent_of(numerator) - exponent_of(denominator) < -F::NONE) return sign * (T)0;
    return std::copysign(quotient, sign);
}

// v_cmp_class: one bit a class.
template <class T> u32 class_of(T value) {
    const bool minus = std::signbit(value);
    if (value != value) return bits_as<typename Form<T>::Bits>(value) >> (Form<T>::MANTISSA - 1) & 1 ? 2 : 1;
    if (std::isinf(value)) return minus ? 4 : 0x200;
    if (value == 0) return minus ? 0x20 : 0x40;
    if (denormal(value)) return minus ? 0x10 : 0x80;
    return minus ? 8 : 0x100;
}

inline f32 float_of_bfloat(u16 bits) { return bits_as<f32>((u32)bits << 16); }

}  // namespace amdgpu
