// Which levels this processor can run, and what needs none: compiled for any processor.
#include <math.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

// Tiles: the processor has them and the kernel would give leave to use them.
static int has_amx(void) {
    uint64_t supported = 0;
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1)) return 0;
    return syscall(SYS_arch_prctl, 0x1021, &supported) == 0 && supported >> 18 & 1;  // ARCH_GET_XCOMP_SUPP
}

static int has_v3(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
           __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("lzcnt") && __builtin_cpu_supports("f16c");
}

static int has_avx512(void) {
    return has_v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

static int has_bf16(void) { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
#endif

// 1 if this processor can run the level, 0 if not, -1 if this library does not have it.
EXPORT int specbatch_supports(const char *level) {
    if (!strcmp(level, "portable")) return 1;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!strcmp(level, "x86-64-v3")) return has_v3();
    if (!strcmp(level, "avx512")) return has_avx512();
    if (!strcmp(level, "avx512-bf16")) return has_bf16();
    if (!strcmp(level, "amx")) return has_bf16() && has_amx();
#elif defined(__aarch64__)
    if (!strcmp(level, "neon")) return 1;
#endif
    return -1;
}

// Ask for what a level needs of the kernel, for all threads from now on; 1 if it is granted.
EXPORT int specbatch_enter(const char *level) {
#if defined(__x86_64__)
    if (!strcmp(level, "amx")) return syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // ARCH_REQ_XCOMP_PERM, XTILEDATA
#endif
    (void)level;
    return 1;
}

// Sine and cosine of x >= 0 up to 2^20, further than positions go: Cody-Waite reduction by pi/2 in three parts of 33 bits, and the
// polynomials of Cephes sin.c and cos.c, each operation rounded by itself in float64.
static void sincos64(double x, double *sine, double *cosine) {
    double n = floor(x * 0.63661977236758134308 + 0.5);
    double r = ((x - n * 1.57079632673412561417e+00) - n * 6.07710050630396597660e-11) - n * 2.02226624879595063154e-21;
    double z = r * r;
    double s = 1.58962301576546568060e-10;
    s = s * z + -2.50507477628578072866e-8;
    s = s * z + 2.75573136213857245213e-6;
    s = s * z + -1.98412698295895385996e-4;
    s = s * z + 8.33333333332211858878e-3;
    s = s * z + -1.66666666666666307295e-1;
    s = r + r * z * s;
    double c = -1.13585365213876817300e-11;
    c = c * z + 2.08757008419747316778e-9;
    c = c * z + -2.75573141792967388112e-7;
    c = c * z + 2.48015872888517045348e-5;
    c = c * z + -1.38888888888730564116e-3;
    c = c * z + 4.16666666666665929218e-2;
    c = 1.0 - 0.5 * z + z * z * c;
    int quarter = (int)((int64_t)n & 3);
    *sine = quarter == 0 ? s : quarter == 1 ? c : quarter == 2 ? -s : -c;
    *cosine = quarter == 0 ? c : quarter == 1 ? -s : quarter == 2 ? -c : s;
}

// Rotary tables float32 [positions, 2·half]: of position·frequency, rounded to float32 before and after,
// times `scaling`; both halves of a row are alike. Library functions differ between processors.
EXPORT void specbatch_rotary(const float *frequencies, int64_t positions, int64_t half, float scaling, float *cos,
                             float *sin) {
    for (int64_t p = 0; p < positions; p++)
        for (int64_t i = 0; i < half; i++) {
            double s, c;
            sincos64((double)((float)p * frequencies[i]), &s, &c);
            float *to_cos = cos + p * 2 * half + i, *to_sin = sin + p * 2 * half + i;
            to_cos[0] = to_cos[half] = (float)c * scaling;
            to_sin[0] = to_sin[half] = (float)s * scaling;
        }
}

// How many of its draft's tokens each sequence agrees with: rows offsets[i] .. offsets[i + 1] are its own,
// and the last of them holds no draft token.
EXPORT void specbatch_match(const int64_t *tokens, const int64_t *drafts, const int64_t *offsets, int64_t sequences,
                            int64_t *agreed) {
    for (int64_t i = 0; i < sequences; i++) {
        int64_t r = offsets[i], last = offsets[i + 1] - 1;
        while (r < last && tokens[r] == drafts[r]) r++;
        agreed[i] = r - offsets[i];
    }
}
