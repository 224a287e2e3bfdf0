// Sixteen floats at a time, in the compiler's own vector types: every element goes through the same
// instructions wherever it stands, which is what makes results independent of the batch.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef float v16 __attribute__((vector_size(64), aligned(64)));
typedef float v16u __attribute__((vector_size(64), aligned(4)));
typedef int32_t i16 __attribute__((vector_size(64), aligned(64)));
typedef uint32_t u16v __attribute__((vector_size(64), aligned(64)));
typedef uint16_t h16 __attribute__((vector_size(32), aligned(2)));
typedef uint16_t bf16;

#define INLINE static inline __attribute__((always_inline))

INLINE v16 splat(float x) { return (v16){} + x; }
INLINE v16 load(const float *p) { return *(const v16u *)p; }
INLINE void store(float *p, v16 x) { *(v16u *)p = x; }
INLINE v16 pick(i16 mask, v16 a, v16 b) {
    return (v16)((mask & (i16)a) | (~mask & (i16)b));
}
INLINE v16 vmax(v16 a, v16 b) { return pick(a > b, a, b); }

INLINE v16 load_bf16(const bf16 *p) {
    return (v16)(__builtin_convertvector(*(const h16 *)p, u16v) << 16);
}

// Round to nearest even; NaN stays NaN.
INLINE void store_bf16(bf16 *p, v16 x) {
    u16v bits = (u16v)x;
    u16v rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    u16v nan = (u16v)(x != x);
    *(h16 *)p = __builtin_convertvector((nan & 0x7FC0) | (~nan & rounded), h16);
}

INLINE float sum16(v16 x) {
    float s = 0;
    for (int i = 0; i < 8; i++) s += x[i] + x[i + 8];
    return s;
}

INLINE float max16(v16 x) {
    float m = x[0];
    for (int i = 1; i < 16; i++) m = x[i] > m ? x[i] : m;
    return m;
}

// e^x after Cephes expf; 0 below -87, which is where masked scores are.
INLINE v16 vexp(v16 x) {
    i16 zero = x < -87.0f;
    x = pick(x > 88.0f, splat(88.0f), pick(zero, splat(-87.0f), x));
    v16 t = x * 1.44269504088896341f;
    i16 n = __builtin_convertvector(t + pick(t < 0.0f, splat(-0.5f), splat(0.5f)), i16);
    v16 fn = __builtin_convertvector(n, v16);
    v16 r = x - fn * 0.693359375f + fn * 2.12194440e-4f;
    v16 p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    v16 y = p * (v16)((n + 127) << 23);
    return pick(zero, splat(0.0f), y);
}
