// Draws tokens from rows of logits. reference.py defines every number; both give the same token, on every device: all
// numbers that decide are compared and summed as integers, so neither the order of a sum, nor the width of a wave, nor
// the contraction of a product can change it.
//
// A block processes a row in several passes: the likeliest token; for top-k or top-p, a histogram of the distances below
// it, and finer ones of the bin that contains the cut (usually one is enough); then the sum of what is kept, and the
// position of one random number in that sum, in order of ids.
//
// defines: RF_TYPE=F32|F16|BF16 RF_THREADS=64|128|256|512|1024
// variants: RF_TYPE=F32|F16|BF16
#include "common.h"

#ifndef RF_TYPE
#error "sampling: RF_TYPE, the type of the logits, must be defined"
#endif
// Of a block.
#ifndef RF_THREADS
#define RF_THREADS 1024
#endif

typedef RF_TYPE::Bits Bits;

// As launch.py packs them.
struct Row {
    u64 top_p;  // of 2^64; 0 is off
    u64 least;  // weight, at least 1
    u64 seed, position;
    float scale;  // steps of a distance of 1; 0 is greedy
    i32 top_k;    // 0 is off
    i32 first_entry, entries;
    float repetition, presence, frequency;
    i32 logprobs;  // -1 is off

    RF_INLINE bool cuts_count(i32 vocab) const { return top_k > 0 && top_k < vocab; }
    RF_INLINE bool cuts_mass() const { return top_p != 0; }
};
struct Entry {
    i32 id;
    i32 count;   // in the output; -1: neither in the output nor in the prompt
    float bias;  // -infinity: never drawn
    float raw;   // space for the original logit
};
enum Error { NONE, NOT_FINITE, NOTHING_LEFT };

static const int THREADS = RF_THREADS;
static const int WAVES = THREADS / RF_WAVE;
static const int MOST_TOP = 20;
static const int LOAD = 4;  // logits that a lane loads at once
// A place is a token's position in the order of falling logits, equals by rising id, as one integer: higher is earlier.
static const int ID_BITS = 18;
static const u32 LAST_ID = (1u << ID_BITS) - 1;
static const u64 PLACES = 1ull << (32 + ID_BITS);
// Steps measure the distance below the likeliest: 2^23 of them halve the weight, and FAR of them make it 0.
static const u32 FAR = 44u << 23;
static const float STEPS = 12102203.0f;  // in a distance of 1 at temperature 1: 2^23 / ln 2, rounded
static const int COARSE_SHIFT = 18;
static const int FAR_BIN = FAR >> COARSE_SHIFT;
static const int COARSE = FAR_BIN + 1;
static const int FINE = 1024;

struct Sum {
    u64 mass;
    u32 count;

    RF_INLINE Sum operator+(const Sum &other) const { return {mass + other.mass, count + other.count}; }
    RF_INLINE Sum operator-(const Sum &other) const { return {mass - other.mass, count - other.count}; }
    RF_INLINE void operator+=(const Sum &other) { *this = *this + other; }
    RF_INLINE u64 of(bool by_mass) const { return by_mass ? mass : count; }
};
// An item, the sum of those before it, and its own.
struct Found {
    Sum before, in;
    int at;
};
// A token is kept if its coarse bin is at most `bin` and its place at least `low`.
struct Cut {
    u64 low;
    int bin;
};
// The search for a cut: one thread advances it, between barriers.
struct Search {
    u64 target;  // number of tokens, or mass, that the cut must keep
    bool by_mass, over;
    int bin;    // the coarse bin that contains the cut
    Sum above;  // the sum of the bins before it
    // Candidates are the bin's tokens with a place from `low` to `high`. The sums before them and of them.
    u64 low, high;
    Sum before, in;
    // The fine bins' window: from here down, 2^shift places per bin. The outermost bins hold everything beyond it.
    u64 last;
    int shift;
};

// Counts and masses, summed in any order. Uses only 32-bit atomics, which every GPU has in shared memory.
template <int Size> struct Bins {
    u32 count[Size], low[Size], high[Size];

    RF_INLINE void clear() {
        for (int i = threadIdx.x; i < Size; i += THREADS) count[i] = low[i] = high[i] = 0;
    }
    RF_INLINE void add(int bin, u64 mass) {
        atomicAdd(&count[bin], 1u);
        u32 added = (u32)mass, was = atomicAdd(&low[bin], added);
        u32 above = (u32)(mass >> 32) + (was + added < was ? 1 : 0);
        if (above) atomicAdd(&high[bin], above);
    }
    RF_INLINE Sum sum(int bin) const { return {(u64)high[bin] << 32 | low[bin], count[bin]}; }
    RF_INLINE void set(int bin, Sum sum) {
        count[bin] = sum.count;
        low[bin] = (u32)sum.mass;
        high[bin] = (u32)(sum.mass >> 32);
    }
};

struct Shared {
    Bins<COARSE> coarse;
    Bins<FINE> fine;
    Sum waves[WAVES];
    u64 best[WAVES];
    u64 top[MOST_TOP];
    Found found;
    Search search;
    u32 banned, barred, damaged, taken;
};

// --- numbers --------------------------------------------------------------------------------------------------------

// The high 64 bits of a product.
RF_INLINE u64 multiply_high(u64 a, u64 b) {
    u64 a0 = (u32)a, a1 = a >> 32, b0 = (u32)b, b1 = b >> 32;
    u64 low = a0 * b0, middle = a1 * b0 + (low >> 32), other = a0 * b1 + (u32)middle;
    return a1 * b1 + (middle >> 32) + (other >> 32);
}

// Philox4x32-10; two of its four words.
RF_INLINE u64 random_bits(u64 seed, u64 position) {
    u32 c0 = (u32)position, c1 = (u32)(position >> 32), c2 = 0, c3 = 0, k0 = (u32)seed, k1 = (u32)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        u64 p0 = 0xD2511F53ull * c0, p1 = 0xCD9E8D57ull * c2;
        c0 = (u32)(p1 >> 32) ^ c1 ^ k0;
        c1 = (u32)p1;
        c2 = (u32)(p0 >> 32) ^ c3 ^ k1;
        c3 = (u32)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return (u64)c1 << 32 | c0;
}

// -0, and what a GPU may flush to -0, count as 0.
RF_INLINE float plain(float value) { return bits_of(value) & 0x7f800000u ? value : 0.0f; }
RF_INLINE u32 ordered(float value) {
    u32 bits = bits_of(value);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
RF_INLINE float value_at(u64 place) {
    u32 bits = (u32)(place >> ID_BITS);
    return float_of(bits >> 31 ? bits & 0x7fffffffu : ~bits);
}
RF_INLINE u64 place_of(float value, int id) { return (u64)ordered(value) << ID_BITS | (LAST_ID - (u32)id); }
RF_INLINE int id_at(u64 place) { return (int)(LAST_ID - ((u32)place & LAST_ID)); }

// 2^44 times 2^-(steps / 2^23): the polynomial of reference.py, each product truncated to 30 fractional bits.
RF_INLINE u32 multiply_high(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }
RF_INLINE u64 weight(u32 steps) {
    u32 x = steps << 9;
    u32 p = 116582u;
    p = 1367404u - multiply_high(p, x);
    p = 10284168u - multiply_high(p, x);
    p = 59582090u - multiply_high(p, x);
    p = 257938816u - multiply_high(p, x);
    p = 744260984u - multiply_high(p, x);
    p = (1u << 30) - multiply_high(p, x);
    return (u64)p << 14 >> (steps >> 23);
}

// A value that is uniform in a wave; AMD's compiler keeps it in a scalar register only if told so.
RF_INLINE u32 uniform(u32 value) {
#if defined(RF_HIP)
    return (u32)__builtin_amdgcn_readfirstlane((int)value);
#else
    return value;
#endif
}
RF_INLINE int uniform(int value) { return (int)uniform((u32)value); }
RF_INLINE u64 uniform(u64 value) { return (u64)uniform((u32)(value >> 32)) << 32 | uniform((u32)value); }

// --- a row ----------------------------------------------------------------------------------------------------------

struct View {
    const Bits *row;
    int vocab;
    float most, scale;

    // A difference, then a product: they cannot be contracted.
    RF_INLINE u32 steps(float value) const {
        float distance = (most - value) * scale;
        return distance < (float)FAR ? (u32)distance : FAR;
    }
};

RF_INLINE int lane() { return threadIdx.x % RF_WAVE; }
RF_INLINE int wave() { return uniform((int)threadIdx.x / RF_WAVE); }

// The ids that a wave processes: a span of this many; the last span is shorter.
RF_INLINE int span_of(int vocab) {
    int step = RF_WAVE * LOAD, steps = (vocab + step - 1) / step;
    return (steps + WAVES - 1) / WAVES * step;
}

typedef Pack<RF_TYPE, LOAD> Loaded;
RF_INLINE Loaded load(const Bits *row, int at, int end, bool aligned) {
    Loaded pack;
    if (aligned && at + LOAD <= end) {
        pack = *(const Loaded *)(row + at);
    } else {
#pragma unroll
        for (int i = 0; i < LOAD; i++) pack.bits[i] = at + i < end ? row[at + i] : RF_TYPE::store(0.0f);
    }
    return pack;
}

// Calls take(id, logit) for every token.
template <class Take> RF_INLINE void each(const Bits *row, int vocab, Take take) {
    const bool aligned = (u64)row % sizeof(Loaded) == 0;
    const int step = RF_WAVE * LOAD, span = span_of(vocab);
    const int begin = wave() * span + lane() * LOAD, end = min((wave() + 1) * span, vocab);
    Loaded next = load(row, begin, end, aligned);
    for (int at = begin; at < end; at += step) {
        Loaded now = next;
        next = load(row, at + step, end, aligned);
#pragma unroll
        for (int i = 0; i < LOAD; i++)
            if (at + i < end) take(at + i, plain(RF_TYPE::load(now.bits[i])));
    }
}

// The likeliest token's place. Counts in `shared` the logits that are -infinity and those that are NaN or +infinity.
RF_INLINE u64 likeliest(const Bits *row, int vocab, Shared *shared) {
    u64 best = 0;
    u32 barred = 0, damaged = 0;
    each(row, vocab, [&](int id, float value) {
        u32 bits = bits_of(value);
        const bool negative = bits == 0xff800000u;
        barred += negative;
        damaged += !negative && (bits & 0x7f800000u) == 0x7f800000u;
        u64 place = place_of(value, id);
        best = place > best ? place : best;
    });
    if (barred) atomicAdd(&shared->barred, barred);
    if (damaged) atomicAdd(&shared->damaged, damaged);
#pragma unroll
    for (int mask = RF_WAVE / 2; mask > 0; mask >>= 1) {
        u64 other = shuffle_xor(best, mask);
        best = other > best ? other : best;
    }
    if (lane() == 0) shared->best[wave()] = best;
    __syncthreads();
    for (int i = 0; i < WAVES; i++) best = shared->best[i] > best ? shared->best[i] : best;
    return uniform(best);
}

// The sum over the block, returned to all threads; leaves the waves' sums in `shared`.
RF_INLINE u64 block_total(u64 value, Shared *shared) {
#pragma unroll
    for (int mask = RF_WAVE / 2; mask > 0; mask >>= 1) value += shuffle_xor(value, mask);
    __syncthreads();
    if (lane() == 0) shared->waves[wave()].mass = value;
    __syncthreads();
    value = 0;
    for (int i = 0; i < WAVES; i++) value += shared->waves[i].mass;
    return uniform(value);
}

// Finds the first of `size` items at which the running sum, of masses or of counts, reaches `target`, which it must.
// Leaves it in `shared`.
template <class Item> RF_INLINE void find(int size, u64 target, bool by_mass, Shared *shared, Item item) {
    const int each_thread = (size + THREADS - 1) / THREADS;
    const int begin = min((int)threadIdx.x * each_thread, size), end = min(begin + each_thread, size);
    __syncthreads();
    Sum mine = {0, 0};
    for (int i = begin; i < end; i++) mine += item(i);
    Sum before = mine;
    for (int by = 1; by < RF_WAVE; by <<= 1) {
        Sum other = {shuffle_up(before.mass, by), shuffle_up(before.count, by)};
        if (lane() >= by) before += other;
    }
    if (lane() == RF_WAVE - 1) shared->waves[wave()] = before;
    __syncthreads();
    for (int i = 0; i < wave(); i++) before += shared->waves[i];
    before = before - mine;
    if (before.of(by_mass) < target && target <= (before + mine).of(by_mass)) {
        int at = begin;
        Sum in = item(at);
        while ((before + in).of(by_mass) < target) {
            before += in;
            in = item(++at);
        }
        shared->found = {before, in, at};
    }
    __syncthreads();
}

// --- how far down the order the kept tokens go ----------------------------------------------------------------------

// Lays the fine bins over the candidates, unless the search is over.
RF_INLINE void aim(const View &view, Search &search, bool first) {
    const bool all = !search.by_mass && search.target == search.before.count + search.in.count;
    search.over = all || search.in.count == 1;
    u64 low = search.low, high = search.high;
    if (first && search.bin < FAR_BIN) {
        // An estimate of the places of the bin's tokens; a bad one costs only a round.
        float width = (float)(1 << COARSE_SHIFT) / view.scale, top = view.most - (float)search.bin * width;
        u64 from = place_of(plain(top - 1.0625f * width), LAST_ID), to = place_of(plain(top + 0.0625f * width), 0);
        if (low <= from && from < to && to <= high) {
            low = from;
            high = to;
        }
    }
    search.last = high;
    for (search.shift = 0; (high - low) >> search.shift >= FINE;) search.shift++;
}
RF_INLINE void step_into(Search &search, const Found &found) {
    search.before += found.before;
    search.in = found.in;
    if (found.at < FINE - 1) {
        i64 low = (i64)search.last - ((i64)(found.at + 1) << search.shift) + 1;
        if (low > (i64)search.low) search.low = (u64)low;
    }
    if (found.at > 0) search.high = search.last - ((u64)found.at << search.shift);
}

// Finds the cut in the coarse bin `shared->found`, among its tokens from `low` up, that keeps `target` of all tokens, or
// of all mass. Each round narrows the places to one fine bin.
RF_INLINE Cut narrow(const View &view, u64 target, bool by_mass, u64 low, Shared *shared) {
    Search &search = shared->search;
    if (threadIdx.x == 0) {
        const Found &found = shared->found;
        search.target = target;
        search.by_mass = by_mass;
        search.bin = found.at;
        search.low = low;
        search.high = PLACES - 1;
        search.above = search.before = found.before;
        search.in = found.in;
        aim(view, search, true);
    }
    for (;;) {
        shared->fine.clear();
        __syncthreads();
        if (search.over) break;
        const u64 from = uniform(search.low), to = uniform(search.high), last = search.last;
        const int bin = uniform(search.bin), shift = uniform(search.shift);
        each(view.row, view.vocab, [&](int id, float value) {
            u32 steps = view.steps(value);
            u64 place = place_of(value, id);
            if ((int)(steps >> COARSE_SHIFT) != bin || place < from || place > to) return;
            u64 fine = place > last ? 0 : (last - place) >> shift;
            shared->fine.add(fine < FINE ? (int)fine : FINE - 1, steps < FAR ? weight(steps) : 0);
        });
        const u64 rest = search.target - search.before.of(search.by_mass);
        find(FINE, rest, search.by_mass, shared, [&](int i) { return shared->fine.sum(i); });
        if (threadIdx.x == 0) {
            step_into(search, shared->found);
            aim(view, search, false);
        }
        // Without it, this block is the loop's back edge: LLVM turns it into an inner loop that only thread 0 leaves.
        __syncthreads();
    }
    return {uniform(search.low), uniform(search.bin)};
}

// --- penalties, biases, bans ----------------------------------------------------------------------------------------

template <class Type> struct Largest;
template <> struct Largest<F32> { static constexpr double value = 3.4028234663852886e38; };
template <> struct Largest<F16> { static constexpr double value = 65504.0; };
template <> struct Largest<BF16> { static constexpr double value = 3.3895313892515355e38; };

RF_INLINE double limited(double value, double most) {
    value = value > most ? most : value < -most ? -most : value;
    return (value < 0 ? -value : value) < 1.1754943508222875e-38 ? 0.0 : value;
}
// In double precision, products of two floats are exact, so contracting one with a sum changes nothing.
RF_INLINE float adjusted(float raw, const Row &row, const Entry &entry) {
    double value = (float)limited((double)raw + (double)entry.bias, Largest<F32>::value);
    if (entry.count >= 0) value = value > 0 ? value / (double)row.repetition : value * (double)row.repetition;
    if (entry.count > 0) value = value - (double)row.frequency * (double)entry.count - (double)row.presence;
    return (float)limited(value, Largest<RF_TYPE>::value);
}
// Replaces the logits of a row's entries by the adjusted ones; the entries keep the original ones.
RF_INLINE void adjust(Bits *logits, const Row &row, Entry *entries, Shared *shared) {
    for (int i = threadIdx.x; i < row.entries; i += THREADS) {
        Entry &entry = entries[row.first_entry + i];
        float raw = RF_TYPE::load(logits[entry.id]), value;
        entry.raw = raw;
        if ((bits_of(raw) & 0x7f800000u) == 0x7f800000u) {
            value = float_of(0x7fc00000u);  // invalid, whatever the adjustment
        } else if (entry.bias == -RF_INFINITY) {
            value = -RF_INFINITY;
            atomicAdd(&shared->banned, 1u);
        } else {
            value = adjusted(raw, row, entry);
        }
        logits[entry.id] = RF_TYPE::store(value);
    }
}
RF_INLINE void restore(Bits *logits, const Row &row, const Entry *entries) {
    for (int i = threadIdx.x; i < row.entries; i += THREADS) {
        const Entry &entry = entries[row.first_entry + i];
        logits[entry.id] = RF_TYPE::store(entry.raw);
    }
}

// --- kernels --------------------------------------------------------------------------------------------------------

// The tokens of a row that top-k and top-p keep; tokens without weight may or may not be among them.
RF_INLINE Cut filtered(const View &view, const Row &row, Shared *shared) {
    Bins<COARSE> &coarse = shared->coarse;
    coarse.clear();
    __syncthreads();
    each(view.row, view.vocab, [&](int, float value) {
        u32 steps = view.steps(value);
        if (steps < FAR) coarse.add((int)(steps >> COARSE_SHIFT), weight(steps));
    });
    // Tokens without weight are counted only as far as a search needs them to end.
    if (threadIdx.x == 0) coarse.count[FAR_BIN] = (u32)view.vocab;

    Cut cut = {0, FAR_BIN};
    // First top-k, by count, then top-p, by mass, of what top-k left.
#pragma unroll 1
    for (int by_mass = 0; by_mass < 2; by_mass++) {
        u64 target = (u64)row.top_k;
        if (by_mass ? !row.cuts_mass() : !row.cuts_count(view.vocab)) continue;
        if (by_mass) {
            u64 mass = 0;
            __syncthreads();
            for (int i = threadIdx.x; i < COARSE && i <= cut.bin; i += THREADS) mass += coarse.sum(i).mass;
            target = multiply_high(block_total(mass, shared), row.top_p);
            if (target == 0) target = 1;
        }
        find(COARSE, target, by_mass, shared, [&](int i) { return coarse.sum(i); });
        const int bin = uniform(shared->found.at);
        if (bin == FAR_BIN) continue;
        cut = narrow(view, target, by_mass, bin == cut.bin ? cut.low : 0, shared);
        // The part of the cut bin that is kept.
        const Search &search = shared->search;
        if (threadIdx.x == 0) coarse.set(bin, search.before + search.in - search.above);
    }
    return cut;
}

// Draws a token for each of gridDim.x rows: out[row]; out[rows + row] is the error if none could be drawn, and the token
// is 0. Restores the logits before it returns. `stride`: logits from one row to the next.
RF_KERNEL __launch_bounds__(THREADS)
sample_tokens(Bits *logits, i64 stride, i32 vocab, const Row *__restrict__ rows, Entry *entries, i32 *out) {
    __shared__ Shared shared_;
    Shared *shared = &shared_;
    const Row &row = rows[blockIdx.x];
    Bits *mine = logits + (i64)blockIdx.x * stride;
    if (threadIdx.x == 0) shared->banned = shared->barred = shared->damaged = 0;
    __syncthreads();
    adjust(mine, row, entries, shared);
    __syncthreads();

    const u64 best = likeliest(mine, vocab, shared);
    // Only bans make a logit -infinity.
    Error error = shared->damaged || shared->barred != shared->banned ? NOT_FINITE : NONE;
    if (error == NONE && (int)shared->banned == vocab) error = NOTHING_LEFT;
    int token = error == NONE ? id_at(best) : 0;

    if (error == NONE && row.scale > 0.0f) {
        const View view = {mine, vocab, value_at(best), row.scale};
        Cut cut = {0, FAR_BIN};
        if (row.cuts_count(vocab) || row.cuts_mass()) cut = filtered(view, row, shared);
        auto kept = [&](int id, float value) -> u64 {
            u32 steps = view.steps(value);
            if (steps >= FAR || (int)(steps >> COARSE_SHIFT) > cut.bin || place_of(value, id) < cut.low) return 0;
            u64 found = weight(steps);
            return found >= row.least ? found : 0;
        };
        u64 mass = 0;
        each(mine, vocab, [&](int id, float value) { mass += kept(id, value); });
        const u64 total = block_total(mass, shared);
        // One of the units of mass, all equally likely; then the token that has it.
        u64 target = multiply_high(random_bits(row.seed, row.position), total) + 1;
        int at = 0;
        while (shared->waves[at].mass < target) target -= shared->waves[at++].mass;
        const int begin = at * span_of(vocab), end = min(begin + span_of(vocab), vocab);
        find(end - begin, target, true, shared, [&](int i) {
            return Sum{kept(begin + i, plain(RF_TYPE::load(mine[begin + i]))), 0};
        });
        token = begin + shared->found.at;
    }
    if (threadIdx.x == 0) {
        out[blockIdx.x] = token;
        out[gridDim.x + blockIdx.x] = error;
    }
    restore(mine, row, entries);  // after the barrier that follows the last read of a logit, on every path
}

// For each row that requests them: the log probability of the token in out[row], and its rank: out[2 rows + row], a
// float, and out[3 rows + row]. Then the likeliest tokens, up to `most` as requested: ids [rows, most] and log
// probabilities [rows, most]. NaN, 0 and -1 where out[rows + row] has an error or nothing is requested.
RF_KERNEL __launch_bounds__(THREADS)
token_logprobs(const Bits *logits, i64 stride, i32 vocab, const Row *__restrict__ rows, i32 *out, i32 most) {
    __shared__ Shared shared_;
    Shared *shared = &shared_;
    const int n = gridDim.x, mine = blockIdx.x;
    const Row &row = rows[mine];
    const Bits *of = logits + (i64)mine * stride;
    float *logprobs = (float *)out + 2 * n, *top_logprobs = (float *)out + 4 * n + (i64)n * most + (i64)mine * most;
    i32 *ranks = out + 3 * n, *top_ids = out + 4 * n + (i64)mine * most;
    const float none = float_of(0x7fc00000u);
    for (int i = threadIdx.x; i < most; i += THREADS) {
        top_ids[i] = -1;
        top_logprobs[i] = none;
    }
    if (threadIdx.x == 0) {
        logprobs[mine] = none;
        ranks[mine] = 0;
        shared->barred = shared->damaged = shared->taken = 0;
    }
    if (row.logprobs < 0 || out[n + mine] != NONE) return;

    const int top = min(min(row.logprobs, most), vocab);
    shared->coarse.clear();
    __syncthreads();
    const View view = {of, vocab, value_at(likeliest(of, vocab, shared)), STEPS};
    const int token = out[mine];
    const float chosen = plain(RF_TYPE::load(of[token]));
    const u64 place = place_of(chosen, token);
    Sum all = {0, 0};  // and the number of tokens ranked before it
    each(of, vocab, [&](int id, float value) {
        u32 steps = view.steps(value);
        if (place_of(value, id) > place) all.count++;
        if (steps >= FAR) return;
        all.mass += weight(steps);
        if (top) atomicAdd(&shared->coarse.count[steps >> COARSE_SHIFT], 1u);
    });
    all.mass = block_total(all.mass, shared);
    all.count = (u32)block_total(all.count, shared);
    const float whole = logf((float)all.mass * 5.684341886080802e-14f);  // 2^-44
    if (threadIdx.x == 0) {
        logprobs[mine] = chosen - view.most - whole;
        ranks[mine] = (i32)all.count + 1;
        shared->coarse.count[FAR_BIN] = (u32)vocab;
    }
    if (!top) return;
    find(COARSE, (u64)top, false, shared, [&](int i) { return Sum{0, shared->coarse.count[i]}; });
    const Cut cut = narrow(view, (u64)top, false, 0, shared);
    each(of, vocab, [&](int id, float value) {
        u64 one = place_of(value, id);
        if ((int)(view.steps(value) >> COARSE_SHIFT) <= cut.bin && one >= cut.low)
            shared->top[atomicAdd(&shared->taken, 1u)] = one;
    });
    __syncthreads();
    for (int i = threadIdx.x; i < top; i += THREADS) {
        int before = 0;
        for (int j = 0; j < top; j++) before += shared->top[j] > shared->top[i];
        top_ids[before] = id_at(shared->top[i]);
        top_logprobs[before] = value_at(shared->top[i]) - view.most - whole;
    }
}
