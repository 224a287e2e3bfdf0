// Rows of logits, how each is sampled, and where its token goes.
#pragma once
#include <stdint.h>

typedef struct {
    int64_t rows, vocab;
    const float *logits;      // [rows, vocab]
    const int64_t *counters;  // [rows, 2]
    const float *temperature, *top_p, *min_p;  // [rows]
    const int64_t *top_k;     // [rows]
    const int64_t *forbidden_starts, *forbidden;  // [rows + 1] into token ids
    const int64_t *adjust_starts, *adjust;        // likewise
    const float *adjust_scale, *adjust_add;       // one per adjusted token
    const int32_t *allowed;   // [rows, (vocab + 31) / 32], a bit per token, or NULL
    int64_t *tokens;          // [rows]
    float *logprobs;          // [rows] or NULL
    float *space;             // [threads, 4, vocab]
    int64_t top_count;
    const int64_t *top_at;    // [rows], where a row's most likely tokens go or -1; or NULL
    int64_t *top_tokens;      // [wanted, top_count]
    float *top_logprobs;      // [wanted, top_count]
} Sampling;

// Returns 0, or 1 when memory ran out.
int specbatch_sample(const Sampling *s, int threads);
