// Attention of few queries over long, paged keys and values: every processor, both dtypes.
//
// A query row's scores, weights and sums are made key by key in the order of the keys, whatever other
// rows share its item of work.
#pragma once
#include "model.h"

#define QUERIES 8  // query rows (tokens × heads of a group) attended at a time
#define MIXED 4    // of them, rows whose values are summed together

// Scores of R query rows against one block of 32 keys: dot products in the order of d.
INLINE void score_block(int R, int dtype, const float *const *q, const void *keys, int64_t base, int d,
                        float scaling, float *scores, int64_t ld, int at) {
    v16 a[QUERIES], c[QUERIES];
    for (int r = 0; r < R; r++) a[r] = c[r] = splat(0);
    for (int i = 0; i < d; i++) {
        v16 k0 = get(dtype, keys, base + i * BLOCK), k1 = get(dtype, keys, base + i * BLOCK + 16);
        for (int r = 0; r < R; r++) a[r] += q[r][i] * k0, c[r] += q[r][i] * k1;
    }
    for (int r = 0; r < R; r++) {
        store(scores + r * ld + at, a[r] * scaling);
        store(scores + r * ld + at + 16, c[r] * scaling);
    }
}

// Softmax over scores[from .. last], in place; returns the sum. `first` and `end` lie on block borders
// around it; entries outside get weight 0.
INLINE float soften(float *scores, int first, int from, int last, int end) {
    for (int j = first; j < from; j++) scores[j] = -INFINITY;
    for (int j = last + 1; j < end; j++) scores[j] = -INFINITY;
    v16 peak = splat(-INFINITY), sum = splat(0);
    for (int j = first; j < end; j += 16) peak = vmax(peak, load(scores + j));
    v16 top = splat(max16(peak));
    for (int j = first; j < end; j += 16) {
        v16 weight = vexp(load(scores + j) - top);
        store(scores + j, weight);
        sum += weight;
    }
    return sum16(sum);
}

// The values of one KV head, by block table.
typedef struct {
    const void *values;
    const int32_t *table;
    int64_t head, stride;  // this head within a block, and from block to block
    int dtype, d;
} Values;

// acc[r] += weights[r][j] · value[j] for j in [from, to), V vectors of 16 dimensions beginning at i.
INLINE void mix_range(int R, int V, v16 (*acc)[4], const float *weights, int64_t ld, const Values *s, int i,
                      int from, int to) {
    v16 sums[MIXED][4];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) sums[r][v] = acc[r][v];
    for (int j = from; j < to; j++) {
        int64_t row = s->table[j / BLOCK] * s->stride + s->head + (int64_t)(j % BLOCK) * s->d + i;
        v16 value[4];
        for (int v = 0; v < V; v++) value[v] = get(s->dtype, s->values, row + v * 16);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) sums[r][v] += weights[r * ld + j] * value[v];
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) acc[r][v] = sums[r][v];
}

// Weighted sums of values for R rows that see [from[r], last[r]]; what a row cannot see is not read for
// it: it may be NaN.
INLINE void mix(int R, int V, const float *weights, int64_t ld, const Values *s, const int *from,
                const int *last, const float *total, int amx, void *out, const int *rows,
                const int *columns, int64_t width) {
    int begin = from[0], end = last[0] + 1;  // what all of them see
    for (int r = 1; r < R; r++) {
        if (from[r] > begin) begin = from[r];
        if (last[r] + 1 < end) end = last[r] + 1;
    }
    if (end < begin) end = begin;
    for (int i = 0; i < s->d; i += 16 * V) {
        v16 acc[MIXED][4];
        for (int r = 0; r < R; r++) {
            for (int v = 0; v < V; v++) acc[r][v] = splat(0);
            int until = begin < last[r] + 1 ? begin : last[r] + 1;
            mix_range(1, V, acc + r, weights + r * ld, ld, s, i, from[r], until);
        }
        mix_range(R, V, acc, weights, ld, s, i, begin, end);
        for (int r = 0; r < R; r++) {
            mix_range(1, V, acc + r, weights + r * ld, ld, s, i, end, last[r] + 1);
            for (int v = 0; v < V; v++)
                put(s->dtype, out, act_at(amx, rows[r], columns[r] + i + v * 16, width),
                    acc[r][v] / total[r]);
        }
    }
}

// Attention of up to 8 tokens of one sequence, for one KV head and its group of query heads.
static void attend(const Model *m, const Layer *l, const Batch *b, int item, int h, float *scores,
                   int64_t ld) {
    int d = m->head_dim, group = m->heads / m->kv_heads, dtype = m->dtype;
    const int32_t *table = b->tables + (int64_t)b->item_seq[item] * b->table_width;
    int64_t stride = (int64_t)m->kv_heads * d * BLOCK, head = (int64_t)h * d * BLOCK;
    int64_t width = (int64_t)(m->heads + 2 * m->kv_heads) * d;
    Values s = {l->values, table, head, stride, dtype, d};
    int all = b->item_count[item] * group;
    for (int done = 0; done < all; done += QUERIES) {
        int R = all - done < QUERIES ? all - done : QUERIES;
        int tokens[QUERIES], columns[QUERIES], from[QUERIES], last[QUERIES];
        const float *q[QUERIES];
        float total[QUERIES];
        int first = INT32_MAX, end = 0;
        for (int r = 0; r < R; r++) {
            tokens[r] = b->item_token[item] + (done + r) / group;
            columns[r] = (h * group + (done + r) % group) * d;
            q[r] = b->qkv + tokens[r] * width + columns[r];
            last[r] = (int)b->positions[tokens[r]];
            from[r] = first_seen(m, last[r]);
            if (from[r] < first) first = from[r];
            if (last[r] + 1 > end) end = last[r] + 1;
        }
        for (int r = R; r < QUERIES; r++) q[r] = q[0];
        for (int j = first / BLOCK * BLOCK; j < end; j += BLOCK) {
            int64_t base = table[j / BLOCK] * stride + head;
#define SCORE(n) score_block(n, dtype, q, l->keys, base, d, m->scaling, scores, ld, j)
            if (R == 1) SCORE(1);
            else if (R == 2) SCORE(2);
            else if (R <= 4) SCORE(4);
            else SCORE(8);
        }
        for (int r = 0; r < R; r++)
            total[r] = soften(scores + r * ld, from[r] / BLOCK * BLOCK, from[r], last[r],
                              last[r] / BLOCK * BLOCK + BLOCK);
        for (int r = 0; r < R;) {
#define MIX(n, v)                                                                                          \
    mix(n, v, scores + r * ld, ld, &s, from + r, last + r, total + r, m->amx, b->act, tokens + r, columns + r, \
        (int64_t)m->heads * d), r += n
#define MIX_ROWS(v)                                                                                        \
    if (R - r >= 4) MIX(4, v);                                                                             \
    else if (R - r >= 2) MIX(2, v);                                                                        \
    else MIX(1, v)
            if (d % 64 == 0) { MIX_ROWS(4); }
            else { MIX_ROWS(2); }
        }
    }
}
