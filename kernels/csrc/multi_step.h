// Several passes in one call, each feeding the tokens that were sampled from the one before: drafts of a
// draft model, and tokens of a verifier that has no drafts to verify.
#pragma once
#include "decoder.h"
#include "sampling.h"

// What the passes behind the first one read: one entry per sequence. The first reads what its caller made.
typedef struct {
    int64_t *ids, *positions, *slots, *rows;
    int64_t *next;  // positions of the tokens to be fed next
    int32_t *sequence, *items, *ones;
} Fed;

static Fed fed_of(int64_t *space, int64_t count) {
    int32_t *narrow = (int32_t *)(space + 5 * count);
    return (Fed){space, space + count, space + 2 * count, space + 3 * count, space + 4 * count,
                 narrow, narrow + count, narrow + 2 * count};
}

// Row i of the next pass gets the token sampled in row from[i], for the `n` rows that continue. `from` ascends.
static void feed(Batch *batch, Sampling *s, Fed *fed, const int32_t *from, int n) {
    int64_t *counters = (int64_t *)s->counters;
    for (int i = 0; i < n; i++) {
        int old = from ? from[i] : i;
        int64_t here = fed->next[old];
        fed->ids[i] = s->tokens[old], fed->positions[i] = here, fed->next[i] = here + 1;
        fed->sequence[i] = fed->sequence[old], fed->rows[i] = fed->items[i] = i, fed->ones[i] = 1;
        fed->slots[i] =
            (int64_t)batch->tables[(int64_t)fed->sequence[i] * batch->table_width + here / BLOCK] * BLOCK +
            here % BLOCK;
        counters[2 * i] = counters[2 * old], counters[2 * i + 1] = counters[2 * old + 1] + 1;
    }
    batch->ids = fed->ids, batch->positions = fed->positions, batch->slots = fed->slots;
    batch->logit_rows = fed->rows, batch->item_seq = fed->sequence, batch->item_token = fed->items;
    batch->item_count = fed->ones;
    batch->tokens = batch->rows = batch->items = n;
    s->rows = n;
}

static int decode_and_sample(const Model *m, Batch *batch, Sampling *s, int threads) {
    return NAME(decode)(m, batch, threads) || NAME(sample)(s, threads < s->rows ? threads : (int)s->rows);
}

// The first pass is `batch` as it stands: its sequences' tokens not yet fed, one row of logits each.
// active[p], falling, is how many sequences, from the first, get a draft token at place p. `space` is
// for `Fed`, with the next positions and the sequences filled in. drafts[p][i] is sequence i's token.
// Returns 0, or 1 when memory ran out.
EXPORT int NAME(draft)(const Model *m, Batch *batch, Sampling *s, int steps, const int32_t *active,
                    int64_t *space, int64_t *drafts, int threads) {
    Fed fed = fed_of(space, active[0]);
    for (int step = 0; step < steps; step++) {
        if (decode_and_sample(m, batch, s, threads)) return 1;
        memcpy(drafts + (int64_t)step * active[0], s->tokens, s->rows * sizeof(int64_t));
        if (step + 1 < steps) feed(batch, s, &fed, NULL, active[step + 1]);
    }
    return 0;
}

static int among(int64_t token, const int64_t *ids, const int64_t *end) {
    while (ids < end && *ids != token) ids++;
    return ids < end;
}

// As `draft`, but every sequence has a limit of its own, and ends with one of its stop tokens or with
// logits that are NaN. Row p of `tokens` and `logprobs` is of pass p; the first made[i] entries of column i
// are valid. Parameters of sampling and counters move with their rows: the caller passes copies.
EXPORT int NAME(generate)(const Model *m, Batch *batch, Sampling *s, const int32_t *limits,
                       const int64_t *stop_starts, const int64_t *stops, int64_t *space, int64_t *tokens,
                       float *logprobs, int32_t *made, int threads) {
    int64_t count = s->rows;
    Fed fed = fed_of(space, count);
    int32_t *from = fed.ones + count;
    float *floats[] = {(float *)s->temperature, (float *)s->top_p, (float *)s->min_p};
    for (int64_t pass = 0; s->rows; pass++) {
        if (decode_and_sample(m, batch, s, threads)) return 1;
        int n = 0;
        for (int row = 0; row < s->rows; row++) {
            int at = fed.sequence[row];
            tokens[pass * count + at] = s->tokens[row], logprobs[pass * count + at] = s->logprobs[row];
            made[at]++;
            int ends = made[at] >= limits[at] || s->logprobs[row] != s->logprobs[row] ||
                       among(s->tokens[row], stops + stop_starts[at], stops + stop_starts[at + 1]);
            if (!ends) from[n++] = row;
        }
        for (int i = 0; i < n && n < s->rows; i++) {
            for (int f = 0; f < 3; f++) floats[f][i] = floats[f][from[i]];
            ((int64_t *)s->top_k)[i] = s->top_k[from[i]];
        }
        feed(batch, s, &fed, from, n);
    }
    return 0;
}
