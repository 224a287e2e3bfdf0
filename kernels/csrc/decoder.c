// A whole forward pass of a Llama-style decoder over one ragged batch with paged KV.
//
// The residual stream, the sums and the softmax are float32; weights, activations between layers and
// the KV cache are in the model's dtype. Nothing here depends on how many tokens share the pass: every
// token's numbers are made by the same operations in the same order (see gemm.h and `attend`).
#include "attention.h"
#include "attention_amx.h"

static float inverse_rms(const float *x, int n, float eps) {
    v16 sum = splat(0);
    for (int i = 0; i < n; i += 16) sum += load(x + i) * load(x + i);
    return 1.0f / sqrtf(sum16(sum) / n + eps);
}

static void normalise(const Model *m, const float *x, const float *weight, void *out, int64_t row) {
    int n = m->hidden;
    float scale = inverse_rms(x, n, m->eps);
    for (int i = 0; i < n; i += 16)
        put(m->dtype, out, act_at(m->amx, row, i, n), load(x + i) * scale * load(weight + i));
}

// Rotary embedding of one head, halves rotated against each other; optional norm before it.
static void rotate(float *x, int d, const float *cos, const float *sin, const float *norm, float eps) {
    if (norm) {
        float scale = inverse_rms(x, d, eps);
        for (int i = 0; i < d; i += 16) store(x + i, load(x + i) * scale * load(norm + i));
    }
    int half = d / 2;
    for (int i = 0; i < half; i += 16) {
        v16 a = load(x + i), b = load(x + half + i);
        store(x + i, a * load(cos + i) - b * load(sin + i));
        store(x + half + i, b * load(cos + half + i) + a * load(sin + half + i));
    }
}

// 2) Rotate queries and keys of one token, write its KV.
static void place(const Model *m, const Layer *l, const Batch *b, int t) {
    int d = m->head_dim;
    float *q = b->qkv + (int64_t)t * (m->heads + 2 * m->kv_heads) * d;
    float *k = q + m->heads * d, *v = k + m->kv_heads * d;
    const float *cos = m->cos + b->positions[t] * d, *sin = m->sin + b->positions[t] * d;
    for (int h = 0; h < m->heads; h++) rotate(q + h * d, d, cos, sin, l->q_norm, m->eps);
    int64_t block = b->slots[t] / BLOCK, at = b->slots[t] % BLOCK;
    for (int h = 0; h < m->kv_heads; h++) {
        rotate(k + h * d, d, cos, sin, l->k_norm, m->eps);
        int64_t base = (block * m->kv_heads + h) * d * BLOCK;
#ifdef HAVE_AMX
        if (m->amx) {
            place_amx((bf16 *)l->keys + base, (bf16 *)l->values + base, k + h * d, v + h * d, d, (int)at);
            continue;
        }
#endif
        for (int i = 0; i < d; i += 16) {
            put(m->dtype, l->values, base + at * d + i, load(v + h * d + i));
            v16 key = load(k + h * d + i);
            if (m->dtype == BF16) {
                bf16 rounded[16];
                store_bf16(rounded, key);
                for (int j = 0; j < 16; j++) ((bf16 *)l->keys)[base + (i + j) * BLOCK + at] = rounded[j];
            } else {
                for (int j = 0; j < 16; j++) ((float *)l->keys)[base + (i + j) * BLOCK + at] = key[j];
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

static void layer(Team *team, const Model *m, const Layer *l, const Batch *b) {
    int H = m->hidden, dtype = m->dtype;
    int64_t ld = (b->longest + BLOCK - 1) / BLOCK * BLOCK;
    Epilogue to_qkv = {STORE, b->qkv, (m->heads + 2 * m->kv_heads) * m->head_dim, F32, 0};
    Epilogue to_x = {ADD, b->x, H, F32, 0};
    Epilogue to_hidden = {SWIGLU, b->hidden, m->inter, dtype, m->amx};
    // 1) Norm and projections.
    normalise_rows(team, m, b, l->norm1);
    gemm(team, dtype, m->amx, b->act, b->tokens, &l->qkv, to_qkv);
    SHARE(team, GROUPS(b->tokens), g)
        for (int t = g * TOKENS; t < b->tokens && t < (g + 1) * TOKENS; t++) place(m, l, b, t);
    SHARE(team, b->items * m->kv_heads, i) {
        float *scores = b->scores + team->thread * SCORE_ROWS * ld;
#ifdef HAVE_AMX
        if (m->amx) {
            attend_amx(m, l, b, i / m->kv_heads, i % m->kv_heads, scores, ld);
            continue;
        }
#endif
        attend(m, l, b, i / m->kv_heads, i % m->kv_heads, scores, ld);
    }
    // 4) Back into the residual stream, then the same for the feed-forward part.
    gemm(team, dtype, m->amx, b->act, b->tokens, &l->o, to_x);
    normalise_rows(team, m, b, l->norm2);
    gemm(team, dtype, m->amx, b->act, b->tokens, &l->gate_up, to_hidden);
    gemm(team, dtype, m->amx, b->hidden, b->tokens, &l->down, to_x);
}

typedef struct {
    Model model;
    Batch batch;
} Decode;

static void decode(Team *team, const void *arguments) {
    const Model *m = &((const Decode *)arguments)->model;
    const Batch *b = &((const Decode *)arguments)->batch;
    int H = m->hidden;
#ifdef HAVE_AMX
    if (m->amx) tiles_on();
#endif
    SHARE(team, GROUPS(b->tokens), g)
        for (int t = g * TOKENS; t < b->tokens && t < (g + 1) * TOKENS; t++)
            for (int i = 0; i < H; i += 16)
                store(b->x + (int64_t)t * H + i, get(m->dtype, m->embedding, b->ids[t] * H + i));
    for (int i = 0; i < m->layers; i++) layer(team, m, m->layer + i, b);
    SHARE(team, b->rows, r)
        normalise(m, b->x + b->logit_rows[r] * H, m->norm, b->act, r);
    gemm(team, m->dtype, m->amx, b->act, b->rows, &m->head, (Epilogue){STORE, b->logits, m->vocab, F32, 0});
#ifdef HAVE_AMX
    if (m->amx) _tile_release();
#endif
}

// Returns 0, or 1 when memory ran out.
int specbatch_decode(const Model *m, const Batch *b, int threads) {
    Decode arguments = {*m, *b};
    return share_pass(decode, &arguments, sizeof arguments, (size_t)m->layers * PHASES_PER_LAYER + 3,
                      threads);
}

// Weights [n, k] (float32, or bfloat16 bits) into the layout of gemm.h.
void specbatch_pack(int dtype, const void *weight, int n, int k, void *packed) {
    for (int64_t block = 0; block < (n + 31) / 32 * 2; block++)
        for (int64_t i = 0; i < k; i++)
            for (int64_t j = 0; j < 16; j++) {
                int64_t row = block * 16 + j;
                if (dtype == F32)
                    ((float *)packed)[(block * k + i) * 16 + j] =
                        row < n ? ((const float *)weight)[row * k + i] : 0;
                else
                    ((bf16 *)packed)[((block * k / 2 + i / 2) * 16 + j) * 2 + i % 2] =
                        row < n ? ((const bf16 *)weight)[row * k + i] : 0;
            }
}

// 1 when this build and this machine multiply bfloat16 tiles; asks the kernel for permission.
int specbatch_amx(void) {
#ifdef HAVE_AMX
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
    return 0;
#endif
}
