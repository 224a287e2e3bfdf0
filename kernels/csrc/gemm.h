// y = x Wᵀ with packed weights. Every output element adds its products in the order of k, whatever
// the number of rows: one row alone and the same row among five hundred have the same bits.
//
// Packed weights, for blocks of 32 outputs (two vectors of 16, zero-padded):
//   float32   [N/16][K][16]
//   bfloat16  [N/16][K/2][16][2]     pairs of k, as the dot-product instructions take them
#pragma once
#include <stdlib.h>

#include "team.h"
#include "vec.h"
#if defined(__AMX_BF16__) || defined(__AVX512BF16__)
#include <immintrin.h>
#endif

enum { F32 = 0, BF16 = 1 };
enum { STORE = 0, ADD = 1, SWIGLU = 2 };

typedef struct {
    const void *packed;
    const float *bias;  // [n] or NULL
    int32_t n, k;
} Linear;

// What becomes of the finished 16 × 32 (or smaller) block of outputs.
typedef struct {
    int mode;   // STORE and ADD: float32 out; SWIGLU: silu(first 16) * last 16, in `dtype`
    void *out;  // [rows, ld]
    int64_t ld;
    int dtype;
    int tiled;  // SWIGLU: the layout of what comes out
} Epilogue;

#define ROWS 8    // rows in registers at a time
#define SPAN 128  // rows of one item of work

// Where an activation stands: rows behind one another, or tiles of 16 rows × 32 columns for AMX.
INLINE int64_t act_at(int tiled, int64_t row, int64_t column, int64_t k) {
    if (!tiled) return row * k + column;
    return ((row / 16 * (k / 32) + column / 32) * 16 + row % 16) * 32 + column % 32;
}

INLINE void finish(const Linear *w, const Epilogue *e, int row, int block, v16 a, v16 b) {
    int column = block * 32;
    if (w->bias) {
        if (column + 32 <= w->n) {
            a += load(w->bias + column), b += load(w->bias + column + 16);
        } else {
            for (int i = 0; i < 16; i++) {
                if (column + i < w->n) a[i] += w->bias[column + i];
                if (column + 16 + i < w->n) b[i] += w->bias[column + 16 + i];
            }
        }
    }
    if (e->mode == SWIGLU) {
        v16 gated = a / (1.0f + vexp(-a)) * b;
        int64_t at = act_at(e->tiled, row, column / 2, e->ld);
        if (e->dtype == BF16) store_bf16((bf16 *)e->out + at, gated);
        else store((float *)e->out + at, gated);
        return;
    }
    float *out = (float *)e->out + row * e->ld + column;
    if (column + 32 <= w->n) {
        if (e->mode == ADD) a += load(out), b += load(out + 16);
        store(out, a), store(out + 16, b);
    } else {
        for (int i = 0; i < 32 && column + i < w->n; i++) {
            float y = i < 16 ? a[i] : b[i - 16];
            out[i] = e->mode == ADD ? out[i] + y : y;
        }
    }
}

// R rows times 32 outputs, float32.
INLINE void block_f32(int R, const float *x, const Linear *w, const Epilogue *e, int row, int block) {
    const float *p = (const float *)w->packed + (int64_t)block * 2 * w->k * 16;
    const float *q = p + (int64_t)w->k * 16;
    v16 a[ROWS], b[ROWS];
    for (int r = 0; r < R; r++) a[r] = b[r] = splat(0);
    for (int k = 0; k < w->k; k++) {
        v16 wa = load(p + k * 16), wb = load(q + k * 16);
        for (int r = 0; r < R; r++) {
            v16 v = splat(x[(int64_t)(row + r) * w->k + k]);
            a[r] += v * wa, b[r] += v * wb;
        }
    }
    for (int r = 0; r < R; r++) finish(w, e, row + r, block, a[r], b[r]);
}

// One pair of products per lane: acc + x0·w0 + x1·w1.
INLINE v16 dot_pair(v16 acc, uint32_t pair, const bf16 *w) {
#if defined(__AVX512BF16__)
    return (v16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32((int)pair),
                                 (__m512bh)_mm512_loadu_si512(w));
#else
    u16v both;
    memcpy(&both, w, 64);
    union { uint32_t u; float f; } lo = {pair << 16}, hi = {pair & 0xFFFF0000u};
    acc += (v16)(both << 16) * lo.f;
    return acc + (v16)(both & 0xFFFF0000u) * hi.f;
#endif
}

INLINE void block_bf16(int R, const bf16 *x, const Linear *w, const Epilogue *e, int row, int block) {
    const bf16 *p = (const bf16 *)w->packed + (int64_t)block * 2 * w->k * 16;
    const bf16 *q = p + (int64_t)w->k * 16;
    v16 a[ROWS], b[ROWS];
    for (int r = 0; r < R; r++) a[r] = b[r] = splat(0);
    for (int k = 0; k < w->k; k += 2) {
        for (int r = 0; r < R; r++) {
            uint32_t pair;
            memcpy(&pair, x + (int64_t)(row + r) * w->k + k, 4);
            a[r] = dot_pair(a[r], pair, p + k * 16), b[r] = dot_pair(b[r], pair, q + k * 16);
        }
    }
    for (int r = 0; r < R; r++) finish(w, e, row + r, block, a[r], b[r]);
}

#include "amx.h"

// All rows of one block of 32 outputs, from row `first` up to `last`.
static void gemm_block(int dtype, int amx, const void *x, const Linear *w, const Epilogue *e, int first,
                       int last, int block) {
    int row = first;
#ifdef HAVE_AMX
    if (amx) {
        block_amx(x, w, e, first, last, block);
        return;
    }
#endif
    (void)amx;
    if (dtype == BF16) {
        for (; row + 8 <= last; row += 8) block_bf16(8, x, w, e, row, block);
        if (row + 4 <= last) block_bf16(4, x, w, e, row, block), row += 4;
        for (; row < last; row++) block_bf16(1, x, w, e, row, block);
    } else {
        for (; row + 8 <= last; row += 8) block_f32(8, x, w, e, row, block);
        if (row + 4 <= last) block_f32(4, x, w, e, row, block), row += 4;
        for (; row < last; row++) block_f32(1, x, w, e, row, block);
    }
}

// Called by every thread of a team.
static void gemm(Team *team, int dtype, int amx, const void *x, int rows, const Linear *w, Epilogue e) {
    int blocks = (w->n + 31) / 32, parts = (rows + SPAN - 1) / SPAN;
    SHARE(team, blocks * parts, item) {
        int first = item % parts * SPAN, last = first + SPAN < rows ? first + SPAN : rows;
        gemm_block(dtype, amx, x, w, &e, first, last, item / parts);
    }
}
