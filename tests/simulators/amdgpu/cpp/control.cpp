// Branches, barriers, the end, and what takes time only.
#include "operands.h"

namespace amdgpu {
namespace {

void jump(Wave &w, const Instruction &in) {
    if (in.target < 0) fault("a branch to what is no instruction");
    w.at = in.target;
}
template <class F> void branch(Wave &w, const Instruction &in) {
    if (F{}(w)) jump(w, in);
}
template <class F> void add_branch(Table &t, const char *name, F) { t[name] = {branch<F>}; }

void nothing(Wave &, const Instruction &) {}

void end(Wave &w, const Instruction &) {
    w.ended = w.switches = true;
    w.block->alive--;
    if (w.block->whole && w.block->arrived) fault("the wave ends while others wait for it at a barrier");
    w.block->arrive();
}

void signal(Wave &w, const Instruction &) {
    if (w.signalled) fault("the wave signals the barrier twice, and waits for neither");
    if (w.block->whole && w.exec() != w.born)
        fault("a barrier that not all lanes of the wave reach: EXEC is 0x%llx", (unsigned long long)w.exec());
    if (w.block->alive < w.block->whole) fault("a barrier after the end of another wave");
    w.signalled = true;
    w.joined = w.block->generation;
    w.block->arrived++;
    w.block->arrive();
}
void wait(Wave &w, const Instruction &) {
    if (!w.signalled) fault("the wave waits for a barrier that it has not signalled");
    w.waiting = w.switches = true;
}
// RDNA 4's halves of a barrier: -1 is the block's, and no other is known here.
void split_signal(Wave &w, const Instruction &in) {
    if (in.operands[0].bits != ~0ull) fault("a barrier other than the block's");
    signal(w, in);
}
void split_wait(Wave &w, const Instruction &in) {
    if ((u16)in.operands[0].bits != 0xffff) fault("a barrier other than the block's");
    wait(w, in);
}

u64 address_of(const Wave &w, u32 pc) { return w.block->program->base + pc; }
void go_to(Wave &w, u64 address) {
    w.at = w.block->program->index_of(address, "a jump");
}

}  // namespace

void Block::arrive() {
    if (alive && arrived >= alive) {
        arrived = 0;
        generation++;
    }
}

void add_control(Table &t) {
    t["s_branch"] = {jump};
    add_branch(t, "s_cbranch_scc0", [](Wave &w) { return !w.scc; });
    add_branch(t, "s_cbranch_scc1", [](Wave &w) { return w.scc; });
    add_branch(t, "s_cbranch_vccz", [](Wave &w) { return w.vcc() == 0; });
    add_branch(t, "s_cbranch_vccnz", [](Wave &w) { return w.vcc() != 0; });
    add_branch(t, "s_cbranch_execz", [](Wave &w) { return w.exec() == 0; });
    add_branch(t, "s_cbranch_execnz", [](Wave &w) { return w.exec() != 0; });
    t["s_endpgm"] = {end};
    t["s_barrier"] = {[](Wave &w, const Instruction &in) {
        signal(w, in);
        wait(w, in);
    }};
    t["s_barrier_signal"] = {split_signal};
    t["s_barrier_wait"] = {split_wait};
    t["s_getpc_b64"] = {[](Wave &w, const Instruction &in) { set_scalar<u64>(w, in.operands[0], address_of(w, in.next)); }};
    t["s_setpc_b64"] = {[](Wave &w, const Instruction &in) { go_to(w, scalar<u64>(w, in.operands[0])); }};
    t["s_swappc_b64"] = {[](Wave &w, const Instruction &in) {
        const u64 to = scalar<u64>(w, in.operands[1]);
        set_scalar<u64>(w, in.operands[0], address_of(w, in.next));
        go_to(w, to);
    }};
    // What an instruction waits for has happened here: all of them are done in order.
    for (const char *name : {"s_nop", "s_waitcnt", "s_waitcnt_vscnt", "s_waitcnt_vmcnt", "s_waitcnt_lgkmcnt",
                             "s_waitcnt_expcnt", "s_waitcnt_depctr", "s_wait_alu", "s_wait_idle", "s_wait_loadcnt",
                             "s_wait_storecnt", "s_wait_kmcnt", "s_wait_dscnt", "s_wait_loadcnt_dscnt",
                             "s_wait_storecnt_dscnt", "s_delay_alu", "s_clause", "s_sleep", "s_setprio",
                             "s_inst_prefetch", "s_set_inst_prefetch_distance", "s_sendmsg", "s_wakeup", "v_nop",
                             "buffer_gl0_inv", "buffer_gl1_inv", "buffer_inv", "buffer_wbl2", "buffer_wbinvl1",
                             "buffer_wbinvl1_vol", "s_icache_inv", "global_inv", "global_wb", "s_code_end"})
        t[name] = {nothing};
    t["s_code_end"] = {[](Wave &, const Instruction &) { fault("the end of the code is reached"); }};
    t["s_trap"] = {[](Wave &, const Instruction &) { fault("a trap"); }};
}

}  // namespace amdgpu
