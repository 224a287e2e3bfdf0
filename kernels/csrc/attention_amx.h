// Attention with bfloat16 tiles: 16 query rows against 16 keys, or 16 dimensions of 32 keys, at a time.
//
// Keys and values of a block (32 tokens of one KV head) lie as the tiles' second operands:
//   keys    [2 halves of 16 keys][D/32][16 pairs of dimensions][16 keys][2]
//   values  [D/16][16 pairs of keys][16 dimensions][2]
// A tile's rows do not see each other, and a weight of 0 adds nothing: so a row's sums do not depend on
// what shares its tile, as long as no value is NaN or infinite. `place_amx` sees to that.
#pragma once
#include "attention.h"

#if HAVE_AMX

#define AMX_ROWS 16
#define MAX_HEAD_DIM 256

// As bfloat16, which the largest float32 numbers overflow.
INLINE int all_finite(const float *x, int n) {
    lanes16 sum = all16(0);
    for (int i = 0; i < n; i += 16) sum.part[0] += (vf)round_bf16(load(x + i)) * 0.0f;
    return sum16(sum) == 0.0f;
}

// Write one token's key and value. A value that is not finite would reach rows that must not see it, so
// it is dropped and its key is NaN instead, which spoils exactly those who do.
static void place_amx(bf16 *keys, bf16 *values, const float *k, const float *v, int d, int at) {
    bf16 key[16], value[16];
    int finite = all_finite(v, d);
    for (int i = 0; i < d; i += 16) {
        vf dims = load(v + i);
        store_bf16(key, finite ? load(k + i) : splat(NAN));
        store_bf16(value, finite ? dims : splat(0));
        bf16 *to_key = keys + ((at / 16 * (d / 32) + i / 32) * 16 + i % 32 / 2) * 32 + at % 16 * 2;
        bf16 *to_value = values + (i / 16 * 16 + at / 2) * 32 + at % 2;
        for (int j = 0; j < 16; j += 2) memcpy(to_key + j / 2 * 32, key + j, 4);
        for (int j = 0; j < 16; j++) to_value[j * 2] = value[j];
    }
}

// Scores of 16 rows against the 32 keys of a block, into scores[.., at].
INLINE void score_amx(const bf16 *q, const bf16 *keys, int d, float *scores, int64_t ld, int at) {
    _tile_zero(0);
    _tile_zero(1);
    for (int i = 0; i < d / 32; i++) {
        _tile_loadd(4, q + i * 512, 64);
        _tile_loadd(5, keys + i * 512, 64);
        _tile_loadd(6, keys + (d / 32 + i) * 512, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_dpbf16ps(1, 4, 6);
    }
    _tile_stored(0, scores + at, ld * 4);
    _tile_stored(1, scores + at + 16, ld * 4);
}

// Softmax over the scaled scores[from .. last]; weights, rounded, go to one row of the tiles behind one
// another, 0 where the row must not look. Returns the sum before rounding.
INLINE float soften_amx(float *scores, float scaling, int first, int from, int last, int end,
                        bf16 *weights) {
    for (int j = first; j < from; j++) scores[j] = -INFINITY;
    for (int j = last + 1; j < end; j++) scores[j] = -INFINITY;
    lanes16 peak = all16(-INFINITY), sum = all16(0);
    for (int j = first; j < end; j += 16) {
        vf score = load(scores + j);
        peak.part[0] = pick(score > peak.part[0], score, peak.part[0]);
    }
    vf top = splat(max16(peak) * scaling);
    for (int j = first; j < end; j += 16) {
        vf weight = vexp(load(scores + j) * scaling - top);
        store_bf16(weights + (j - first) / BLOCK * 512 + j % BLOCK, weight);
        sum.part[0] += weight;
    }
    return sum16(sum);
}

// Weighted sums of values over the blocks [first, end), 16 rows, into out[16][d].
INLINE void mix_amx(int tiles, const bf16 *weights, const Values *s, int first, int end, int column,
                    float *out) {
    _tile_zero(0);
    _tile_zero(1);
    if (tiles == 4) { _tile_zero(2); _tile_zero(3); }
    for (int j = first; j < end; j++) {
        const bf16 *value = (const bf16 *)s->values + s->table[j] * s->stride + s->head + column * 32;
        _tile_loadd(4, weights + (int64_t)(j - first) * 512, 64);
        _tile_loadd(5, value, 64);
        _tile_loadd(6, value + 512, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_dpbf16ps(1, 4, 6);
        if (tiles == 4) {
            _tile_loadd(5, value + 1024, 64);
            _tile_loadd(6, value + 1536, 64);
            _tile_dpbf16ps(2, 4, 5);
            _tile_dpbf16ps(3, 4, 6);
        }
    }
    _tile_stored(0, out + column, s->d * 4);
    _tile_stored(1, out + column + 16, s->d * 4);
    if (tiles == 4) {
        _tile_stored(2, out + column + 32, s->d * 4);
        _tile_stored(3, out + column + 48, s->d * 4);
    }
}

// As `attend`. `scores` has room for 16 rows and, behind them, for their weights as tiles.
static void attend_amx(const Model *m, const Layer *l, const Batch *b, int item, int h, float *scores,
                       int64_t ld) {
    int d = m->head_dim, group = m->heads / m->kv_heads, all = b->item_count[item] * group;
    const int32_t *table = b->tables + (int64_t)b->item_seq[item] * b->table_width;
    Values s = {l->values, table, (int64_t)h * d * BLOCK, (int64_t)m->kv_heads * d * BLOCK, BF16, d};
    int64_t width = (int64_t)(m->heads + 2 * m->kv_heads) * d;
    bf16 *weights = (bf16 *)(scores + AMX_ROWS * ld);
    bf16 q[AMX_ROWS * MAX_HEAD_DIM] __attribute__((aligned(64)));
    float out[AMX_ROWS * MAX_HEAD_DIM] __attribute__((aligned(64)));
    for (int done = 0; done < all; done += AMX_ROWS) {
        int R = all - done < AMX_ROWS ? all - done : AMX_ROWS;
        int tokens[AMX_ROWS], columns[AMX_ROWS], from[AMX_ROWS], last[AMX_ROWS];
        int first = INT32_MAX, end = 0;
        if (R < AMX_ROWS) memset(q, 0, sizeof(bf16) * AMX_ROWS * d);
        for (int r = 0; r < R; r++) {
            tokens[r] = b->item_token[item] + (done + r) / group;
            columns[r] = (h * group + (done + r) % group) * d;
            last[r] = (int)b->positions[tokens[r]];
            from[r] = first_seen(m, last[r]);
            if (from[r] < first) first = from[r];
            if (last[r] + 1 > end) end = last[r] + 1;
            const float *query = b->qkv + tokens[r] * width + columns[r];
            for (int i = 0; i < d; i += 16)
                store_bf16(q + (i / 32 * 16 + r) * 32 + i % 32, load(query + i));
        }
        first /= BLOCK, end = (end + BLOCK - 1) / BLOCK;
        for (int j = first; j < end; j++)
            score_amx(q, (const bf16 *)l->keys + table[j] * s.stride + s.head, d, scores, ld, j * BLOCK);
        float total[AMX_ROWS];
        for (int r = 0; r < AMX_ROWS; r++) {
            float *row = scores + r * ld;
            if (r >= R) {
                for (int j = first; j < end; j++) memset(weights + ((j - first) * 16 + r) * 32, 0, 64);
                continue;
            }
            total[r] = soften_amx(row, m->scaling, first * BLOCK, from[r], last[r], end * BLOCK,
                              weights + r * 32);
        }
        for (int i = 0; i < d; i += 64)
            if (d - i >= 64) mix_amx(4, weights, &s, first, end, i, out);
            else mix_amx(2, weights, &s, first, end, i, out);
        for (int r = 0; r < R; r++)
            for (int i = 0; i < d; i += 16)
                put_act(BF16, b->act, act_at(BF16, tokens[r], columns[r] + i, (int64_t)m->heads * d),
                        load(out + r * d + i) / total[r]);
    }
}
#else
INLINE void place_amx(void *keys, void *values, const float *k, const float *v, int d, int at) {
    (void)keys, (void)values, (void)k, (void)v, (void)d, (void)at;
}
INLINE void attend_amx(const Model *m, const Layer *l, const Batch *b, int item, int h, float *scores, int64_t ld) {
    (void)m, (void)l, (void)b, (void)item, (void)h, (void)scores, (void)ld;
}
#endif
