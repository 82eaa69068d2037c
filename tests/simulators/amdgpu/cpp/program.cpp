// A program out of the text that the disassembly is written down as; see encoding.py.
#include <cstdarg>
#include <cstdio>
#include <sstream>

#include "machine.h"

namespace amdgpu {

void fault(const char *format, ...) {
    char text[1000];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    throw Fault(text);
}

const Table &handlers() {
    static const Table all = [] {
        Table table;
        for (auto add : {add_scalar, add_vector, add_vector_64, add_vector_16, add_compares, add_lanes, add_lds,
                         add_memory, add_matrix, add_control})
            add(table);
        return table;
    }();
    return all;
}

int Program::index_of(u64 pc, const char *what) const {
    const auto found = by_pc.find((u32)(pc - base));
    if (pc < base || (pc - base) >> 32 || found == by_pc.end())
        fault("%s to 0x%llx, where no instruction is", what, (unsigned long long)pc);
    return found->second;
}

namespace {

Operand operand_of(const std::string &token) {
    Operand one;
    size_t at = 0;
    for (; token[at] == 'N' || token[at] == 'A' || token[at] == 'X'; at++)
        (token[at] == 'N' ? one.negative : token[at] == 'A' ? one.absolute : one.extended) = true;
    const char kind = token[at++];
    const std::string rest = token.substr(at);
    switch (kind) {
    case 'v':
    case 's': {
        const size_t colon = rest.find(':');
        one.kind = kind == 'v' ? Kind::VECTOR : Kind::SCALAR;
        one.index = std::stoi(rest.substr(0, colon));
        one.words = std::stoi(rest.substr(colon + 1));
        if (one.index < 0 || one.index + one.words > (kind == 'v' ? VECTORS : SCALARS)) fault("operand %s", token.c_str());
        return one;
    }
    case 'i': one.kind = Kind::INTEGER; one.bits = (u64)std::stoll(rest); return one;
    case 'l': one.kind = Kind::LITERAL; one.bits = std::stoull(rest, nullptr, 16); return one;
    case 'f': one.kind = Kind::FLOAT; one.value = std::stod(rest); return one;
    case 'n': one.kind = Kind::NOTHING; return one;
    case 'o': one.kind = Kind::OFF; return one;
    case 'c': one.kind = Kind::SCC; return one;
    case 'z': one.kind = Kind::VCCZ; return one;
    case 'e': one.kind = Kind::EXECZ; return one;
    case 'h': one.kind = Kind::SHARED; return one;
    case 'p': one.kind = Kind::PRIVATE; return one;
    default: fault("operand %s", token.c_str());
    }
}

void set_modifier(Instruction &in, const std::string &key, const std::string &text) {
    if (key == "factor") {
        in.factor = std::stof(text);
        return;
    }
    const i64 value = std::stoll(text);
    if (key == "offset") in.offset = value;
    else if (key == "offset0") in.offset0 = value;
    else if (key == "offset1") in.offset1 = value;
    else if (key == "op_sel") in.op_sel = (u8)value;
    else if (key == "op_sel_hi") in.op_sel_hi = (u8)value;
    else if (key == "neg_lo") in.neg_lo = (u8)value;
    else if (key == "neg_hi") in.neg_hi = (u8)value;
    else if (key == "clamp") in.clamp = value;
    else if (key == "gfx9") in.gfx9 = value;
    else if (key == "flushes") in.flushes = value;
    else if (key == "sdwa") in.sdwa = value;
    else if (key == "destination") in.destination = (u8)value;
    else if (key == "unused") in.unused = (u8)value;
    else if (key == "select0") in.select[0] = (u8)value;
    else if (key == "select1") in.select[1] = (u8)value;
    else if (key == "lanes") in.lanes = (Lanes)value;
    else if (key == "lanes_by") in.lanes_by = (u32)value;
    else if (key == "rows") in.rows = (u8)value;
    else if (key == "banks") in.banks = (u8)value;
    else if (key == "zero_bound") in.zero_bound = value;
    else if (key == "fetch_inactive") in.fetch_inactive = value;
    else fault("modifier %s", key.c_str());
}

std::vector<std::string> split(const std::string &line, char by) {
    std::vector<std::string> parts;
    std::stringstream stream(line);
    for (std::string part; std::getline(stream, part, by);) parts.push_back(part);
    return parts;
}

// pc, next pc, target pc or "-", name, modifiers, operands, the disassembly; by tabs.
Instruction instruction_of(const std::vector<std::string> &fields, i64 &target) {
    Instruction in;
    in.pc = (u32)std::stoul(fields[0], nullptr, 16);
    in.next = (u32)std::stoul(fields[1], nullptr, 16);
    target = fields[2] == "-" ? -1 : std::stoll(fields[2], nullptr, 16);
    in.name = fields[3];
    in.text = fields[6];
    const auto found = handlers().find(in.name);
    if (found == handlers().end())
        fault("0x%x: %s: the executor has no %s", in.pc, in.text.c_str(), in.name.c_str());
    for (const std::string &pair : split(fields[4], ' ')) {
        const size_t equals = pair.find('=');
        set_modifier(in, pair.substr(0, equals), pair.substr(equals + 1));
    }
    for (const std::string &token : split(fields[5], ' ')) {
        if (in.count >= 6) fault("0x%x: %s: too many operands", in.pc, in.text.c_str());
        in.operands[in.count++] = operand_of(token);
    }
    in.handler = found->second.handler;
    in.argument = found->second.argument;
    if (found->second.implied) in.operands[in.count++] = in.operands[0];
    return in;
}

// Both halves of a dual instruction read before either writes.
void both(Wave &w, const Instruction &in) {
    const Instruction &other = *in.second;
    const u32 index = in.operands[0].index;
    u32 old[LANES], now[LANES];
    memcpy(old, w.v[index], sizeof old);
    handlers().at(in.name).handler(w, in);
    memcpy(now, w.v[index], sizeof now);
    memcpy(w.v[index], old, sizeof old);
    other.handler(w, other);
    memcpy(w.v[index], now, sizeof now);
}

}  // namespace

void read_program(Program &program, const char *text) {
    std::vector<i64> targets;
    std::stringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
        i64 target;
        if (line[0] == '+') {
            program.code.back().second = std::make_unique<Instruction>(instruction_of(split(line.substr(1), '\t'), target));
            program.code.back().handler = both;
            continue;
        }
        program.code.push_back(instruction_of(split(line, '\t'), target));
        targets.push_back(target);
        program.by_pc[program.code.back().pc] = (int)program.code.size() - 1;
    }
    for (size_t i = 0; i < targets.size(); i++)
        if (targets[i] >= 0) {
            const auto found = program.by_pc.find((u32)targets[i]);
            program.code[i].target = found == program.by_pc.end() ? -1 : found->second;
        }
    program.executed.assign(program.code.size(), 0);
}

}  // namespace amdgpu
