// Attention of the few newest tokens of a row over its paged keys: bound by the bytes of K and V, each read once.
//
// A block processes an item: keys begin to end of one row, for one kv head and all RF_ROWS queries of a tile. Its waves
// take turns at the item's keys, one step each, every wave with its own softmax (Milakov and Gimelshein, "Online
// normalizer calculation for softmax"), and merge their results at the end. If a row's keys are split into several
// items, their partial results are left to attention_combine.hip.
//
// The queries of a row are numbered q = token * RF_GROUP + head of the group. Only slots that hold keys of the row are
// read: past the last key, lanes read the last key again, with weight 0.
//
// defines: RF_TYPE=F32|F16|BF16 RF_KV=F32|F16|BF16|INT8 RF_HEAD_DIM=64|80|96|128|256 RF_PAGE_SIZE=1.. RF_GROUP=1..
// defines: RF_ROWS=1|2|4|8|16 RF_BLOCKS=1.. RF_MATRIX=0|1|2
// variants: RF_TYPE=BF16 RF_KV=BF16|INT8 RF_HEAD_DIM=128 RF_PAGE_SIZE=16 RF_GROUP=4 RF_ROWS=4
// variants: RF_TYPE=F16 RF_KV=F16 RF_HEAD_DIM=80|256 RF_PAGE_SIZE=16 RF_GROUP=7 RF_ROWS=8
// variants: RF_TYPE=F32 RF_KV=F32 RF_HEAD_DIM=128 RF_PAGE_SIZE=24 RF_GROUP=1 RF_ROWS=1|8
#include "common.h"

#if !defined(RF_TYPE) || !defined(RF_KV) || !defined(RF_HEAD_DIM) || !defined(RF_PAGE_SIZE) || !defined(RF_GROUP)
#error "attention_decode: RF_TYPE, RF_KV, RF_HEAD_DIM, RF_PAGE_SIZE and RF_GROUP must be defined"
#endif
// Queries of a tile: 8 or 16 with a matrix unit, else at most 8.
#ifndef RF_ROWS
#define RF_ROWS 8
#endif
// Blocks that must fit on a multiprocessor, which limits their registers.
#ifndef RF_BLOCKS
#define RF_BLOCKS 2
#endif
// For RF_TYPE of 16 bits and RF_KV the same or INT8, 1: by multiply_16x8x16, 2: by multiply_16x16x16. 0: one number at
// a time.
#ifndef RF_MATRIX
#define RF_MATRIX 0
#endif

typedef RF_KV::Bits Stored;
static const int WAVES = 4;
static const int THREADS = WAVES * RF_WAVE;
static const int DIM = RF_HEAD_DIM;
// Keys of a wave's step, in eights: loads in flight, traded against registers.
#ifndef RF_EIGHTS
#define RF_EIGHTS (RF_ROWS > 8 || (RF_HEAD_DIM > 128 && sizeof(Stored) > 1) ? 1 : 2)
#endif
#if defined(RF_CUDA)
#define BOUNDS __launch_bounds__(THREADS, RF_BLOCKS)
#elif defined(RF_HIP) && RF_WAVE == 64 && RF_MATRIX == 2
// Two waves on a SIMD: with 256 registers at most, the matrix unit takes all operands from the vector registers, and none
// is moved to and from its own.
#define BOUNDS __launch_bounds__(THREADS, 2)
#else
#define BOUNDS __launch_bounds__(THREADS)
#endif
static const int ITEM = 5;  // row, first query, begin, end, index of the partial result or -1
static const bool SCALED = sizeof(Stored) == 1;
// Below any score, and finite: the maximum of a wave before its first key.
#define LOWEST -3.0e38f
// A wave's maximum may lag by this much, in powers of two: the sums are rescaled less often.
#define SLACK 8.0f

// The location of a row's keys, for one layer and kv head.
struct Keys {
    const u8 *k, *v;                 // of slot 0 in page 0
    const float *k_scale, *v_scale;  // of page 0
    const i32 *table;
    i64 page_bytes;
    int last;  // the last key that may be read

    RF_INLINE int page_of(int key) const { return table[min(key, last) / RF_PAGE_SIZE]; }
    RF_INLINE i64 place_of(int key, int page) const {
        return page * page_bytes + (u32)min(key, last) % RF_PAGE_SIZE * (u32)(DIM * sizeof(Stored));
    }
    static RF_INLINE float scale_of(const float *scales, i64 page_bytes, int page) {
        return *(const float *)((const u8 *)scales + page * page_bytes);
    }
};

// Numbers that a lane loads at once, as words: 2, 4, 8, 16 or 32 bytes.
template <int Count> struct Loaded {
    static const int BYTES = Count * sizeof(Stored);
    u32 words[BYTES < 4 ? 1 : BYTES / 4];

    RF_INLINE void load(const u8 *from) {
        if constexpr (BYTES == 2) {
            words[0] = *(const u16 *)from;
        } else if constexpr (BYTES == 4) {
            words[0] = *(const u32 *)from;
        } else if constexpr (BYTES == 8 || SCALED) {
            // Pages of INT8 begin at multiples of 8 bytes: they end with the scales.
#pragma unroll
            for (int i = 0; i < BYTES / 8; i++) {
                uint2 two = load_once((const uint2 *)from + i);
                words[2 * i] = two.x, words[2 * i + 1] = two.y;
            }
        } else {
#pragma unroll
            for (int i = 0; i < BYTES / 16; i++) {
                uint4 four = load_once((const uint4 *)from + i);
                words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
            }
        }
    }
    RF_INLINE float number(int i) const {
        if constexpr (sizeof(Stored) == 4) return float_of(words[i]);
        else if constexpr (SCALED) return (float)(i8)(words[i / 4] >> (8 * (i % 4)));
        else return RF_KV::load((u16)(words[i / 2] >> (16 * (i % 2))));
    }
};

#if RF_MATRIX
static_assert(sizeof(RF_TYPE::Bits) == 2, "a matrix unit multiplies 16-bit numbers");

// INT8 numbers are converted to BF16, whatever RF_TYPE is: exact, and products with an outlier's scale do not overflow.
template <class Type, class Kv> struct Factor {
    typedef Type Is;
};
template <class Type> struct Factor<Type, INT8> {
    typedef BF16 Is;
};
typedef Factor<RF_TYPE, RF_KV>::Is Number;
#endif

#if RF_MATRIX == 1
static_assert(RF_ROWS == 8 || RF_ROWS == 16, "a tile of queries is 8 or 16 rows");

// Two BF16 numbers from two INT8 bytes of a word: 0 and 1, or 2 and 3. The low seven bits become the mantissa of 128 +
// them; the sign bit counts -128, so it makes the subtrahend 256 instead of 128.
RF_INLINE u32 two_of_bytes(u32 word, bool second) {
    u32 both = bytes_of(word, 0x43434343u, second ? 0x4342u : 0x4140u);
    u32 low = both & 0xff7fff7fu, high = both & 0xff80ff80u;
#if defined(RF_CUDA)
    u32 two;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(two) : "r"(high), "r"(0xbf80bf80u), "r"(low));
    return two;
#else
    float first = bfloat_to_float((u16)low) - bfloat_to_float((u16)high);
    return two_of<BF16>(first, bfloat_to_float((u16)(low >> 16)) - bfloat_to_float((u16)(high >> 16)));
#endif
}

// A step of KEYS keys, in registers from memory to the matrix unit. Lane 4 g + t only multiplies what it loaded itself:
// - scores[q][key] = sum over d of Q[q][d] K[key][d]. The order of d is arbitrary, so each lane of a key loads 8
//   contiguous numbers, enough for two products. A product covers eight keys: a lane has key g of each eight.
// - out[d][q] = sum over keys of V[key][d] P[q][key]. The scores are already laid out as P: a lane has keys 2 t and
//   2 t + 1 of each eight, and a product covers two eights. The order of d is arbitrary, so each lane of a key loads 8
//   contiguous numbers, rows of four products.
struct Step {
    static const int EIGHTS = RF_EIGHTS, KEYS = 8 * EIGHTS;
    static const bool SHARED = true;           // the queries
    static const int SETS = RF_ROWS / 8;       // queries g and, in the second, g + 8
    static const int K_WHOLE = DIM / 32;       // loads of 8 numbers by 4 lanes
    static const bool K_REST = DIM % 32 != 0;  // and one of 4 numbers
    static const int V_WHOLE = DIM / 64;       // loads of 8 numbers by 8 lanes
    static const int V_REST = DIM % 64 / 8;    // and one of this many numbers
    static_assert(DIM % 32 % 16 == 0 && V_REST != 6, "a head dim of loads that are powers of two");
    // Keys guaranteed to share a page: a step begins at a multiple of KEYS.
    static const int SPAN = RF_PAGE_SIZE % KEYS == 0 ? KEYS
                            : RF_PAGE_SIZE % 16 == 0 ? 16
                            : RF_PAGE_SIZE % 8 == 0  ? 8
                                                     : 1;
    static const int K_PAGES = SPAN == 1 ? EIGHTS : KEYS / SPAN, V_PAGES = SPAN == 1 ? 2 * EIGHTS : KEYS / SPAN;

    // Each lane's fragment of Q for one product, the same in all waves: in shared memory, to save registers.
    struct alignas(8 * SETS) Query {
        u32 words[2 * SETS];
    };
    struct Shared {
        Query of[DIM / 16][32];
    };

    int g, t;
    Shared *queries;
    float out[DIM / 16][SETS][4];
    float best[SETS], total[SETS];
    int limit[SETS];
    Loaded<8> k[EIGHTS][K_WHOLE], v[2 * EIGHTS][V_WHOLE];
    Loaded<4> k_rest[EIGHTS];
    Loaded<V_REST ? V_REST : 2> v_rest[2 * EIGHTS];
    int k_page[K_PAGES], v_page[V_PAGES];
    float k_scale[V_PAGES], v_scale[V_PAGES];
    typedef float Weights[SETS][2 * EIGHTS];  // of the keys score_key(i)

    static RF_INLINE int score_key(int i, int t) { return i / 2 * 8 + 2 * t + i % 2; }
    // The page that holds the i-th eight keys of K, and the one that holds key score_key(i).
    static RF_INLINE int k_page_of(int i) { return SPAN == 1 ? i : 8 * i / SPAN; }
    static RF_INLINE int v_page_of(int i) { return SPAN == 1 ? i : i / 2 * 8 / SPAN; }

    RF_INLINE void begin(int lane, Shared *shared) {
        g = lane / 4, t = lane % 4;
        queries = shared;
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            best[set] = LOWEST, total[set] = 0.0f;
#pragma unroll
            for (int m = 0; m < DIM / 16; m++)
#pragma unroll
                for (int i = 0; i < 4; i++) out[m][set][i] = 0.0f;
        }
    }
    // The row of the tile that a set of this lane belongs to.
    RF_INLINE int row_of(int set) const { return g + 8 * set; }
    RF_INLINE void load_query(int set, const RF_TYPE::Bits *from) {
#pragma unroll
        for (int step = 0; step < DIM / 16; step++) {
            int d = step < 2 * K_WHOLE ? 32 * (step / 2) + 8 * t + 4 * (step % 2) : 32 * K_WHOLE + 4 * t;
            Pack<RF_TYPE, 4> four = *(const Pack<RF_TYPE, 4> *)(from + d);
            u32 *to = queries->of[step][4 * g + t].words;
            to[set] = two_of<Number>(RF_TYPE::load(four.bits[0]), RF_TYPE::load(four.bits[1]));
            to[SETS + set] = two_of<Number>(RF_TYPE::load(four.bits[2]), RF_TYPE::load(four.bits[3]));
        }
    }
    RF_INLINE void find_pages(const Keys &keys, int first) {
#pragma unroll
        for (int i = 0; i < V_PAGES; i++) v_page[i] = keys.page_of(first + (SPAN == 1 ? score_key(i, t) : i * SPAN));
#pragma unroll
        for (int i = 0; i < K_PAGES; i++) k_page[i] = SPAN == 1 ? keys.page_of(first + g + 8 * i) : v_page[i];
    }
    RF_INLINE void load_keys(const Keys &keys, int first) {
#pragma unroll
        for (int i = 0; i < EIGHTS; i++) {
            const u8 *from = keys.k + keys.place_of(first + g + 8 * i, k_page[k_page_of(i)]);
#pragma unroll
            for (int c = 0; c < K_WHOLE; c++) k[i][c].load(from + (32 * c + 8 * t) * sizeof(Stored));
            if constexpr (K_REST) k_rest[i].load(from + (32 * K_WHOLE + 4 * t) * sizeof(Stored));
        }
        if constexpr (SCALED)
#pragma unroll
            for (int i = 0; i < V_PAGES; i++) k_scale[i] = Keys::scale_of(keys.k_scale, keys.page_bytes, v_page[i]);
    }
    RF_INLINE void load_values(const Keys &keys, int first) {
#pragma unroll
        for (int i = 0; i < 2 * EIGHTS; i++) {
            const u8 *from = keys.v + keys.place_of(first + score_key(i, t), v_page[v_page_of(i)]);
#pragma unroll
            for (int c = 0; c < V_WHOLE; c++) v[i][c].load(from + (64 * c + 8 * g) * sizeof(Stored));
            if constexpr (V_REST) v_rest[i].load(from + (64 * V_WHOLE + V_REST * g) * sizeof(Stored));
        }
        if constexpr (SCALED)
#pragma unroll
            for (int i = 0; i < V_PAGES; i++) v_scale[i] = Keys::scale_of(keys.v_scale, keys.page_bytes, v_page[i]);
    }
    // Numbers 2 i and 2 i + 1 of one key.
    template <int Count> RF_INLINE u32 pair_of(const Loaded<Count> &from, int i) const {
        if constexpr (SCALED) return two_of_bytes(from.words[i / 2], i % 2);
        else return from.words[i];
    }
    // Number i of one key and of another.
    template <int Count> RF_INLINE u32 pair_of(const Loaded<Count> &from, const Loaded<Count> &other, int i) const {
        if constexpr (SCALED)
            return two_of_bytes(bytes_of(from.words[i / 4], other.words[i / 4], i % 4 < 2 ? 0x5140u : 0x7362u), i % 2);
        else return bytes_of(from.words[i / 2], other.words[i / 2], i % 2 ? 0x7632u : 0x5410u);
    }
    RF_INLINE void multiply_keys(Weights &weight) const {
        float c[EIGHTS][4] = {};
#pragma unroll
        for (int step = 0; step < DIM / 16; step++) {
            Query of = queries->of[step][4 * g + t];
            u32 a[4] = {of.words[0], SETS == 2 ? of.words[1] : 0, of.words[SETS],
                        SETS == 2 ? of.words[2 * SETS - 1] : 0};
#pragma unroll
            for (int i = 0; i < EIGHTS; i++) {
                u32 b[2];
#pragma unroll
                for (int half = 0; half < 2; half++)
                    b[half] =
                        step < 2 * K_WHOLE ? pair_of(k[i][step / 2], step % 2 * 2 + half) : pair_of(k_rest[i], half);
                multiply_16x8x16<Number>(c[i], a, b);
            }
        }
#pragma unroll
        for (int set = 0; set < SETS; set++)
#pragma unroll
            for (int i = 0; i < 2 * EIGHTS; i++) {
                weight[set][i] = c[i / 2][2 * set + i % 2];
                if constexpr (SCALED) weight[set][i] *= k_scale[v_page_of(i)];
            }
    }
    RF_INLINE void weigh(Weights &weight, int first, float scale) {
        float highest[SETS];
        bool higher = false;
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            highest[set] = LOWEST;
#pragma unroll
            for (int i = 0; i < 2 * EIGHTS; i++) {
                weight[set][i] = first + score_key(i, t) <= limit[set] ? weight[set][i] * scale : -RF_INFINITY;
                highest[set] = fmaxf(highest[set], weight[set][i]);
            }
            higher = higher || highest[set] > best[set] + SLACK;
        }
        if (ballot(higher)) {
#pragma unroll
            for (int set = 0; set < SETS; set++) {
                float now = fmaxf(highest[set], best[set]);
                now = fmaxf(now, shuffle_xor(now, 1));
                now = fmaxf(now, shuffle_xor(now, 2));
                float shrink = power_of_two(best[set] - now);
                best[set] = now;
                total[set] *= shrink;
                // Here, `out` has queries 2 t and 2 t + 1.
                float of_out[2] = {shuffle(shrink, 8 * t), shuffle(shrink, 8 * t + 4)};
#pragma unroll
                for (int m = 0; m < DIM / 16; m++)
#pragma unroll
                    for (int i = 0; i < 4; i++) out[m][set][i] *= of_out[i % 2];
            }
        }
#pragma unroll
        for (int set = 0; set < SETS; set++)
#pragma unroll
            for (int i = 0; i < 2 * EIGHTS; i++) {
                weight[set][i] = power_of_two(weight[set][i] - best[set]);
                total[set] += weight[set][i];
                if constexpr (SCALED) weight[set][i] *= v_scale[v_page_of(i)];
            }
    }
    // The four keys of a product, or two keys and padding.
    template <bool Four, int Count> RF_INLINE void multiply_values(const Loaded<Count> &v0, const Loaded<Count> &v1,
                                                                   const Loaded<Count> &v2, const Loaded<Count> &v3,
                                                                   const u32 (&p)[SETS][2], int tile) {
#pragma unroll
        for (int i = 0; i < Count / 2; i++) {
            u32 a[4] = {pair_of(v0, v1, 2 * i), pair_of(v0, v1, 2 * i + 1), Four ? pair_of(v2, v3, 2 * i) : 0,
                        Four ? pair_of(v2, v3, 2 * i + 1) : 0};
#pragma unroll
            for (int set = 0; set < SETS; set++) multiply_16x8x16<Number>(out[tile + i][set], a, p[set]);
        }
    }
    RF_INLINE void multiply_values(const Weights &weight) {
#pragma unroll
        for (int e = 0; e < EIGHTS; e += 2) {
            static const bool FOUR = EIGHTS > 1;
            const int i = 2 * e, j = FOUR ? i + 2 : i;
            u32 p[SETS][2];
#pragma unroll
            for (int set = 0; set < SETS; set++) {
                p[set][0] = two_of<Number>(weight[set][i], weight[set][i + 1]);
                p[set][1] = FOUR ? two_of<Number>(weight[set][j], weight[set][j + 1]) : 0;
            }
#pragma unroll
            for (int c = 0; c < V_WHOLE; c++)
                multiply_values<FOUR>(v[i][c], v[i + 1][c], v[j][c], v[j + 1][c], p, 4 * c);
            if constexpr (V_REST)
                multiply_values<FOUR>(v_rest[i], v_rest[i + 1], v_rest[j], v_rest[j + 1], p, 4 * V_WHOLE);
        }
    }
    // Gather the numbers of a query from its lanes.
    RF_INLINE void finish() {
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            total[set] += shuffle_xor(total[set], 1);
            total[set] += shuffle_xor(total[set], 2);
        }
    }
    RF_INLINE bool tells(int) const { return t == 0; }
    template <class Put> RF_INLINE void put_out(Put put) const {
#pragma unroll
        for (int set = 0; set < SETS; set++)
#pragma unroll
            for (int m = 0; m < DIM / 16; m++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int d = m < 4 * V_WHOLE ? m / 4 * 64 + 8 * g + m % 4 * 2
                                            : V_WHOLE * 64 + V_REST * g + (m - 4 * V_WHOLE) * 2;
                    put(8 * set + 2 * t + i % 2, d + i / 2, out[m][set][i]);
                }
    }
};

#elif RF_MATRIX == 2
static_assert(RF_ROWS <= 16, "a tile of queries is at most 16 rows");

// Hoisting operands of later products across this would take more registers than RDNA has.
#if defined(RF_HIP) && RF_WAVE == 32
#define IN_ORDER __builtin_amdgcn_sched_barrier(0)
#else
#define IN_ORDER
#endif

// A step of 16 keys, in registers from memory to the matrix unit. Lane 16 u + i only multiplies what it loaded itself:
// - scores[key][q] = sum over d of K[key][d] Q[q][d]. The order of d is arbitrary, so each lane of a key loads contiguous
//   numbers, enough for several products. The result has keys EACH u to EACH u + EACH - 1 of query i.
// - out[d][q] = sum over keys of V[key][d] P[q][key]. The scores are already laid out as P. The order of d is arbitrary,
//   so a lane loads contiguous numbers of each of those keys, which are in row i of as many products.
// INT8 numbers are multiplied as unsigned ones, 128 more than they are, which take an instruction less to convert. What
// that adds to a product of the matrix unit is taken away by a product of -128s: scores begin with it, `out` ends with it.
struct Step {
    static const int KEYS = 16, SETS = 1;
    // The queries: the same in all waves. With 32 lanes, registers lack for them beside K and V of 16 bits.
    static const bool SHARED = RF_WAVE == 32 && !SCALED;
    static const int EACH = 256 / RF_WAVE, PARTS = RF_WAVE / 16;
    // Numbers of K that a lane loads together.
    static const int TOGETHER = SCALED && DIM % (16 * PARTS) == 0 ? 16 : 8;
    static const int LOADS = DIM / (PARTS * TOGETHER), PRODUCTS = TOGETHER / EACH;
    // The same of V: whole pieces, and a rest.
    static const int PIECE = DIM / 16 >= 8 ? 8 : 4, WHOLE = DIM / 16 / PIECE, REST = DIM / 16 % PIECE;
    static_assert(DIM % (PARTS * TOGETHER) == 0 && (REST == 0 || REST == 2), "a head dim of loads that are powers of two");
    // Whether all keys of a step share a page: a step begins at a multiple of KEYS.
    static const bool ONE_PAGE = RF_PAGE_SIZE % KEYS == 0;
    static const int PAGES = ONE_PAGE ? 1 : EACH;

    int u, i, row;  // row: of a product that this lane loads for
    float out[DIM / 16][EACH];
    typedef Registers<EACH / 2> Words;
    struct Shared {
        Words of[SHARED ? DIM / 16 : 1][RF_WAVE];
    };
    Words query[SHARED ? 1 : DIM / 16];
    Shared *queries;
    float over, out_over[EACH];  // of a score, and of out: the same in every row
    float best[SETS], total[SETS];
    int limit[SETS];
    Loaded<TOGETHER> k[LOADS];
    Loaded<PIECE> v[EACH][WHOLE];
    Loaded<REST ? REST : 2> v_rest[EACH];
    int k_page, page[PAGES];
    float k_scale[PAGES], v_scale[PAGES];
    typedef float Weights[SETS][EACH];  // of keys EACH u + e

    RF_INLINE void begin(int lane, Shared *shared) {
        queries = shared;
        u = lane / 16, i = lane % 16, row = matrix_row(lane % 16);
        best[0] = LOWEST, total[0] = 0.0f;
#pragma unroll
        for (int m = 0; m < DIM / 16; m++)
#pragma unroll
            for (int e = 0; e < EACH; e++) out[m][e] = 0.0f;
#pragma unroll
        for (int e = 0; e < EACH; e++) out_over[e] = 0.0f;
        over = 0.0f;
    }
    RF_INLINE int row_of(int) const { return i; }
    RF_INLINE void load_query(int, const RF_TYPE::Bits *from) {
#pragma unroll
        for (int m = 0; m < DIM / 16; m++) {
            int d = m / PRODUCTS * PARTS * TOGETHER + u * TOGETHER + m % PRODUCTS * EACH;
            Words words;
            Pack<RF_TYPE, EACH> some = *(const Pack<RF_TYPE, EACH> *)(from + d);
#pragma unroll
            for (int j = 0; j < EACH / 2; j++)
                words.of[j] = two_of<Number>(RF_TYPE::load(some.bits[2 * j]), RF_TYPE::load(some.bits[2 * j + 1]));
            if constexpr (SHARED) queries->of[SHARED ? m : 0][16 * u + i] = words;
            else query[SHARED ? 0 : m] = words;
        }
        if constexpr (SCALED) {
            float all[EACH] = {};
#pragma unroll
            for (int m = 0; m < DIM / 16; m++) multiply_by_minus_128(all, query[SHARED ? 0 : m].of);
            over = all[0];
        }
    }
    // c += a b, for an a that is -128 everywhere.
    static RF_INLINE void multiply_by_minus_128(float (&c)[EACH], const u32 (&b)[EACH / 2]) {
        u32 a[EACH / 2];
#pragma unroll
        for (int j = 0; j < EACH / 2; j++) a[j] = 0xc300c300u;
        multiply_16x16x16<BF16>(c, a, b);
    }
    RF_INLINE void find_pages(const Keys &keys, int first) {
#pragma unroll
        for (int e = 0; e < PAGES; e++) page[e] = keys.page_of(first + (ONE_PAGE ? 0 : EACH * u + e));
        k_page = ONE_PAGE ? page[0] : keys.page_of(first + row);
    }
    RF_INLINE void load_keys(const Keys &keys, int first) {
        const u8 *from = keys.k + keys.place_of(first + row, k_page);
#pragma unroll
        for (int c = 0; c < LOADS; c++) k[c].load(from + (c * PARTS + u) * TOGETHER * sizeof(Stored));
        if constexpr (SCALED)
#pragma unroll
            for (int e = 0; e < PAGES; e++) k_scale[e] = Keys::scale_of(keys.k_scale, keys.page_bytes, page[e]);
    }
    RF_INLINE void load_values(const Keys &keys, int first) {
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const u8 *from = keys.v + keys.place_of(first + EACH * u + e, page[ONE_PAGE ? 0 : e]);
#pragma unroll
            for (int c = 0; c < WHOLE; c++) v[e][c].load(from + (16 * c + row) * PIECE * sizeof(Stored));
            if constexpr (REST) v_rest[e].load(from + (16 * WHOLE * PIECE + row * REST) * sizeof(Stored));
        }
        if constexpr (SCALED)
#pragma unroll
            for (int e = 0; e < PAGES; e++) v_scale[e] = Keys::scale_of(keys.v_scale, keys.page_bytes, page[e]);
    }
    // Number i of one key and number j of another. A BF16 number is the upper half of a float; whole numbers up to 255
    // have nothing in the lower one.
    template <int Count> static RF_INLINE u32 pair_of(const Loaded<Count> &from, int i, const Loaded<Count> &other, int j) {
        if constexpr (SCALED) return bytes_of(bits_of(more_128(from, i)), bits_of(more_128(other, j)), 0x7632u);
        else return bytes_of(from.words[i / 2], other.words[j / 2], (i % 2 ? 0x32u : 0x10u) | (j % 2 ? 0x7600u : 0x5400u));
    }
    template <int Count> static RF_INLINE float more_128(const Loaded<Count> &from, int i) {
        return (float)(u8)((from.words[i / 4] ^ 0x80808080u) >> (8 * (i % 4)));
    }
    RF_INLINE void multiply_keys(Weights &weight) const {
#pragma unroll
        for (int e = 0; e < EACH; e++) weight[0][e] = over;
#pragma unroll
        for (int m = 0; m < DIM / 16; m++) {
            IN_ORDER;
            u32 a[EACH / 2];
#pragma unroll
            for (int j = 0; j < EACH / 2; j++) {
                int number = m % PRODUCTS * EACH + 2 * j;
                if constexpr (SCALED) a[j] = pair_of(k[m / PRODUCTS], number, k[m / PRODUCTS], number + 1);
                else a[j] = k[m / PRODUCTS].words[number / 2];
            }
            const Words b = SHARED ? queries->of[SHARED ? m : 0][16 * u + i] : query[SHARED ? 0 : m];
            multiply_16x16x16<Number>(weight[0], a, b.of);
        }
        if constexpr (SCALED)
#pragma unroll
            for (int e = 0; e < EACH; e++) weight[0][e] *= k_scale[ONE_PAGE ? 0 : e];
    }
    RF_INLINE void weigh(Weights &weight, int first, float scale) {
        float highest = LOWEST;
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            weight[0][e] = first + EACH * u + e <= limit[0] ? weight[0][e] * scale : -RF_INFINITY;
            highest = fmaxf(highest, weight[0][e]);
        }
        if (ballot(highest > best[0] + SLACK)) {
            float now = fmaxf(highest, best[0]);
#pragma unroll
            for (int mask = 16; mask < RF_WAVE; mask *= 2) now = fmaxf(now, shuffle_xor(now, mask));
            float shrink = power_of_two(best[0] - now);
            best[0] = now;
            total[0] *= shrink;
#pragma unroll
            for (int m = 0; m < DIM / 16; m++)
#pragma unroll
                for (int e = 0; e < EACH; e++) out[m][e] *= shrink;
            if constexpr (SCALED)
#pragma unroll
                for (int e = 0; e < EACH; e++) out_over[e] *= shrink;
        }
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            weight[0][e] = power_of_two(weight[0][e] - best[0]);
            total[0] += weight[0][e];
            if constexpr (SCALED) weight[0][e] *= v_scale[ONE_PAGE ? 0 : e];
        }
    }
    template <int Count, class Of> RF_INLINE void multiply_piece(Of of, const u32 (&p)[EACH / 2], int product) {
#pragma unroll
        for (int n = 0; n < Count; n++) {
            IN_ORDER;
            u32 a[EACH / 2];
#pragma unroll
            for (int j = 0; j < EACH / 2; j++) a[j] = pair_of(of(2 * j), n, of(2 * j + 1), n);
            multiply_16x16x16<Number>(out[product + n], a, p);
        }
    }
    RF_INLINE void multiply_values(const Weights &weight) {
        u32 p[EACH / 2];
#pragma unroll
        for (int j = 0; j < EACH / 2; j++) p[j] = two_near<Number>(weight[0][2 * j], weight[0][2 * j + 1]);
        if constexpr (SCALED) multiply_by_minus_128(out_over, p);
#pragma unroll
        for (int c = 0; c < WHOLE; c++)
            multiply_piece<PIECE>([&](int e) -> const Loaded<PIECE> & { return v[e][c]; }, p, PIECE * c);
        if constexpr (REST > 0)
            multiply_piece<REST ? REST : 2>([&](int e) -> const Loaded<REST ? REST : 2> & { return v_rest[e]; }, p,
                                            PIECE * WHOLE);
    }
    // The keys of a query are divided among its lanes.
    RF_INLINE void finish() {
#pragma unroll
        for (int mask = 16; mask < RF_WAVE; mask *= 2) total[0] += shuffle_xor(total[0], mask);
        if constexpr (SCALED)
#pragma unroll
            for (int m = 0; m < DIM / 16; m++)
#pragma unroll
                for (int e = 0; e < EACH; e++) out[m][e] += out_over[0];
    }
    RF_INLINE bool tells(int) const { return u == 0 && i < RF_ROWS; }
    template <class Put> RF_INLINE void put_out(Put put) const {
        if (i >= RF_ROWS) return;
#pragma unroll
        for (int m = 0; m < DIM / 16; m++)
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                int piece = m / PIECE, count = piece < WHOLE ? PIECE : REST;
                put(i, 16 * PIECE * piece + count * (EACH * u + e) + m % PIECE, out[m][e]);
            }
    }
};

#else

static_assert(RF_ROWS <= 8, "a tile of queries is at most 8 rows");

// A step of DEEP keys for each group of LANES lanes, 8 numbers of a key per lane. Each group has its own softmax.
struct Step {
    static const int LANES = DIM <= 64 ? 8 : DIM <= 128 ? 16 : 32;
    static const int GROUPS = RF_WAVE / LANES, DEEP = RF_ROWS > 4 ? 2 : 4;
    static const int KEYS = GROUPS * DEEP;
    static const int SETS = RF_ROWS;
    static const bool SHARED = false;
    static_assert(DIM % 8 == 0 && DIM <= 8 * LANES, "a head dim that the lanes of a key can hold");

    int group, d;  // the lane's first number; past the head's end, a lane loads other numbers and stores none
    bool idle;
    float q[SETS][8], out[SETS][8];
    float best[SETS], total[SETS];
    int limit[SETS];
    struct Shared {};
    Loaded<8> k[DEEP], v[DEEP];
    int page[DEEP];
    float k_scale[SCALED ? DEEP : 1], v_scale[SCALED ? DEEP : 1];

    RF_INLINE void begin(int lane, Shared *) {
        group = lane / LANES, d = lane % LANES * 8;
        idle = d >= DIM;
        if (idle) d = 0;
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            best[set] = LOWEST, total[set] = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; i++) out[set][i] = 0.0f;
        }
    }
    RF_INLINE int row_of(int set) const { return set; }
    RF_INLINE void load_query(int set, const RF_TYPE::Bits *from) {
        static const int TOGETHER = 16 / sizeof(RF_TYPE::Bits);
#pragma unroll
        for (int i = 0; i < 8; i += TOGETHER) {
            Pack<RF_TYPE, TOGETHER> pack = *(const Pack<RF_TYPE, TOGETHER> *)(from + d + i);
#pragma unroll
            for (int j = 0; j < TOGETHER; j++) q[set][i + j] = idle ? 0.0f : RF_TYPE::load(pack.bits[j]);
        }
    }
    RF_INLINE void find_pages(const Keys &keys, int first) {
#pragma unroll
        for (int i = 0; i < DEEP; i++) page[i] = keys.page_of(first + i * GROUPS + group);
    }
    RF_INLINE void load_keys(const Keys &keys, int first) {
#pragma unroll
        for (int i = 0; i < DEEP; i++) {
            k[i].load(keys.k + keys.place_of(first + i * GROUPS + group, page[i]) + d * sizeof(Stored));
            if constexpr (SCALED) k_scale[i] = Keys::scale_of(keys.k_scale, keys.page_bytes, page[i]);
        }
    }
    RF_INLINE void load_values(const Keys &keys, int first) {
#pragma unroll
        for (int i = 0; i < DEEP; i++) {
            v[i].load(keys.v + keys.place_of(first + i * GROUPS + group, page[i]) + d * sizeof(Stored));
            if constexpr (SCALED) v_scale[i] = Keys::scale_of(keys.v_scale, keys.page_bytes, page[i]);
        }
    }
    typedef float Weights[SETS][DEEP];
    RF_INLINE void multiply_keys(Weights &weight) const {
#pragma unroll
        for (int i = 0; i < DEEP; i++) {
#pragma unroll
            for (int set = 0; set < SETS; set++) weight[set][i] = 0.0f;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float number = k[i].number(j);
#pragma unroll
                for (int set = 0; set < SETS; set++) weight[set][i] = fmaf(q[set][j], number, weight[set][i]);
            }
        }
#pragma unroll
        for (int mask = LANES / 2; mask > 0; mask /= 2)
#pragma unroll
            for (int set = 0; set < SETS; set++)
#pragma unroll
                for (int i = 0; i < DEEP; i++) weight[set][i] += shuffle_xor(weight[set][i], mask);
        if constexpr (SCALED)
#pragma unroll
            for (int set = 0; set < SETS; set++)
#pragma unroll
                for (int i = 0; i < DEEP; i++) weight[set][i] *= k_scale[i];
    }
    RF_INLINE void weigh(Weights &weight, int first, float scale) {
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            float highest = LOWEST;
#pragma unroll
            for (int i = 0; i < DEEP; i++) {
                bool seen = first + i * GROUPS + group <= limit[set];
                weight[set][i] = seen ? weight[set][i] * scale : -RF_INFINITY;
                highest = fmaxf(highest, weight[set][i]);
            }
            if (highest > best[set] + SLACK) {
                float shrink = power_of_two(best[set] - highest);
                best[set] = highest;
                total[set] *= shrink;
#pragma unroll
                for (int j = 0; j < 8; j++) out[set][j] *= shrink;
            }
#pragma unroll
            for (int i = 0; i < DEEP; i++) {
                weight[set][i] = power_of_two(weight[set][i] - best[set]);
                total[set] += weight[set][i];
                if constexpr (SCALED) weight[set][i] *= v_scale[i];
            }
        }
    }
    RF_INLINE void multiply_values(const Weights &weight) {
#pragma unroll
        for (int i = 0; i < DEEP; i++)
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float number = v[i].number(j);
#pragma unroll
                for (int set = 0; set < SETS; set++) out[set][j] = fmaf(weight[set][i], number, out[set][j]);
            }
    }
    RF_INLINE void finish() {
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            float most = best[set];
#pragma unroll
            for (int mask = LANES; mask < RF_WAVE; mask *= 2) most = fmaxf(most, shuffle_xor(most, mask));
            float shrink = power_of_two(best[set] - most);
            best[set] = most;
            total[set] *= shrink;
#pragma unroll
            for (int j = 0; j < 8; j++) out[set][j] *= shrink;
#pragma unroll
            for (int mask = LANES; mask < RF_WAVE; mask *= 2) {
                total[set] += shuffle_xor(total[set], mask);
#pragma unroll
                for (int j = 0; j < 8; j++) out[set][j] += shuffle_xor(out[set][j], mask);
            }
        }
    }
    RF_INLINE bool tells(int) const { return group == 0 && d == 0 && !idle; }
    template <class Put> RF_INLINE void put_out(Put put) const {
        if (group > 0 || idle) return;
#pragma unroll
        for (int set = 0; set < SETS; set++)
#pragma unroll
            for (int j = 0; j < 8; j++) put(set, d + j, out[set][j]);
    }
};

#endif

// q and out: [tokens, kv_heads * RF_GROUP, RF_HEAD_DIM]; q_stride numbers from one token of q to the next. Row r of the
// batch has tokens offsets[r] to offsets[r + 1] - 1, the first at position starts[r]; its pages are tables[r *
// table_stride ...]. scale: the scores' factor, times log2(e). A partial result has, for each query from the item's
// index on and each kv head, RF_HEAD_DIM sums in `partials` and (maximum, sum of weights) in `stats`.
RF_KERNEL BOUNDS attention_decode(const RF_TYPE::Bits *__restrict__ q, i64 q_stride, const u8 *__restrict__ pages,
                                  i64 page_bytes, i32 layers, i32 layer, i32 kv_heads, const i32 *__restrict__ tables,
                                  i32 table_stride, const i32 *__restrict__ starts, const i32 *__restrict__ offsets,
                                  const i32 *__restrict__ items, float scale, RF_TYPE::Bits *__restrict__ out,
                                  float *__restrict__ partials, float *__restrict__ stats) {
    __shared__ float sum[RF_ROWS * DIM];
    __shared__ float bests[WAVES][RF_ROWS], totals[WAVES][RF_ROWS];

    int lane = threadIdx.x % RF_WAVE, wave = threadIdx.x / RF_WAVE;
    int head = blockIdx.x % kv_heads;
    const i32 *item = items + (i64)(blockIdx.x / kv_heads) * ITEM;
    int row = item[0], query = item[1], begin = item[2], end = item[3], partial = item[4];
    if (row < 0) return;  // padding
    int token = offsets[row], start = starts[row];
    int count = min((offsets[row + 1] - token) * RF_GROUP - query, RF_ROWS);

    Keys keys;
    i64 of_head = (i64)RF_PAGE_SIZE * DIM * sizeof(Stored);
    keys.k = pages + ((i64)layer * 2 * kv_heads + head) * of_head;
    keys.v = keys.k + kv_heads * of_head;
    keys.k_scale = (const float *)(pages + (i64)layers * 2 * kv_heads * of_head) + (i64)layer * 2 * kv_heads + head;
    keys.v_scale = keys.k_scale + kv_heads;
    keys.table = tables + (i64)row * table_stride;
    keys.page_bytes = page_bytes;
    keys.last = end - 1;

    __shared__ Step::Shared shared;
    Step step;
    step.begin(lane, &shared);
    int first = begin + wave * Step::KEYS;
    if (first < end) {
        step.find_pages(keys, first);
        step.load_keys(keys, first);
        step.load_values(keys, first);
        step.find_pages(keys, first + WAVES * Step::KEYS);
    }
#pragma unroll
    for (int set = 0; set < Step::SETS; set++) {
        int number = query + min(step.row_of(set), count - 1);
        step.limit[set] = min(start + number / RF_GROUP, end - 1);
        if (!Step::SHARED || wave == 0)
            step.load_query(set,
                            q + (token + number / RF_GROUP) * q_stride + (head * RF_GROUP + number % RF_GROUP) * DIM);
    }
    __syncthreads();
    // Past the end, the last key is loaded again and not used.
    for (; first < end; first += WAVES * Step::KEYS) {
        int next = first + WAVES * Step::KEYS;
        Step::Weights weight;
        step.multiply_keys(weight);
        step.load_keys(keys, next);
        step.weigh(weight, first, scale);
        step.multiply_values(weight);
        step.load_values(keys, next);
        step.find_pages(keys, next + WAVES * Step::KEYS);
    }
    step.finish();

#pragma unroll
    for (int set = 0; set < Step::SETS; set++)
        if (step.tells(set)) {
            bests[wave][step.row_of(set)] = step.best[set];
            totals[wave][step.row_of(set)] = step.total[set];
        }
    __syncthreads();
    for (int turn = 0; turn < WAVES; turn++) {
        if (wave == turn)
            step.put_out([&](int of, int d, float value) {
                float most = bests[0][of];
                for (int other = 1; other < WAVES; other++) most = fmaxf(most, bests[other][of]);
                value *= power_of_two(bests[wave][of] - most);
                sum[of * DIM + d] = turn ? sum[of * DIM + d] + value : value;
            });
        __syncthreads();
    }

    for (int i = threadIdx.x; i < count * DIM; i += THREADS) {
        int of = i / DIM, d = i % DIM, number = query + of;
        float most = bests[0][of], total = 0.0f;
        for (int other = 1; other < WAVES; other++) most = fmaxf(most, bests[other][of]);
        for (int other = 0; other < WAVES; other++) total += totals[other][of] * power_of_two(bests[other][of] - most);
        if (partial < 0) {
            i64 place = ((i64)(token + number / RF_GROUP) * kv_heads + head) * RF_GROUP + number % RF_GROUP;
            out[place * DIM + d] = RF_TYPE::store(sum[i] / total);
        } else {
            i64 place = ((i64)partial + of) * kv_heads + head;
            partials[place * DIM + d] = sum[i];
            if (d == 0) stats[place * 2] = most, stats[place * 2 + 1] = total;
        }
    }
}
