// Philox4x32-10, Gumbel noise and sampling, row by row. The noise has the same bits as the definition in
// torch, where every operation rounds by itself: nothing in it is fused.
#pragma once
#include <stdlib.h>

#include "level.h"
#include "team.h"

// Rows of logits, how each is sampled, and where its token goes.
typedef struct {
    int64_t rows, vocab;
    const float *logits;      // [rows, vocab]
    const int64_t *counters;  // [rows, 2]
    const float *temperature, *top_p, *min_p;  // [rows]
    const int64_t *top_k;     // [rows]
    const int64_t *forbidden_starts, *forbidden;  // [rows + 1] into token ids; or NULL
    const int64_t *adjust_starts, *adjust;        // likewise
    const float *adjust_scale, *adjust_add;       // one per adjusted token
    const int32_t *allowed;   // [rows, (vocab + 31) / 32], a bit per token, or NULL
    int64_t *tokens;          // [rows]
    float *logprobs;          // [rows] or NULL
    float *space;             // [threads, 6, vocab]: scores, a copy of them, two lists of candidates
    int64_t top_count;
    const int64_t *top_at;    // [rows], where a row's most likely tokens go or -1; or NULL
    int64_t *top_tokens;      // [wanted, top_count]
    float *top_logprobs;      // [wanted, top_count]
} Sampling;

#define MAX_GUMBEL 22.9f  // -log(-log1p(-2^-33)), rounded up
#define NOISE (4 * W)     // tokens whose noise is made at a time

// The upper words of 64-bit products: of even lanes, and of odd ones moved down.
INLINE vl even_products(vu a, uint32_t b) {
#if W == 16
    return (vl)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi32((int)b));
#elif W == 8
    return (vl)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi32((int)b));
#else
    return ((vl)a & 0xFFFFFFFFu) * (uint64_t)b;
#endif
}

INLINE vu mul_hi(vu a, uint32_t b) {
    vl even = even_products(a, b), odd = even_products((vu)((vl)a >> 32), b);
    return (vu)((even >> 32) | (odd & 0xFFFFFFFF00000000u));
}

// The four words of W consecutive counters (first quad, position, stream, 0).
INLINE void philox(uint32_t quad, uint32_t position, uint32_t stream, uint64_t key, vu out[4]) {
    vu lanes;
    for (int i = 0; i < W; i++) lanes[i] = (uint32_t)i;
    vu c0 = lanes + quad, c1 = (vu){} + position, c2 = (vu){} + stream, c3 = (vu){};
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        vu h0 = mul_hi(c0, 0xD2511F53u), l0 = c0 * 0xD2511F53u;
        vu h1 = mul_hi(c2, 0xCD9E8D57u), l1 = c2 * 0xCD9E8D57u;
        c0 = h1 ^ c1 ^ k0, c1 = l1, c2 = h0 ^ c3 ^ k1, c3 = l0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

INLINE vf tail(vf f, vf z) {
    vf p = splat(7.0376836292e-2f);
    p = p * f + -1.1514610310e-1f;
    p = p * f + 1.1676998740e-1f;
    p = p * f + -1.2420140846e-1f;
    p = p * f + 1.4249322787e-1f;
    p = p * f + -1.6668057665e-1f;
    p = p * f + 2.0000714765e-1f;
    p = p * f + -2.4999993993e-1f;
    p = p * f + 3.3333331174e-1f;
    return (p * f) * z - 0.5f * z;
}

INLINE vf vlog(vf x) {
    vi bits = (vi)x, exponent = (bits - 0x3F3504F3) >> 23;
    vf f = (vf)(bits - (exponent << 23)) - 1.0f, e = __builtin_convertvector(exponent, vf);
    return (f + (tail(f, f * f) + e * -2.12194440e-4f)) + e * 0.693359375f;
}

// (2·word + 1)·2^-33, rounded once: both halves are exact, so their sum rounds as the whole would.
INLINE vf unit(vu word) {
    vf high = __builtin_convertvector((vi)(word >> 16), vf) * 0x1p17f;
    vf low = __builtin_convertvector((vi)((word & 0xFFFF) * 2 + 1), vf);
    return (high + low) * 0x1p-33f;
}

INLINE vf vgumbel(vu word) {
    vf u = unit(word), rest = unit(~word);
    vi near_zero = (vi)(word < (1u << 30));
    vf small = -u + tail(-u, u * u);
    vf e = -pick(near_zero, small, vlog(rest));
    return -vlog(e);
}

// Noise of NOISE tokens from `token` (a multiple of NOISE).
INLINE void make_noise(int64_t token, uint64_t key, int64_t position, uint32_t stream, float *out) {
    vu words[4];
    philox((uint32_t)(token / 4), (uint32_t)position, stream, key, words);
    for (int w = 0; w < 4; w++) {
        vf g = vgumbel(words[w]);
        for (int i = 0; i < W; i++) out[i * 4 + w] = g[i];
    }
}

EXPORT void NAME(gumbel)(const int64_t *counters, int64_t rows, int64_t vocab, uint32_t stream, float *out) {
    uint32_t before = set_arithmetic(0);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t t = 0; t < vocab; t += NOISE) {
            float g[NOISE];
            make_noise(t, (uint64_t)counters[2 * r], counters[2 * r + 1], stream, g);
            int64_t n = vocab - t < NOISE ? vocab - t : NOISE;
            memcpy(out + r * vocab + t, g, n * sizeof(float));
        }
    reset_arithmetic(before);
}

typedef struct {
    float score;
    int32_t token;
} Candidate;

// Unsigned numbers that rise as scores fall; -0 is 0.
INLINE uint32_t falling_key(float score) {
    uint32_t bits;
    score += 0.0f;
    memcpy(&bits, &score, 4);
    return bits >> 31 ? bits : ~bits & 0x7FFFFFFFu;
}

// Candidates by falling score, of equal scores the lower token id first: few by insertion, many by a
// radix sort of three digits; both keep the order of equals. `list` is in the order of token ids; `spare` has room for as many.
static void sort_candidates(Candidate *list, Candidate *spare, int64_t n) {
    enum { FEW = 64, BITS = 11, DIGITS = 1 << BITS };
    for (int64_t i = 1; n <= FEW && i < n; i++) {
        Candidate moved = list[i];
        int64_t at = i;
        for (; at > 0 && list[at - 1].score < moved.score; at--) list[at] = list[at - 1];
        list[at] = moved;
    }
    if (n <= FEW) return;
    for (int shift = 0; shift < 32; shift += BITS) {
        int64_t starts[DIGITS + 1] = {0};
        for (int64_t i = 0; i < n; i++) starts[(falling_key(list[i].score) >> shift & (DIGITS - 1)) + 1]++;
        for (int d = 0; d < DIGITS; d++) starts[d + 1] += starts[d];
        for (int64_t i = 0; i < n; i++)
            spare[starts[falling_key(list[i].score) >> shift & (DIGITS - 1)]++] = list[i];
        Candidate *other = list;
        list = spare, spare = other;
    }
    memcpy(spare, list, n * sizeof(Candidate));  // three passes end in the other one
}

// The k-th largest score (k >= 1), by quickselect on a copy.
static float kth_largest(const float *scores, int64_t n, int64_t k, float *copy) {
    memcpy(copy, scores, n * sizeof(float));
    int64_t left = 0, right = n - 1, want = k - 1;
    while (left < right) {
        float pivot = copy[(left + right) / 2];
        int64_t i = left, j = right;
        while (i <= j) {
            while (copy[i] > pivot) i++;
            while (copy[j] < pivot) j--;
            if (i <= j) {
                float t = copy[i];
                copy[i++] = copy[j], copy[j--] = t;
            }
        }
        if (want <= j) right = j;
        else if (want >= i) left = i;
        else break;
    }
    return copy[want];
}

INLINE float exp1(float x) { return vexp(splat(x))[0]; }
INLINE float log1(float x) { return x == x ? vlog(splat(x))[0] : x; }

// The sum of e^(x - top), in sixteen partial sums.
static float sum_exp(const float *x, int64_t n, float top) {
    lanes16 sum = all16(0);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int p = 0; p < PARTS; p++) sum.part[p] += vexp(load(x + i + p * W) - top);
    float total = sum16(sum);
    for (; i < n; i++) total += exp1(x[i] - top);
    return total;
}

// The lowest score inside the nucleus of mass top_p; `last` is the highest token id kept at it.
static float nucleus(const float *scores, int64_t n, float top, float top_p, Candidate *list, int64_t *last) {
    Candidate *spare = list + n;
    float sum = sum_exp(scores, n, top);
    // All tokens below this share of the mass cannot be in it together.
    float least = (1.0f - top_p) / (float)n * sum;
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += W) {
        float weights[W];
        if (i + W <= n) store(weights, vexp(load(scores + i) - top));
        for (int j = 0; j < W && i + j < n; j++) {
            float weight = i + W <= n ? weights[j] : exp1(scores[i + j] - top);
            if (weight >= least || scores[i + j] == top)
                list[count++] = (Candidate){scores[i + j], (int32_t)(i + j)};
        }
    }
    if (count == 0) {  // NaN everywhere: nothing to choose from
        *last = n;
        return -INFINITY;
    }
    sort_candidates(list, spare, count);
    float before = 0;
    int64_t kept = 0;
    while (kept < count && (kept == 0 || before < top_p)) before += exp1(list[kept++].score - top) / sum;
    *last = list[kept - 1].token;
    return list[kept - 1].score;
}

// Where a row's entries begin; no row has any without `starts`.
INLINE int64_t begin_of(const int64_t *starts, int64_t r) { return starts ? starts[r] : 0; }

static void scale_row(const Sampling *s, int64_t r, float *scores) {
    const float *logits = s->logits + r * s->vocab;
    float t = s->temperature[r];
    float divisor = t <= 0 ? 1.0f : t < 1e-6f ? 1e-6f : t;
    if (t > 0)
        for (int64_t i = 0; i < s->vocab; i++) scores[i] = logits[i] / divisor;
    else
        memcpy(scores, logits, s->vocab * sizeof(float));
    for (int64_t i = begin_of(s->adjust_starts, r); i < begin_of(s->adjust_starts, r + 1); i++) {
        float x = logits[s->adjust[i]], scale = s->adjust_scale[i];
        scores[s->adjust[i]] = ((x > 0 ? x / scale : x * scale) + s->adjust_add[i]) / divisor;
    }
    for (int64_t i = begin_of(s->forbidden_starts, r); i < begin_of(s->forbidden_starts, r + 1); i++)
        scores[s->forbidden[i]] = -INFINITY;
    if (!s->allowed) return;
    int64_t words = (s->vocab + 31) / 32;
    for (int64_t w = 0; w < words; w++) {
        uint32_t bits = (uint32_t)s->allowed[r * words + w];
        for (int64_t i = w * 32; bits != UINT32_MAX && i < w * 32 + 32 && i < s->vocab; i++)
            if (!(bits >> (i - w * 32) & 1)) scores[i] = -INFINITY;
    }
}

INLINE lanes16 higher(lanes16 peak, const float *x) {
    for (int p = 0; p < PARTS; p++) {
        vf score = load(x + p * W);
        peak.part[p] = pick(score > peak.part[p], score, peak.part[p]);
    }
    return peak;
}

// The highest of n scores; NaN counts for nothing.
static float highest(const float *scores, int64_t n) {
    lanes16 even = all16(-INFINITY), odd = even;
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) even = higher(even, scores + i), odd = higher(odd, scores + i + 16);
    float a = max16(even), b = max16(odd), best = a > b ? a : b;
    for (; i < n; i++) best = scores[i] > best ? scores[i] : best;
    return best;
}

static int64_t first_max(const float *scores, int64_t n) {
    float best = highest(scores, n);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        vi any = {};
        for (int p = 0; p < PARTS; p++) any |= load(scores + i + p * W) == best;
        int32_t found = 0;
        for (int j = 0; j < W; j++) found |= any[j];
        if (found) break;
    }
    for (; i < n; i++)
        if (scores[i] == best) return i;
    return 0;  // NaN: the log-probability says so
}

// The argmax of scores + noise over the kept tokens. Noise is made only where it could still win.
static int64_t noisy_max(const Sampling *s, int64_t r, const float *scores, float floor, int64_t last) {
    uint64_t key = (uint64_t)s->counters[2 * r];
    int64_t position = s->counters[2 * r + 1], winner = 0;
    float best = -INFINITY;
    for (int64_t t = 0; t < s->vocab; t += NOISE) {
        int64_t n = s->vocab - t < NOISE ? s->vocab - t : NOISE;
        float peak = highest(scores + t, n), g[NOISE];
        if (peak < floor || peak + MAX_GUMBEL < best) continue;
        make_noise(t, key, position, 0, g);
        for (int64_t i = 0; i < n; i++) {
            float z = scores[t + i];
            if (z < floor || (z == floor && t + i > last)) continue;
            if (z + g[i] > best) best = z + g[i], winner = t + i;
        }
    }
    return winner;
}

// The most likely tokens of a row, in order; of equal logits the lower id comes first. NaN is last.
static void top_row(const Sampling *s, const float *logits, float norm_top, float norm_log, int64_t slot) {
    int64_t *tokens = s->top_tokens + slot * s->top_count, count = 0;
    float *values = s->top_logprobs + slot * s->top_count;  // logits at first
    for (int64_t i = 0; i < s->vocab; i++) {
        float x = logits[i] == logits[i] ? logits[i] : -INFINITY;
        if (count == s->top_count && !(x > values[count - 1])) continue;
        int64_t at = count < s->top_count ? count++ : count - 1;
        for (; at > 0 && x > values[at - 1]; at--) values[at] = values[at - 1], tokens[at] = tokens[at - 1];
        values[at] = x, tokens[at] = i;
    }
    for (int64_t i = 0; i < count; i++) values[i] = logits[tokens[i]] - norm_top - norm_log;
}

// Greedy, with nothing changed: the logits themselves are judged.
static int is_plain(const Sampling *s, int64_t r) {
    return s->temperature[r] <= 0 && !s->allowed &&
           begin_of(s->adjust_starts, r) == begin_of(s->adjust_starts, r + 1) &&
           begin_of(s->forbidden_starts, r) == begin_of(s->forbidden_starts, r + 1);
}

static void sample_row(const Sampling *s, int64_t r, float *scores, float *copy, Candidate *list) {
    int64_t n = s->vocab;
    const float *logits = s->logits + r * n, *judged = logits;
    if (!is_plain(s, r)) scale_row(s, r, scores), judged = scores;
    int64_t token = first_max(judged, n);
    int nothing_left = judged[token] == -INFINITY;
    if (s->temperature[r] > 0) {
        float top = scores[token], floor = -INFINITY;
        int64_t last = n;  // of the tokens exactly at the floor, those up to here are kept
        if (s->top_k[r] > 0 && s->top_k[r] < n) {
            floor = kth_largest(scores, n, s->top_k[r], copy);
            for (int64_t i = 0; i < n; i++)
                if (scores[i] < floor) scores[i] = -INFINITY;
        }
        if (s->top_p[r] < 1) {
            floor = nucleus(scores, n, top, s->top_p[r], list, &last);
        }
        if (s->min_p[r] > 0) {
            float least = top + log1(s->min_p[r]);
            if (least > floor) floor = least, last = n;
        }
        token = noisy_max(s, r, scores, floor, last);
    }
    s->tokens[r] = token;
    if (!s->logprobs) return;
    float top = judged == logits ? logits[token] : highest(logits, n);
    float mass = log1(sum_exp(logits, n, top));
    s->logprobs[r] = nothing_left ? NAN : logits[token] - top - mass;
    if (s->top_at && s->top_at[r] >= 0) top_row(s, logits, top, mass, s->top_at[r]);
}

static void sample(Team *team, const void *arguments) {
    const Sampling *s = arguments;
    float *scores = s->space + team->thread * 6 * s->vocab, *copy = scores + s->vocab;
    uint32_t before = set_arithmetic(0);
    SHARE(team, (int)s->rows, r) sample_row(s, r, scores, copy, (Candidate *)(copy + s->vocab));
    reset_arithmetic(before);
}

// Returns 0, or 1 when memory ran out.
EXPORT int NAME(sample)(const Sampling *s, int threads) {
    return specbatch_share_pass(sample, s, sizeof *s, 1, threads);
}
