// Products of a few rows: bound by the bytes of the weight, each read once. The operations before and after a product in
// a layer are fused, because a small model's launches take longer than its loads: residual and norm before it, the
// gate's activation after it. ops_numpy.linear, norm_linear and norm_gated.
//
// A wave computes two outputs at a time, for all rows; `split` waves of a block share their inputs. A lane multiplies
// packs of 16 bytes of each output's weights with the same packs of the rows. The assignment of inputs to lanes, and the
// order of the sums, depend on the shape of the weight and on the GPU, not on the number of rows.
//
// Block THREADS; any grid, best as many blocks as the GPU holds: blocks loop. `split` is a power of two, at most the
// waves of a block. The bytes of `inputs` numbers are a multiple of 16, and every array is aligned to 16 bytes.
//
// defines: RF_TYPE=F32|F16|BF16 RF_ROWS=1|2|4
// variants: RF_TYPE=BF16 RF_ROWS=1|4
// variants: RF_TYPE=F32|F16 RF_ROWS=2
#include "common.h"

#if !defined(RF_TYPE) || !defined(RF_ROWS)
#error "gemv: RF_TYPE and RF_ROWS must be defined"
#endif

typedef RF_TYPE::Bits Bits;
static const int THREADS = 256;
static const int WAVES = THREADS / RF_WAVE;
static const int COUNT = 16 / (int)sizeof(Bits);
static const int PAIR = 2;
static const int SUMS = RF_ROWS * PAIR;
// Packs of each output that a lane has in flight.
static const int AHEAD = 4;
// Blocks that must fit on a multiprocessor, which limits their registers: see gemv.py.
#if defined(RF_CUDA)
#define BOUNDS __launch_bounds__(THREADS, RF_ROWS == 1 ? 4 : 3)
#else
#define BOUNDS __launch_bounds__(THREADS)
#endif

// The weights of a wave's two outputs. A lane has pack `first` and every `step`-th after it.
struct Place {
    const u8 *rows[PAIR];
    i32 first, step, packs;
};

// A lane's next operands, as stored.
struct Fetched {
    uint4 packs[PAIR][AHEAD];

    RF_INLINE void fetch(const Place &place, i32 from) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const i32 at = from + i * place.step;
            if (at >= place.packs) return;
#pragma unroll
            for (int p = 0; p < PAIR; p++) packs[p][i] = load_once((const uint4 *)(place.rows[p] + (i64)at * 16));
        }
    }
};

RF_INLINE float number_of(u32 word, int half) {
    if constexpr (sizeof(Bits) == 4) return float_of(word);
    else return RF_TYPE::load((u16)(word >> (16 * half)));
}

RF_INLINE void numbers_of(const uint4 &pack, float *values) {
    const u32 words[4] = {pack.x, pack.y, pack.z, pack.w};
#pragma unroll
    for (int i = 0; i < COUNT; i++) values[i] = number_of(words[i * (int)sizeof(Bits) / 4], i % 2);
}

// A lane's part of the products. Even and odd numbers have separate sums, which halves the chain of dependent additions.
struct Totals {
    float of[PAIR][RF_ROWS][2];

    RF_INLINE void clear() {
#pragma unroll
        for (int p = 0; p < PAIR; p++)
#pragma unroll
            for (int row = 0; row < RF_ROWS; row++) of[p][row][0] = of[p][row][1] = 0.0f;
    }
    // Multiplies what was fetched from pack `from` on by x, [rows, inputs].
    RF_INLINE void add(const Fetched &fetched, const Place &place, i32 from, const Bits *x, i32 rows, i32 inputs) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const i32 at = from + i * place.step;
            if (at >= place.packs) return;
            float weights[PAIR][COUNT];
#pragma unroll
            for (int p = 0; p < PAIR; p++) numbers_of(fetched.packs[p][i], weights[p]);
#pragma unroll
            for (int row = 0; row < RF_ROWS; row++) {
                if (RF_ROWS > 2 && row >= rows) break;
                float values[COUNT];
                load_numbers<RF_TYPE, COUNT>(x + (i64)row * inputs + at * COUNT, values);
#pragma unroll
                for (int p = 0; p < PAIR; p++)
#pragma unroll
                    for (int j = 0; j < COUNT; j++) of[p][row][j % 2] += weights[p][j] * values[j];
            }
        }
    }
    // Stores the wave's sums to [RF_ROWS, PAIR].
    RF_INLINE void store(float *parts) const {
#pragma unroll
        for (int p = 0; p < PAIR; p++)
#pragma unroll
            for (int row = 0; row < RF_ROWS; row++) {
                const float sum = wave_sum(of[p][row][0] + of[p][row][1]);
                if (threadIdx.x % RF_WAVE == 0) parts[row * PAIR + p] = sum;
            }
    }
};

// Computes `normed` [rows, inputs], in shared memory, from x plus its residual; block 0 also writes that sum. Rounds where
// rms_norm of norm.hip rounds. A block's waves share its rows. Ends with a barrier.
RF_INLINE void normalise(
    const Bits *x, const Bits *residual, const Bits *weight, Bits *sum, Bits *normed, i32 rows, i32 inputs, float eps
) {
    __shared__ float scratch[WAVES];
    static_assert(WAVES >= RF_ROWS, "a row has a wave at least");
    const int each = WAVES / RF_ROWS, wave = (int)threadIdx.x / RF_WAVE;
    const i32 packs = inputs / COUNT, row = wave / each, first = (int)threadIdx.x % (each * RF_WAVE);
    const i64 begin = (i64)row * inputs;
    float squares = 0.0f;
    if (row < rows) {
        for (i32 pack = first; pack < packs; pack += each * RF_WAVE) {
            const i64 at = begin + pack * COUNT;
            float values[COUNT];
            load_sum<RF_TYPE, COUNT>(x, residual, at, values);
            if (residual && blockIdx.x == 0) store_numbers<RF_TYPE, COUNT>(sum + at, values);
            store_numbers<RF_TYPE, COUNT>(normed + at, values);
            squares += sum_of_squares<COUNT>(values);
        }
    }
    squares = wave_sum(squares);
    if (threadIdx.x % RF_WAVE == 0) scratch[wave] = squares;
    __syncthreads();
    if (row < rows) {
        float total = 0.0f;
        for (int i = 0; i < each; i++) total += scratch[row * each + i];
        const float scale = rsqrtf(total / (float)inputs + eps);
        for (i32 pack = first; pack < packs; pack += each * RF_WAVE) {
            float factors[COUNT], values[COUNT];
            load_numbers<RF_TYPE, COUNT>(weight + pack * COUNT, factors);
            load_numbers<RF_TYPE, COUNT>(normed + begin + pack * COUNT, values);
#pragma unroll
            for (int i = 0; i < COUNT; i++) values[i] = values[i] * scale * factors[i];
            store_numbers<RF_TYPE, COUNT>(normed + begin + pack * COUNT, values);
        }
    }
    __syncthreads();
}

// The waves' partial sums: `split` times [RF_ROWS, PAIR].
struct Parts {
    const float *of;
    int split;

    RF_INLINE float sum(int row, int p) const {
        float sum = 0.0f;
        for (int part = 0; part < split; part++) sum += of[part * SUMS + row * PAIR + p];
        return sum;
    }
};

// Stores the sums of a pair of outputs: two adjacent rows of the weight.
template <class Out> struct Plain {
    Out *out;
    i32 rows, outputs;

    RF_INLINE i32 pairs() const { return (outputs + PAIR - 1) / PAIR; }
    // Without a second output, the first is computed twice and written once.
    RF_INLINE i32 weight_row(i32 pair, int p) const { return min(pair * PAIR + p, outputs - 1); }
    RF_INLINE void write(const Parts &parts, i32 pair, int lane) const {
        const i32 row = lane / PAIR, output = pair * PAIR + lane % PAIR;
        if (row >= rows || output >= outputs) return;
        const float sum = parts.sum(row, lane % PAIR);
        if constexpr (sizeof(Out) == 4) out[(i64)row * outputs + output] = sum;
        else out[(i64)row * outputs + output] = RF_TYPE::store(sum);
    }
};
// Stores the activation of a gate and the output that it gates.
struct Gated {
    Bits *out;
    i32 rows, outputs;

    RF_INLINE i32 pairs() const { return outputs; }
    RF_INLINE i32 weight_row(i32 pair, int p) const { return pair + p * outputs; }
    RF_INLINE void write(const Parts &parts, i32 pair, int lane) const {
        if (lane >= rows) return;
        // Rounded first, as if the product had been stored.
        const float gate = RF_TYPE::load(RF_TYPE::store(parts.sum(lane, 0)));
        const float up = RF_TYPE::load(RF_TYPE::store(parts.sum(lane, 1)));
        out[(i64)lane * outputs + pair] = RF_TYPE::store(silu(gate) * up);
    }
};

// Computes all outputs of the block. `prepare` makes the rows, after the first loads of weights were issued.
template <class Prepare, class Result>
RF_INLINE void products(
    const Prepare &prepare, const Bits *weight, const Result &result, i32 rows, i32 inputs, i32 split
) {
    __shared__ float parts[WAVES * SUMS];
    const int wave = (int)threadIdx.x / RF_WAVE, lane = (int)threadIdx.x % RF_WAVE;
    const i32 pairs = result.pairs(), together = WAVES / split;
    Place place;
    place.first = wave % split * RF_WAVE + lane;
    place.step = split * RF_WAVE;
    place.packs = inputs / COUNT;
    const Bits *x = RF_POINTERS_FIRST ? prepare.made() : nullptr;
    bool prepared = false;
    for (i32 begin = blockIdx.x * together; begin < pairs; begin += gridDim.x * together) {
        const i32 pair = begin + wave / split;
#pragma unroll
        for (int p = 0; p < PAIR; p++)
            place.rows[p] = (const u8 *)(weight + (i64)result.weight_row(min(pair, pairs - 1), p) * inputs);
        Fetched fetched;
        fetched.fetch(place, place.first);
        if (RF_POINTERS_FIRST ? !prepared : !x) {
            prepare.make();
            prepared = true;
            x = prepare.made();
        }
        Totals totals;
        totals.clear();
        for (i32 from = place.first; from < place.packs; from += AHEAD * place.step) {
            if (from != place.first) fetched.fetch(place, from);
            totals.add(fetched, place, from, x, rows, inputs);
        }
        totals.store(parts + wave * SUMS);
        // With one part, a wave reads only its own sums.
        if (split > 1) __syncthreads();
        else sync_wave();
        if (wave % split == 0 && pair < pairs && lane < SUMS) result.write(Parts{parts + wave * SUMS, split}, pair, lane);
        if (split > 1) __syncthreads();
        else sync_wave();
    }
}

struct Given {
    const Bits *x;
    RF_INLINE const Bits *made() const { return x; }
    RF_INLINE void make() const {}
};
struct Normed {
    const Bits *x, *residual, *weight;
    Bits *sum, *normed;
    i32 rows, inputs;
    float eps;
    RF_INLINE const Bits *made() const { return normed; }
    RF_INLINE void make() const { normalise(x, residual, weight, sum, normed, rows, inputs, eps); }
};

// x: [rows, inputs], rows at most RF_ROWS. weight: [outputs, inputs]. out: [rows, outputs].
RF_KERNEL BOUNDS
gemv(const Bits *x, const Bits *weight, Bits *out, i32 rows, i32 inputs, i32 outputs, i32 split) {
    products(Given{x}, weight, Plain<Bits>{out, rows, outputs}, rows, inputs, split);
}

// The same, with a float32 result.
RF_KERNEL BOUNDS
gemv_wide(const Bits *x, const Bits *weight, float *out, i32 rows, i32 inputs, i32 outputs, i32 split) {
    products(Given{x}, weight, Plain<float>{out, rows, outputs}, rows, inputs, split);
}

// The same for the norm of x plus residual, both [rows, inputs]; their sum is written to `sum`, a separate array. If
// residual is null, no sum is written. norm: [inputs]. Needs dynamic shared memory for `rows` rows of x.
RF_KERNEL BOUNDS norm_gemv(
    const Bits *x, const Bits *residual, const Bits *norm, float eps, const Bits *weight, Bits *out, Bits *sum, i32 rows,
    i32 inputs, i32 outputs, i32 split
) {
    RF_DYNAMIC_SHARED(Bits, normed);
    const Normed prepare{x, residual, norm, sum, normed, rows, inputs, eps};
    products(prepare, weight, Plain<Bits>{out, rows, outputs}, rows, inputs, split);
}

// The same, followed by the activation: weight [2 outputs, inputs], the gate's rows first. out: [rows, outputs].
RF_KERNEL BOUNDS norm_gated_gemv(
    const Bits *x, const Bits *residual, const Bits *norm, float eps, const Bits *weight, Bits *out, Bits *sum, i32 rows,
    i32 inputs, i32 outputs, i32 split
) {
    RF_DYNAMIC_SHARED(Bits, normed);
    const Normed prepare{x, residual, norm, sum, normed, rows, inputs, eps};
    products(prepare, weight, Gated{out, rows, outputs}, rows, inputs, split);
}
