// A model's weights, one batch, and the workspace of a pass.
//
//   T tokens   S sequences   R logit rows   H hidden   D head dimension
#pragma once
#include "gemm.h"

#define BLOCK 32  // tokens per KV block
#define SCORE_ROWS 24  // score rows per thread: those of attention, or 16 and their weights in bfloat16

typedef struct {
    const float *norm1, *norm2;    // [H]
    const float *q_norm, *k_norm;  // [D] or NULL
    Linear qkv, o, gate_up, down;
    void *keys, *values;  // [blocks][kv_heads], then [D][32] and [32][D], or tiles: see attention_amx.h
} Layer;

typedef struct {
    int32_t layers, hidden, heads, kv_heads, head_dim, inter, vocab, window, dtype;
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
    void *act;     // [T, max(H, heads·D)] of 4 bytes, laid out as `act_at` says
    float *qkv;    // [T, (heads + 2·kv_heads)·D]
    void *hidden;  // [T, inter], likewise
    float *scores; // [threads, SCORE_ROWS, longest rounded up to 32]
    double *seconds;  // [KERNELS] to add each kernel's time to, or NULL
} Batch;

// Keys and values, in the model's dtype.
INLINE void put(int dtype, void *out, int64_t at, vf x) {
    if (dtype == BF16) store_bf16((bf16 *)out + at, x);
    else store((float *)out + at, x);
}

INLINE vf get(int dtype, const void *in, int64_t at) {
    return dtype == BF16 ? load_bf16((const bf16 *)in + at) : load((const float *)in + at);
}

// Which positions a token sees: from here to its own.
INLINE int first_seen(const Model *m, int at) {
    return m->window && at >= m->window ? at - m->window + 1 : 0;
}
