// A whole forward pass of a Llama-style decoder over one ragged batch with paged KV.
//
// The residual stream, the sums and the softmax are float32; weights, activations between layers and
// the KV cache are in the model's dtype. Nothing here depends on how many tokens share the pass: every
// token's numbers are made by the same operations in the same order (see gemm.h and `attend`).
#pragma once
#include <time.h>

#include "attention.h"
#include "attention_amx.h"

// Kernels timed in `Batch.seconds`.
enum { NORMS, PRODUCTS, PLACING, ATTENTION, HEAD, KERNELS };

static float inverse_rms(const float *x, int n, float eps) {
    lanes16 sum = all16(0);
    for (int i = 0; i < n; i += 16)
        for (int p = 0; p < PARTS; p++) {
            vf part = load(x + i + p * W);
            sum.part[p] = vfma(part, part, sum.part[p]);
        }
    return 1.0f / sqrtf(sum16(sum) / (float)n + eps);
}

static void normalise(const Model *m, const float *x, const float *weight, void *out, int64_t row) {
    int n = m->hidden;
    float scale = inverse_rms(x, n, m->eps);
    for (int i = 0; i < n; i += W)
        put_act(m->dtype, out, act_at(m->dtype, row, i, n), load(x + i) * scale * load(weight + i));
}

// Rotary embedding of one head, halves rotated against each other; optional norm before it.
static void rotate(float *x, int d, const float *cos, const float *sin, const float *norm, float eps) {
    if (norm) {
        float scale = inverse_rms(x, d, eps);
        for (int i = 0; i < d; i += W) store(x + i, load(x + i) * scale * load(norm + i));
    }
    int half = d / 2;
    for (int i = 0; i < half; i += W) {
        vf a = load(x + i), b = load(x + half + i);
        store(x + i, vfma(a, load(cos + i), -(b * load(sin + i))));
        store(x + half + i, vfma(b, load(cos + half + i), a * load(sin + half + i)));
    }
}

// Rotate queries and keys of one token, write its KV.
static void place(const Model *m, const Layer *l, const Batch *b, int t) {
    int d = m->head_dim;
    float *q = b->qkv + (int64_t)t * (m->heads + 2 * m->kv_heads) * d;
    float *k = q + m->heads * d, *v = k + m->kv_heads * d;
    const float *cos = m->cos + b->positions[t] * d, *sin = m->sin + b->positions[t] * d;
    for (int h = 0; h < m->heads; h++) rotate(q + h * d, d, cos, sin, l->q_norm, m->eps);
    int64_t block = b->slots[t] / BLOCK, at = b->slots[t] % BLOCK;
    for (int h = 0; h < m->kv_heads; h++) {
        float *key = k + h * d;
        rotate(key, d, cos, sin, l->k_norm, m->eps);
        int64_t base = (block * m->kv_heads + h) * d * BLOCK;
        if (IS_TILED(m->dtype)) {
            place_amx((bf16 *)l->keys + base, (bf16 *)l->values + base, key, v + h * d, d, (int)at);
            continue;
        }
        for (int i = 0; i < d; i += W) put(m->dtype, l->values, base + at * d + i, load(v + h * d + i));
        if (m->dtype == F32) {
            for (int i = 0; i < d; i++) ((float *)l->keys)[base + i * BLOCK + at] = key[i];
        } else {
            bf16 rounded[W];
            for (int i = 0; i < d; i += W) {
                store_bf16(rounded, load(key + i));
                for (int j = 0; j < W; j++) ((bf16 *)l->keys)[base + (i + j) * BLOCK + at] = rounded[j];
            }
        }
    }
}

#define TOKENS 8  // tokens per item where the work is per token
#define GROUPS(n) (((n) + TOKENS - 1) / TOKENS)
#define PHASES_PER_LAYER 8

static void normalise_rows(Team *team, const Model *m, const Batch *b, const float *weight) {
    int H = m->hidden;
    SHARE(team, GROUPS(b->tokens), g)
        for (int t = g * TOKENS; t < b->tokens && t < (g + 1) * TOKENS; t++)
            normalise(m, b->x + (int64_t)t * H, weight, b->act, t);
}

// Add the seconds since the last call to one kernel's sum; thread 0 measures for all.
static void add_elapsed(const Team *team, const Batch *b, double *since, int kernel) {
    if (!b->seconds || team->thread) return;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    double at = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
    if (kernel >= 0) b->seconds[kernel] += at - *since;
    *since = at;
}

static void layer(Team *team, const Model *m, const Layer *l, const Batch *b, double *since) {
    int H = m->hidden, dtype = m->dtype;
    int64_t ld = (b->longest + BLOCK - 1) / BLOCK * BLOCK;
    Epilogue to_qkv = {STORE, b->qkv, (m->heads + 2 * m->kv_heads) * m->head_dim, F32};
    Epilogue to_x = {ADD, b->x, H, F32};
    Epilogue to_hidden = {SWIGLU, b->hidden, m->inter, dtype};
    // 1) Norm and projections.
    normalise_rows(team, m, b, l->norm1);
    add_elapsed(team, b, since, NORMS);
    gemm(team, dtype, b->act, b->tokens, &l->qkv, to_qkv);
    add_elapsed(team, b, since, PRODUCTS);
    // 2) Queries and keys turned to their positions, KV written.
    SHARE(team, GROUPS(b->tokens), g)
        for (int t = g * TOKENS; t < b->tokens && t < (g + 1) * TOKENS; t++) place(m, l, b, t);
    add_elapsed(team, b, since, PLACING);
    // 3) Attention.
    SHARE(team, b->items * m->kv_heads, i) {
        float *scores = b->scores + team->thread * SCORE_ROWS * ld;
        if (IS_TILED(dtype)) attend_amx(m, l, b, i / m->kv_heads, i % m->kv_heads, scores, ld);
        else attend(m, l, b, i / m->kv_heads, i % m->kv_heads, scores, ld);
    }
    add_elapsed(team, b, since, ATTENTION);
    // 4) Back into the residual stream, then the same for the feed-forward part.
    gemm(team, dtype, b->act, b->tokens, &l->o, to_x);
    add_elapsed(team, b, since, PRODUCTS);
    normalise_rows(team, m, b, l->norm2);
    add_elapsed(team, b, since, NORMS);
    gemm(team, dtype, b->act, b->tokens, &l->gate_up, to_hidden);
    gemm(team, dtype, b->hidden, b->tokens, &l->down, to_x);
    add_elapsed(team, b, since, PRODUCTS);
}

typedef struct {
    Model model;
    Batch batch;
} Decode;

static void decode(Team *team, const void *arguments) {
    const Model *m = &((const Decode *)arguments)->model;
    const Batch *b = &((const Decode *)arguments)->batch;
    int H = m->hidden;
    double since = 0;
    uint32_t before = set_arithmetic(m->dtype == BF16);
    if (IS_TILED(m->dtype)) tiles_on();
    add_elapsed(team, b, &since, -1);
    SHARE(team, GROUPS(b->tokens), g)
        for (int t = g * TOKENS; t < b->tokens && t < (g + 1) * TOKENS; t++)
            for (int i = 0; i < H; i += W)
                store(b->x + (int64_t)t * H + i, get(m->dtype, m->embedding, b->ids[t] * H + i));
    for (int i = 0; i < m->layers; i++) layer(team, m, m->layer + i, b, &since);
    SHARE(team, b->rows, r)
        normalise(m, b->x + b->logit_rows[r] * H, m->norm, b->act, r);
    add_elapsed(team, b, &since, NORMS);
    gemm(team, m->dtype, b->act, b->rows, &m->head, (Epilogue){STORE, b->logits, m->vocab, F32});
    add_elapsed(team, b, &since, HEAD);
    if (IS_TILED(m->dtype)) tiles_off();
    reset_arithmetic(before);
}

// One pass. Returns 0, or 1 when memory ran out.
EXPORT int NAME(decode)(const Model *m, const Batch *b, int threads) {
    Decode arguments = {*m, *b};
    return specbatch_share_pass(decode, &arguments, sizeof arguments,
                                (size_t)m->layers * PHASES_PER_LAYER + 3, threads);
}

// Weights [n, k] (float32, or bfloat16 bits) into the layout of gemm.h.
EXPORT void NAME(pack)(int dtype, const void *weight, int n, int k, void *packed) {
    for (int64_t panel = 0; panel < (n + PANEL - 1) / PANEL; panel++)
        for (int64_t j = 0; j < PANEL; j++) {
            int64_t row = panel * PANEL + j, to = panel * k * PANEL + j;
            if (dtype == F32) {
                const float *from = (const float *)weight + row * k;
                for (int64_t i = 0; i < k; i++) ((float *)packed)[to + i * PANEL] = row < n ? from[i] : 0;
            } else {
                const bf16 *from = (const bf16 *)weight + row * k;
                bf16 *pairs = (bf16 *)packed + panel * k * PANEL + 2 * j;
                for (int64_t i = 0; i < k; i++)
                    pairs[i / 2 * 2 * PANEL + i % 2] = row < n ? from[i] : 0;
            }
        }
}

// How many outputs a panel has: rows of a gate and its `up` stand in halves of it.
EXPORT int NAME(panel)(void) { return PANEL; }

// y = x Wᵀ alone, for tests and measurements. float32 out [rows, n]; `acts` as `act_at` lays them out.
typedef struct {
    int dtype, rows;
    const void *acts;
    Linear linear;
    float *out;
} Alone;

static void product_alone(Team *team, const void *arguments) {
    const Alone *a = arguments;
    uint32_t before = set_arithmetic(a->dtype == BF16);
    if (IS_TILED(a->dtype)) tiles_on();
    gemm(team, a->dtype, a->acts, a->rows, &a->linear, (Epilogue){STORE, a->out, a->linear.n, F32});
    if (IS_TILED(a->dtype)) tiles_off();
    reset_arithmetic(before);
}

EXPORT int NAME(product)(int dtype, int rows, const void *acts, const Linear *linear, float *out, int threads) {
    Alone arguments = {dtype, rows, acts, *linear, out};
    return specbatch_share_pass(product_alone, &arguments, sizeof arguments, 1, threads);
}

// float32 [rows, k], rounded to the dtype, as `act_at` lays activations out.
EXPORT void NAME(acts)(int dtype, int rows, int k, const float *x, void *acts) {
    for (int64_t r = 0; r < rows; r++)
        for (int i = 0; i < k; i += W) put_act(dtype, acts, act_at(dtype, r, i, k), load(x + r * k + i));
}
