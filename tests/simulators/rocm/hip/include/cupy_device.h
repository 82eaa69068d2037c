// What CuPy's own kernels take from HIP beside what the executor's gpu.h has for the project's: arithmetic on integers
// and on floats of 32 and 16 bits. A kernel of CuPy's that asks a wave something does not compile.
#pragma once
#include <cmath>
#include <cstddef>
#include <limits>

using std::isfinite;
using std::isinf;
using std::isnan;
using std::signbit;

struct __half_raw {
    unsigned short x;
};
struct half {
    unsigned short x;
    half() = default;
    half(float value) : x(__builtin_bit_cast(unsigned short, (_Float16)value)) {}
    explicit half(const __half_raw &raw) : x(raw.x) {}
    operator float() const { return (float)__builtin_bit_cast(_Float16, x); }
    operator __half_raw() const { return {x}; }
};
inline unsigned short __half_as_ushort(half value) { return value.x; }
inline half __ushort_as_half(unsigned short bits) { return half(__half_raw{bits}); }

inline unsigned long long __double_as_longlong(double value) { return executor::raw(value); }
inline double __longlong_as_double(long long bits) { return executor::cooked<double>((unsigned long long)bits); }
