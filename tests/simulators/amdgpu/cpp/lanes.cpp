// Instructions between the lanes of a wave, and between lanes and scalars.
#include "operands.h"

namespace amdgpu {
namespace {

int first_lane(const Wave &w) { return w.exec() ? __builtin_ctzll(w.exec()) : 0; }

u32 word_of(const Wave &w, const Operand &one, int lane) {
    return one.kind == Kind::VECTOR ? w.v[one.index][lane] : scalar<u32>(w, one);
}

// Of a number of lanes, those below this one; `argument` is the first lane that the mask tells of.
void count_below(Wave &w, const Instruction &in) {
    u32 out[LANES];
    for (int lane = 0; lane < w.lanes; lane++) {
        const int below = lane - in.argument;
        const u32 mask = below <= 0 ? 0 : below >= 32 ? ~0u : (1u << below) - 1;
        out[lane] = (u32)__builtin_popcount(word_of(w, in.operands[1], lane) & mask) + word_of(w, in.operands[2], lane);
    }
    write_words(w, in, in.operands[0], out);
}

// Each lane of a row of 16 takes the one that 4 bits of the two scalars say, of its own row, or of its neighbour. op_sel:
// the first bit is for fetching inactive lanes, the second for 0 where there is nothing to fetch.
void permute_rows(Wave &w, const Instruction &in) {
    const u64 which = (u64)scalar<u32>(w, in.operands[3]) << 32 | scalar<u32>(w, in.operands[2]);
    const bool fetches = in.op_sel & 1, zero = in.op_sel & 2;
    const u32 *from = w.v[in.operands[1].index];
    u32 *to = w.v[in.operands[0].index], out[LANES];
    for (int lane = 0; lane < w.lanes; lane++) {
        const int source = ((lane & ~15) ^ (in.argument ? 16 : 0)) | (int)(which >> (4 * (lane & 15)) & 15);
        const bool there = fetches || w.active(source);
        out[lane] = there ? from[source] : zero ? 0 : to[lane];
    }
    write_words(w, in, in.operands[0], out);
}

// Swap the odd rows of 16 (or the upper 32 lanes) of the first register with the even (lower) ones of the second.
void swap_rows(Wave &w, const Instruction &in) {
    const int size = in.argument;
    u32 *a = w.v[in.operands[0].index], *b = w.v[in.operands[1].index];
    for (int lane = 0; lane < w.lanes; lane++)
        if (lane & size && w.active(lane) && w.active(lane - size)) std::swap(a[lane], b[lane - size]);
}

}  // namespace

void add_lanes(Table &t) {
    t["v_readfirstlane_b32"] = {[](Wave &w, const Instruction &in) {
        set_scalar(w, in.operands[0], word_of(w, in.operands[1], first_lane(w)));
    }};
    t["v_readlane_b32"] = {[](Wave &w, const Instruction &in) {
        set_scalar(w, in.operands[0], w.v[in.operands[1].index][scalar<u32>(w, in.operands[2]) % w.lanes]);
    }};
    t["v_writelane_b32"] = {[](Wave &w, const Instruction &in) {
        w.v[in.operands[0].index][scalar<u32>(w, in.operands[2]) % w.lanes] = scalar<u32>(w, in.operands[1]);
    }};
    t["v_mbcnt_lo_u32_b32"] = {count_below, 0};
    t["v_mbcnt_hi_u32_b32"] = {count_below, 32};
    t["v_permlane16_b32"] = {permute_rows, 0};
    t["v_permlanex16_b32"] = {permute_rows, 1};
    t["v_permlane16_swap_b32"] = {swap_rows, 16};
    t["v_permlane32_swap_b32"] = {swap_rows, 32};
}

}  // namespace amdgpu
