// Sources by DPP and SDWA, and destinations: which lanes are written, and which part of a register.
#include "operands.h"

namespace amdgpu {
namespace {

// The lane that DPP takes a lane's first source from, or -1.
int source_lane(const Instruction &in, int lane, int lanes) {
    const int row = lane & ~15, at = lane & 15, by = (int)in.lanes_by;
    switch (in.lanes) {
    case Lanes::NONE: return lane;
    case Lanes::QUAD: return (lane & ~3) | (by >> (2 * (lane & 3)) & 3);
    case Lanes::ROW_SHL: return at + by < 16 ? lane + by : -1;
    case Lanes::ROW_SHR: return at - by >= 0 ? lane - by : -1;
    case Lanes::ROW_ROR: return row | ((at - by) & 15);
    case Lanes::WAVE_SHL: return lane + 1 < lanes ? lane + 1 : -1;
    case Lanes::WAVE_SHR: return lane - 1;
    case Lanes::WAVE_ROL: return (lane + 1) % lanes;
    case Lanes::WAVE_ROR: return (lane + lanes - 1) % lanes;
    case Lanes::MIRROR: return row | (15 - at);
    case Lanes::HALF_MIRROR: return (lane & ~7) | (7 - (lane & 7));
    case Lanes::BCAST15: return row ? row - 1 : -1;
    case Lanes::BCAST31: return lane < 32 ? -1 : 31;
    case Lanes::SHARE: return row | by;
    case Lanes::XMASK: return lane ^ by;
    case Lanes::EIGHT: return (lane & ~7) | (by >> (3 * (lane & 7)) & 7);
    }
    return -1;
}
bool readable(const Wave &w, const Instruction &in, int lane) {
    return lane >= 0 && (in.fetch_inactive || w.active(lane));
}

u32 part_of(u32 word, int select, bool extended) {
    switch (select) {
    case 0: return word;
    case 5:
    case 6: word >>= 16 * (select - 5); return extended ? (u32)(i32)(i16)word : word & 0xffff;
    default: word >>= 8 * (select - 1); return extended ? (u32)(i32)(i8)word : word & 0xff;
    }
}

}  // namespace

const u32 *source_words(Wave &w, const Instruction &in, int operand, int number, u32 *buffer) {
    const Operand &one = in.operands[operand];
    const u32 *from = one.kind == Kind::VECTOR ? w.v[one.index] : nullptr;
    if (in.lanes != Lanes::NONE && number == 0) {
        if (!from) fault("DPP of a scalar");
        for (int i = 0; i < w.lanes; i++) {
            const int source = source_lane(in, i, w.lanes);
            buffer[i] = readable(w, in, source) ? from[source] : 0;
        }
        return buffer;
    }
    if (in.sdwa && number < 2) {
        const u32 alike = from ? 0 : scalar<u32>(w, one);
        for (int i = 0; i < LANES; i++) buffer[i] = part_of(from ? from[i] : alike, in.select[number], one.extended);
        return buffer;
    }
    if (!from) fault("not a vector source");
    return from;
}

u64 lanes_written(Wave &w, const Instruction &in) {
    u64 active = w.exec();
    if (in.lanes == Lanes::NONE) return active;
    for (int i = 0; i < w.lanes; i++) {
        const bool chosen = in.rows >> (i / 16) & 1 && in.banks >> (i % 16 / 4) & 1;
        const bool found = in.zero_bound || in.lanes == Lanes::EIGHT || readable(w, in, source_lane(in, i, w.lanes));
        if (!chosen || !found) active &= ~(1ull << i);
    }
    return active;
}

void write_words(Wave &w, const Instruction &in, const Operand &to, const u32 *words) {
    if (to.kind != Kind::VECTOR) fault("not a vector destination");
    const u32 *mask = w.spread(lanes_written(w, in));
    u32 *at = w.v[to.index];
    if (in.sdwa && in.destination) {
        const int bits = in.destination >= 5 ? 16 : 8;
        const int shift = in.destination >= 5 ? 16 * (in.destination - 5) : 8 * (in.destination - 1);
        const u32 field = (bits == 16 ? 0xffffu : 0xffu) << shift;
        for (int i = 0; i < LANES; i++) {
            const u32 part = words[i] << shift & field;
            u32 rest = in.unused == 2 ? at[i] & ~field : 0;
            if (in.unused == 1 && part >> (shift + bits - 1) & 1) rest = shift + bits == 32 ? 0 : ~0u << (shift + bits);
            at[i] = ((part | rest) & mask[i]) | (at[i] & ~mask[i]);
        }
        return;
    }
    for (int i = 0; i < LANES; i++) at[i] = (words[i] & mask[i]) | (at[i] & ~mask[i]);
}

// GCN clears the other half of the register, RDNA leaves it.
void write_halves(Wave &w, const Instruction &in, const Operand &to, const u16 *halves) {
    if (to.kind != Kind::VECTOR) fault("not a vector destination");
    const u32 *old = w.v[to.index];
    u32 words[LANES];
    for (int i = 0; i < LANES; i++) {
        if (in.op_sel & 8) words[i] = (old[i] & 0xffff) | (u32)halves[i] << 16;
        else if (in.gfx9 || in.sdwa) words[i] = halves[i];
        else words[i] = (old[i] & 0xffff0000) | halves[i];
    }
    write_words(w, in, to, words);
}

}  // namespace amdgpu
