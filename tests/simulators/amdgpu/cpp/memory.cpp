// Memory: arrays, and the instructions that load, store and change them; private memory.
#include "operands.h"
#include "transfer.h"

namespace amdgpu {

u64 Memory::add(u64 bytes, const char *name, bool writable) {
    if (bytes >> SLOT_BITS) throw Fault("an array of 16 GiB or more");
    if (arrays.empty()) arrays.emplace_back();  // null is in nothing
    u64 slot = arrays.size();
    if (unused.size() > 64) {  // not at once: what is freed stays an error for a while
        slot = unused.front();
        unused.erase(unused.begin());
    } else {
        arrays.emplace_back();
    }
    arrays[slot] = std::make_unique<Array>(Array{std::vector<u8>(bytes), name, writable});
    return slot << SLOT_BITS;
}

void Memory::free(u64 address) {
    arrays.at(address >> SLOT_BITS).reset();
    unused.push_back(address >> SLOT_BITS);
}

void Memory::refuse(u64 address, u64 bytes, bool write) const {
    const char *what = write ? "a store" : "a load";
    // An access a little before an array is in the end of the addresses of the one before it.
    const u64 near = (address + (1ull << (SLOT_BITS - 1))) & ~((1ull << SLOT_BITS) - 1);
    if (const Array *one = array(near))
        fault("%s of %llu bytes at 0x%llx: %s of %zu bytes, at its byte %lld%s", what, (unsigned long long)bytes,
              (unsigned long long)address, one->name.c_str(), one->bytes.size(), (long long)(address - near),
              write && !one->writable ? ", which may not be written" : "");
    fault("%s of %llu bytes at 0x%llx: no array is there", what, (unsigned long long)bytes, (unsigned long long)address);
}

namespace {

// --- addresses --------------------------------------------------------------------------------------------------------

// Of global memory: a pair of registers, or a pair of scalars and a register's offset.
u64 global_address(const Wave &w, const Instruction &in, const Operand &vector, const Operand &base, int lane) {
    if (base.kind != Kind::SCALAR) {
        const u64 address = (u64)w.v[vector.index + 1][lane] << 32 | w.v[vector.index][lane];
        return address + (u64)in.offset;
    }
    const u64 by = vector.kind == Kind::VECTOR ? w.v[vector.index][lane] : 0;
    return w.scalar64(base.index) + by + (u64)in.offset;
}
// Aligned or not: the runtime switches on what that takes, and LLVM relies on it.
u8 *global_at(Wave &w, u64 address, int bytes, bool write) { return w.block->memory->at(address, bytes, write); }
// Of private memory: a lane's own bytes.
u8 *private_at(Wave &w, u32 address, int bytes, int lane) {
    const u32 each = w.block->private_bytes;
    if ((u64)address + bytes > each) fault("private memory: %d bytes at %u of %u", bytes, address, each);
    return (u8 *)w.private_words.data() + (u64)lane * each + address;
}
// Of anything: LDS and private memory have their apertures.
u8 *flat_at(Wave &w, u64 address, int bytes, bool write, int lane) {
    if (address >> 32 == SHARED_APERTURE) return w.block->shared_at((u32)address, bytes);
    if (address >> 32 == PRIVATE_APERTURE) return private_at(w, (u32)address, bytes, lane);
    return global_at(w, address, bytes, write);
}

enum Space { GLOBAL, FLAT, SCRATCH };
u8 *lane_at(Wave &w, const Instruction &in, Space space, int vector, int bytes, bool write, int lane) {
    const Operand &one = in.operands[vector], none;
    if (space == FLAT) return flat_at(w, global_address(w, in, one, none, lane), bytes, write, lane);
    const Operand &base = in.operands[2];
    if (space == GLOBAL) return global_at(w, global_address(w, in, one, base, lane), bytes, write);
    const u32 by = one.kind == Kind::VECTOR ? w.v[one.index][lane] : 0;
    const u32 from = base.kind == Kind::SCALAR ? w.s[base.index] : 0;
    return private_at(w, by + from + (u32)in.offset, bytes, lane);
}

template <Space SPACE> void load(Wave &w, const Instruction &in) {
    const Transfer &how = TRANSFERS[in.argument];
    u8 bytes[LANES][16];  // all is read before any register changes: the address may be where the result goes
    for (int lane = 0; lane < w.lanes; lane++)
        if (w.active(lane)) memcpy(bytes[lane], lane_at(w, in, SPACE, 1, how.bytes, false, lane), how.bytes);
    for (int lane = 0; lane < w.lanes; lane++)
        if (w.active(lane)) load_lane(w, how, in.operands[0].index, lane, bytes[lane]);
}
template <Space SPACE> void store(Wave &w, const Instruction &in) {
    const Transfer &how = TRANSFERS[in.argument];
    for (int lane = 0; lane < w.lanes; lane++)
        if (w.active(lane))
            store_lane(w, how, in.operands[1].index, lane, lane_at(w, in, SPACE, 0, how.bytes, true, lane));
}

// Private memory by its buffer: [to or from], a lane's offset or none, the buffer, the wave's offset.
u8 *buffer_at(Wave &w, const Instruction &in, int bytes, int lane) {
    const Operand &by = in.operands[1], &buffer = in.operands[2], &offset = in.operands[3];
    if (buffer.kind != Kind::SCALAR || w.s[buffer.index] || w.s[buffer.index + 1] != PRIVATE_BUFFER[0])
        fault("a buffer other than that of private memory");
    if (offset.kind != Kind::INTEGER || offset.bits) fault("an offset into the private memory of all lanes");
    return private_at(w, (by.kind == Kind::VECTOR ? w.v[by.index][lane] : 0) + (u32)in.offset, bytes, lane);
}
void buffer_load(Wave &w, const Instruction &in) {
    const Transfer &how = TRANSFERS[in.argument];
    u8 bytes[LANES][16];
    for (int lane = 0; lane < w.lanes; lane++)
        if (w.active(lane)) memcpy(bytes[lane], buffer_at(w, in, how.bytes, lane), how.bytes);
    for (int lane = 0; lane < w.lanes; lane++)
        if (w.active(lane)) load_lane(w, how, in.operands[0].index, lane, bytes[lane]);
}
void buffer_store(Wave &w, const Instruction &in) {
    const Transfer &how = TRANSFERS[in.argument];
    for (int lane = 0; lane < w.lanes; lane++)
        if (w.active(lane)) store_lane(w, how, in.operands[0].index, lane, buffer_at(w, in, how.bytes, lane));
}

// Atomics return what was there if they have a destination. Operands: [to,] address, data, base.
template <class F, class T> void atomic(Wave &w, const Instruction &in) {
    const int first = in.count == 4 ? 1 : 0;
    const Operand &data = in.operands[first + 1], &base = in.operands[first + 2];
    for (int lane = 0; lane < w.lanes; lane++) {
        if (!w.active(lane)) continue;
        const u64 address = global_address(w, in, in.operands[first], base, lane);
        if (address % sizeof(T)) fault("an atomic at 0x%llx, which is not aligned", (unsigned long long)address);
        u8 *at = global_at(w, address, sizeof(T), true);
        T old, by;
        memcpy(&old, at, sizeof old);
        for (int i = 0; i < (int)sizeof(T) / 4; i++) memcpy((u8 *)&by + 4 * i, &w.v[data.index + i][lane], 4);
        const T now = F{}(old, by);
        memcpy(at, &now, sizeof now);
        if (first)
            for (int i = 0; i < (int)sizeof(T) / 4; i++) memcpy(&w.v[in.operands[0].index + i][lane], (u8 *)&old + 4 * i, 4);
    }
}
template <class T, class F> void add_atomic(Table &t, const char *name, F) {
    t[std::string("global_atomic_") + name] = {atomic<F, T>};
}

// `argument` dwords by the scalar cache. Its addresses are multiples of 4.
void scalar_load(Wave &w, const Instruction &in) {
    const Operand &offset = in.operands[2];
    u64 address = scalar<u64>(w, in.operands[1]) + (u64)in.offset;
    if (offset.kind == Kind::INTEGER || offset.kind == Kind::LITERAL) address += offset.bits;
    else if (offset.kind != Kind::NONE) address += scalar<u32>(w, offset);
    address &= ~3ull;
    const u8 *from = w.block->memory->at(address, 4 * in.argument, false);
    const Operand &to = in.operands[0];
    if (to.kind == Kind::SCALAR) memcpy(&w.s[to.index], from, 4 * in.argument);
    else if (to.kind != Kind::NOTHING) fault("not a scalar destination");
}

}  // namespace

void add_memory(Table &t) {
    for (int i = 0; i < TRANSFER_COUNT; i++) {
        const std::string name = TRANSFERS[i].name;
        if (TRANSFERS[i].loads) {
            t["global_load_" + name] = {load<GLOBAL>, i};
            t["flat_load_" + name] = {load<FLAT>, i};
            t["scratch_load_" + name] = {load<SCRATCH>, i};
            t["buffer_load_" + name] = {buffer_load, i};
        }
        if (TRANSFERS[i].stores) {
            t["global_store_" + name] = {store<GLOBAL>, i};
            t["flat_store_" + name] = {store<FLAT>, i};
            t["scratch_store_" + name] = {store<SCRATCH>, i};
            t["buffer_store_" + name] = {buffer_store, i};
        }
    }
    for (int dwords : {1, 2, 3, 4, 8, 16}) t["s_load_b" + std::to_string(32 * dwords)] = {scalar_load, dwords};
    add_atomic<u32>(t, "add_u32", [](u32 old, u32 by) { return old + by; });
    add_atomic<u64>(t, "add_u64", [](u64 old, u64 by) { return old + by; });
    add_atomic<f32>(t, "add_f32", [](f32 old, f32 by) { return old + by; });
    add_atomic<u32>(t, "max_u32", [](u32 old, u32 by) { return old > by ? old : by; });
    add_atomic<u32>(t, "or_b32", [](u32 old, u32 by) { return old | by; });
    add_atomic<u32>(t, "swap_b32", [](u32, u32 by) { return by; });
}

}  // namespace amdgpu
