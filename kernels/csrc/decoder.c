// A whole forward pass of a Llama-style decoder over one ragged batch with paged KV.
//
// The residual stream, the sums and the softmax are float32; weights, activations between layers and
// the KV cache are in the model's dtype. Nothing here depends on how many tokens share the pass: every
// token's numbers are made by the same operations in the same order (see gemm.h and `attend`).
//
//   T tokens   S sequences   R logit rows   H hidden   D head dimension
#include "gemm.h"

#define BLOCK 32  // tokens per KV block
#define QUERIES 8 // query rows (tokens × heads of a group) attended at a time

typedef struct {
    const float *norm1, *norm2;    // [H]
    const float *q_norm, *k_norm;  // [D] or NULL
    Linear qkv, o, gate_up, down;
    void *keys, *values;  // [blocks][kv_heads][D][32] and [blocks][kv_heads][32][D]
} Layer;

typedef struct {
    int32_t layers, hidden, heads, kv_heads, head_dim, inter, vocab, window, dtype, amx;
    float eps, scaling;
    const void *embedding;  // [vocab, H]
    const float *cos, *sin;  // [positions, D]
    const float *norm;  // [H]
    Linear head;
    const Layer *layer;
} Model;

typedef struct {
    int32_t tokens, rows, items, table_width;
    const int64_t *ids, *positions, *slots;  // [T]
    const int32_t *item_seq, *item_token, *item_count;  // [items] up to 8 tokens of one sequence
    const int32_t *tables;  // [S, table_width] KV blocks
    const int64_t *logit_rows;  // [R]
    float *logits;  // [R, vocab]
    int32_t longest;  // context, for the score buffers
    // Workspace, rows rounded up to 32.
    float *x;      // [T, H]
    void *act;     // [T, max(H, heads·D)]
    float *qkv;    // [T, (heads + 2·kv_heads)·D]
    void *hidden;  // [T, inter]
    float *scores; // [threads, QUERIES, longest rounded up to 32]
} Batch;

INLINE void put(int dtype, void *out, int64_t at, v16 x) {
    if (dtype == BF16) store_bf16((bf16 *)out + at, x);
    else store((float *)out + at, x);
}

INLINE v16 get(int dtype, const void *in, int64_t at) {
    return dtype == BF16 ? load_bf16((const bf16 *)in + at) : load((const float *)in + at);
}

static float inverse_rms(const float *x, int n, float eps) {
    v16 sum = splat(0);
    for (int i = 0; i < n; i += 16) sum += load(x + i) * load(x + i);
    return 1.0f / sqrtf(sum16(sum) / n + eps);
}

static void normalise(int dtype, const float *x, const float *weight, int n, float eps, void *out,
                      int64_t at) {
    float scale = inverse_rms(x, n, eps);
    for (int i = 0; i < n; i += 16) put(dtype, out, at + i, load(x + i) * scale * load(weight + i));
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

// Softmax over scores[first .. last], in place; returns the sum. `first` and the end of the buffer lie
// on block borders, entries outside are set to weight 0.
static float soften(float *scores, int first, int from, int last) {
    int end = last / BLOCK * BLOCK + BLOCK;
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

// Weighted sum of values for one query row, in the order of the keys; keys it cannot see are not read.
INLINE void mix(int V, int dtype, const float *weights, const void *values, const int32_t *table,
                int64_t head, int64_t stride, int d, int from, int last, float total, void *out,
                int64_t at) {
    for (int i = 0; i < d; i += 16 * V) {
        v16 acc[4];
        for (int v = 0; v < V; v++) acc[v] = splat(0);
        for (int j = from; j <= last; j++) {
            int64_t row = table[j / BLOCK] * stride + head + (int64_t)(j % BLOCK) * d + i;
            for (int v = 0; v < V; v++) acc[v] += weights[j] * get(dtype, values, row + v * 16);
        }
        for (int v = 0; v < V; v++) put(dtype, out, at + i + v * 16, acc[v] / total);
    }
}

// 3) Attention of up to 8 tokens of one sequence, for one KV head and its group of query heads.
static void attend(const Model *m, const Layer *l, const Batch *b, int item, int h, float *scores,
                   int64_t ld) {
    int d = m->head_dim, group = m->heads / m->kv_heads, dtype = m->dtype;
    const int32_t *table = b->tables + (int64_t)b->item_seq[item] * b->table_width;
    int64_t stride = (int64_t)m->kv_heads * d * BLOCK, head = (int64_t)h * d * BLOCK;
    int64_t width = (int64_t)(m->heads + 2 * m->kv_heads) * d;
    int rows = b->item_count[item] * group;
    for (int done = 0; done < rows; done += QUERIES) {
        int R = rows - done < QUERIES ? rows - done : QUERIES, tokens[QUERIES], heads[QUERIES];
        const float *q[QUERIES];
        int first = INT32_MAX, last = 0;
        for (int r = 0; r < R; r++) {
            tokens[r] = b->item_token[item] + (done + r) / group;
            heads[r] = h * group + (done + r) % group;
            q[r] = b->qkv + tokens[r] * width + (int64_t)heads[r] * d;
            int at = (int)b->positions[tokens[r]];
            int from = m->window && at >= m->window ? at - m->window + 1 : 0;
            if (from < first) first = from;
            if (at > last) last = at;
        }
        for (int r = R; r < QUERIES; r++) q[r] = q[0];
        for (int j = first / BLOCK * BLOCK; j <= last; j += BLOCK) {
            int64_t base = table[j / BLOCK] * stride + head;
#define SCORE(n) score_block(n, dtype, q, l->keys, base, d, m->scaling, scores, ld, j)
            if (R == 1) SCORE(1);
            else if (R == 2) SCORE(2);
            else if (R <= 4) SCORE(4);
            else SCORE(8);
        }
        for (int r = 0; r < R; r++) {
            int at = (int)b->positions[tokens[r]];
            int from = m->window && at >= m->window ? at - m->window + 1 : 0;
            float *w = scores + r * ld, total = soften(w, from / BLOCK * BLOCK, from, at);
            int64_t out = (int64_t)tokens[r] * m->heads * d + (int64_t)heads[r] * d;
#define MIX(n) mix(n, dtype, w, l->values, table, head, stride, d, from, at, total, b->act, out)
            if (d % 64 == 0) MIX(4);
            else if (d % 32 == 0) MIX(2);
            else MIX(1);
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
            normalise(m->dtype, b->x + (int64_t)t * H, weight, H, m->eps, b->act, (int64_t)t * H);
}

static void layer(Team *team, const Model *m, const Layer *l, const Batch *b) {
    int H = m->hidden, dtype = m->dtype;
    int64_t ld = (b->longest + BLOCK - 1) / BLOCK * BLOCK;
    Epilogue to_qkv = {STORE, b->qkv, (m->heads + 2 * m->kv_heads) * m->head_dim, F32};
    Epilogue to_x = {ADD, b->x, H, F32}, to_hidden = {SWIGLU, b->hidden, m->inter, dtype};
    // 1) Norm and projections.
    normalise_rows(team, m, b, l->norm1);
    gemm(team, dtype, m->amx, b->act, b->tokens, &l->qkv, to_qkv);
    SHARE(team, GROUPS(b->tokens), g)
        for (int t = g * TOKENS; t < b->tokens && t < (g + 1) * TOKENS; t++) place(m, l, b, t);
    SHARE(team, b->items * m->kv_heads, i)
        attend(m, l, b, i / m->kv_heads, i % m->kv_heads, b->scores + team->thread * QUERIES * ld, ld);
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
        normalise(m->dtype, b->x + b->logit_rows[r] * H, m->norm, H, m->eps, b->act, (int64_t)r * H);
    gemm(team, m->dtype, m->amx, b->act, b->rows, &m->head, (Epilogue){STORE, b->logits, m->vocab, F32});
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
