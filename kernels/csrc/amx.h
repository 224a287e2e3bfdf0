// Products of bfloat16 tiles, 16 rows at a time (AMX). A row's sums are made in the order of k and do
// not depend on the other rows of its tile. Included by gemm.h.
#pragma once
#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>

#define HAVE_AMX 1
#define DEPTH 256  // of k at a time: a block's weights then stay in the first cache for all rows

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

// Sums of 32 (or 16) rows times 32 outputs over k in [from, to), begun at 0 or taken up from `c`.
INLINE void steps_amx(int two, const bf16 *x, const bf16 *w, int K, int from, int to, float *c) {
    const bf16 *p = w, *q = w + (int64_t)K * 16;
    const bf16 *x0 = x, *x1 = x + (int64_t)16 * K;
    if (from) {
        _tile_loadd(0, c, 64); _tile_loadd(1, c + 256, 64);
        if (two) { _tile_loadd(2, c + 512, 64); _tile_loadd(3, c + 768, 64); }
    } else {
        _tile_zero(0); _tile_zero(1);
        if (two) { _tile_zero(2); _tile_zero(3); }
    }
    for (int k = from; k < to; k += 32) {
        _tile_loadd(6, p + k * 16, 64);
        _tile_loadd(4, x0 + k * 16, 64);
        _tile_loadd(7, q + k * 16, 64);
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

// Rows `first` to `last` (first a multiple of 16) of one block of 32 outputs. The last tile's further
// rows exist and may hold anything.
static void block_amx(const bf16 *x, const Linear *w, const Epilogue *e, int first, int last, int block) {
    float c[SPAN / 16][2][256] __attribute__((aligned(64)));
    const bf16 *weights = (const bf16 *)w->packed + (int64_t)block * 2 * w->k * 16;
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
        finish(w, e, row, block, load(c[tile][0] + at), load(c[tile][1] + at));
    }
}
#endif
