// A launch: blocks one after the other, the waves of a block by turns, and the functions that Python calls.
#include <algorithm>
#include <set>
#include <sstream>

#include "machine.h"

namespace amdgpu {

void read_program(Program &program, const char *text);

// As device.py fills it.
struct Launch {
    u64 arguments, packet;  // addresses
    u64 bound;              // of instructions that a wave may execute
    u32 entry;              // pc
    u32 grid[3], block[3];
    u32 shared_bytes, private_bytes;
    u32 lanes, vectors, accumulators;  // registers of a wave
    u32 properties, user_scalars, ids;  // of the descriptor: what is passed in scalars; which ids of the block
    u32 private_offset;                 // whether a scalar has the place of a wave's private memory
    u32 ids_in_traps;                   // the block's are in trap registers, as of gfx12
    u32 threads_apart;                  // a thread's three ids have a register each, before gfx90a and gfx11
    u32 seed;
    u32 whole_barriers;
};

namespace {

struct Order {
    u64 state;
    u32 next(u32 below) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        return (u32)(state >> 33) % below;
    }
};

// What the loader and the dispatcher put into registers.
void start(Wave &w, const Launch &launch, Block &block, const u32 (&id)[3], u32 number) {
    w.block = &block;
    w.lanes = (int)launch.lanes;
    w.number = (int)number;
    w.at = block.program->index_of(block.program->base + launch.entry, "a launch");
    w.scc = w.ended = w.waiting = w.switches = w.signalled = false;
    w.steps = 0;
    w.masked = 0;
    memset(w.mask, 0, sizeof w.mask);
    std::fill(w.s, w.s + SCALARS, POISON);
    std::fill(w.v[0], w.v[0] + (u64)launch.vectors * LANES, POISON);
    std::fill(w.v[ACCUMULATORS], w.v[ACCUMULATORS] + (u64)launch.accumulators * LANES, POISON);
    w.private_words.assign((u64)launch.private_bytes * launch.lanes / 4, POISON);

    u32 at = 0;
    const u32 p = launch.properties;
    const auto pair = [&](u64 value) {
        w.s[at++] = (u32)value;
        w.s[at++] = (u32)(value >> 32);
    };
    const u64 poison = (u64)POISON << 32 | POISON;
    if (p & 1) {
        pair((u64)PRIVATE_BUFFER[0] << 32);
        pair((u64)PRIVATE_BUFFER[2] << 32 | PRIVATE_BUFFER[1]);
    }
    if (p & 2) pair(launch.packet);
    if (p & 4) pair(poison);         // the queue
    if (p & 8) pair(launch.arguments);
    if (p & 16) pair(poison);        // the dispatch's number
    if (p & 32) pair(0);             // where flat instructions find private memory
    if (p & 64) w.s[at++] = launch.private_bytes;
    if (at > launch.user_scalars) fault("the descriptor has %u user SGPRs, its properties are %u", launch.user_scalars, at);
    at = launch.user_scalars;
    if (launch.ids_in_traps) {
        w.s[TRAP + 9] = id[0];
        w.s[TRAP + 7] = id[1] | id[2] << 16;
    } else {
        for (int i = 0; i < 3; i++)
            if (launch.ids >> i & 1) w.s[at++] = id[i];
    }
    if (launch.private_offset) w.s[at++] = 0;
    const u32 threads = launch.block[0] * launch.block[1] * launch.block[2];
    u64 exec = 0;
    for (u32 lane = 0; lane < launch.lanes; lane++) {
        const u32 thread = number * launch.lanes + lane;
        if (thread >= threads) continue;
        exec |= 1ull << lane;
        const u32 x = thread % launch.block[0], y = thread / launch.block[0] % launch.block[1];
        const u32 z = thread / launch.block[0] / launch.block[1];
        w.v[0][lane] = launch.threads_apart ? x : x | y << 10 | z << 20;
        if (launch.threads_apart) w.v[1][lane] = y, w.v[2][lane] = z;
    }
    w.born = exec;
    w.s[EXEC] = (u32)exec;
    w.s[EXEC + 1] = (u32)(exec >> 32);
}

// Where a wave is that has executed too much: the loop, by the instructions of the next turns.
std::string loop_of(Wave &w, Program &program, u64 bound) {
    std::set<int> seen;
    u64 steps = 0;
    for (; steps < 100000 && !w.ended; steps++) {
        const Instruction &in = program.code[w.at];
        seen.insert(w.at++);
        in.handler(w, in);
        if (w.waiting) w.waiting = w.signalled = false;
    }
    std::stringstream out;
    out << "does not end: " << bound << " instructions of a wave, and it is in a loop of " << seen.size()
        << " instructions from 0x" << std::hex << program.code[*seen.begin()].pc << " to 0x"
        << program.code[*seen.rbegin()].pc << ", EXEC 0x" << w.exec() << std::dec << ":";
    int lines = 0;
    for (int at : seen) {
        if (lines++ == 24) {
            out << "\n  ...";
            break;
        }
        out << "\n  " << std::hex << program.code[at].pc << std::dec << ": " << program.code[at].text;
    }
    return out.str();
}

void run_block(Program &program, const Launch &launch, Block &block, std::vector<Wave> &waves, Order &order) {
    int last = 0;
    const Wave *now = nullptr;
    try {
        while (block.alive) {
            std::vector<Wave *> ready;
            for (Wave &w : waves) {
                if (w.waiting && block.generation > w.joined) w.waiting = w.signalled = false;
                if (!w.ended && !w.waiting) ready.push_back(&w);
            }
            if (ready.empty()) fault("all waves wait for a barrier that not all of them reach");
            Wave &w = *ready[order.next((u32)ready.size())];
            now = &w;
            w.switches = false;
            for (u32 turn = 1 + order.next(2000); turn && !w.switches; turn--) {
                const Instruction &in = program.code[last = w.at];
                program.executed[w.at++]++;
                w.steps++;
                in.handler(w, in);
            }
            if (w.steps > launch.bound && !w.ended) throw Fault(loop_of(w, program, launch.bound));
        }
    } catch (const Fault &error) {
        std::stringstream out;
        out << "0x" << std::hex << program.code[last].pc << std::dec << ": " << program.code[last].text;
        if (now) out << " (wave " << now->number << ")";
        throw Fault(out.str() + ": " + error.what());
    }
}

void run(Program &program, Memory &memory, const Launch &launch) {
    const u32 threads = launch.block[0] * launch.block[1] * launch.block[2];
    const u32 count = (threads + launch.lanes - 1) / launch.lanes;
    std::vector<Wave> waves(count);
    std::vector<u32> registers((u64)count * VECTORS * LANES, POISON);
    for (u32 i = 0; i < count; i++) waves[i].v = (u32(*)[LANES])(registers.data() + (u64)i * VECTORS * LANES);
    Order order{0x9e3779b97f4a7c15ull * (launch.seed + 1)};
    const u64 blocks = (u64)launch.grid[0] * launch.grid[1] * launch.grid[2];
    std::vector<u64> numbers(blocks);
    for (u64 i = 0; i < blocks; i++) numbers[i] = i;
    for (u64 i = blocks; i > 1; i--) std::swap(numbers[i - 1], numbers[order.next((u32)i)]);
    for (u64 number : numbers) {
        const u32 id[3] = {(u32)(number % launch.grid[0]), (u32)(number / launch.grid[0] % launch.grid[1]),
                           (u32)(number / launch.grid[0] / launch.grid[1])};
        Block block{&memory, &program, {}, launch.private_bytes, (int)count};
        block.whole = launch.whole_barriers ? (int)count : 0;
        block.shared.resize(launch.shared_bytes);
        for (u32 i = 0; i < launch.shared_bytes; i++) block.shared[i] = (u8)(POISON >> (8 * (i % 4)));
        for (u32 i = 0; i < count; i++) start(waves[i], launch, block, id, i);
        try {
            run_block(program, launch, block, waves, order);
        } catch (const Fault &error) {
            std::stringstream out;
            out << "block " << id[0] << "," << id[1] << "," << id[2] << ": " << error.what();
            throw Fault(out.str());
        }
    }
}

thread_local std::string last_error;
template <class F> int guarded(F work) {
    try {
        work();
        return 0;
    } catch (const std::exception &error) {
        last_error = error.what();
        return 1;
    }
}

}  // namespace
}  // namespace amdgpu

using namespace amdgpu;

extern "C" {
const char *executor_error() { return last_error.c_str(); }

Memory *executor_memory() { return new Memory; }
void executor_memory_end(Memory *memory) { delete memory; }
int executor_new(Memory *memory, u64 bytes, const char *name, int writable, u64 *address) {
    return guarded([&] { *address = memory->add(bytes, name, writable); });
}
void executor_free(Memory *memory, u64 address) { memory->free(address); }
u8 *executor_data(Memory *memory, u64 address) { return memory->data(address); }

int executor_program(const char *text, u64 base, Program **program) {
    return guarded([&] {
        auto made = std::make_unique<Program>();
        made->base = base;
        read_program(*made, text);
        *program = made.release();
    });
}
void executor_program_end(Program *program) { delete program; }
// How often each instruction was executed, by waves, in the order of the text.
void executor_counts(Program *program, u64 *counts) {
    std::copy(program->executed.begin(), program->executed.end(), counts);
}
int executor_launch(Program *program, Memory *memory, const Launch *launch) {
    return guarded([&] { run(*program, *memory, *launch); });
}
// One wave from `pc` to its end, with the registers, LDS and private memory that are given; they come back as they are
// then. For tests of single instructions.
int executor_wave(Program *program, Memory *memory, u32 pc, u32 lanes, u32 *scalars, u32 *vectors, u8 *scc, u8 *shared,
                  u32 shared_bytes, u8 *private_bytes, u32 private_each) {
    return guarded([&] {
        Block block{memory, program, std::vector<u8>(shared, shared + shared_bytes), private_each, 1};
        Wave w;
        w.block = &block;
        w.lanes = (int)lanes;
        w.at = program->index_of(program->base + pc, "a launch");
        w.v = (u32(*)[LANES])vectors;
        w.scc = *scc;
        memset(w.mask, 0, sizeof w.mask);
        memcpy(w.s, scalars, sizeof w.s);
        w.private_words.resize((u64)private_each * lanes / 4);
        if (private_each) memcpy(w.private_words.data(), private_bytes, (u64)private_each * lanes);
        while (!w.ended) {
            const Instruction &in = program->code[w.at];
            program->executed[w.at++]++;
            if (++w.steps > 1000) fault("does not end");
            in.handler(w, in);
            if (w.waiting && block.generation <= w.joined) fault("waits for ever");
            if (w.waiting) w.waiting = w.signalled = false;
        }
        *scc = w.scc;
        memcpy(scalars, w.s, sizeof w.s);
        std::copy(block.shared.begin(), block.shared.end(), shared);
        if (private_each) memcpy(private_bytes, w.private_words.data(), (u64)private_each * lanes);
    });
}
// Whether the executor has an instruction of that name.
int executor_has(const char *name) { return handlers().count(name) != 0; }
}
