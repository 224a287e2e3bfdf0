// Draft tokens one after another in one call: a pass, its rows sampled, the tokens fed to the next pass.
#pragma once
#include "decoder.h"
#include "sampling.h"

// The first pass is `batch` as it stands: its sequences' tokens not yet fed, one row of logits each.
// active[p], falling, is how many sequences, from the first, get a draft token at place p. Arrays that
// later passes overwrite have room for one entry per sequence. drafts[p][i] is sequence i's token.
// Returns 0, or 1 when memory ran out.
EXPORT int NAME(draft)(const Model *m, Batch *batch, Sampling *s, int steps, const int32_t *active,
                    int64_t *next, int64_t *drafts, int threads) {
    // What the first pass read stays as it was: the later ones have arrays of their own.
    int64_t *ids = next, *positions = ids + active[0], *slots = positions + active[0];
    int64_t *rows = slots + active[0], *at = rows + active[0];  // `at` holds the next positions
    int32_t *items = (int32_t *)(at + active[0]), *ones = items + active[0];
    int64_t *counters = (int64_t *)s->counters;
    for (int step = 0; step < steps; step++) {
        if (NAME(decode)(m, batch, threads)) return 1;
        if (NAME(sample)(s, threads < s->rows ? threads : (int)s->rows)) return 1;
        memcpy(drafts + (int64_t)step * active[0], s->tokens, s->rows * sizeof(int64_t));
        if (step + 1 == steps) break;
        int n = active[step + 1];
        for (int i = 0; i < n; i++) {
            int64_t here = at[i]++;
            ids[i] = s->tokens[i], positions[i] = here, rows[i] = i, items[i] = i, ones[i] = 1;
            slots[i] = (int64_t)batch->tables[(int64_t)i * batch->table_width + here / BLOCK] * BLOCK +
                       here % BLOCK;
            counters[2 * i + 1]++;
        }
        batch->ids = ids, batch->positions = positions, batch->slots = slots, batch->logit_rows = rows;
        batch->item_seq = batch->item_token = items, batch->item_count = ones;
        batch->tokens = batch->rows = batch->items = n;
        s->rows = n;
    }
    return 0;
}
