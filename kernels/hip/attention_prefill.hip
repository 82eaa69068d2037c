// Attention of many new tokens of a row over its paged keys: compute-bound, so tiles of queries are multiplied by tiles
// of keys in shared memory (Dao, "FlashAttention-2").
//
// A block processes an item: keys begin to end of one row, for one kv head and RF_TILE of its queries. The waves divide
// the queries among them and step through the keys together, TILE_KEYS at a time: while a tile of keys is multiplied,
// its values are loaded, and while these are multiplied, the next keys are. If a row's keys are split into several
// items, their partial results are left to attention_combine.hip.
//
// The queries of a row are numbered q = token * RF_GROUP + head of the group. Only slots that hold keys of the row are
// read: past the last key, lanes read the last key again, with weight 0.
//
// defines: RF_TYPE=F32|F16|BF16 RF_KV=F32|F16|BF16|INT8 RF_HEAD_DIM=64|80|96|128|256 RF_PAGE_SIZE=1.. RF_GROUP=1..
// defines: RF_MATRIX=0|1|2
// variants: RF_TYPE=BF16 RF_KV=BF16 RF_HEAD_DIM=64|128|256 RF_PAGE_SIZE=16 RF_GROUP=4
// variants: RF_TYPE=F32|F16 RF_KV=INT8 RF_HEAD_DIM=80 RF_PAGE_SIZE=24 RF_GROUP=7
#include "common.h"

#if !defined(RF_TYPE) || !defined(RF_KV) || !defined(RF_HEAD_DIM) || !defined(RF_PAGE_SIZE) || !defined(RF_GROUP)
#error "attention_prefill: RF_TYPE, RF_KV, RF_HEAD_DIM, RF_PAGE_SIZE and RF_GROUP must be defined"
#endif
// For RF_TYPE of 16 bits, 1: by multiply_16x8x16, 2: by multiply_16x16x16. 0: one number at a time.
#ifndef RF_MATRIX
#define RF_MATRIX 0
#endif

typedef RF_TYPE::Bits Bits;
typedef RF_KV::Bits Stored;
static const int DIM = RF_HEAD_DIM;
static const int ITEM = 5;  // row, first query, begin, end, index of the partial result or -1
static const bool SCALED = sizeof(Stored) == 1;
#define LOWEST -3.0e38f  // below any score, and finite: the maximum of a query before its first key
// The maximum may lag by this much, in powers of two: the sums are rescaled less often.
#define SLACK 8.0f

// --- shared memory: rows of DIM numbers in chunks of 16 bytes ------------------------------------------------------

static const int CHUNK = 16 / sizeof(Bits), CHUNKS = DIM / CHUNK;
// The same chunk of eight rows covers all banks: chunks are permuted by row, or rows have an odd number of chunks.
static const bool SWIZZLED = CHUNKS % 8 == 0;
static const int ROW_CHUNKS = SWIZZLED ? CHUNKS : CHUNKS | 1;
static const int ROW_BYTES = ROW_CHUNKS * 16;
RF_INLINE int place(int row, int chunk) {
    return row * (ROW_CHUNKS * CHUNK) + (SWIZZLED ? chunk ^ (row & 7) : chunk) * CHUNK;
}

// Queries of a tile, so that they take at most 32 KB; plan.py computes the same.
static const int TILE = DIM * sizeof(Bits) <= 256 ? 128 : DIM * sizeof(Bits) <= 512 ? 64 : 32;
// The fragments of Q that a wave multiplies by stay in its registers if they fit beside the sums. Then keys and values
// replace the queries in shared memory.
static const bool HELD = RF_MATRIX == 2 ? RF_WAVE == 64 || DIM < 128 : RF_MATRIX == 1 && (DIM <= 64 || DIM > 128);
static const int ROOM = (48 * 1024 - (HELD ? 0 : TILE * ROW_BYTES)) / (2 * ROW_BYTES);
// As registers allow.
static const int MOST_KEYS = RF_MATRIX == 0 ? 32 : (RF_MATRIX == 2 && RF_WAVE == 32 ? 32 : 64) / (DIM > 128 ? 2 : 1);
static const int FITS = ROOM < MOST_KEYS ? ROOM : MOST_KEYS;
static const int TILE_KEYS = FITS >= 64 ? 64 : FITS >= 48 ? 48 : FITS >= 32 ? 32 : FITS >= 16 ? 16 : 8;
static const int SHARED_ROWS = !HELD ? TILE + 2 * TILE_KEYS : TILE > 2 * TILE_KEYS ? TILE : 2 * TILE_KEYS;

// --- a lane's part of a wave's tiles -------------------------------------------------------------------------------

// Of a tile of the wave's rows and some columns, a lane holds some numbers of each of ROWS rows; the others are held by
// the PARTS - 1 lanes whose indices differ from its own by multiples of STRIDE. Number j of row r is at(tile, r, j).
#if RF_MATRIX == 2
// The layout of c of multiply_16x16x16, transposed.
static const int EACH = 256 / RF_WAVE, M = DIM <= 128 && RF_WAVE == 64 ? 2 : 1;
static const int ROWS = M, PARTS = RF_WAVE / 16, STRIDE = 16, WAVE_ROWS = 16 * M;
template <int Columns> struct Fragments {
    float of[M][Columns / 16][EACH];
};
template <int Columns> RF_INLINE float &at(Fragments<Columns> &tile, int r, int j) {
    return tile.of[r][j / EACH][j % EACH];
}
RF_INLINE int row_of(int r, int lane) { return 16 * r + lane % 16; }
RF_INLINE int key_of(int j, int lane) { return j / EACH * 16 + lane / 16 * EACH + j % EACH; }
#else
// The layout of c of multiply_16x8x16; waves of 64 lanes have twice as many rows.
static const int M = RF_MATRIX && DIM <= 128 ? 2 : 1;
static const int ROWS = 2 * M, PARTS = 4, STRIDE = 1, WAVE_ROWS = M * RF_WAVE / 2;
template <int Columns> struct Fragments {
    float of[M][Columns / 8][4];
};
template <int Columns> RF_INLINE float &at(Fragments<Columns> &tile, int r, int j) {
    return tile.of[r / 2][j / 2][r % 2 * 2 + j % 2];
}
RF_INLINE int row_of(int r, int lane) { return r * (RF_WAVE / 4) + lane / 4; }
RF_INLINE int key_of(int j, int lane) { return j / 2 * 8 + lane % 4 * 2 + j % 2; }
#endif
static const int WAVES = TILE / WAVE_ROWS, THREADS = WAVES * RF_WAVE;
static const int SCORES = TILE_KEYS / PARTS, SUMS = DIM / PARTS;  // numbers of a row
typedef Fragments<TILE_KEYS> Scores;
typedef Fragments<DIM> Out;
template <int Columns> RF_INLINE void clear(Fragments<Columns> &tile) {
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int j = 0; j < Columns / PARTS; j++) at(tile, r, j) = 0.0f;
}

#if defined(RF_CUDA)
#define BOUNDS __launch_bounds__(THREADS, THREADS <= 128 ? 2 : 1)
#else
#define BOUNDS __launch_bounds__(THREADS)
#endif

#if RF_MATRIX == 1
static_assert(sizeof(Bits) == 2 && RF_WAVE == 32, "multiply_16x8x16 is for 16-bit numbers and waves of 32 lanes");

RF_INLINE int column_of(int j, int lane) { return key_of(j, lane); }

struct QueryPart {
    u32 of[M][4];  // 16 numbers of each row of the wave
};
struct Queries {
    QueryPart parts[HELD ? DIM / 16 : 1];
};
// Part d of the queries from row `first` on.
RF_INLINE void load_queries(QueryPart &part, const Bits *queries, int first, int d, int lane) {
#pragma unroll
    for (int m = 0; m < M; m++) load_tiles(part.of[m], queries + place(first + 16 * m + lane % 16, 2 * d + lane / 16));
}
// scores = queries, from row `first` on, times keys.
RF_INLINE void multiply_keys(Scores &scores, const Queries &held, const Bits *queries, int first, const Bits *keys,
                             int lane) {
    clear(scores);
#pragma unroll
    for (int d = 0; d < DIM / 16; d++) {
        QueryPart part;
        if constexpr (HELD) part = held.parts[HELD ? d : 0];
        else load_queries(part, queries, first, d, lane);
#pragma unroll
        for (int n = 0; n < TILE_KEYS / 8; n += 2) {
            u32 tiles[4];
            load_tiles(tiles, keys + place(8 * n + lane / 16 * 8 + lane % 8, 2 * d + lane / 8 % 2));
            u32 b[2][2] = {{tiles[0], tiles[1]}, {tiles[2], tiles[3]}};
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int i = 0; i < 2; i++) multiply_16x8x16<RF_TYPE>(scores.of[m][n + i], part.of[m], b[i]);
        }
    }
}
// out += weights times values. The weights are already laid out for it.
RF_INLINE void multiply_values(Out &out, const Scores &weights, const Bits *values, int lane) {
#pragma unroll
    for (int n = 0; n < TILE_KEYS / 8; n += 2) {
        u32 a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                a[m][i] = two_of<RF_TYPE>(weights.of[m][n + i / 2][i % 2 * 2], weights.of[m][n + i / 2][i % 2 * 2 + 1]);
#pragma unroll
        for (int d = 0; d < DIM / 8; d += 2) {
            u32 tiles[4];
            load_tiles_transposed(tiles, values + place(8 * n + lane % 16, d + lane / 16));
            u32 b[2][2] = {{tiles[0], tiles[1]}, {tiles[2], tiles[3]}};
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int i = 0; i < 2; i++) multiply_16x8x16<RF_TYPE>(out.of[m][d + i], a[m], b[i]);
        }
    }
}

#elif RF_MATRIX == 2
static_assert(sizeof(Bits) == 2, "multiply_16x16x16 is for 16-bit numbers");
// Hoisting loads for later products across this would take more registers than RDNA has.
#if defined(RF_HIP) && RF_WAVE == 32
#define IN_ORDER __builtin_amdgcn_sched_barrier(0)
#else
#define IN_ORDER
#endif

// Rows of out are columns of V: row i of product j is column 16 * base + count * i + j, for the products base to base +
// count - 1 of a piece, so that a lane reads `count` contiguous numbers.
static const int PIECE = DIM / 16 >= 8 ? 8 : 4, WHOLE = DIM / 16 / PIECE, REST = DIM / 16 % PIECE;
static_assert(DIM == 16 * (PIECE * WHOLE + REST) && (REST == 0 || REST == 1 || REST == 2), "a head dim of pieces");
RF_INLINE int column_of(int j, int lane) {
    int piece = j / (EACH * PIECE), count = piece < WHOLE ? PIECE : REST, within = j - piece * EACH * PIECE;
    return 16 * PIECE * piece + count * EACH * (lane / 16) + within;
}
// The index of that number in a lane's fragments.
RF_INLINE int number_of_column(int j) {
    int piece = j / (EACH * PIECE), count = piece < WHOLE ? PIECE : REST, within = j - piece * EACH * PIECE;
    return (piece * PIECE + within % count) * EACH + within / count;
}

typedef Registers<EACH / 2> Words;
struct QueryPart {
    Words of[M];
};
struct Queries {
    QueryPart parts[HELD ? DIM / 16 : 1];
};
RF_INLINE void load_queries(QueryPart &part, const Bits *queries, int first, int d, int lane) {
#pragma unroll
    for (int m = 0; m < M; m++) {
        int column = 16 * d + lane / 16 * EACH;
        part.of[m] =
            *(const Words *)(queries + place(first + row_of(m, lane), column / CHUNK) + column % CHUNK);
    }
}
RF_INLINE void multiply_keys(Scores &scores, const Queries &held, const Bits *queries, int first, const Bits *keys,
                             int lane) {
    clear(scores);
#pragma unroll
    for (int d = 0; d < DIM / 16; d++) {
        IN_ORDER;
        QueryPart part;
        if constexpr (HELD) part = held.parts[HELD ? d : 0];
        else load_queries(part, queries, first, d, lane);
#pragma unroll
        for (int n = 0; n < TILE_KEYS / 16; n++) {
            int column = 16 * d + lane / 16 * EACH;
            const Bits *from = keys + place(16 * n + matrix_row(lane % 16), column / CHUNK) + column % CHUNK;
            Words a = *(const Words *)from;
#pragma unroll
            for (int m = 0; m < M; m++) multiply_16x16x16<RF_TYPE>(scores.of[m][n], a.of, part.of[m].of);
        }
    }
}
template <int Count>
RF_INLINE void multiply_piece(Out &out, const u32 (&b)[M][EACH / 2], const Bits *values, int base, int key, int lane) {
    IN_ORDER;
    static const int WORDS = Count > 1 ? Count / 2 : 1;
    u32 words[EACH][WORDS];
    int column = 16 * base + Count * matrix_row(lane % 16);
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const Bits *from = values + place(key + lane / 16 * EACH + e, column / CHUNK) + column % CHUNK;
        Pack<RF_TYPE, Count> pack = *(const Pack<RF_TYPE, Count> *)from;
#pragma unroll
        for (int i = 0; i < WORDS; i++)
            words[e][i] = Count > 1 ? pack.bits[2 * i] | (u32)pack.bits[Count > 1 ? 2 * i + 1 : 0] << 16 : pack.bits[0];
    }
#pragma unroll
    for (int j = 0; j < Count; j++) {
        u32 a[EACH / 2];
#pragma unroll
        for (int i = 0; i < EACH / 2; i++)
            a[i] = bytes_of(words[2 * i][j / 2], words[2 * i + 1][j / 2], j % 2 ? 0x7632u : 0x5410u);
#pragma unroll
        for (int m = 0; m < M; m++) multiply_16x16x16<RF_TYPE>(out.of[m][base + j], a, b[m]);
    }
}
RF_INLINE void multiply_values(Out &out, const Scores &weights, const Bits *values, int lane) {
#pragma unroll
    for (int n = 0; n < TILE_KEYS / 16; n++) {
        u32 b[M][EACH / 2];
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < EACH / 2; i++)
                b[m][i] = two_near<RF_TYPE>(weights.of[m][n][2 * i], weights.of[m][n][2 * i + 1]);
#pragma unroll
        for (int piece = 0; piece < WHOLE; piece++) multiply_piece<PIECE>(out, b, values, PIECE * piece, 16 * n, lane);
        if constexpr (REST > 0) multiply_piece<REST ? REST : 1>(out, b, values, PIECE * WHOLE, 16 * n, lane);
    }
}

#else
// Four contiguous numbers: those of two fragments.
RF_INLINE int column_of(int j, int lane) { return j / 4 * 16 + lane % 4 * 4 + j % 4; }

struct Queries {};
RF_INLINE void multiply_keys(Scores &scores, const Queries &, const Bits *queries, int first, const Bits *keys,
                             int lane) {
    int t = lane % 4;
    clear(scores);
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        float q[ROWS][CHUNK];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            Pack<RF_TYPE, CHUNK> pack =
                *(const Pack<RF_TYPE, CHUNK> *)(queries + place(first + row_of(r, lane), chunk));
#pragma unroll
            for (int i = 0; i < CHUNK; i++) q[r][i] = RF_TYPE::load(pack.bits[i]);
        }
#pragma unroll
        for (int n = 0; n < TILE_KEYS / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                Pack<RF_TYPE, CHUNK> pack = *(const Pack<RF_TYPE, CHUNK> *)(keys + place(8 * n + 2 * t + e, chunk));
#pragma unroll
                for (int i = 0; i < CHUNK; i++) {
                    float number = RF_TYPE::load(pack.bits[i]);
#pragma unroll
                    for (int r = 0; r < ROWS; r++)
                        at(scores, r, 2 * n + e) = fmaf(q[r][i], number, at(scores, r, 2 * n + e));
                }
            }
    }
}
RF_INLINE void multiply_values(Out &out, Scores &weights, const Bits *values, int lane) {
#pragma unroll
    for (int n = 0; n < TILE_KEYS / 8; n++)
#pragma unroll 1
        for (int owner = 0; owner < 4; owner++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float weight[ROWS];
#pragma unroll
                for (int r = 0; r < ROWS; r++) weight[r] = shuffle(at(weights, r, 2 * n + e), lane / 4 * 4 + owner);
#pragma unroll
                for (int j = 0; j < SUMS; j += 4) {
                    int column = column_of(j, lane);
                    Pack<RF_TYPE, 4> pack =
                        *(const Pack<RF_TYPE, 4> *)(values + place(8 * n + 2 * owner + e, column / CHUNK) +
                                                    column % CHUNK);
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float number = RF_TYPE::load(pack.bits[i]);
#pragma unroll
                        for (int r = 0; r < ROWS; r++) at(out, r, j + i) = fmaf(weight[r], number, at(out, r, j + i));
                    }
                }
            }
}
#endif

RF_INLINE void hold_queries([[maybe_unused]] Queries &held, const Bits *queries, int first, int lane) {
#if RF_MATRIX
#pragma unroll
    for (int d = 0; d < DIM / 16; d++) load_queries(held.parts[HELD ? d : 0], queries, first, d, lane);
#endif
}

// The sum of column_of(j, lane).
RF_INLINE float sum_of(Out &out, int r, int j) {
#if RF_MATRIX == 2
    return at(out, r, number_of_column(j));
#else
    return at(out, r, j);
#endif
}

// --- keys and values from pages to shared memory -------------------------------------------------------------------

template <class A, class B> struct Same {
    static const bool IS = false;
};
template <class A> struct Same<A, A> {
    static const bool IS = true;
};
// Asynchronously to shared memory, or through registers.
static const bool DIRECT = Same<RF_TYPE, RF_KV>::IS && RF_MATRIX == 1;
static const int UNIT = 16 / (sizeof(Bits) > sizeof(Stored) ? sizeof(Bits) : sizeof(Stored));  // numbers moved together
static const int UNITS = DIM / UNIT, MOVES = (TILE_KEYS * UNITS + THREADS - 1) / THREADS;

// Number i of a pack. INT8 bytes become floats without a conversion instruction, which GPUs execute at a low rate:
// 2^23 + 128 + the number has it as its last byte.
RF_INLINE float number_of(const Pack<RF_KV, UNIT> &pack, int i) {
#if defined(RF_CUDA)
    if constexpr (SCALED) {
        u32 word = *(const u32 *)&pack.bits[i / 4 * 4] ^ 0x80808080u;
        return float_of(__byte_perm(word, 0x4b000000u, 0x7650u + i % 4)) - 8388736.0f;
    }
#endif
    return RF_KV::load(pack.bits[i]);
}

// The location of this thread's part of a tile.
struct Pages {
    const i32 *table;
    i64 page_bytes;
    int last;  // the last key that may be read
    int page[MOVES];

    static RF_INLINE int row_of(int move) { return (move * THREADS + threadIdx.x) / UNITS; }
    static RF_INLINE int unit_of(int move) { return (move * THREADS + threadIdx.x) % UNITS; }
    static RF_INLINE bool has(int move) {
        return (TILE_KEYS * UNITS) % THREADS == 0 || move * THREADS + (int)threadIdx.x < TILE_KEYS * UNITS;
    }
    RF_INLINE void find(int first) {
#pragma unroll
        for (int i = 0; i < MOVES; i++) page[i] = table[min(first + row_of(i), last) / RF_PAGE_SIZE];
    }
    RF_INLINE const u8 *at(const u8 *arena, int first, int i) const {
        u32 slot = (u32)min(first + row_of(i), last) % RF_PAGE_SIZE;
        return arena + page[i] * page_bytes + (slot * DIM + unit_of(i) * UNIT) * (u32)sizeof(Stored);
    }
};

// The keys, or the values, of a tile in flight.
struct Tile {
    const u8 *arena;      // slot 0 of page 0, for this layer and kv head
    const float *scales;  // the scale of page 0
    Bits *shared;
    Pack<RF_KV, UNIT> packs[DIRECT ? 1 : MOVES];
    float scale[SCALED ? MOVES : 1];

    RF_INLINE void load(const Pages &pages, int first) {
#pragma unroll
        for (int i = 0; i < MOVES; i++) {
            if (Pages::has(i)) packs[i] = *(const Pack<RF_KV, UNIT> *)pages.at(arena, first, i);
            if constexpr (SCALED) scale[i] = *(const float *)((const u8 *)scales + pages.page[i] * pages.page_bytes);
        }
    }
    RF_INLINE void store() {
#pragma unroll
        for (int i = 0; i < MOVES; i++) {
            if (!Pages::has(i)) continue;
            int column = Pages::unit_of(i) * UNIT;
            Bits *to = shared + place(Pages::row_of(i), column / CHUNK) + column % CHUNK;
            if constexpr (Same<RF_TYPE, RF_KV>::IS) {
                Pack<RF_TYPE, UNIT> same;
#pragma unroll
                for (int j = 0; j < UNIT; j++) same.bits[j] = packs[i].bits[j];
                *(Pack<RF_TYPE, UNIT> *)to = same;
            } else {
                float numbers[UNIT];
#pragma unroll
                for (int j = 0; j < UNIT; j++)
                    numbers[j] = number_of(packs[i], j) * (SCALED ? scale[SCALED ? i : 0] : 1.0f);
                Registers<UNIT * (int)sizeof(Bits) / 4> converted;
#pragma unroll
                for (int j = 0; j < UNIT * (int)sizeof(Bits) / 4; j++)
                    if constexpr (SCALED && sizeof(Bits) == 2)
                        converted.of[j] = two_near<RF_TYPE>(numbers[2 * j], numbers[2 * j + 1]);
                    else converted.of[j] = register_of(RF_TYPE(), numbers, j);
                *(Registers<UNIT * (int)sizeof(Bits) / 4> *)to = converted;
            }
        }
    }
    RF_INLINE void copy(const Pages &pages, int first) {
#pragma unroll
        for (int i = 0; i < MOVES; i++)
            if (Pages::has(i)) copy_16(shared + place(Pages::row_of(i), Pages::unit_of(i)), pages.at(arena, first, i));
    }
};

// --- weights -------------------------------------------------------------------------------------------------------

struct Softmax {
    float best[ROWS], total[ROWS];
    int limit[ROWS];  // the last key that the row sees

    RF_INLINE void weigh(Scores &scores, Out &out, int first, bool masked, float scale, int lane) {
        float highest[ROWS];
        bool higher = false;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            highest[r] = -RF_INFINITY;
#pragma unroll
            for (int j = 0; j < SCORES; j++) {
                if (masked && first + key_of(j, lane) > limit[r]) at(scores, r, j) = -RF_INFINITY;
                highest[r] = fmaxf(highest[r], at(scores, r, j));
            }
            highest[r] *= scale;
            higher = higher || highest[r] > best[r] + SLACK;
        }
        if (ballot(higher)) {
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float now = fmaxf(highest[r], best[r]);
#pragma unroll
                for (int i = 1; i < PARTS; i *= 2) now = fmaxf(now, shuffle_xor(now, i * STRIDE));
                float shrink = power_of_two(best[r] - now);
                best[r] = now;
                total[r] *= shrink;
#pragma unroll
                for (int j = 0; j < SUMS; j++) at(out, r, j) *= shrink;
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int j = 0; j < SCORES; j++) {
                float weight = power_of_two(fmaf(at(scores, r, j), scale, -best[r]));
                at(scores, r, j) = weight;
                total[r] += weight;
            }
    }
};

// q and out: [tokens, kv_heads * RF_GROUP, RF_HEAD_DIM]; q_stride numbers, a multiple of 16 bytes, from one token of q
// to the next. Row r of the batch has tokens offsets[r] to offsets[r + 1] - 1, the first at position starts[r]; its
// pages are tables[r * table_stride ...]. scale: the scores' factor, above 0, times log2(e). A partial result has, for
// each query from the item's index on and each kv head, RF_HEAD_DIM sums in `partials` and (maximum, sum of weights) in
// `stats`.
RF_KERNEL BOUNDS attention_prefill(const Bits *__restrict__ q, i64 q_stride, const u8 *__restrict__ pages,
                                   i64 page_bytes, i32 layers, i32 layer, i32 kv_heads, const i32 *__restrict__ tables,
                                   i32 table_stride, const i32 *__restrict__ starts, const i32 *__restrict__ offsets,
                                   const i32 *__restrict__ items, float scale, Bits *__restrict__ out,
                                   float *__restrict__ partials, float *__restrict__ stats) {
    __shared__ __align__(16) Bits shared[SHARED_ROWS * ROW_CHUNKS * CHUNK];
    Bits *queries = shared;

    int lane = threadIdx.x % RF_WAVE, wave = threadIdx.x / RF_WAVE;
    int head = blockIdx.x % kv_heads;
    const i32 *item = items + (i64)(blockIdx.x / kv_heads) * ITEM;
    int row = item[0], query = item[1], begin = item[2], end = item[3], partial = item[4];
    int token = offsets[row], start = starts[row];
    int count = min((offsets[row + 1] - token) * RF_GROUP - query, TILE);

    Pages where;
    where.table = tables + (i64)row * table_stride;
    where.page_bytes = page_bytes;
    where.last = end - 1;
    i64 of_head = (i64)RF_PAGE_SIZE * DIM * sizeof(Stored);
    Tile keys, values;
    keys.arena = pages + ((i64)layer * 2 * kv_heads + head) * of_head;
    values.arena = keys.arena + kv_heads * of_head;
    keys.scales = (const float *)(pages + (i64)layers * 2 * kv_heads * of_head) + (i64)layer * 2 * kv_heads + head;
    values.scales = keys.scales + kv_heads;
    keys.shared = shared + (HELD ? 0 : TILE * ROW_CHUNKS * CHUNK);
    values.shared = keys.shared + TILE_KEYS * ROW_CHUNKS * CHUNK;

    where.find(begin);
    for (int i = threadIdx.x; i < TILE * CHUNKS; i += THREADS) {
        int number = query + min(i / CHUNKS, count - 1);
        const Bits *from = q + (token + number / RF_GROUP) * q_stride + (head * RF_GROUP + number % RF_GROUP) * DIM +
                           i % CHUNKS * CHUNK;
        copy_16(queries + place(i / CHUNKS, i % CHUNKS), from);
    }
    int first_row = wave * WAVE_ROWS;
    Queries held;
    if constexpr (!DIRECT) keys.load(where, begin);
    if constexpr (HELD) {
        wait_copies();
        __syncthreads();
        hold_queries(held, queries, first_row, lane);
        __syncthreads();
    }
    if constexpr (DIRECT) {
        keys.copy(where, begin);
    } else {
        keys.store();
        values.load(where, begin);
        where.find(begin + TILE_KEYS);
    }

    Softmax softmax;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        int number = query + min(first_row + row_of(r, lane), count - 1);
        softmax.limit[r] = min(start + number / RF_GROUP, end - 1);
        softmax.best[r] = LOWEST, softmax.total[r] = 0.0f;
    }
    Out sums;
    clear(sums);
    int all_seen = min(start + query / RF_GROUP, end - 1);  // every row attends to all keys up to this one

    for (int first = begin; first < end; first += TILE_KEYS) {
        int next = first + TILE_KEYS;
        wait_copies();
        __syncthreads();  // the keys have arrived; the previous values are no longer needed
        if constexpr (DIRECT) {
            values.copy(where, first);
            where.find(next);
        } else {
            values.store();
            keys.load(where, next);
        }
        Scores scores;
        multiply_keys(scores, held, queries, first_row, keys.shared, lane);
        softmax.weigh(scores, sums, first, next - 1 > all_seen, scale, lane);
        wait_copies();
        __syncthreads();  // the values have arrived; the keys are no longer needed
        if constexpr (DIRECT) {
            if (next < end) keys.copy(where, next);
        } else {
            keys.store();
            values.load(where, next);
            where.find(next + TILE_KEYS);
        }
        multiply_values(sums, scores, values.shared, lane);
    }

#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
        for (int i = 1; i < PARTS; i *= 2) softmax.total[r] += shuffle_xor(softmax.total[r], i * STRIDE);
        int of = first_row + row_of(r, lane), number = query + of;
        if (of >= count) continue;
        if (partial < 0) {
            i64 to = (((i64)(token + number / RF_GROUP) * kv_heads + head) * RF_GROUP + number % RF_GROUP) * DIM;
            float factor = 1.0f / softmax.total[r];
#pragma unroll
            for (int j = 0; j < SUMS; j += 2) {
                Pack<RF_TYPE, 2> two;
#pragma unroll
                for (int e = 0; e < 2; e++) two.bits[e] = RF_TYPE::store(sum_of(sums, r, j + e) * factor);
                *(Pack<RF_TYPE, 2> *)(out + to + column_of(j, lane)) = two;
            }
        } else {
            i64 to = ((i64)partial + of) * kv_heads + head;
#pragma unroll
            for (int j = 0; j < SUMS; j += 2)
                *(float2 *)(partials + to * DIM + column_of(j, lane)) =
                    make_float2(sum_of(sums, r, j), sum_of(sums, r, j + 1));
            if (lane / STRIDE % PARTS == 0) stats[to * 2] = softmax.best[r], stats[to * 2 + 1] = softmax.total[r];
        }
    }
}
