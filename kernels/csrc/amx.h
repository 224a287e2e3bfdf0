// Products of bfloat16 tiles, 16 rows at a time (AMX). Included by gemm.h.
//
// A row's sums do not depend on the other rows of its tile. Of 32 columns of k the even products are
// added up, the odd ones apart from them, both from 0; their sum is added to what was there. That is
// TDPBF16PS, and another order than VDPBF16PS has: a numeric class of its own.
#pragma once
#if HAVE_AMX
#define DEPTH 256  // of k at a time: a panel's weights then stay in the first cache for all rows

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} __attribute__((packed)) TileConfig;

INLINE void tiles_on(void) {
    TileConfig c = {.palette = 1};
    for (int i = 0; i < 8; i++) c.bytes[i] = 64, c.rows[i] = 16;
    _tile_loadconfig(&c);
}

INLINE void tiles_off(void) { _tile_release(); }

// Sums of 32 (or 16) rows times a panel over k in [from, to), begun at 0 or taken up from `c`.
INLINE void steps_amx(int two, const bf16 *x, const bf16 *w, int K, int from, int to, float *c) {
    const bf16 *x0 = x, *x1 = x + (int64_t)16 * K;
    if (from) {
        _tile_loadd(0, c, 64); _tile_loadd(1, c + 256, 64);
        if (two) { _tile_loadd(2, c + 512, 64); _tile_loadd(3, c + 768, 64); }
    } else {
        _tile_zero(0); _tile_zero(1);
        if (two) { _tile_zero(2); _tile_zero(3); }
    }
    for (int k = from; k < to; k += 32) {
        const bf16 *weights = w + (int64_t)k * PANEL;
        _tile_loadd(6, weights, 128);
        _tile_loadd(4, x0 + k * 16, 64);
        _tile_loadd(7, weights + 32, 128);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (two) {
            _tile_loadd(5, x1 + k * 16, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, 64); _tile_stored(1, c + 256, 64);
    if (two) { _tile_stored(2, c + 512, 64); _tile_stored(3, c + 768, 64); }
}

// Rows `first` to `last` (first a multiple of 16) of one panel. The last tile's further rows exist and
// may hold anything.
static void tile_amx(const bf16 *x, const Linear *w, const Epilogue *e, int first, int last, int panel) {
    float c[SPAN / 16][2][256] __attribute__((aligned(64)));
    const bf16 *weights = (const bf16 *)w->packed + (int64_t)panel * w->k * PANEL;
    int depth = last - first > 32 ? DEPTH : w->k;
    for (int from = 0; from < w->k; from += depth) {
        int to = from + depth < w->k ? from + depth : w->k;
        for (int row = first; row < last; row += 32) {
            const bf16 *rows = x + (int64_t)row * w->k;
            float *sums = c[(row - first) / 16][0];
            if (last - row > 16) steps_amx(1, rows, weights, w->k, from, to, sums);
            else steps_amx(0, rows, weights, w->k, from, to, sums);
        }
    }
    for (int row = first; row < last; row++) {
        int tile = (row - first) / 16, at = row % 16 * 16;
        vf y[VECTORS] = {load(c[tile][0] + at), load(c[tile][1] + at)};
        finish(w, e, row, panel, y);
    }
}
#else
INLINE void tiles_on(void) {}
INLINE void tiles_off(void) {}
INLINE void tile_amx(const void *x, const Linear *w, const Epilogue *e, int first, int last, int panel) {
    (void)x, (void)w, (void)e, (void)first, (void)last, (void)panel;
}
#endif
