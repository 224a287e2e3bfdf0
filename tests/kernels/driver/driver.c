// Runs one level's kernels on fixed inputs and prints a digest of what each wrote: the same lines on
// every processor. Compiled with the kernels' sources, LEVEL and flags; see test_driver.py.
#include <stdio.h>

#include "multi_step.h"

static uint32_t state = 2463534242u;

static uint32_t next_word(void) {
    state ^= state << 13, state ^= state >> 17, state ^= state << 5;
    return state;
}

// Between -1 and 1, of 24 bits: exact on every machine.
static float next_float(void) { return (float)((int32_t)next_word() >> 8) * 0x1p-23f; }

static float *floats(int64_t n, float scale) {
    float *x = aligned_alloc(64, (n * 4 + 4095) / 64 * 64);
    for (int64_t i = 0; i < n; i++) x[i] = next_float() * scale;
    return x;
}

static void *zeros(size_t bytes) {
    void *x = aligned_alloc(64, (bytes + 4095) / 64 * 64);
    memset(x, 0, bytes);
    return x;
}

// FNV-1a.
static void tell(const char *name, const void *data, size_t bytes) {
    uint64_t digest = 14695981039346656037ull;
    for (size_t i = 0; i < bytes; i++) digest = (digest ^ ((const uint8_t *)data)[i]) * 1099511628211ull;
    printf("%s %016llx\n", name, (unsigned long long)digest);
}

static const void *in_dtype(int dtype, const float *x, int64_t n) {
    if (dtype == F32) return x;
    bf16 *y = zeros(n * 2);
    for (int64_t i = 0; i < n; i += W) {
        float part[W] = {0};
        bf16 rounded[W];
        for (int j = 0; j < W && i + j < n; j++) part[j] = x[i + j];
        store_bf16(rounded, load(part));
        for (int j = 0; j < W && i + j < n; j++) y[i + j] = rounded[j];
    }
    return y;
}

static Linear linear(int dtype, int n, int k, int bias) {
    const float *weight = floats((int64_t)n * k, 0.3f);
    void *packed = zeros((int64_t)(n + PANEL - 1) / PANEL * PANEL * k * 4);
    NAME(pack)(dtype, in_dtype(dtype, weight, (int64_t)n * k), n, k, packed);
    return (Linear){packed, bias ? floats(n, 0.5f) : NULL, n, k};
}

// Gate and up rows stand in halves of a panel, which differs between levels; their values do not.
static Linear gate_up(int dtype, int inter, int k) {
    const float *gate = floats((int64_t)inter * k, 0.3f), *up = floats((int64_t)inter * k, 0.3f);
    float *both = zeros((int64_t)2 * inter * k * 4);
    for (int i = 0; i < inter; i++) {
        int64_t at = (int64_t)i / (PANEL / 2) * PANEL + i % (PANEL / 2);
        memcpy(both + at * k, gate + (int64_t)i * k, k * 4);
        memcpy(both + (at + PANEL / 2) * k, up + (int64_t)i * k, k * 4);
    }
    void *packed = zeros((int64_t)2 * inter * k * 4);
    NAME(pack)(dtype, in_dtype(dtype, both, (int64_t)2 * inter * k), 2 * inter, k, packed);
    return (Linear){packed, NULL, 2 * inter, k};
}

static void products(void) {
    int n = 77, k = 96;
    Linear w = linear(F32, n, k, 0);
    for (int rows = 1; rows < 30; rows = rows * 2 + 1) {
        const float *x = floats((int64_t)rows * k, 3);
        float *acts = zeros((int64_t)(rows + 32) * k * 4), *out = zeros((int64_t)rows * n * 4);
        NAME(acts)(F32, rows, k, x, acts);
        NAME(product)(F32, rows, acts, &w, out, 1 + rows % 2);
        char name[32];
        snprintf(name, sizeof name, "product-%d", rows);
        tell(name, out, (size_t)rows * n * 4);
    }
}

void specbatch_settle(void);
void specbatch_rotary(const float *, int64_t, int64_t, float, float *, float *);

enum { HIDDEN = 64, HEADS = 4, KV = 2, D = 32, INTER = 96, VOCAB = 200, BLOCKS = 6, MOST = 64 };

// Two sequences: prompts of 40 and 7 tokens, then one token each, five times; the last logits sampled.
static void model(int dtype, int window, const char *name) {
    float frequencies[D / 2], cos[MOST * D], sin[MOST * D];
    for (int i = 0; i < D / 2; i++) frequencies[i] = 1.0f / (float)(1 + 3 * i);
    specbatch_rotary(frequencies, MOST, D / 2, 1.0f, cos, sin);
    Layer layers[2];
    for (int i = 0; i < 2; i++)
        layers[i] = (Layer){floats(HIDDEN, 1), floats(HIDDEN, 1), floats(D, 1), floats(D, 1),
                            linear(dtype, (HEADS + 2 * KV) * D, HIDDEN, 1), linear(dtype, HIDDEN, HEADS * D, 0),
                            gate_up(dtype, INTER, HIDDEN), linear(dtype, HIDDEN, INTER, 0),
                            zeros(BLOCKS * KV * D * BLOCK * 4), zeros(BLOCKS * KV * D * BLOCK * 4)};
    Model m = {2, HIDDEN, HEADS, KV, D, INTER, VOCAB, window, dtype, 1e-5f, 0.1767767f,
               in_dtype(dtype, floats(VOCAB * HIDDEN, 1), VOCAB * HIDDEN), cos, sin, floats(HIDDEN, 1),
               linear(dtype, VOCAB, HIDDEN, 0), layers};
    int32_t tables[2][2] = {{3, 0}, {5, 1}}, lengths[2] = {0, 0};
    float *logits = zeros(2 * VOCAB * 4);
    for (int step = 0; step < 6; step++) {
        int64_t ids[MOST], positions[MOST], slots[MOST], last[2];
        int32_t seq[MOST], first[MOST], count[MOST], items = 0, tokens = 0;
        for (int s = 0; s < 2; s++) {
            int fed = step ? 1 : s ? 7 : 40;
            for (int t = 0; t < fed; t++) {
                if (t % 8 == 0) seq[items] = s, first[items] = tokens, count[items++] = 0;
                count[items - 1]++;
                int at = lengths[s]++;
                ids[tokens] = next_word() % VOCAB, positions[tokens] = at;
                slots[tokens++] = tables[s][at / BLOCK] * BLOCK + at % BLOCK;
            }
            last[s] = tokens - 1;
        }
        Batch b = {tokens, 2, items, 2, ids, positions, slots, seq, first, count, tables[0], last, logits, lengths[0],
                   zeros(64 * HIDDEN * 4), zeros(64 * HEADS * D * 4), zeros(64 * (HEADS + 2 * KV) * D * 4),
                   zeros(64 * INTER * 4), zeros(2 * SCORE_ROWS * MOST * 4), NULL};
        if (NAME(decode)(&m, &b, 1 + step % 2)) exit(3);
    }
    specbatch_settle();
    tell(name, logits, 2 * VOCAB * 4);
}

static void sampling(void) {
    enum { ROWS = 8, WORDS = 500 };
    const float *logits = floats(ROWS * WORDS, 6);
    int64_t counters[ROWS][2], top_k[ROWS] = {0, 0, 5, 40, 0, 0, 100, 1}, starts[ROWS + 1] = {0}, tokens[ROWS];
    float temperature[ROWS] = {0, 1, 0.7f, 0.9f, 1.5f, 1, 2, 1}, top_p[ROWS] = {1, 1, 1, 0.9f, 0.5f, 1, 0.95f, 1};
    float min_p[ROWS] = {0, 0, 0, 0, 0, 0.1f, 0.01f, 0}, logprobs[ROWS], noise[ROWS * WORDS];
    for (int r = 0; r < ROWS; r++) counters[r][0] = (int64_t)next_word() << 32 | next_word(), counters[r][1] = r * 77;
    Sampling s = {ROWS, WORDS, logits, counters[0], temperature, top_p, min_p, top_k, starts, NULL, starts, NULL,
                  NULL, NULL, NULL, tokens, logprobs, zeros(2 * 6 * WORDS * 4), 0, NULL, NULL, NULL};
    if (NAME(sample)(&s, 2)) exit(3);
    NAME(gumbel)(counters[0], ROWS, WORDS, 1, noise);
    tell("tokens", tokens, sizeof tokens);
    tell("log-probabilities", logprobs, sizeof logprobs);
    tell("noise", noise, sizeof noise);
}

int main(void) {
    products();
    model(F32, 0, "decoder");
    model(F32, 16, "decoder-window");
    sampling();
    if (!HAVE_AMX) model(BF16, 0, "decoder-bfloat16");
    return 0;
}
