// Attention of few queries over long, paged keys and values: every level, both dtypes.
//
// A query row's scores, weights and sums are made key by key in the order of the keys (scores: in the
// order of d), whatever other rows share its item of work.
#pragma once
#include "model.h"

#define QUERIES 8  // query rows (tokens × heads of a group) attended at a time
#if W == 8
#define SUMS 12  // accumulators in use at a time
#else
#define SUMS 16
#endif
#define BLOCK_VECTORS (BLOCK / W)

// Scores of R query rows against V vectors of keys of a block: dot products in the order of d.
INLINE void score_keys(int R, int V, int dtype, const float *const *q, const void *keys, int64_t base, int d,
                       float scaling, float *scores, int64_t ld) {
    vf sums[SUMS];
    for (int c = 0; c < R * V; c++) sums[c] = splat(0);
    for (int i = 0; i < d; i++) {
        vf key[BLOCK_VECTORS];
        for (int v = 0; v < V; v++) key[v] = get(dtype, keys, base + i * BLOCK + v * W);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) sums[r * V + v] = vfma(splat(q[r][i]), key[v], sums[r * V + v]);
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(scores + r * ld + v * W, sums[r * V + v] * scaling);
}

// As many keys at a time as the registers take.
INLINE void score_block(int R, int dtype, const float *const *q, const void *keys, int64_t base, int d,
                        float scaling, float *scores, int64_t ld) {
    const int fits = SUMS / R >= 8 ? 8 : SUMS / R >= 4 ? 4 : 2;
    const int V = fits < BLOCK_VECTORS ? fits : BLOCK_VECTORS;
    for (int v = 0; v < BLOCK_VECTORS; v += V)
        score_keys(R, V, dtype, q, keys, base + v * W, d, scaling, scores + v * W, ld);
}

static void score_rows(int rows, int dtype, const float *const *q, const void *keys, int64_t base, int d,
                       float scaling, float *scores, int64_t ld) {
    for (int r = 0; r < rows;) {
#define SCORE(n) score_block(n, dtype, q + r, keys, base, d, scaling, scores + r * ld, ld), r += n
        if (rows - r >= 8 && SUMS >= 16) SCORE(8);
        else if (rows - r >= 6 && SUMS < 16) SCORE(6);
        else if (rows - r >= 4) SCORE(4);
        else if (rows - r >= 2) SCORE(2);
        else SCORE(1);
    }
}

// Softmax over scores[from .. last], in place; returns the sum. `first` and `end` lie on block borders
// around it; entries outside get weight 0.
INLINE float soften(float *scores, int first, int from, int last, int end) {
    for (int j = first; j < from; j++) scores[j] = -INFINITY;
    for (int j = last + 1; j < end; j++) scores[j] = -INFINITY;
    lanes16 peak = all16(-INFINITY), sum = all16(0);
    for (int j = first; j < end; j += 16)
        for (int p = 0; p < PARTS; p++) {
            vf score = load(scores + j + p * W);
            peak.part[p] = pick(score > peak.part[p], score, peak.part[p]);
        }
    vf top = splat(max16(peak));
    for (int j = first; j < end; j += 16)
        for (int p = 0; p < PARTS; p++) {
            vf weight = vexp(load(scores + j + p * W) - top);
            store(scores + j + p * W, weight);
            sum.part[p] += weight;
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

// sums[r] += weights[r][j] · value[j] for j in [from, to), V vectors of dimensions beginning at i.
INLINE void mix_range(int R, int V, vf *out, const float *weights, int64_t ld, const Values *s, int i, int from,
                      int to) {
    vf sums[SUMS];  // in registers, which `out` would not be
    for (int c = 0; c < R * V; c++) sums[c] = out[c];
    for (int j = from; j < to;) {
        int64_t block = s->table[j / BLOCK] * s->stride + s->head + i;
        int stop = j / BLOCK * BLOCK + BLOCK < to ? j / BLOCK * BLOCK + BLOCK : to;
        for (; j < stop; j++) {
            vf value[SUMS];
            for (int v = 0; v < V; v++)
                value[v] = get(s->dtype, s->values, block + (int64_t)(j % BLOCK) * s->d + v * W);
            for (int r = 0; r < R; r++)
                for (int v = 0; v < V; v++)
                    sums[r * V + v] = vfma(splat(weights[r * ld + j]), value[v], sums[r * V + v]);
        }
    }
    for (int c = 0; c < R * V; c++) out[c] = sums[c];
}

// What R rows that see [from[r], last[r]] become: weighted sums of values over the sum of weights. What a
// row cannot see is not read for it: it may be NaN.
INLINE void mix(int R, int V, const float *weights, int64_t ld, const Values *s, const int *from,
                const int *last, const float *total, void *out, const int *rows, const int *columns,
                int64_t width) {
    int begin = from[0], end = last[0] + 1;  // what all of them see
    for (int r = 1; r < R; r++) {
        if (from[r] > begin) begin = from[r];
        if (last[r] + 1 < end) end = last[r] + 1;
    }
    if (end < begin) end = begin;
    for (int i = 0; i < s->d; i += W * V) {
        vf sums[SUMS];
        for (int c = 0; c < R * V; c++) sums[c] = splat(0);
        for (int r = 0; r < R; r++) {
            int until = begin < last[r] + 1 ? begin : last[r] + 1;
            mix_range(1, V, sums + r * V, weights + r * ld, ld, s, i, from[r], until);
        }
        mix_range(R, V, sums, weights, ld, s, i, begin, end);
        for (int r = 0; r < R; r++) {
            mix_range(1, V, sums + r * V, weights + r * ld, ld, s, i, end, last[r] + 1);
            for (int v = 0; v < V; v++)
                put_act(s->dtype, out, act_at(s->dtype, rows[r], columns[r] + i + v * W, width),
                        sums[r * V + v] / total[r]);
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
        for (int j = first / BLOCK * BLOCK; j < end; j += BLOCK)
            score_rows(R, dtype, q, l->keys, table[j / BLOCK] * stride + head, d, m->scaling, scores + j, ld);
        for (int r = 0; r < R; r++)
            total[r] = soften(scores + r * ld, from[r] / BLOCK * BLOCK, from[r], last[r],
                              last[r] / BLOCK * BLOCK + BLOCK);
        for (int r = 0; r < R;) {
#define MIX(n, v)                                                                                             \
    mix(n, v, scores + r * ld, ld, &s, from + r, last + r, total + r, b->act, tokens + r, columns + r,        \
        (int64_t)m->heads * d), r += n
            // Enough sums under way, in vectors of which a head has a whole number.
            if (R - r >= 4 && W == 16 && d % 64 == 0) MIX(4, 4);
            else if (R - r >= 4) MIX(4, 2);
            else if (R - r >= 2 && W < 16) MIX(2, 4);
            else if (R - r >= 2 && d % 64 == 0) MIX(2, 4);
            else if (R - r >= 2) MIX(2, 2);
            else if (W < 16 || d % 64 == 0) MIX(1, 4);
            else MIX(1, 2);
        }
    }
}
