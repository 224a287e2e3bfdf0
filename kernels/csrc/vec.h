// Sixteen floats at a time, in the compiler's own vector types: every element goes through the same
// instructions wherever it stands, which is what makes results independent of the batch.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef float v16 __attribute__((vector_size(64), aligned(64)));
typedef float v16u __attribute__((vector_size(64), aligned(4)));
typedef float v8 __attribute__((vector_size(32), aligned(32)));
typedef int32_t i8 __attribute__((vector_size(32), aligned(32)));
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

// Halves folded onto each other, always in this order.
INLINE v8 low8(v16 x) { v8 y; memcpy(&y, &x, 32); return y; }
INLINE v8 high8(v16 x) { v8 y; memcpy(&y, (const char *)&x + 32, 32); return y; }

INLINE float sum16(v16 x) {
    v8 a = low8(x) + high8(x);
    float b[4];
    for (int i = 0; i < 4; i++) b[i] = a[i] + a[i + 4];
    return (b[0] + b[2]) + (b[1] + b[3]);
}

INLINE float max16(v16 x) {
    v8 a = low8(x), b = high8(x), m = (v8)(((a > b) & (i8)a) | (~(a > b) & (i8)b));
    float c[4];
    for (int i = 0; i < 4; i++) c[i] = m[i] > m[i + 4] ? m[i] : m[i + 4];
    float d = c[0] > c[2] ? c[0] : c[2], e = c[1] > c[3] ? c[1] : c[3];
    return d > e ? d : e;
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
