// What loads and stores move, wherever they do: by the last part of their names.
#pragma once
#include "machine.h"

namespace amdgpu {

struct Transfer {
    const char *name;
    int bytes;
    bool loads, stores;
    int into;          // 0: whole registers, 1: the low half of one, 2: the high half
    bool with_sign;
};
inline constexpr Transfer TRANSFERS[] = {
    {"b8", 1, false, true, 0, false},        {"b16", 2, false, true, 0, false},
    {"b32", 4, true, true, 0, false},        {"b64", 8, true, true, 0, false},
    {"b96", 12, true, true, 0, false},       {"b128", 16, true, true, 0, false},
    {"u8", 1, true, false, 0, false},        {"i8", 1, true, false, 0, true},
    {"u16", 2, true, false, 0, false},       {"i16", 2, true, false, 0, true},
    {"d16_u8", 1, true, false, 1, false},    {"d16_i8", 1, true, false, 1, true},
    {"d16_b16", 2, true, false, 1, false},   {"d16_hi_u8", 1, true, false, 2, false},
    {"d16_hi_i8", 1, true, false, 2, true},  {"d16_hi_b16", 2, true, true, 2, false},
    {"d16_hi_b8", 1, false, true, 2, false},
};
constexpr int TRANSFER_COUNT = sizeof TRANSFERS / sizeof *TRANSFERS;

inline void load_lane(Wave &w, const Transfer &how, int index, int lane, const u8 *from) {
    if (how.bytes >= 4) {
        for (int i = 0; i < how.bytes / 4; i++) memcpy(&w.v[index + i][lane], from + 4 * i, 4);
        return;
    }
    u32 value = how.bytes == 1 ? (how.with_sign ? (u32)(i32)(i8)from[0] : from[0]) : 0;
    if (how.bytes == 2) {
        u16 half;
        memcpy(&half, from, 2);
        value = how.with_sign ? (u32)(i32)(i16)half : half;
    }
    u32 &to = w.v[index][lane];
    to = how.into == 0 ? value : how.into == 1 ? (to & 0xffff0000) | (value & 0xffff) : (to & 0xffff) | value << 16;
}
inline void store_lane(Wave &w, const Transfer &how, int index, int lane, u8 *to) {
    if (how.bytes >= 4) {
        for (int i = 0; i < how.bytes / 4; i++) memcpy(to + 4 * i, &w.v[index + i][lane], 4);
        return;
    }
    const u32 value = w.v[index][lane] >> (how.into == 2 ? 16 : 0);
    memcpy(to, &value, how.bytes);
}

}  // namespace amdgpu
