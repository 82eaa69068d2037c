// LDS: what the waves of a block share.
#include "operands.h"
#include "transfer.h"

namespace amdgpu {
namespace {

u32 address_of(const Wave &w, const Operand &one, int lane) { return w.v[one.index][lane]; }

void read(Wave &w, const Instruction &in) {
    const Transfer &how = TRANSFERS[in.argument];
    for (int lane = 0; lane < w.lanes; lane++)
        if (w.active(lane)) {
            const u8 *from = w.block->shared_at(address_of(w, in.operands[1], lane) + (u32)in.offset, how.bytes);
            load_lane(w, how, in.operands[0].index, lane, from);
        }
}
void write(Wave &w, const Instruction &in) {
    const Transfer &how = TRANSFERS[in.argument];
    for (int lane = 0; lane < w.lanes; lane++)
        if (w.active(lane)) {
            u8 *to = w.block->shared_at(address_of(w, in.operands[0], lane) + (u32)in.offset, how.bytes);
            store_lane(w, how, in.operands[1].index, lane, to);
        }
}
// Two words, or pairs, at offsets counted in their size, or in 64 of them. `argument`: bytes, and the step.
void read_two(Wave &w, const Instruction &in) {
    const int bytes = in.argument & 15, step = in.argument >> 4;
    for (int lane = 0; lane < w.lanes; lane++) {
        if (!w.active(lane)) continue;
        const u32 address = address_of(w, in.operands[1], lane);
        u32 words[4];
        memcpy(words, w.block->shared_at(address + (u32)in.offset0 * step, bytes), bytes);
        memcpy(words + bytes / 4, w.block->shared_at(address + (u32)in.offset1 * step, bytes), bytes);
        for (int i = 0; i < bytes / 2; i++) w.v[in.operands[0].index + i][lane] = words[i];
    }
}
void write_two(Wave &w, const Instruction &in) {
    const int bytes = in.argument & 15, step = in.argument >> 4;
    for (int lane = 0; lane < w.lanes; lane++) {
        if (!w.active(lane)) continue;
        const u32 address = address_of(w, in.operands[0], lane);
        for (int part = 0; part < 2; part++)
            for (int i = 0; i < bytes / 4; i++)
                memcpy(w.block->shared_at(address + (u32)(part ? in.offset1 : in.offset0) * step + 4 * i, 4),
                       &w.v[in.operands[1 + part].index + i][lane], 4);
    }
}

template <class F, class T, bool Returns> void atomic(Wave &w, const Instruction &in) {
    const int first = Returns ? 1 : 0;
    for (int lane = 0; lane < w.lanes; lane++) {
        if (!w.active(lane)) continue;
        u8 *at = w.block->shared_at(address_of(w, in.operands[first], lane) + (u32)in.offset, 4);
        T old, data = bits_as<T>(w.v[in.operands[first + 1].index][lane]);
        memcpy(&old, at, 4);
        const T now = F{}(old, data);
        memcpy(at, &now, 4);
        if (Returns) w.v[in.operands[0].index][lane] = bits_as<u32>(old);
    }
}
template <class T, class F> void add_atomic(Table &t, const std::string &name, const std::string &type, F) {
    t["ds_" + name + "_" + type] = {atomic<F, T, false>};
    t["ds_" + name + "_rtn_" + type] = {atomic<F, T, true>};
}

// Lanes without memory. An inactive lane gives 0.
void pull(Wave &w, const Instruction &in) {
    u32 out[LANES];
    const u32 *from = w.v[in.operands[2].index];
    for (int lane = 0; lane < w.lanes; lane++) {
        const int source = (int)((address_of(w, in.operands[1], lane) + (u32)in.offset) / 4 % w.lanes);
        out[lane] = w.active(source) ? from[source] : 0;
    }
    write_words(w, in, in.operands[0], out);
}
void push(Wave &w, const Instruction &in) {
    u32 out[LANES] = {};
    for (int lane = 0; lane < w.lanes; lane++)
        if (w.active(lane))
            out[(address_of(w, in.operands[1], lane) + (u32)in.offset) / 4 % w.lanes] = w.v[in.operands[2].index][lane];
    write_words(w, in, in.operands[0], out);
}
// The offset says how: of four lanes each another, or of 32 the number changed by and, or, xor.
void swizzle(Wave &w, const Instruction &in) {
    u32 out[LANES];
    const u32 *from = w.v[in.operands[1].index];
    const u32 how = (u32)in.offset;
    if ((how & 0xe000) == 0xe000 || (how & 0xe000) == 0xc000) fault("ds_swizzle: a rotation or an FFT");
    for (int lane = 0; lane < w.lanes; lane++) {
        const int in_group = lane & 31;
        const int source = how & 0x8000 ? (lane & ~3) | (how >> (2 * (lane & 3)) & 3)
                                        : (lane & ~31) | (((in_group & (how & 31)) | (how >> 5 & 31)) ^ (how >> 10 & 31));
        out[lane] = w.active(source) ? from[source] : 0;
    }
    write_words(w, in, in.operands[0], out);
}

}  // namespace

void add_lds(Table &t) {
    for (int i = 0; i < TRANSFER_COUNT; i++) {
        if (TRANSFERS[i].loads) t[std::string("ds_load_") + TRANSFERS[i].name] = {read, i};
        if (TRANSFERS[i].stores) t[std::string("ds_store_") + TRANSFERS[i].name] = {write, i};
    }
    for (int bytes : {4, 8}) {
        const std::string type = bytes == 4 ? "b32" : "b64";
        t["ds_load_2addr_" + type] = {read_two, bytes | bytes << 4};
        t["ds_store_2addr_" + type] = {write_two, bytes | bytes << 4};
        t["ds_load_2addr_stride64_" + type] = {read_two, bytes | (64 * bytes) << 4};
        t["ds_store_2addr_stride64_" + type] = {write_two, bytes | (64 * bytes) << 4};
    }
    add_atomic<u32>(t, "add", "u32", [](u32 old, u32 data) { return old + data; });
    add_atomic<u32>(t, "sub", "u32", [](u32 old, u32 data) { return old - data; });
    add_atomic<u32>(t, "max", "u32", [](u32 old, u32 data) { return old > data ? old : data; });
    add_atomic<u32>(t, "min", "u32", [](u32 old, u32 data) { return old < data ? old : data; });
    add_atomic<i32>(t, "max", "i32", [](i32 old, i32 data) { return old > data ? old : data; });
    add_atomic<i32>(t, "min", "i32", [](i32 old, i32 data) { return old < data ? old : data; });
    add_atomic<u32>(t, "and", "b32", [](u32 old, u32 data) { return old & data; });
    add_atomic<u32>(t, "or", "b32", [](u32 old, u32 data) { return old | data; });
    add_atomic<u32>(t, "xor", "b32", [](u32 old, u32 data) { return old ^ data; });
    add_atomic<f32>(t, "add", "f32", [](f32 old, f32 data) { return old + data; });
    t["ds_bpermute_b32"] = {pull};
    t["ds_permute_b32"] = {push};
    t["ds_swizzle_b32"] = {swizzle};
}

}  // namespace amdgpu
