// Native vectors of W floats in the compiler's own vector types, W as wide as the level has them.
//
// Elementwise work gives a lane the same bits whatever W is. Sums over lanes do not, so they always go
// through sixteen partial sums (`lanes16`) and one tree (`sum16`). Nothing is fused by the compiler
// (-ffp-contract=off): where a product and a sum round once, the source says `vfma`.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define W 16
#elif defined(__AVX2__)
#define W 8
#else
#define W 4
#endif
#define PARTS (16 / W)  // native vectors that sixteen lanes take

#define VECTOR(type, bytes) type __attribute__((vector_size(bytes), __may_alias__))
typedef VECTOR(float, 4 * W) vf;
typedef VECTOR(int32_t, 4 * W) vi;
typedef VECTOR(uint32_t, 4 * W) vu;
typedef VECTOR(uint64_t, 4 * W) vl;
typedef float __attribute__((vector_size(4 * W), aligned(4), __may_alias__)) vf_at;
typedef uint32_t __attribute__((vector_size(4 * W), aligned(4), __may_alias__)) vu_at;
typedef uint16_t __attribute__((vector_size(2 * W), aligned(2), __may_alias__)) vh_at;
typedef uint16_t bf16;

#define INLINE static inline __attribute__((always_inline))

INLINE vf splat(float x) { return x - (vf){}; }  // x - 0 is x, for -0 too
INLINE vf load(const float *p) { return *(const vf_at *)p; }
INLINE void store(float *p, vf x) { *(vf_at *)p = x; }
INLINE vf pick(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }

// a * b + c, rounded once.
INLINE vf vfma(vf a, vf b, vf c) {
#if defined(PORTABLE)
    vf y;
    for (int i = 0; i < W; i++) y[i] = fmaf(a[i], b[i], c[i]);
    return y;
#elif W == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif W == 8
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#endif
}

INLINE vf load_bf16(const bf16 *p) {
    return (vf)(__builtin_convertvector(*(const vh_at *)p, vu) << 16);
}

// The bits of x rounded to nearest even, in the upper half of each lane; NaN stays NaN.
INLINE vu round_bf16(vf x) {
    vu bits = (vu)x, nan = (vu)(x != x);
    vu rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000u;
    return (nan & 0x7FC00000u) | (~nan & rounded);
}

INLINE void store_bf16(bf16 *p, vf x) {
    *(vh_at *)p = __builtin_convertvector(round_bf16(x) >> 16, vh_at);
}

// Sixteen running sums or maxima, in as many registers as they take.
typedef struct {
    vf part[PARTS];
} lanes16;

INLINE lanes16 all16(float x) {
    lanes16 y;
    for (int j = 0; j < PARTS; j++) y.part[j] = splat(x);
    return y;
}

// The lanes added up, halves onto each other, always in this order.
INLINE float sum16(lanes16 x) {
    float a[16], b[8], c[4];
    for (int j = 0; j < PARTS; j++) store(a + j * W, x.part[j]);
    for (int i = 0; i < 8; i++) b[i] = a[i] + a[i + 8];
    for (int i = 0; i < 4; i++) c[i] = b[i] + b[i + 4];
    return (c[0] + c[2]) + (c[1] + c[3]);
}

INLINE float max16(lanes16 x) {
    float best = -INFINITY;
    for (int j = 0; j < PARTS; j++)
        for (int i = 0; i < W; i++) best = x.part[j][i] > best ? x.part[j][i] : best;
    return best;
}

// e^x after Cephes expf; 0 below -87, which is where masked scores are.
INLINE vf vexp(vf x) {
    vi zero = x < -87.0f;
    x = pick(x > 88.0f, splat(88.0f), pick(zero, splat(-87.0f), x));
    vf t = x * 1.44269504088896341f;
    vi n = __builtin_convertvector(t + pick(t < 0.0f, splat(-0.5f), splat(0.5f)), vi);
    vf fn = __builtin_convertvector(n, vf);
    vf r = vfma(fn, splat(-0.693359375f), x);
    r = vfma(fn, splat(2.12194440e-4f), r);
    vf p = splat(1.9875691500e-4f);
    p = vfma(p, r, splat(1.3981999507e-3f));
    p = vfma(p, r, splat(8.3334519073e-3f));
    p = vfma(p, r, splat(4.1665795894e-2f));
    p = vfma(p, r, splat(1.6666665459e-1f));
    p = vfma(p, r, splat(5.0000001201e-1f));
    p = vfma(p, r * r, r) + 1.0f;
    vf y = p * (vf)((n + 127) << 23);
    return pick(zero, splat(0.0f), y);
}

// Denormal numbers are kept in float32 and flushed in bfloat16, as the dot-product instructions flush
// them; rounding is to nearest. Whatever the calling thread had set is put back afterwards.
#if defined(__x86_64__)
INLINE uint32_t set_arithmetic(int flush) {
    uint32_t before = _mm_getcsr();
    _mm_setcsr(flush ? 0x9FC0 : 0x1F80);
    return before;
}
INLINE void reset_arithmetic(uint32_t before) { _mm_setcsr(before); }
#elif defined(__aarch64__)
INLINE uint32_t set_arithmetic(int flush) {
    uint64_t before, now = flush ? 1u << 24 : 0;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" ::"r"(now) : "memory");
    return (uint32_t)before;
}
INLINE void reset_arithmetic(uint32_t before) {
    __asm__ volatile("msr fpcr, %0" ::"r"((uint64_t)before) : "memory");
}
#else
INLINE uint32_t set_arithmetic(int flush) { return (uint32_t)flush; }
INLINE void reset_arithmetic(uint32_t before) { (void)before; }
#endif
