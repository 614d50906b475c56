// Vectors of float32 as wide as the registers that a build has, and what is computed with them. The same source makes
// AVX-512, AVX2 and portable builds; a vector type wider than the registers would be kept in memory by the compiler.
#pragma once
#include <cstdint>
#include <cstring>
#include <limits>
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include <immintrin.h>
#define KV_AVX512 1
#if defined(__AVX512BF16__)
#define KV_PAIRS 1  // products of pairs of bfloat16
#if defined(__AVX512VBMI__)
#define KV_BYTES 1  // tables of bytes
#endif
#endif
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define KV_AVX2 1
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__ARM_NEON) && defined(__ARM_FEATURE_FMA)
#include <arm_neon.h>
#define KV_NEON 1
#endif
// Arrays of vectors stay in registers only if every loop over them is unrolled.
#define KV_UNROLL _Pragma("GCC unroll 32")
#define KV_INLINE inline __attribute__((always_inline))

namespace vectors {

#if KV_AVX512
constexpr int BYTES = 64;
#elif KV_AVX2
constexpr int BYTES = 32;
#else
constexpr int BYTES = 16;
#endif
#if KV_AVX512
constexpr int REGISTERS = 32;
#else
constexpr int REGISTERS = 16;
#endif
constexpr int W = BYTES / 4;  // floats of a vector
typedef float F __attribute__((vector_size(BYTES)));
typedef int32_t I __attribute__((vector_size(BYTES)));
constexpr float NONE = -std::numeric_limits<float>::infinity();
constexpr float LOG2E = 1.44269504088896f;

KV_INLINE F load(const void* from) {
    F x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

KV_INLINE void store(void* to, F x) { std::memcpy(to, &x, sizeof x); }

KV_INLINE F all(float x) { return F{} + x; }

// a * b + c, rounded once where the instruction set can: never left to the compiler, whose choice may differ by place.
KV_INLINE F fused(F a, F b, F c) {
#if KV_AVX512
    return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif KV_AVX2
    return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif KV_NEON
    return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#elif defined(__FP_FAST_FMAF)
    F sum;
    KV_UNROLL for (int i = 0; i < W; ++i) sum[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return sum;
#else
    return a * b + c;  // two instructions: there is none for both
#endif
}

// The larger; b where one of them is NaN.
KV_INLINE F larger(F a, F b) {
#if KV_AVX512
    return (F)_mm512_max_ps((__m512)a, (__m512)b);
#elif KV_AVX2
    return (F)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

// Of numbers, none of them NaN.
KV_INLINE float largest(F x) {
#if KV_AVX512
    return _mm512_reduce_max_ps((__m512)x);
#else
    float top = NONE;
    KV_UNROLL for (int i = 0; i < W; ++i) top = x[i] > top ? x[i] : top;
    return top;
#endif
}

// Halves are added until one number is left.
KV_INLINE float total(F x) {
#if KV_AVX512
    return _mm512_reduce_add_ps((__m512)x);
#else
    float part[W];
    std::memcpy(part, &x, sizeof part);
    KV_UNROLL for (int half = W / 2; half > 0; half /= 2)
        KV_UNROLL for (int i = 0; i < half; ++i) part[i] += part[i + half];
    return part[0];
#endif
}

// 2^x for x below 128; 0 below -126; NaN stays NaN. Relative error below 2^-23, or 2^-14 if `rough`.
template <bool rough = false>
KV_INLINE F power_of_two(F x) {
#if KV_AVX512
    const F n = (F)_mm512_roundscale_ps((__m512)x, 8), r = x - n;
#else
    const F shifted = x + 12582912.f, n = shifted - 12582912.f, r = x - n;
#endif
    F p;
    if constexpr (rough) {
        p = fused(all(0.00967604f), r, all(0.05550410f));
        p = fused(p, r, all(0.24022260f));
        p = fused(p, r, all(0.69314720f));
        p = fused(p, r, all(1.f));
    } else {
        p = fused(all(1.5403530e-4f), r, all(1.3333558e-3f));
        p = fused(p, r, all(9.6181291e-3f));
        p = fused(p, r, all(5.5504109e-2f));
        p = fused(p, r, all(2.4022651e-1f));
        p = fused(p, r, all(6.9314718e-1f));
        p = fused(p, r, all(1.f));
    }
#if KV_AVX512
    const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.f), _CMP_NLT_UQ);
    return (F)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)n);
#else
    // The last bits of `shifted` are n.
    const F scaled = (F)((I)p + ((I)shifted << 23));
    return x < -126.f ? F{} : (x != x ? x : scaled);
#endif
}

template <bool rough = false>
KV_INLINE float power_of_two(float x) {
    return power_of_two<rough>(all(x))[0];
}

// softcap * tanh(x / softcap)
KV_INLINE F capped(F x, float softcap) {
    F y = x * (2.f / softcap * LOG2E);
    y = y > 115.f ? all(115.f) : y;
    y = y < -115.f ? all(-115.f) : y;
    return softcap - 2.f * softcap / (power_of_two(y) + 1.f);
}

// bfloat16 as float32.
KV_INLINE float widened(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float y;
    std::memcpy(&y, &bits, sizeof y);
    return y;
}

// To the nearest, ties to even; NaN stays NaN.
KV_INLINE uint16_t narrowed(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if (x != x) return uint16_t((bits >> 16) | 64);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// float16 as float32, without instructions for it.
KV_INLINE float of_half(uint16_t x) {
    const uint32_t sign = uint32_t(x & 0x8000) << 16, rest = uint32_t(x & 0x7fff) << 13;
    float y;
    std::memcpy(&y, &rest, sizeof y);
    y *= 0x1p112f;  // the exponent's bias is larger by 112; right for subnormal numbers, too
    if ((x & 0x7c00) == 0x7c00) y = x & 0x3ff ? std::numeric_limits<float>::quiet_NaN() : -NONE;
    uint32_t bits;
    std::memcpy(&bits, &y, sizeof bits);
    bits |= sign;
    std::memcpy(&y, &bits, sizeof y);
    return y;
}

}  // namespace vectors
