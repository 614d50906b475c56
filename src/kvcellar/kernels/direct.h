// A few query rows over a bundle of keys that is not packed first: keys are turned and codes are made into bfloat16 in
// registers, between the products. `tile.h` says what is computed; the bits are those over packed keys and values.
#pragma once
#include <cstdint>

#include "cells.h"
#include "tile.h"
#include "vectors.h"

#if KV_PAIRS
namespace tiles {
using cells::Kind;
using cells::Rows;

// bfloat16 of 128 codes without their signs, the low bytes and then the high ones.
struct Table {
    alignas(64) uint8_t low[128], high[128];
};

constexpr Table table_of(Kind kind) {
    Table t{};
    for (int i = 0; i < 128; ++i) {
        int exponent = 0;
        while ((i >> exponent) > 1) ++exponent;
        int bits = i == 0 ? 0 : (127 + exponent) << 7 | ((i << 7 >> exponent) & 127);
        if (kind == cells::FP8) {
            // e4m3: numbers below 8 are subnormal, multiples of 2^-9.
            bits = i >= 8 ? (i << 4) + (120 << 7) : i == 0 ? 0 : bits - (9 << 7);
        }
        t.low[i] = uint8_t(bits), t.high[i] = uint8_t(bits >> 8);
    }
    return t;
}

// How 16 bytes of a key, or 32 elements of a value, become bfloat16.
template <Kind K>
struct Codes {
    static constexpr int64_t STEP = 16;  // elements of 16 bytes
    static constexpr int WORDS = 2;      // pairs of bfloat16 of a 32-bit word
    static constexpr int64_t BYTES = 1;  // of an element, rounded up
    inline static constexpr Table TABLE = table_of(K);

    // Bytes of codes into their numbers, of which the first and last 8 of each 16 become `first` and `last`.
    static KV_INLINE void numbers(__m512i x, __m512i& first, __m512i& last) {
        const __m512i size = K == cells::INT8 ? _mm512_abs_epi8(x) : x;  // -128 is no code
        const auto look_up = [&](const uint8_t* table) {
            return _mm512_permutex2var_epi8(_mm512_load_si512(table), size, _mm512_load_si512(table + 64));
        };
        const __m512i low = look_up(TABLE.low);
        const __m512i high = _mm512_ternarylogic_epi32(look_up(TABLE.high), x, _mm512_set1_epi8(-128), 0xf8);  // a | b & c
        first = _mm512_unpacklo_epi8(low, high), last = _mm512_unpackhi_epi8(low, high);
    }
    static KV_INLINE __m512i part(__m512i x, bool) { return x; }
    static int64_t offset(int64_t element, int64_t) { return element; }
};

// Two codes in a byte; the first half of the elements are in the low bits.
template <>
struct Codes<cells::INT4> {
    static constexpr int64_t STEP = 16;
    static constexpr int WORDS = 2;
    static constexpr int64_t BYTES = 1;

    static KV_INLINE void numbers(__m512i x, __m512i& first, __m512i& last) {
        const __m512i lows = _mm512_broadcast_i32x4(_mm_setr_epi8(0, -32, -64, -96, -128, 64, 0, -128, 0, -128, 0, 64, -128, -96, -64, -32));
        const __m512i highs = _mm512_broadcast_i32x4(
            _mm_setr_epi8(-63, -64, -64, -64, -64, -64, -64, -65, 0, 63, 64, 64, 64, 64, 64, 64));
        const __m512i low = _mm512_shuffle_epi8(lows, x), high = _mm512_shuffle_epi8(highs, x);
        first = _mm512_unpacklo_epi8(low, high), last = _mm512_unpackhi_epi8(low, high);
    }
    static KV_INLINE __m512i part(__m512i x, bool second) {
        return _mm512_and_si512(second ? _mm512_srli_epi16(x, 4) : x, _mm512_set1_epi8(15));
    }
    static int64_t offset(int64_t element, int64_t size) { return element < size / 2 ? element : element - size / 2; }
};

template <>
struct Codes<cells::BFLOAT16> {
    static constexpr int64_t STEP = 8;
    static constexpr int WORDS = 1;
    static constexpr int64_t BYTES = 2;
    static int64_t offset(int64_t element, int64_t) { return element * 2; }
};

// 32-bit word n of 16 rows, for the four words at `at`.
KV_INLINE void turned(const char* at, int64_t stride, __m512i (&out)[4]) {
    __m512i a[4];
    KV_UNROLL for (int g = 0; g < 4; ++g) {
        const auto row = [&](int i) { return _mm_loadu_si128((const __m128i*)(at + i * stride)); };
        a[g] = _mm512_broadcast_i32x4(row(g));
        a[g] = _mm512_mask_broadcast_i32x4(a[g], 0x00f0, row(4 + g));
        a[g] = _mm512_mask_broadcast_i32x4(a[g], 0x0f00, row(8 + g));
        a[g] = _mm512_mask_broadcast_i32x4(a[g], 0xf000, row(12 + g));
    }
    const __m512i b0 = _mm512_unpacklo_epi32(a[0], a[1]), b1 = _mm512_unpackhi_epi32(a[0], a[1]);
    const __m512i b2 = _mm512_unpacklo_epi32(a[2], a[3]), b3 = _mm512_unpackhi_epi32(a[2], a[3]);
    out[0] = _mm512_unpacklo_epi64(b0, b2), out[1] = _mm512_unpackhi_epi64(b0, b2);
    out[2] = _mm512_unpacklo_epi64(b1, b3), out[3] = _mm512_unpackhi_epi64(b1, b3);
}

// s[R][2] += words x [.,R] times 16 bytes of each of 32 keys.
template <Kind K, int R>
KV_INLINE void products(const char* at, int64_t stride, bool second, const uint32_t* x, F (&s)[R][2]) {
    using C = Codes<K>;
    __m512i one[4], two[4];
    turned(at, stride, one), turned(at + 16 * stride, stride, two);
    KV_UNROLL for (int j = 0; j < 4; ++j) {
        __m512i a[C::WORDS], b[C::WORDS];
        if constexpr (K == cells::BFLOAT16) {
            a[0] = one[j], b[0] = two[j];
        } else {
            // A key's first two bytes come before all keys' last two.
            const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
            C::numbers(C::part(_mm512_shuffle_epi8(one[j], order), second), a[0], a[1]);
            C::numbers(C::part(_mm512_shuffle_epi8(two[j], order), second), b[0], b[1]);
        }
        KV_UNROLL for (int w = 0; w < C::WORDS; ++w) KV_UNROLL for (int r = 0; r < R; ++r) {
            const __m512bh q = (__m512bh)_mm512_set1_epi32(x[(j * C::WORDS + w) * R + r]);
            s[r][0] = (F)_mm512_dpbf16_ps((__m512)s[r][0], (__m512bh)a[w], q);
            s[r][1] = (F)_mm512_dpbf16_ps((__m512)s[r][1], (__m512bh)b[w], q);
        }
    }
}

// Scores of a bundle of keys, for queries [words,R]. `scales` [blocks,CHUNK] of the chunk. Memory from `soon` on is asked
// for, as much as is read.
template <Kind K, int R>
__attribute__((noinline)) void score_bundle(const Shape& c, Tile& t, const uint32_t* queries, Rows keys, int64_t size, const float* scales, int64_t at,
                  const char* soon) {
    using C = Codes<K>;
    F s[R][2];
    const int64_t all_of = c.words * 2, block = c.key_blocks == 1 ? all_of : SCALED;
    for (int64_t b = 0; b < c.key_blocks; ++b) {
        F y[R][2];
        KV_UNROLL for (int r = 0; r < R; ++r) y[r][0] = y[r][1] = F{};
        for (int64_t d = b * block, end = std::min(d + block, all_of); d < end; d += C::STEP) {
            KV_UNROLL for (int i = 0; i < 512; i += 64) __builtin_prefetch(soon + i);
            soon += 512;
            products<K, R>(keys.at + C::offset(d, size), keys.stride, d >= size / 2, queries + d / 2 * R, y);
        }
        KV_UNROLL for (int j = 0; j < 2; ++j) {
            const F scale = c.scaled_keys ? load(scales + b * CHUNK + at + W * j) : F{};
            KV_UNROLL for (int r = 0; r < R; ++r)
                s[r][j] = !c.scaled_keys ? y[r][j] : b == 0 ? y[r][j] * scale : fused(y[r][j], scale, s[r][j]);
        }
    }
    keep_scores<true, R, 2>(c, t, s, at);
}

// 32 elements of two keys' values, in pairs, in the order of `cells::pack_values`.
template <Kind K>
KV_INLINE void paired(const char* one, const char* two, bool second, __m512i& low, __m512i& high) {
    if constexpr (K == cells::BFLOAT16) {
        const __m512i a = _mm512_loadu_si512(one), b = _mm512_loadu_si512(two);
        low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);
    } else {
        const auto bytes = [](const char* at) { return _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)at)); };
        alignas(64) static constexpr uint8_t in_turn[64] = {
            0, 64, 1, 65, 2, 66, 3, 67, 4, 68, 5, 69, 6, 70, 7, 71, 8, 72, 9, 73, 10, 74, 11, 75, 12, 76, 13, 77, 14, 78, 15, 79,
            16, 80, 17, 81, 18, 82, 19, 83, 20, 84, 21, 85, 22, 86, 23, 87, 24, 88, 25, 89, 26, 90, 27, 91, 28, 92, 29, 93, 30, 94, 31, 95};
        const __m512i both = _mm512_permutex2var_epi8(bytes(one), _mm512_load_si512(in_turn), bytes(two));
        Codes<K>::numbers(Codes<K>::part(both, second), low, high);
    }
}

// Adds the values of a bundle of keys: `add_values`.
template <Kind K, int R>
__attribute__((noinline)) void add_bundle(const Shape& c, Tile& t, Rows values, int64_t size, const float* scales, int64_t at, bool begins, bool ends,
                const char* soon) {
    const uint32_t* weights = t.weights + at / 2;
    for (int64_t d = 0; d < c.width; d += 32) {
        if (c.scaled_values && d % SCALED == 0) scale_weights<true, R>(t, scales + d / SCALED * CHUNK, at, at + cells::BUNDLE);
        F s[R][2];
        KV_UNROLL for (int r = 0; r < R; ++r)
            KV_UNROLL for (int j = 0; j < 2; ++j) s[r][j] = begins ? F{} : load(t.part + r * c.width + d + W * j);
        const char* from = values.at + Codes<K>::offset(d, size);
        for (int64_t i = 0; i < cells::BUNDLE / 2; ++i, from += 2 * values.stride, soon += 64 * Codes<K>::BYTES) {
            __m512i low, high;
            KV_UNROLL for (int64_t b = 0; b < Codes<K>::BYTES; ++b) __builtin_prefetch(soon + 64 * b);
            paired<K>(from, from + values.stride, d >= size / 2, low, high);
            KV_UNROLL for (int r = 0; r < R; ++r) {
                const __m512bh x = (__m512bh)_mm512_set1_epi32(weights[r * CHUNK + i]);
                s[r][0] = (F)_mm512_dpbf16_ps((__m512)s[r][0], (__m512bh)low, x);
                s[r][1] = (F)_mm512_dpbf16_ps((__m512)s[r][1], (__m512bh)high, x);
            }
        }
        KV_UNROLL for (int r = 0; r < R; ++r) KV_UNROLL for (int j = 0; j < 2; ++j) keep_sum(c, t, r, d + W * j, s[r][j], ends);
    }
}

}  // namespace tiles
#endif
