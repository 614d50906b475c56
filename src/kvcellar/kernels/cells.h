// What is stored in cells, read as rows of bfloat16 or float32, and packed for products of many rows at once.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "vectors.h"

namespace cells {
using namespace vectors;

enum Kind : int32_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT4 = 3, FP8 = 4 };
typedef uint16_t Half;  // a bfloat16

constexpr int64_t BUNDLE = 32;   // keys that are read and packed at once
constexpr int64_t PANEL = 64;    // keys, or elements of values, that lie side by side in packed form
constexpr int64_t SCALED = 128;  // elements of a vector that share a scale

// A plane of a layer as `memory/kv/quantise.py` stores it. Strides are in bytes; a vector's elements lie side by side.
struct Plane {
    char *codes, *scales;  // scales: null if it is not quantised
    int64_t cell, head, scale_cell, scale_head, size;
    int32_t kind, rotated;  // rotated: stored keys are multiplied with a Hadamard matrix

    int64_t bytes() const {
        return kind == FLOAT32 ? size * 4 : kind == BFLOAT16 ? size * 2 : kind == INT4 ? (size + 1) / 2 : size;
    }
    int64_t blocks() const { return scales ? (size + SCALED - 1) / SCALED : 1; }
};

// Walks the cells of a segment in order of key.
struct Walk {
    const int64_t* run;  // [first key, cell]; the next run's first key is where this one ends
    int64_t key;

    // The cells of the next n keys, n <= BUNDLE.
    void next(int64_t n, int64_t* found) {
        while (n > 0) {
            while (key >= run[2]) run += 2;
            const int64_t here = std::min(n, run[2] - key), cell = run[1] + (key - run[0]);
            for (int64_t i = 0; i < here; ++i) found[i] = cell + i;
            found += here, key += here, n -= here;
        }
    }
};

// -- codes into elements ----------------------------------------------------------------------------------------------

inline void elements(Kind kind, const char* from, int64_t size, float* to) {
    const uint8_t* codes = (const uint8_t*)from;
    const int64_t half = (size + 1) / 2;
    switch (kind) {
        case FLOAT32: std::memcpy(to, from, size * 4); break;
        case BFLOAT16:
            for (int64_t i = 0; i < size; ++i) to[i] = widened(((const Half*)from)[i]);
            break;
        case INT8:
            for (int64_t i = 0; i < size; ++i) to[i] = ((const int8_t*)from)[i];
            break;
        case INT4:
            for (int64_t i = 0; i < half; ++i) to[i] = float(codes[i] & 15) - 8.f;
            for (int64_t i = half; i < size; ++i) to[i] = float(codes[i - half] >> 4) - 8.f;
            break;
        case FP8:
            for (int64_t i = 0; i < size; ++i) {
                const uint32_t bits = uint32_t(codes[i] & 0x7f) << 20;
                float x;
                std::memcpy(&x, &bits, 4);
                x *= 0x1p120f;  // the exponent's bias is larger by 120
                to[i] = codes[i] & 0x80 ? -x : x;
            }
            break;
    }
}

// Times the Hadamard matrix, as `rotate` in memory/kv/quantise.py computes it: blocks of powers of two, the largest first.
inline void rotate(float* x, int64_t size) {
    for (int64_t width = int64_t(1) << 62; width > 0; width /= 2) {
        if (!(size & width)) continue;
        for (int64_t half = 1; half < width; half *= 2)
            for (int64_t i = 0; i < width; i += 2 * half)
                for (int64_t j = i; j < i + half; ++j) {
                    const float left = x[j], right = x[j + half];
                    x[j] = left + right, x[j + half] = left - right;
                }
        const float scale = float(1 / std::sqrt(double(width)));
        for (int64_t i = 0; i < width; ++i) x[i] *= scale;
        x += width;
    }
}

#if KV_PAIRS
// The numbers -8 to 7 as bfloat16.
alignas(64) constexpr Half INT4_NUMBERS[32] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                                               0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};

// Codes are exact in bfloat16.
inline void elements(Kind kind, const char* from, int64_t size, Half* to) {
    const int64_t half = (size + 1) / 2, bytes = kind == INT4 ? half : size;
    if (kind == BFLOAT16) {
        std::memcpy(to, from, size * 2);
        return;
    }
    for (int64_t i = 0; i < bytes; i += 32) {
        const __mmask32 here = bytes - i >= 32 ? ~__mmask32(0) : (__mmask32(1) << (bytes - i)) - 1;
        const __m256i codes = _mm256_maskz_loadu_epi8(here, from + i);
        if (kind == INT8) {
            const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(codes)));
            const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(codes, 1)));
            _mm512_mask_storeu_epi16(to + i, here, (__m512i)_mm512_cvtne2ps_pbh(high, low));
            continue;
        }
        const __m512i wide = _mm512_cvtepu8_epi16(codes);
        if (kind == INT4) {
            const __m512i table = _mm512_load_si512(INT4_NUMBERS);
            const __m512i low = _mm512_permutexvar_epi16(_mm512_and_si512(wide, _mm512_set1_epi16(15)), table);
            const __m512i high = _mm512_permutexvar_epi16(_mm512_srli_epi16(wide, 4), table);
            _mm512_mask_storeu_epi16(to + i, here, low);
            const int64_t left = size - half - i;
            const __mmask32 there = left >= 32 ? ~__mmask32(0) : left <= 0 ? 0 : (__mmask32(1) << left) - 1;
            _mm512_mask_storeu_epi16(to + half + i, there, high);
            continue;
        }
        // Subnormal numbers of e4m3, multiples of 2^-9, are normal in bfloat16: they are looked up.
        alignas(64) static constexpr Half smallest[32] = {0x0000, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
        const __m512i magnitude = _mm512_and_si512(wide, _mm512_set1_epi16(0x7f));
        const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
        const __mmask32 small = _mm512_testn_epi16_mask(wide, _mm512_set1_epi16(0x78));
        const __m512i found = _mm512_permutexvar_epi16(_mm512_and_si512(wide, _mm512_set1_epi16(7)), _mm512_load_si512(smallest));
        const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(wide, _mm512_set1_epi16(0x80)), 8);
        _mm512_mask_storeu_epi16(to + i, here, _mm512_or_si512(_mm512_mask_mov_epi16(normal, small, found), sign));
    }
}
#endif

// Vectors in cells as rows of elements, `padded` apart.
template <class E>
inline void bundle_elements(Kind kind, const char* codes, const int64_t* found, int64_t n, int64_t cell, int64_t size, E* to,
                            int64_t padded) {
#if KV_PAIRS
    if constexpr (sizeof(E) == 2) {
        if (kind == INT8 && size % 32 == 0) {
            for (int64_t i = 0; i < n; ++i, to += padded) {
                const char* from = codes + found[i] * cell;
                for (int64_t d = 0; d < size; d += 32) {
                    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(from + d))));
                    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(from + d + 16))));
                    _mm512_storeu_si512(to + d, (__m512i)_mm512_cvtne2ps_pbh(high, low));
                }
            }
            return;
        }
        if (kind == INT4 && size % 64 == 0) {
            const __m512i table = _mm512_load_si512(INT4_NUMBERS);
            for (int64_t i = 0; i < n; ++i, to += padded) {
                const char* from = codes + found[i] * cell;
                for (int64_t d = 0; d < size / 2; d += 32) {
                    const __m512i wide = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)(from + d)));
                    const __m512i low = _mm512_and_si512(wide, _mm512_set1_epi16(15)), high = _mm512_srli_epi16(wide, 4);
                    _mm512_storeu_si512(to + d, _mm512_permutexvar_epi16(low, table));
                    _mm512_storeu_si512(to + size / 2 + d, _mm512_permutexvar_epi16(high, table));
                }
            }
            return;
        }
    }
#endif
    for (int64_t i = 0; i < n; ++i) elements(kind, codes + found[i] * cell, size, to + i * padded);
}

// BUNDLE numbers of float16 as float32.
inline void of_halves(const uint16_t* from, float* to) {
#if KV_AVX512
    for (int64_t i = 0; i < BUNDLE; i += 16)
        _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(from + i))));
#else
    for (int64_t i = 0; i < BUNDLE; ++i) to[i] = of_half(from[i]);
#endif
}

// A bundle of vectors in memory, equally far apart, each of which begins at `at + i * stride`.
struct Rows {
    const char* at;
    int64_t stride;  // in bytes
    bool in_place;   // in cells, one behind the other
};

template <class E>
constexpr Kind kind_of = sizeof(E) == 4 ? FLOAT32 : BFLOAT16;

// Reads a plane of one head, a bundle of keys at a time.
template <class E>
struct Reader {
    const Plane& plane;
    const char *codes, *scales;
    int64_t padded;  // elements of a row, zeros behind the last included
    bool in_place;
    E* copies;       // [BUNDLE,padded], zero behind each row's elements
    const E* zeros;  // [padded]

    Reader(const Plane& from, int64_t head, int64_t multiple, E* room)
        : plane(from), codes(from.codes + head * from.head),
          scales(from.scales ? from.scales + head * from.scale_head : nullptr),
          padded((from.size + multiple - 1) / multiple * multiple),
          in_place(from.kind == kind_of<E> && padded == from.size), copies(room), zeros(room + BUNDLE * padded) {
        std::memset(room, 0, bytes(padded));
    }

    static int64_t bytes(int64_t padded) { return (BUNDLE + 1) * padded * sizeof(E); }

    // As what `rows` returns vectors: as they are stored, or made into elements.
    Kind kind() const {
#if KV_BYTES
        if (plane.kind == INT4 ? plane.size % 64 == 0 : plane.size % 32 == 0) return (Kind)plane.kind;
#endif
        return kind_of<E>;
    }

    // The same as `read`, for keys that are not packed.
    Rows rows(Walk& walk, int64_t first, int64_t end, float* to, int64_t stride) {
        while (walk.key >= walk.run[2]) walk.run += 2;
        if (first > 0 || end < BUNDLE || walk.run[2] - walk.key < BUNDLE || (kind() == kind_of<E> && !in_place))
            return gathered(walk, first, end, to, stride);
        const int64_t cell = walk.run[1] + (walk.key - walk.run[0]);
        walk.key += BUNDLE;
        if (scales) {
            alignas(64) uint16_t halves[BUNDLE];
            for (int64_t b = 0; b < plane.blocks(); ++b) {
                const char* from = scales + cell * plane.scale_cell + b * 2;
                if (plane.scale_cell == 2) std::memcpy(halves, from, sizeof halves);
                else
                    for (int64_t i = 0; i < BUNDLE; ++i) std::memcpy(halves + i, from + i * plane.scale_cell, 2);
                of_halves(halves, to + b * stride);
            }
        }
        return {codes + cell * plane.cell, plane.cell, plane.cell == plane.bytes()};
    }

    // Copies of vectors; zeros where there is none.
    Rows gathered(Walk& walk, int64_t first, int64_t end, float* to, int64_t stride) {
        int64_t found[BUNDLE];
        walk.next(end - first, found);
        const bool elements = kind() == kind_of<E>;
        for (int64_t i = 0; i < BUNDLE; ++i) {
            char* copy = (char*)(copies + i * padded);
            if (i < first || i >= end) std::memset(copy, kind() == INT4 ? 0x88 : 0, padded * sizeof(E));
            else if (!elements || in_place) std::memcpy(copy, codes + found[i - first] * plane.cell, plane.bytes());
        }
        if (elements && !in_place)
            bundle_elements((Kind)plane.kind, codes, found, end - first, plane.cell, plane.size, copies + first * padded, padded);
        read_scales(found, first, end, to, stride);
        return {(const char*)copies, padded * int64_t(sizeof(E)), false};
    }

    // Keys [0,BUNDLE), of which [first,end) are there and begin at `walk`; others are zero, and so are their scales.
    // Scale of block b and key i: to[b * stride + i].
    void read(Walk& walk, int64_t first, int64_t end, const E** rows, float* to, int64_t stride) {
        int64_t found[BUNDLE];
        walk.next(end - first, found);
        for (int64_t i = 0; i < first; ++i) rows[i] = zeros;
        for (int64_t i = end; i < BUNDLE; ++i) rows[i] = zeros;
        for (int64_t i = first; i < end; ++i) {
            const char* from = codes + found[i - first] * plane.cell;
            rows[i] = in_place ? (const E*)from : copies + i * padded;
        }
        if (!in_place)
            bundle_elements((Kind)plane.kind, codes, found, end - first, plane.cell, plane.size, copies + first * padded, padded);
        read_scales(found, first, end, to, stride);
    }

    // Scale of block b and key i of [first,end): to[b * stride + i]; 0 for other keys.
    void read_scales(const int64_t* found, int64_t first, int64_t end, float* to, int64_t stride) {
        if (!scales) return;
        uint16_t halves[BUNDLE] = {};
        for (int64_t b = 0; b < plane.blocks(); ++b) {
            const char* from = scales + b * 2;
            for (int64_t i = first; i < end; ++i)
                std::memcpy(halves + i, from + found[i - first] * plane.scale_cell, 2);
            of_halves(halves, to + b * stride);
        }
    }
};

// -- packing ----------------------------------------------------------------------------------------------------------

// 16 rows of so many 32-bit words, a multiple of 4, turned: out[word * stride + row].
inline void turn(const char* const* rows, int64_t words, uint32_t* out, int64_t stride) {
    for (int64_t w = 0; w < words; w += 4, out += 4 * stride) {
#if KV_AVX512
        // Four rows' quarters meet as they are loaded; only 4 x 4 words within a quarter are left to shuffles.
        __m512i a[4];
        KV_UNROLL for (int g = 0; g < 4; ++g) {
            const auto at = [&](int row) { return _mm_loadu_si128((const __m128i*)(rows[row] + w * 4)); };
            a[g] = _mm512_broadcast_i32x4(at(g));
            a[g] = _mm512_mask_broadcast_i32x4(a[g], 0x00f0, at(4 + g));
            a[g] = _mm512_mask_broadcast_i32x4(a[g], 0x0f00, at(8 + g));
            a[g] = _mm512_mask_broadcast_i32x4(a[g], 0xf000, at(12 + g));
        }
        const __m512i b0 = _mm512_unpacklo_epi32(a[0], a[1]), b1 = _mm512_unpackhi_epi32(a[0], a[1]);
        const __m512i b2 = _mm512_unpacklo_epi32(a[2], a[3]), b3 = _mm512_unpackhi_epi32(a[2], a[3]);
        _mm512_storeu_si512(out, _mm512_unpacklo_epi64(b0, b2));
        _mm512_storeu_si512(out + stride, _mm512_unpackhi_epi64(b0, b2));
        _mm512_storeu_si512(out + 2 * stride, _mm512_unpacklo_epi64(b1, b3));
        _mm512_storeu_si512(out + 3 * stride, _mm512_unpackhi_epi64(b1, b3));
#elif defined(__SSE2__)
        for (int row = 0; row < 16; row += 4) {
            __m128i a[4];
            KV_UNROLL for (int i = 0; i < 4; ++i) a[i] = _mm_loadu_si128((const __m128i*)(rows[row + i] + w * 4));
            const __m128i b0 = _mm_unpacklo_epi32(a[0], a[1]), b1 = _mm_unpackhi_epi32(a[0], a[1]);
            const __m128i b2 = _mm_unpacklo_epi32(a[2], a[3]), b3 = _mm_unpackhi_epi32(a[2], a[3]);
            _mm_storeu_si128((__m128i*)(out + row), _mm_unpacklo_epi64(b0, b2));
            _mm_storeu_si128((__m128i*)(out + stride + row), _mm_unpackhi_epi64(b0, b2));
            _mm_storeu_si128((__m128i*)(out + 2 * stride + row), _mm_unpacklo_epi64(b1, b3));
            _mm_storeu_si128((__m128i*)(out + 3 * stride + row), _mm_unpackhi_epi64(b1, b3));
        }
#else
        for (int row = 0; row < 16; ++row)
            for (int i = 0; i < 4; ++i) std::memcpy(out + i * stride + row, rows[row] + (w + i) * 4, 4);
#endif
    }
}

// A bundle of keys: out[word * stride + key].
template <class E>
void pack_keys(const E* const* rows, int64_t padded, uint32_t* out, int64_t stride) {
    const int64_t words = padded * sizeof(E) / 4;
    turn((const char* const*)rows, words, out, stride);
    turn((const char* const*)rows + 16, words, out + 16, stride);
}

// A bundle of values of so many elements, a multiple of 32: panels of 64 elements, `panel` words apart, in each of
// which a key's elements (in float32), or those of two keys in pairs (in bfloat16), are a row of 64 words.
inline void pack_values(const float* const* rows, int64_t width, uint32_t* out, int64_t panel) {
    for (int64_t i = 0; i < BUNDLE; ++i)
        for (int64_t d = 0; d < width; d += 32) {
            uint32_t* to = out + d / PANEL * panel + i * PANEL + d % PANEL;
            KV_UNROLL for (int j = 0; j < 32; j += W) store(to + j, load(rows[i] + d + j));
        }
}

#if KV_PAIRS
// Elements of 32 are in the order in which unpacking leaves them; `in_order` undoes it.
inline void pack_values(const Half* const* rows, int64_t width, uint32_t* out, int64_t panel) {
    for (int64_t i = 0; i < BUNDLE; i += 2)
        for (int64_t d = 0; d < width; d += 32) {
            uint32_t* to = out + d / PANEL * panel + i / 2 * PANEL + d % PANEL;
            const __m512i one = _mm512_loadu_si512(rows[i] + d), two = _mm512_loadu_si512(rows[i + 1] + d);
            _mm512_storeu_si512(to, _mm512_unpacklo_epi16(one, two));
            _mm512_storeu_si512(to + 16, _mm512_unpackhi_epi16(one, two));
        }
}

// 32 sums over packed values, in the order of the elements, as bfloat16.
inline __m512i in_order(F low, F high) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    const __m512 a = _mm512_permutex2var_ps((__m512)low, first, (__m512)high);
    const __m512 b = _mm512_permutex2var_ps((__m512)low, second, (__m512)high);
    return (__m512i)_mm512_cvtne2ps_pbh(b, a);
}
#endif

}  // namespace cells
