// Attention of many new tokens of a row over its paged keys: bound by multiplications, so tiles of queries meet tiles of
// keys in shared memory (Dao, "FlashAttention-2").
//
// A block takes an item: keys begin to end of one row, for one kv head and RF_TILE of its queries. The waves have
// those rows between them, and go together through the keys, TILE_KEYS at a time: while one tile of keys is multiplied its
// values arrive, and while these are multiplied the next keys do. A row whose keys are more than one item leaves partial
// results to attention_combine.hip.
//
// The queries of a row are numbered q = token * RF_GROUP + head of the group. No slot is read that holds no key of the
// row: behind the last key, lanes read the last one again, and its weight is 0.
//
// defines: RF_TYPE=F32|F16|BF16 RF_KV=F32|F16|BF16|INT8 RF_HEAD_DIM=64|80|96|128|256 RF_PAGE_SIZE=1.. RF_GROUP=1..
// defines: RF_MATRIX=0|1
// variants: RF_TYPE=F16|BF16 RF_KV=F16 RF_HEAD_DIM=128 RF_PAGE_SIZE=16 RF_GROUP=4
// variants: RF_TYPE=BF16 RF_KV=BF16|INT8 RF_HEAD_DIM=64|80|96|128|256 RF_PAGE_SIZE=16 RF_GROUP=7
// variants: RF_TYPE=F32 RF_KV=F32|INT8 RF_HEAD_DIM=64|128|256 RF_PAGE_SIZE=24 RF_GROUP=1
#include "common.h"

#if !defined(RF_TYPE) || !defined(RF_KV) || !defined(RF_HEAD_DIM) || !defined(RF_PAGE_SIZE) || !defined(RF_GROUP)
#error "attention_prefill: RF_TYPE, RF_KV, RF_HEAD_DIM, RF_PAGE_SIZE and RF_GROUP must be defined"
#endif
// 1: by multiply_16x8x16, for RF_TYPE of 16 bits. 0: one number at a time.
#ifndef RF_MATRIX
#define RF_MATRIX 0
#endif

typedef RF_TYPE::Bits Bits;
typedef RF_KV::Bits Stored;
static const int DIM = RF_HEAD_DIM;
static const int ITEM = 5;  // row, first query, begin, end, number of the partial result or -1
static const bool SCALED = sizeof(Stored) == 1;
#define LOWEST -3.0e38f  // below any score, and finite: the maximum of a query that has seen no key
#define SLACK 8.0f       // the maximum in use may be this much too low, in powers of two: the sums need a new scale less often

// --- shared memory: rows of DIM numbers in chunks of 16 bytes --------------------------------------------------------

static const int CHUNK = 16 / sizeof(Bits), CHUNKS = DIM / CHUNK;
// Eight rows at the same chunk lie in all banks: chunks change places with the row, or rows have an odd number of them.
static const bool SWIZZLED = CHUNKS % 8 == 0;
static const int ROW_CHUNKS = SWIZZLED ? CHUNKS : CHUNKS | 1;
static const int ROW_BYTES = ROW_CHUNKS * 16;
RF_INLINE int place(int row, int chunk) { return row * (ROW_CHUNKS * CHUNK) + (SWIZZLED ? chunk ^ (row & 7) : chunk) * CHUNK; }

// Queries of a tile, such that they take 32 KB at most; the host knows the same (attention.py).
static const int TILE = DIM * sizeof(Bits) <= 256 ? 128 : DIM * sizeof(Bits) <= 512 ? 64 : 32;
static const int ROOM = (48 * 1024 - TILE * ROW_BYTES) / (2 * ROW_BYTES);
static const int TILE_KEYS = ROOM >= 64 ? 64 : ROOM >= 48 ? 48 : ROOM >= 32 ? 32 : ROOM >= 16 ? 16 : 8;

// --- what a lane has -------------------------------------------------------------------------------------------------

// A fragment is RF_WAVE / 2 rows by 8 columns. Lane 4 g + t has, of row g and of row g + RF_WAVE / 4, columns 2 t and
// 2 t + 1: for waves of 32 lanes as multiply_16x8x16 has them.
static const int FRAGMENT_ROWS = RF_WAVE / 2;
static const int M = RF_MATRIX && DIM <= 128 ? 2 : 1;  // fragments of a wave, by rows
static const int WAVE_ROWS = M * FRAGMENT_ROWS;
static const int WAVES = TILE / WAVE_ROWS, THREADS = WAVES * RF_WAVE;
static const int KEY_FRAGMENTS = TILE_KEYS / 8, DIM_FRAGMENTS = DIM / 8;
typedef float Scores[M][KEY_FRAGMENTS][4];
typedef float Out[M][DIM_FRAGMENTS][4];

#if defined(RF_CUDA)
#define BOUNDS __launch_bounds__(THREADS, THREADS <= 128 ? 2 : 1)
#else
#define BOUNDS __launch_bounds__(THREADS)
#endif

#if RF_MATRIX == 1
static_assert(sizeof(Bits) == 2 && RF_WAVE == 32, "multiply_16x8x16 is for 16-bit numbers and waves of 32 lanes");

RF_INLINE int column_of(int fragment, int i, int t) { return 8 * fragment + 2 * t + i; }

// scores = queries, from row `first` on, times keys.
RF_INLINE void multiply_keys(Scores &scores, const Bits *queries, int first, const Bits *keys, int lane) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < KEY_FRAGMENTS; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) scores[m][n][i] = 0.0f;
#pragma unroll
    for (int d = 0; d < DIM / 16; d++) {
        u32 a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) load_tiles(a[m], queries + place(first + 16 * m + lane % 16, 2 * d + lane / 16));
#pragma unroll
        for (int n = 0; n < KEY_FRAGMENTS; n += 2) {
            u32 tiles[4];
            load_tiles(tiles, keys + place(8 * n + lane / 16 * 8 + lane % 8, 2 * d + lane / 8 % 2));
            u32 b[2][2] = {{tiles[0], tiles[1]}, {tiles[2], tiles[3]}};
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int i = 0; i < 2; i++) multiply_16x8x16<RF_TYPE>(scores[m][n + i], a[m], b[i]);
        }
    }
}
// out += weights times values. The weights lie as that needs them.
RF_INLINE void multiply_values(Out &out, const Scores &weights, const Bits *values, int lane) {
#pragma unroll
    for (int n = 0; n < KEY_FRAGMENTS; n += 2) {
        u32 a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                a[m][i] = two_of<RF_TYPE>(weights[m][n + i / 2][i % 2 * 2], weights[m][n + i / 2][i % 2 * 2 + 1]);
#pragma unroll
        for (int d = 0; d < DIM_FRAGMENTS; d += 2) {
            u32 tiles[4];
            load_tiles_transposed(tiles, values + place(8 * n + lane % 16, d + lane / 16));
            u32 b[2][2] = {{tiles[0], tiles[1]}, {tiles[2], tiles[3]}};
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int i = 0; i < 2; i++) multiply_16x8x16<RF_TYPE>(out[m][d + i], a[m], b[i]);
        }
    }
}
#else
// Four numbers that lie together: two fragments' worth.
RF_INLINE int column_of(int fragment, int i, int t) { return fragment / 2 * 16 + 4 * t + fragment % 2 * 2 + i; }

RF_INLINE void multiply_keys(Scores &scores, const Bits *queries, int first, const Bits *keys, int lane) {
    int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < KEY_FRAGMENTS; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) scores[m][n][i] = 0.0f;
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        float q[2 * M][CHUNK];
#pragma unroll
        for (int r = 0; r < 2 * M; r++) {
            Pack<RF_TYPE, CHUNK> pack =
                *(const Pack<RF_TYPE, CHUNK> *)(queries + place(first + r * (RF_WAVE / 4) + g, chunk));
#pragma unroll
            for (int i = 0; i < CHUNK; i++) q[r][i] = RF_TYPE::load(pack.bits[i]);
        }
#pragma unroll
        for (int n = 0; n < KEY_FRAGMENTS; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                Pack<RF_TYPE, CHUNK> pack = *(const Pack<RF_TYPE, CHUNK> *)(keys + place(8 * n + 2 * t + e, chunk));
#pragma unroll
                for (int i = 0; i < CHUNK; i++) {
                    float number = RF_TYPE::load(pack.bits[i]);
#pragma unroll
                    for (int r = 0; r < 2 * M; r++)
                        scores[r / 2][n][r % 2 * 2 + e] = fmaf(q[r][i], number, scores[r / 2][n][r % 2 * 2 + e]);
                }
            }
    }
}
RF_INLINE void multiply_values(Out &out, const Scores &weights, const Bits *values, int lane) {
    int t = lane % 4;
#pragma unroll
    for (int n = 0; n < KEY_FRAGMENTS; n++)
#pragma unroll 1
        for (int owner = 0; owner < 4; owner++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float weight[2 * M];
#pragma unroll
                for (int r = 0; r < 2 * M; r++) weight[r] = shuffle(weights[r / 2][n][r % 2 * 2 + e], lane / 4 * 4 + owner);
#pragma unroll
                for (int d = 0; d < DIM_FRAGMENTS; d += 2) {
                    int first = column_of(d, 0, t);
                    Pack<RF_TYPE, 4> pack =
                        *(const Pack<RF_TYPE, 4> *)(values + place(8 * n + 2 * owner + e, first / CHUNK) + first % CHUNK);
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float number = RF_TYPE::load(pack.bits[i]);
#pragma unroll
                        for (int r = 0; r < 2 * M; r++)
                            out[r / 2][d + i / 2][r % 2 * 2 + i % 2] =
                                fmaf(weight[r], number, out[r / 2][d + i / 2][r % 2 * 2 + i % 2]);
                    }
                }
            }
}
#endif

// --- keys and values from pages to shared memory ----------------------------------------------------------------------

template <class A, class B> struct Same { static const bool IS = false; };
template <class A> struct Same<A, A> { static const bool IS = true; };
// Straight to shared memory, without waiting, or by way of registers.
static const bool DIRECT = Same<RF_TYPE, RF_KV>::IS && RF_MATRIX == 1;
static const int UNIT = 16 / (sizeof(Bits) > sizeof(Stored) ? sizeof(Bits) : sizeof(Stored));  // numbers moved together
static const int UNITS = DIM / UNIT, MOVES = (TILE_KEYS * UNITS + THREADS - 1) / THREADS;

// Where this thread's part of a tile lies.
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

// The keys, or the values, of a tile on their way.
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
            Pack<RF_TYPE, UNIT> converted;
#pragma unroll
            for (int j = 0; j < UNIT; j++) {
                if constexpr (Same<RF_TYPE, RF_KV>::IS) {
                    converted.bits[j] = packs[i].bits[j];
                } else {
                    float number = RF_KV::load(packs[i].bits[j]);
                    if constexpr (SCALED) number *= scale[i];
                    converted.bits[j] = RF_TYPE::store(number);
                }
            }
            int column = Pages::unit_of(i) * UNIT;
            *(Pack<RF_TYPE, UNIT> *)(shared + place(Pages::row_of(i), column / CHUNK) + column % CHUNK) = converted;
        }
    }
    RF_INLINE void copy(const Pages &pages, int first) {
#pragma unroll
        for (int i = 0; i < MOVES; i++)
            if (Pages::has(i)) copy_16(shared + place(Pages::row_of(i), Pages::unit_of(i)), pages.at(arena, first, i));
    }
};

// --- weights -----------------------------------------------------------------------------------------------------------

// Row r = 2 m + h of a lane is row FRAGMENT_ROWS m + RF_WAVE / 4 h + g of its wave.
struct Softmax {
    float best[2 * M], total[2 * M];
    int limit[2 * M];  // the last key that the row sees

    RF_INLINE void weigh(Scores &scores, Out &out, int first, bool masked, float scale, int lane) {
        float highest[2 * M];
        bool higher = false;
#pragma unroll
        for (int r = 0; r < 2 * M; r++) {
            highest[r] = -RF_INFINITY;
#pragma unroll
            for (int n = 0; n < KEY_FRAGMENTS; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float &score = scores[r / 2][n][r % 2 * 2 + e];
                    if (masked && first + 8 * n + lane % 4 * 2 + e > limit[r]) score = -RF_INFINITY;
                    highest[r] = fmaxf(highest[r], score);
                }
            highest[r] *= scale;
            higher = higher || highest[r] > best[r] + SLACK;
        }
        if (ballot(higher)) {
#pragma unroll
            for (int r = 0; r < 2 * M; r++) {
                float now = fmaxf(highest[r], best[r]);
                now = fmaxf(now, shuffle_xor(now, 1));
                now = fmaxf(now, shuffle_xor(now, 2));
                float shrink = power_of_two(best[r] - now);
                best[r] = now;
                total[r] *= shrink;
#pragma unroll
                for (int n = 0; n < DIM_FRAGMENTS; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) out[r / 2][n][r % 2 * 2 + e] *= shrink;
            }
        }
#pragma unroll
        for (int r = 0; r < 2 * M; r++)
#pragma unroll
            for (int n = 0; n < KEY_FRAGMENTS; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float &score = scores[r / 2][n][r % 2 * 2 + e];
                    score = power_of_two(fmaf(score, scale, -best[r]));
                    total[r] += score;
                }
    }
};

// q and out: [tokens, kv_heads * RF_GROUP, RF_HEAD_DIM], q with q_stride numbers from token to token, a multiple of 16
// bytes. Row r of the batch has the tokens offsets[r] to offsets[r + 1], the first at position starts[r], and its pages
// are tables[r * table_stride ...]. scale: of the scores, above 0, times log2(e). A partial result is, for each query from
// the item's number on and each kv head, RF_HEAD_DIM sums in `partials` and (maximum, sum of weights) in `stats`.
RF_KERNEL BOUNDS attention_prefill(
    const Bits *__restrict__ q, i64 q_stride, const u8 *__restrict__ pages, i64 page_bytes, i32 layers, i32 layer,
    i32 kv_heads, const i32 *__restrict__ tables, i32 table_stride, const i32 *__restrict__ starts,
    const i32 *__restrict__ offsets, const i32 *__restrict__ items, float scale, Bits *__restrict__ out,
    float *__restrict__ partials, float *__restrict__ stats) {
    __shared__ __align__(16) Bits shared[(TILE + 2 * TILE_KEYS) * ROW_CHUNKS * CHUNK];
    Bits *queries = shared;

    int lane = threadIdx.x % RF_WAVE, wave = threadIdx.x / RF_WAVE, g = lane / 4, t = lane % 4;
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
    keys.shared = shared + TILE * ROW_CHUNKS * CHUNK;
    values.shared = keys.shared + TILE_KEYS * ROW_CHUNKS * CHUNK;

    where.find(begin);
    for (int i = threadIdx.x; i < TILE * CHUNKS; i += THREADS) {
        int number = query + min(i / CHUNKS, count - 1);
        const Bits *from =
            q + (token + number / RF_GROUP) * q_stride + (head * RF_GROUP + number % RF_GROUP) * DIM + i % CHUNKS * CHUNK;
        copy_16(queries + place(i / CHUNKS, i % CHUNKS), from);
    }
    if constexpr (DIRECT) {
        keys.copy(where, begin);
    } else {
        keys.load(where, begin);
        keys.store();
        values.load(where, begin);
        where.find(begin + TILE_KEYS);
    }

    Softmax softmax;
    Out sums;
    int first_row = wave * WAVE_ROWS;
#pragma unroll
    for (int r = 0; r < 2 * M; r++) {
        int number = query + min(first_row + r * (RF_WAVE / 4) + g, count - 1);
        softmax.limit[r] = min(start + number / RF_GROUP, end - 1);
        softmax.best[r] = LOWEST, softmax.total[r] = 0.0f;
    }
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < DIM_FRAGMENTS; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sums[m][n][i] = 0.0f;
    int all_seen = min(start + query / RF_GROUP, end - 1);  // up to this key, every row sees all

    for (int first = begin; first < end; first += TILE_KEYS) {
        int next = first + TILE_KEYS;
        wait_copies();
        __syncthreads();  // the keys are there; the last values have been used
        if constexpr (DIRECT) {
            values.copy(where, first);
            where.find(next);
        } else {
            values.store();
            keys.load(where, next);
        }
        Scores scores;
        multiply_keys(scores, queries, first_row, keys.shared, lane);
        softmax.weigh(scores, sums, first, next - 1 > all_seen, scale, lane);
        wait_copies();
        __syncthreads();  // the values are there; the keys have been used
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
    for (int r = 0; r < 2 * M; r++) {
        softmax.total[r] += shuffle_xor(softmax.total[r], 1);
        softmax.total[r] += shuffle_xor(softmax.total[r], 2);
        int of = first_row + r * (RF_WAVE / 4) + g, number = query + of;
        if (of >= count) continue;
        if (partial < 0) {
            i64 to = (((i64)(token + number / RF_GROUP) * kv_heads + head) * RF_GROUP + number % RF_GROUP) * DIM;
            float factor = 1.0f / softmax.total[r];
#pragma unroll
            for (int n = 0; n < DIM_FRAGMENTS; n++) {
                Pack<RF_TYPE, 2> two;
#pragma unroll
                for (int e = 0; e < 2; e++) two.bits[e] = RF_TYPE::store(sums[r / 2][n][r % 2 * 2 + e] * factor);
                *(Pack<RF_TYPE, 2> *)(out + to + column_of(n, 0, t)) = two;
            }
        } else {
            i64 to = ((i64)partial + of) * kv_heads + head;
#pragma unroll
            for (int n = 0; n < DIM_FRAGMENTS; n++)
                *(float2 *)(partials + to * DIM + column_of(n, 0, t)) =
                    make_float2(sums[r / 2][n][r % 2 * 2], sums[r / 2][n][r % 2 * 2 + 1]);
            if (t == 0) stats[to * 2] = softmax.best[r], stats[to * 2 + 1] = softmax.total[r];
        }
    }
}
