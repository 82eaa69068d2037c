// What an operand is to an instruction that takes it as a T: scalars alike for all lanes, a register's lanes, constants.
#pragma once
#include <cmath>
#include <type_traits>

#include "machine.h"

namespace amdgpu {

// A lane's bit of a mask of lanes.
struct Bit {
    u32 set;
};

// A constant as a T has it: inline floats are of the operand's own type; a literal is the high half of an f64, and of a
// 64-bit integer with a sign has its own.
template <class T> T constant(const Operand &one) {
    u64 bits = one.bits;
    if (one.kind == Kind::FLOAT) {
        if constexpr (sizeof(T) == 8) bits = bits_as<u64>(one.value);
        else if constexpr (sizeof(T) == 4) bits = bits_as<u32>((f32)one.value);
        else bits = bits_as<u16>((f16)one.value);
    } else if (one.kind == Kind::LITERAL && sizeof(T) == 8) {
        if constexpr (std::is_same_v<T, f64>) bits <<= 32;
        else if constexpr (std::is_same_v<T, i64>) bits = (u64)(i64)(i32)bits;
    }
    if constexpr (sizeof(T) == 8) return bits_as<T>(bits);
    else if constexpr (sizeof(T) == 4) return bits_as<T>((u32)bits);
    else if constexpr (sizeof(T) == 2) return bits_as<T>((u16)bits);
    else return (T)bits;
}

template <class T> T scalar(const Wave &w, const Operand &one) {
    switch (one.kind) {
    case Kind::SCALAR:
        if constexpr (sizeof(T) == 8) return bits_as<T>(w.scalar64(one.index));
        else if constexpr (sizeof(T) == 4) return bits_as<T>(w.s[one.index]);
        else return bits_as<T>((u16)w.s[one.index]);
    case Kind::INTEGER:
    case Kind::LITERAL:
    case Kind::FLOAT: return constant<T>(one);
    case Kind::NOTHING: return bits_as<T>((std::conditional_t<sizeof(T) == 8, u64, std::conditional_t<sizeof(T) == 4, u32, u16>>)0);
    default: break;
    }
    u64 value = one.kind == Kind::SCC ? w.scc
                : one.kind == Kind::VCCZ ? w.vcc() == 0
                : one.kind == Kind::EXECZ ? w.exec() == 0
                : one.kind == Kind::SHARED ? (u64)SHARED_APERTURE << 32
                : one.kind == Kind::PRIVATE ? (u64)PRIVATE_APERTURE << 32
                                            : 0;
    if (one.kind == Kind::VECTOR || one.kind == Kind::NONE || one.kind == Kind::OFF) fault("not a scalar operand");
    if constexpr (sizeof(T) == 8) return bits_as<T>(value);
    else if constexpr (sizeof(T) == 4) return bits_as<T>((u32)(value >> 32 ? value >> 32 : value));
    else fault("a special value as 16 bits");
}

template <class T> void set_scalar(Wave &w, const Operand &one, T value) {
    if (one.kind == Kind::NOTHING) return;
    if (one.kind != Kind::SCALAR) fault("not a scalar destination");
    if constexpr (sizeof(T) == 8) {
        u64 bits = bits_as<u64>(value);
        w.s[one.index] = (u32)bits;
        w.s[one.index + 1] = (u32)(bits >> 32);
    } else {
        w.s[one.index] = bits_as<u32>(value);
    }
}
inline void set_mask(Wave &w, const Operand &one, u64 value) {
    if (one.kind == Kind::NOTHING) return;
    if (one.kind != Kind::SCALAR) fault("not a destination for a mask");
    w.set_mask(one.index, value);
}

// The 32 bits of source `number` of each lane, by DPP and SDWA if the instruction has them.
const u32 *source_words(Wave &w, const Instruction &in, int operand, int number, u32 *buffer);
// The lanes that DPP leaves an instruction to write, of those that are active.
u64 lanes_written(Wave &w, const Instruction &in);

template <class T> T modified(const Operand &one, T value) {
    if constexpr (sizeof(T) == 8) {
        u64 bits = bits_as<u64>(value);
        if (one.absolute) bits &= ~(1ull << 63);
        if (one.negative) bits ^= 1ull << 63;
        return bits_as<T>(bits);
    } else if constexpr (sizeof(T) == 4) {
        u32 bits = bits_as<u32>(value);
        if (one.absolute) bits &= 0x7fffffffu;
        if (one.negative) bits ^= 0x80000000u;
        return bits_as<T>(bits);
    } else {
        u16 bits = bits_as<u16>(value);
        if (one.absolute) bits &= 0x7fff;
        if (one.negative) bits ^= 0x8000;
        return bits_as<T>(bits);
    }
}

// The lanes of source `number`, a pointer into the registers where they lie as they are wanted. Sources are counted from
// the first operand behind the destinations, `operand`; op_sel and SDWA count them so, too.
template <class T> const T *lanes_of(Wave &w, const Instruction &in, int operand, int number, T *buffer) {
    const Operand &one = in.operands[operand];
    if constexpr (std::is_same_v<T, Bit>) {
        u64 mask = w.lanes == 64 ? scalar<u64>(w, one) : scalar<u32>(w, one);
        for (int i = 0; i < LANES; i++) buffer[i].set = mask >> i & 1;
        return buffer;
    } else {
        const bool altered = one.negative || one.absolute;
        if (one.kind != Kind::VECTOR) {
            T value;
            if (sizeof(T) == 2 && one.kind == Kind::SCALAR && in.op_sel >> number & 1)
                value = bits_as<T>((std::conditional_t<sizeof(T) == 2, u16, T>)(w.s[one.index] >> 16));
            else if (sizeof(T) == 4 && in.sdwa && number < 2 && in.select[number]) {
                u32 words[LANES];
                memcpy(&value, source_words(w, in, operand, number, words), sizeof value < 4 ? sizeof value : 4);
            } else {
                value = scalar<T>(w, one);
            }
            value = modified(one, value);
            for (int i = 0; i < LANES; i++) buffer[i] = value;
            return buffer;
        }
        if constexpr (sizeof(T) == 8) {
            if (in.sdwa || in.lanes != Lanes::NONE) fault("DPP or SDWA of 64 bits");
            const u32 *low = w.v[one.index], *high = w.v[one.index + 1];
            u64 bits[LANES];
            for (int i = 0; i < LANES; i++) bits[i] = (u64)high[i] << 32 | low[i];
            memcpy(buffer, bits, sizeof bits);
        } else if constexpr (sizeof(T) == 4) {
            if (!in.sdwa && in.lanes == Lanes::NONE && !altered) return (const T *)w.v[one.index];
            u32 words[LANES];
            const u32 *found = source_words(w, in, operand, number, words);
            memcpy(buffer, found, sizeof words);
        } else {
            u32 words[LANES];
            const u32 *found = source_words(w, in, operand, number, words);
            const int shift = in.op_sel >> number & 1 ? 16 : 0;
            u16 halves[LANES];
            for (int i = 0; i < LANES; i++) halves[i] = (u16)(found[i] >> shift);
            memcpy(buffer, halves, sizeof halves);
        }
        if (altered)
            for (int i = 0; i < LANES; i++) buffer[i] = modified(one, buffer[i]);
        return buffer;
    }
}

// 0 to 1; a NaN is 0. Of integers: nothing is done here, an instruction that saturates does it itself.
template <class T> T clamped(T value) {
    return value > (T)0 ? (value < (T)1 ? value : (T)1) : (T)0;
}

void write_words(Wave &w, const Instruction &in, const Operand &to, const u32 *words);
void write_halves(Wave &w, const Instruction &in, const Operand &to, const u16 *halves);

// Write a result for each active lane.
template <class T> void write_lanes(Wave &w, const Instruction &in, const Operand &to, T *out) {
    if constexpr (std::is_floating_point_v<T> || std::is_same_v<T, f16>) {
        if (in.factor != 1)
            for (int i = 0; i < LANES; i++) out[i] = (T)(out[i] * (T)in.factor);
        if (in.clamp)
            for (int i = 0; i < LANES; i++) out[i] = clamped(out[i]);
    } else if (in.clamp || in.factor != 1) {
        fault("clamp of integers");
    }
    if (to.kind != Kind::VECTOR) fault("not a vector destination");
    if constexpr (sizeof(T) == 2) {
        u16 halves[LANES];
        memcpy(halves, out, sizeof halves);
        write_halves(w, in, to, halves);
    } else if constexpr (sizeof(T) == 4) {
        write_words(w, in, to, (const u32 *)out);
    } else {
        u32 low[LANES], high[LANES];
        u64 bits[LANES];
        memcpy(bits, out, sizeof bits);
        for (int i = 0; i < LANES; i++) {
            low[i] = (u32)bits[i];
            high[i] = (u32)(bits[i] >> 32);
        }
        Operand upper = to;
        upper.index++;
        write_words(w, in, to, low);
        write_words(w, in, upper, high);
    }
}

// A result and a bit for a mask of lanes, as additions with carry have.
template <class T> struct WithBit {
    T value;
    bool bit;
};
template <class T> struct IsWithBit : std::false_type {};
template <class T> struct IsWithBit<WithBit<T>> : std::true_type {
    typedef T Value;
};

template <class T> struct Lane {
    alignas(64) T of[LANES];
};

// An instruction of a lane: F(sources...) gives a number, a bool (a comparison), or a number with a bit.
template <class F, class R, class... A> struct Vector {
    template <size_t... I> static void go(Wave &w, const Instruction &in, std::index_sequence<I...>) {
        constexpr int first = IsWithBit<R>::value ? 2 : 1;
        std::tuple<Lane<A>...> buffers;
        auto from = std::make_tuple(lanes_of<A>(w, in, first + I, I, std::get<I>(buffers).of)...);
        if constexpr (std::is_same_v<R, bool>) {
            u64 mask = 0;
            for (int i = 0; i < w.lanes; i++) mask |= (u64)F{}(std::get<I>(from)[i]...) << i;
            set_mask(w, in.operands[0], mask & w.exec());
        } else if constexpr (IsWithBit<R>::value) {
            Lane<typename IsWithBit<R>::Value> out;
            u64 mask = 0;
            for (int i = 0; i < LANES; i++) {
                R one = F{}(std::get<I>(from)[i]...);
                out.of[i] = one.value;
                mask |= (u64)one.bit << i;
            }
            write_lanes(w, in, in.operands[0], out.of);
            set_mask(w, in.operands[1], mask & w.exec());
        } else {
            Lane<R> out;
            for (int part = 0; part < w.lanes; part += PART)
                for (int i = part; i < part + PART; i++) out.of[i] = F{}(std::get<I>(from)[i]...);
            write_lanes(w, in, in.operands[0], out.of);
        }
    }
    static void run(Wave &w, const Instruction &in) { go(w, in, std::index_sequence_for<A...>{}); }
};
template <class R, class... A> struct Signature;
template <class R, class... A> struct Signature<R(A...)> {
    template <class F> static constexpr Handler handler = &Vector<F, R, A...>::run;
};

template <class Form, class F> void vector(Table &table, const char *name, F) {
    table[name] = {Signature<Form>::template handler<F>};
}
// The destination is the last source, too.
template <class Form, class F> void accumulate(Table &table, const char *name, F) {
    table[name] = {Signature<Form>::template handler<F>, 0, 1};
}

}  // namespace amdgpu
