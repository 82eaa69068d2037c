// The state that instructions act on: memory, a block's LDS and barrier, a wave's registers; and a decoded program.
#pragma once
#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace amdgpu {

typedef int8_t i8;
typedef uint8_t u8;
typedef int16_t i16;
typedef uint16_t u16;
typedef int32_t i32;
typedef uint32_t u32;
typedef int64_t i64;
typedef uint64_t u64;
typedef float f32;
typedef double f64;
typedef _Float16 f16;

// What a kernel or a code object does that a GPU would not, or that this executor lacks.
struct Fault : std::runtime_error {
    using std::runtime_error::runtime_error;
};
[[noreturn, gnu::format(printf, 1, 2)]] void fault(const char *format, ...);

template <class To, class From> To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

constexpr int LANES = 64;          // a register has room for as many, whatever the wave
constexpr int PART = 32;           // lanes that a loop takes at once: a constant, which compilers vectorise
constexpr int VECTORS = 512;       // VGPRs, and AGPRs behind them
constexpr int ACCUMULATORS = 256;  // the first AGPR
constexpr int VCC = 106, TRAP = 108, M0 = 124, EXEC = 126, SCALARS = 128;
// A NaN as f32, and each half of it as f16 and bf16; far out of any array as an index.
constexpr u32 POISON = 0x7fff7fff;
// The high halves of the addresses by which flat instructions reach LDS and private memory.
constexpr u32 SHARED_APERTURE = 0x00010000, PRIVATE_APERTURE = 0x00020000;
// The last three words of the buffer by which buffer instructions reach private memory; the first is 0.
constexpr u32 PRIVATE_BUFFER[] = {PRIVATE_APERTURE, 0xffffffff, 0x00e00000};

// --- memory -----------------------------------------------------------------------------------------------------------

// Arrays, each in a range of addresses of its own with nothing near it: any access beside one is a fault.
class Memory {
  public:
    static constexpr int SLOT_BITS = 34;
    u64 add(u64 bytes, const char *name, bool writable);
    void free(u64 address);
    u8 *data(u64 address) { return array(address)->bytes.data(); }
    // Where `bytes` from `address` lie; a fault if they are not all in one array, or may not be written.
    u8 *at(u64 address, u64 bytes, bool write) {
        Array *one = array(address);
        u64 offset = address & ((1ull << SLOT_BITS) - 1);
        if (!one || offset + bytes > one->bytes.size() || (write && !one->writable)) refuse(address, bytes, write);
        return one->bytes.data() + offset;
    }

  private:
    struct Array {
        std::vector<u8> bytes;
        std::string name;
        bool writable;
    };
    std::vector<std::unique_ptr<Array>> arrays;
    std::vector<u64> unused;

    Array *array(u64 address) const {
        u64 slot = address >> SLOT_BITS;
        return slot < arrays.size() ? arrays[slot].get() : nullptr;
    }
    [[noreturn]] void refuse(u64 address, u64 bytes, bool write) const;
};

// --- programs ---------------------------------------------------------------------------------------------------------

enum class Kind : u8 { NONE, VECTOR, SCALAR, INTEGER, LITERAL, FLOAT, NOTHING, OFF, SCC, VCCZ, EXECZ, SHARED, PRIVATE };

struct Operand {
    Kind kind = Kind::NONE;
    bool negative = false, absolute = false, extended = false;
    int index = 0, words = 1;
    u64 bits = 0;
    f64 value = 0;
};

struct Wave;
struct Instruction;
typedef void (*Handler)(Wave &, const Instruction &);

// A lane's source by DPP.
enum class Lanes : u8 {
    NONE, QUAD, ROW_SHL, ROW_SHR, ROW_ROR, WAVE_SHL, WAVE_SHR, WAVE_ROL, WAVE_ROR, MIRROR, HALF_MIRROR,
    BCAST15, BCAST31, SHARE, XMASK, EIGHT,
};

struct Instruction {
    Handler handler = nullptr;
    int argument = 0;    // what the handler's name says besides: bytes, a kind
    int target = -1;     // of a branch: an instruction's index
    u32 pc = 0, next = 0;
    int count = 0;       // of operands
    std::array<Operand, 7> operands;
    // Modifiers.
    i64 offset = 0, offset0 = 0, offset1 = 0;
    u8 op_sel = 0, op_sel_hi = 0, neg_lo = 0, neg_hi = 0;  // a bit an operand
    bool clamp = false, gfx9 = false, flushes = false, dwords = false;
    f32 factor = 1;
    // SDWA: 0 is the register, 1 to 4 a byte of it, 5 and 6 a half; unused: 0 is zero, 1 sign, 2 as it was.
    bool sdwa = false;
    u8 destination = 0, unused = 0, select[2] = {0, 0};
    Lanes lanes = Lanes::NONE;
    u32 lanes_by = 0;
    u8 rows = 15, banks = 15;
    bool zero_bound = false, fetch_inactive = false;
    std::unique_ptr<Instruction> second;  // of a dual instruction
    std::string name, text;
};

struct Program {
    std::vector<Instruction> code;
    std::vector<u64> executed;  // how often, by instruction: by waves
    std::unordered_map<u32, int> by_pc;
    u64 base = 0;  // the code object's address in memory
    int index_of(u64 pc, const char *what) const;
};

// Handlers by name; every file that has some adds its own.
struct Entry {
    Handler handler;
    int argument = 0;
    int implied = 0;  // 1: the destination is the last source, too
};
typedef std::unordered_map<std::string, Entry> Table;
void add_scalar(Table &);
void add_vector(Table &);
void add_vector_64(Table &);
void add_vector_16(Table &);
void add_compares(Table &);
void add_lanes(Table &);
void add_lds(Table &);
void add_memory(Table &);
void add_matrix(Table &);
void add_control(Table &);
const Table &handlers();

// --- waves ------------------------------------------------------------------------------------------------------------

struct Block {
    Memory *memory;
    Program *program;
    std::vector<u8> shared;
    u32 private_bytes = 0;  // of a lane
    int alive = 0, arrived = 0;
    int whole = 0;  // as many waves have to reach every barrier, with all their lanes; 0: what a GPU does
    u64 generation = 0;  // of the barrier: how often all have arrived
    u8 *shared_at(u32 address, u32 bytes) {
        if ((u64)address + bytes > shared.size())
            fault("LDS: %u bytes at %u of %zu", bytes, address, shared.size());
        return shared.data() + address;
    }
    void arrive();
};

struct Wave {
    alignas(64) u32 mask[LANES];  // of the active lanes, as `masked` is
    Block *block = nullptr;
    int lanes = 64, number = 0;
    int at = 0;  // the next instruction
    bool scc = false, ended = false, waiting = false, switches = false;
    u64 joined = 0;  // the barrier's generation that this wave arrived in
    bool signalled = false;
    u64 steps = 0;
    u64 masked = 0;
    u64 born = 0;  // the lanes that it began with
    u32 s[SCALARS];
    std::vector<u32> private_words;
    u32 (*v)[LANES] = nullptr;

    u64 all() const { return lanes == 64 ? ~0ull : 0xffffffffull; }
    u64 scalar64(int index) const { return (u64)s[index + 1] << 32 | s[index]; }
    u64 exec() const { return lanes == 64 ? scalar64(EXEC) : s[EXEC]; }
    u64 vcc() const { return lanes == 64 ? scalar64(VCC) : s[VCC]; }
    bool active(int lane) const { return exec() >> lane & 1; }
    // A mask of lanes, as wide as the wave.
    u64 mask_of(int index) const { return lanes == 64 ? scalar64(index) : s[index]; }
    void set_mask(int index, u64 value) {
        s[index] = (u32)value;
        if (lanes == 64) s[index + 1] = (u32)(value >> 32);
    }
    const u32 *spread(u64 active) {
        if (active != masked) {
            for (int i = 0; i < LANES; i++) mask[i] = active >> i & 1 ? ~0u : 0u;
            masked = active;
        }
        return mask;
    }
};

}  // namespace amdgpu
