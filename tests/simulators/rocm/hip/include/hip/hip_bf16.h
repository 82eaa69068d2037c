// What CuPy's bfloat16 takes from HIP's.
#pragma once

struct __hip_bfloat16 {
    unsigned short x;
    __hip_bfloat16() = default;
    // To the nearest, ties to even; a NaN stays one.
    __hip_bfloat16(float value) {
        unsigned bits = __float_as_uint(value);
        bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
        x = (unsigned short)(nan ? bits >> 16 | 0x40 : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
    }
    operator float() const { return __uint_as_float((unsigned)x << 16); }
};
inline unsigned short __bfloat16_as_ushort(__hip_bfloat16 value) { return value.x; }
inline __hip_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
    __hip_bfloat16 value;
    value.x = bits;
    return value;
}
inline int __hisnan(__hip_bfloat16 value) { return (value.x & 0x7fff) > 0x7f80; }
inline int __hisinf(__hip_bfloat16 value) { return (value.x & 0x7fff) == 0x7f80; }
