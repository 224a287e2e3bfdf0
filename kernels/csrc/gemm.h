// y = x Wᵀ with packed weights. Every output adds its products one by one in the order of k, each
// multiply-add rounded once, whatever the number of rows, the tile or the width of the vectors (in
// bfloat16 on AMX see amx.h).
//
// Weights are packed in panels of PANEL outputs, zero-padded:
//   float32   [N/PANEL][K][PANEL]
//   bfloat16  [N/PANEL][K/2][PANEL][2]     pairs of k, as the dot-product instructions take them
//
// In bfloat16 the odd product of a pair is added before the even one and denormals are flushed: that is
// what VDPBF16PS does, so levels without it have the same bits. AMX adds in another order (amx.h).
#pragma once
#include <stdlib.h>

#include "level.h"
#include "team.h"

enum { F32 = 0, BF16 = 1 };
enum { STORE = 0, ADD = 1, SWIGLU = 2 };

typedef struct {
    const void *packed;
    const float *bias;  // [n] or NULL
    int32_t n, k;
} Linear;

// What becomes of finished outputs.
typedef struct {
    int mode;   // STORE and ADD: float32 out; SWIGLU: silu(first half of a panel) * second half, activations
    void *out;  // [rows, ld]
    int64_t ld;
    int dtype;
} Epilogue;

#define MOST_PANELS 4  // of a tile
#define SPAN 128  // rows of one item of work
#define PREFETCH 2048  // bytes ahead, where weights come from memory
#define TILES_THAT_ASK 6  // of one panel: where it serves more, little of the time goes into reading it

// Activations between layers: bfloat16 where an instruction takes pairs of them, else float32 (rounded
// to bfloat16 if that is the model's dtype). For AMX they lie in tiles of 16 rows × 32 columns.
#define IS_TILED(dtype) (HAVE_AMX && (dtype) == BF16)

INLINE int64_t act_at(int dtype, int64_t row, int64_t column, int64_t k) {
    if (!IS_TILED(dtype)) return row * k + column;
    return ((row / 16 * (k / 32) + column / 32) * 16 + row % 16) * 32 + column % 32;
}

INLINE void put_act(int dtype, void *out, int64_t at, vf x) {
    if (dtype == F32) store((float *)out + at, x);
    else if (HAVE_DOT) store_bf16((bf16 *)out + at, x);
    else store((float *)out + at, (vf)round_bf16(x));
}

INLINE void finish(const Linear *w, const Epilogue *e, int64_t row, int panel, vf *y) {
    int column = panel * PANEL, whole = column + PANEL <= w->n;
    if (w->bias) {
        float bias[PANEL] = {0};
        for (int i = 0; i < PANEL && column + i < w->n; i++) bias[i] = w->bias[column + i];
        for (int v = 0; v < VECTORS; v++) y[v] += load(bias + v * W);
    }
    if (e->mode == SWIGLU) {
        for (int v = 0; v < VECTORS / 2; v++) {
            vf gated = y[v] / (1.0f + vexp(-y[v])) * y[VECTORS / 2 + v];
            put_act(e->dtype, e->out, act_at(e->dtype, row, column / 2 + v * W, e->ld), gated);
        }
        return;
    }
    float *out = (float *)e->out + row * e->ld + column, rest[PANEL];
    if (whole) {
        for (int v = 0; v < VECTORS; v++) {
            if (e->mode == ADD) y[v] += load(out + v * W);
            store(out + v * W, y[v]);
        }
        return;
    }
    for (int v = 0; v < VECTORS; v++) store(rest + v * W, y[v]);
    for (int i = 0; column + i < w->n; i++) out[i] = e->mode == ADD ? rest[i] + out[i] : rest[i];
}

// R rows times G panels of sums y[R][G][VECTORS] are finished. The copy leaves the sums in registers.
INLINE void finish_tile(int R, int G, const Linear *w, const Epilogue *e, int64_t row, int panel, const vf *y) {
    for (int r = 0; r < R; r++)
        for (int g = 0; g < G; g++) {
            vf sums[VECTORS];
            for (int v = 0; v < VECTORS; v++) sums[v] = y[(r * G + g) * VECTORS + v];
            finish(w, e, row + r, panel + g, sums);
        }
}

// Weights come from memory at its full speed only if they are asked for in time: some lines before they
// are used and, where a panel serves several tiles, the next panel's too, a part of it during each tile.
typedef struct {
    const char *next;  // what a tile asks for of the next panel
    int stride;        // bytes of that for each step along k
} Ahead;

INLINE void prefetch(const void *weights) {
    for (int b = 0; b < PANEL * 4; b += 64) __builtin_prefetch((const char *)weights + b + PREFETCH);
}

INLINE void prefetch_next(const Ahead *ahead, int64_t step) {
    if (ahead) __builtin_prefetch(ahead->next + step * ahead->stride, 0, 2);
}

INLINE void tile_f32(int R, int G, const Ahead *ahead, const void *acts, const Linear *w, const Epilogue *e,
                     int64_t row, int panel) {
    int64_t K = w->k;
    const float *p = (const float *)w->packed + panel * K * PANEL, *x = (const float *)acts + row * K;
    vf y[TILE_VECTORS];
    for (int c = 0; c < R * G * VECTORS; c++) y[c] = splat(0);
    for (int64_t k = 0; k < K; k++) {
        prefetch_next(ahead, k);
        vf weights[MOST_PANELS * VECTORS];
        for (int g = 0; g < G; g++) {
            const float *at = p + (g * K + k) * PANEL;
            prefetch(at);
            for (int v = 0; v < VECTORS; v++) weights[g * VECTORS + v] = load(at + v * W);
        }
        for (int r = 0; r < R; r++) {
            vf one = splat(x[r * K + k]);
            for (int c = 0; c < G * VECTORS; c++)
                y[r * G * VECTORS + c] = vfma(one, weights[c], y[r * G * VECTORS + c]);
        }
    }
    finish_tile(R, G, w, e, row, panel, y);
}

// y += odd products, then even products, of a pair of activations with pairs of weights.
INLINE void add_pair(int n, const void *acts, int64_t at, const vu *pairs, vf *y) {
#if HAVE_DOT
    uint32_t pair;
    memcpy(&pair, (const bf16 *)acts + at, 4);
    __m512bh both = (__m512bh)_mm512_set1_epi32((int)pair);
    for (int c = 0; c < n; c++) y[c] = (vf)_mm512_dpbf16_ps((__m512)y[c], both, (__m512bh)pairs[c]);
#else
    vf even = splat(((const float *)acts)[at]), odd = splat(((const float *)acts)[at + 1]);
    for (int c = 0; c < n; c++) {
        y[c] = vfma(odd, (vf)(pairs[c] & 0xFFFF0000u), y[c]);
        y[c] = vfma(even, (vf)(pairs[c] << 16), y[c]);
    }
#endif
}

INLINE void tile_bf16(int R, int G, const Ahead *ahead, const void *acts, const Linear *w, const Epilogue *e,
                      int64_t row, int panel) {
    int64_t K = w->k;
    const uint32_t *p = (const uint32_t *)w->packed + panel * K / 2 * PANEL;
    vf y[TILE_VECTORS];
    for (int c = 0; c < R * G * VECTORS; c++) y[c] = splat(0);
    for (int64_t k = 0; k < K; k += 2) {
        prefetch_next(ahead, k / 2);
        vu pairs[MOST_PANELS * VECTORS];
        for (int g = 0; g < G; g++) {
            const uint32_t *at = p + (g * K + k) / 2 * PANEL;
            prefetch(at);
            for (int v = 0; v < VECTORS; v++) pairs[g * VECTORS + v] = *(const vu_at *)(at + v * W);
        }
        for (int r = 0; r < R; r++) add_pair(G * VECTORS, acts, (row + r) * K + k, pairs, y + r * G * VECTORS);
    }
    finish_tile(R, G, w, e, row, panel, y);
}

#include "amx.h"

// How many panels go together: with few rows, more of them, to have enough sums under way.
INLINE int panels_at_once(int rows) {
    return rows * 4 * VECTORS <= TILE_VECTORS ? 4 : rows * 2 * VECTORS <= TILE_VECTORS ? 2 : 1;
}

#define TILE(R, G)                                                                                        \
    case (R) * 8 + (G):                                                                                   \
        if ((R) * (G) * VECTORS <= TILE_VECTORS) {                                                        \
            if (dtype == BF16) tile_bf16((R), (G), NULL, x, w, e, row, panel);                            \
            else tile_f32((R), (G), NULL, x, w, e, row, panel);                                           \
        }                                                                                                 \
        break;

static void tile(int dtype, int height, int count, const void *x, const Linear *w, const Epilogue *e,
                 int64_t row, int panel) {
    switch (height * 8 + count) {
        TILE(1, 4) TILE(2, 4) TILE(3, 4)
        TILE(1, 2) TILE(2, 2) TILE(3, 2) TILE(4, 2) TILE(5, 2) TILE(6, 2)
        TILE(1, 1) TILE(2, 1) TILE(3, 1) TILE(4, 1) TILE(5, 1) TILE(6, 1)
        TILE(7, 1) TILE(8, 1) TILE(9, 1) TILE(10, 1) TILE(11, 1) TILE(12, 1)
    }
}

#define ASKING(R)                                                                                         \
    case (R):                                                                                             \
        if ((R) * VECTORS <= TILE_VECTORS) {                                                              \
            if (dtype == BF16) tile_bf16((R), 1, &ahead, x, w, e, row, panel);                            \
            else tile_f32((R), 1, &ahead, x, w, e, row, panel);                                           \
        }                                                                                                 \
        break;

// A tile of one panel. A function of its own: with a test in `tile`, large bfloat16 products were slower.
static void asking_tile(int dtype, int height, Ahead ahead, const void *x, const Linear *w,
                        const Epilogue *e, int64_t row, int panel) {
    switch (height) {
        ASKING(1) ASKING(2) ASKING(3) ASKING(4) ASKING(5) ASKING(6)
        ASKING(7) ASKING(8) ASKING(9) ASKING(10) ASKING(11) ASKING(12)
    }
}

// Rows `first` to `last` of `count` panels, cut into tiles of nearly equal height. `next`: the panel that
// this thread will probably have next, or -1.
static void product(int dtype, const void *x, const Linear *w, const Epilogue *e, int first, int last,
                    int panel, int count, int next) {
    int together = panels_at_once(last - first) == count ? count : 1;
    int tiles = (last - first + TILE_ROWS - 1) / TILE_ROWS;
    int64_t bytes = (int64_t)w->k * PANEL * (dtype == BF16 ? 2 : 4);
    int asks = together == 1 && tiles > 1 && tiles <= TILES_THAT_ASK && next >= 0;
    const char *ahead = (const char *)w->packed + (asks ? next * bytes : 0);
    for (int end = panel + count; panel < end; panel += together) {
        int row = first;
        for (int i = 0; i < tiles; i++) {
            int height = (last - row + tiles - i - 1) / (tiles - i);
            Ahead part = {ahead + bytes / tiles * i, (PANEL * 4 + tiles - 1) / tiles};
            if (asks) asking_tile(dtype, height, part, x, w, e, row, panel);
            else tile(dtype, height, together, x, w, e, row, panel);
            row += height;
        }
    }
}

// Called by every thread of a team.
static void gemm(Team *team, int dtype, const void *x, int rows, const Linear *w, Epilogue e) {
    int panels = (w->n + PANEL - 1) / PANEL, parts = (rows + SPAN - 1) / SPAN;
    int at_once = IS_TILED(dtype) ? 1 : panels_at_once(rows);
    while (at_once > 1 && panels < 2 * at_once * team->threads) at_once /= 2;  // work for every thread
    int items = (panels + at_once - 1) / at_once;
    SHARE(team, items * parts, item) {
        int first = item % parts * SPAN, last = first + SPAN < rows ? first + SPAN : rows;
        int panel = item / parts * at_once, count = panel + at_once < panels ? at_once : panels - panel;
        int beyond = panel + at_once * team->threads, next = parts == 1 && beyond < panels ? beyond : -1;
        if (IS_TILED(dtype)) tile_amx(x, w, &e, first, last, panel);
        else product(dtype, x, w, &e, first, last, panel, count, next);
    }
}
