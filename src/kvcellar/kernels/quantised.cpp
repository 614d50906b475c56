// Linear layers with weights of 8 and 4 bits. Inputs are rounded to 8 bits in blocks of STEP, each with its own scale;
// products are summed as integers, exactly, within a block, and the blocks of a row in order, as floats. So the bits of
// a row depend neither on other rows nor on threads, nor on the instructions that this was compiled for: floats are
// multiplied and added one after the other everywhere, never fused. `quantised.py` calls it.
//
// Weights are in panels of 32 outputs: bytes [panel][in/4][32][4] of 8 bits, or [panel][in/8][32][4] where byte b has
// the input 8k + b in its low half and 8k + 4 + b in its high half. Inputs are padded to a multiple of 32 and outputs to
// a panel. 8 bits are stored plus 128; 4 bits are an index into a table of bytes, plus 128 too, or without a table they
// are the value plus 8. Scales and minima [panel][groups][32] are bfloat16, float16 or float32. Layers that are one call
// share the rounded inputs, so blocks of one size, and an order of inputs.
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "layers.h"
#include "vectors.h"

namespace {

constexpr int PANEL = 32;
constexpr int64_t NEAR = 1 << 18;  // bytes of rounded inputs that stay in a core's own cache
constexpr int64_t ITEM = 1 << 22;  // products that are worth being an item of a thread's work

// Sums of TILE_ROWS rows for TILE vectors of outputs stay in registers, as integers and as floats.
#if defined(__AVX512BW__)
constexpr int LANES = 16, TILE = 2, TILE_ROWS = 6;  // 32 registers
#elif defined(__AVX2__)
constexpr int LANES = 8, TILE = 2, TILE_ROWS = 3;  // 16
#else
constexpr int LANES = 4, TILE = 2, TILE_ROWS = 2;
#endif
#if (defined(__AVX512BW__) && defined(__AVX512VNNI__)) || (!defined(__AVX512BW__) && defined(__AVXVNNI__))
#define DOT_OF_BYTES 1
constexpr int WORDS = 1;  // of 32 bits, for four inputs: bytes
#else
constexpr int WORDS = 2;  // inputs 0 and 2, and 1 and 3, as 16 bits each
#endif

typedef float F __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));
typedef uint32_t U __attribute__((vector_size(4 * LANES)));
typedef uint16_t H __attribute__((vector_size(2 * LANES)));

using Call = LayerCall;

template <class To, class From>
inline To as(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

template <class V>
inline V load(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

inline F every(float x) { return F{} + x; }
inline I every(int32_t x) { return I{} + x; }

inline float widened(uint16_t x) { return as<float>(uint32_t(x) << 16); }

// To nearest, ties to even.
inline uint16_t narrowed(float x) {
    if (x != x) return 0x7fc0;
    const uint32_t bits = as<uint32_t>(x);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline F scales_at(const void* from, int64_t at, int64_t type) {
    if (type == FLOAT32) return load<F>(static_cast<const float*>(from) + at);
    const uint16_t* narrow = static_cast<const uint16_t*>(from) + at;
#if defined(__AVX512BW__)
    if (type == FLOAT16) return as<F>(_mm512_cvtph_ps(load<__m256i>(narrow)));
    return as<F>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load<__m256i>(narrow)), 16));
#else
#if defined(__AVX2__) && defined(__F16C__)
    if (type == FLOAT16) return as<F>(_mm256_cvtph_ps(load<__m128i>(narrow)));
#else
    if (type == FLOAT16) {
        F wide;
        for (int i = 0; i < LANES; ++i) wide[i] = vectors::of_half(narrow[i]);
        return wide;
    }
#endif
    return as<F>(__builtin_convertvector(load<H>(narrow), U) << 16);
#endif
}

// -- integers ---------------------------------------------------------------------------------------------------------

// sum + the products of four bytes of weights, without a sign, with four inputs, in each lane.
inline I dot(I sum, U w, const int32_t* x) {
#if defined(__AVX512BW__) && defined(DOT_OF_BYTES)
    return as<I>(_mm512_dpbusd_epi32(as<__m512i>(sum), as<__m512i>(w), _mm512_set1_epi32(*x)));
#elif defined(DOT_OF_BYTES)
    return as<I>(_mm256_dpbusd_avx_epi32(as<__m256i>(sum), as<__m256i>(w), _mm256_set1_epi32(*x)));
#else
    const U even = w & 0x00ff00ffu, odd = (w >> 8) & 0x00ff00ffu;  // pairs of 16 bits
#if defined(__AVX512BW__)
    sum += as<I>(_mm512_madd_epi16(as<__m512i>(even), _mm512_set1_epi32(x[0])));
    return sum + as<I>(_mm512_madd_epi16(as<__m512i>(odd), _mm512_set1_epi32(x[1])));
#elif defined(__AVX2__)
    sum += as<I>(_mm256_madd_epi16(as<__m256i>(even), _mm256_set1_epi32(x[0])));
    return sum + as<I>(_mm256_madd_epi16(as<__m256i>(odd), _mm256_set1_epi32(x[1])));
#elif defined(__SSE2__)
    sum += as<I>(_mm_madd_epi16(as<__m128i>(even), _mm_set1_epi32(x[0])));
    return sum + as<I>(_mm_madd_epi16(as<__m128i>(odd), _mm_set1_epi32(x[1])));
#else
    sum += as<I>(even & 0xffffu) * int16_t(x[0]) + as<I>(even >> 16) * (x[0] >> 16);
    return sum + as<I>(odd & 0xffffu) * int16_t(x[1]) + as<I>(odd >> 16) * (x[1] >> 16);
#endif
#endif
}

// The bytes of a table at indices, which are bytes from 0 to 15.
struct Table {
    explicit Table(const uint8_t* from) {
        for (int i = 0; i < 4 * LANES; ++i) bytes[i] = from[i % 16];
    }
    U at(U indices) const {
#if defined(__AVX512BW__)
        return as<U>(_mm512_shuffle_epi8(load<__m512i>(bytes), as<__m512i>(indices)));
#elif defined(__AVX2__)
        return as<U>(_mm256_shuffle_epi8(load<__m256i>(bytes), as<__m256i>(indices)));
#elif defined(__SSSE3__)
        return as<U>(_mm_shuffle_epi8(load<__m128i>(bytes), as<__m128i>(indices)));
#else
        uint8_t found[4 * LANES];
        std::memcpy(found, &indices, sizeof found);
        for (uint8_t& one : found) one = bytes[one];
        return load<U>(found);
#endif
    }
    alignas(4 * LANES) uint8_t bytes[4 * LANES];
};

enum Codes { BYTES, NIBBLES, LOOKED_UP };

// -- inputs -----------------------------------------------------------------------------------------------------------

// Some rows of inputs, rounded: of each block the bytes, their scale, and the sum of the inputs, as an integer and times
// the scale.
struct Rounded {
    int32_t* words;  // [rows, in/4 * WORDS]
    float* scales;   // [rows, blocks]
    int32_t* counts; // [rows, blocks]
    float* sums;     // [rows, blocks]
    float* row;      // [in], of the row that is being rounded
    int64_t words_a_row, blocks;
};

// LANES integers as bytes, or as pairs of 16 bits.
inline void put_words(const I& all, int32_t* at) {
#if defined(__AVX512BW__) && defined(DOT_OF_BYTES)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm512_cvtepi32_epi8(as<__m512i>(all)));
#else
    for (int quad = 0; quad < LANES / 4; ++quad, at += WORDS) {
        const int32_t a = all[4 * quad], b = all[4 * quad + 1], c = all[4 * quad + 2], d = all[4 * quad + 3];
        if (WORDS == 1) {
            at[0] = int32_t(uint32_t(a & 255) | uint32_t(b & 255) << 8 | uint32_t(c & 255) << 16 | uint32_t(d) << 24);
        } else {
            at[0] = int32_t(uint32_t(a & 0xffff) | uint32_t(c) << 16);
            at[WORDS - 1] = int32_t(uint32_t(b & 0xffff) | uint32_t(d) << 16);
        }
    }
#endif
}

// `x` are `step` inputs; the largest magnitude becomes 127. What is not finite makes the whole row NaN.
inline void round_block(const float* x, int64_t step, const Rounded& to, int64_t row, int64_t block) {
    I largest = every(int32_t(0));  // as bits, which are in the order of the magnitudes, NaN last
    for (int64_t i = 0; i < step; i += LANES) {
        const I bits = as<I>(load<F>(x + i)) & 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    int32_t most = 0;
    for (int lane = 0; lane < LANES; ++lane) most = std::max<int32_t>(most, largest[lane]);
    const float magnitude = as<float>(most);
    const bool finite = most < 0x7f800000, tiny = finite && magnitude < 1e-30f;
    const float scale = !finite ? as<float>(0x7fc00000) : tiny ? 0.0f : magnitude / 127.0f;
    const float by = finite && !tiny ? 127.0f / magnitude : 0.0f;
    I total = every(int32_t(0));
    int32_t* words = to.words + row * to.words_a_row + block * (step / 4 * WORDS);
    for (int64_t i = 0; i < step; i += LANES, words += LANES / 4 * WORDS) {
        // Adding 1.5 * 2^23 rounds to nearest, ties to even, and leaves the integer in the low bits.
        const F scaled = load<F>(x + i) * every(by) + every(12582912.0f);
        const I all = finite ? as<I>(scaled) - every(0x4b400000) : every(int32_t(0));
        total += all;
        put_words(all, words);
    }
    int32_t sum = 0;
    for (int lane = 0; lane < LANES; ++lane) sum += total[lane];
    const int64_t at = row * to.blocks + block;
    to.scales[at] = scale;
    to.counts[at] = sum;
    to.sums[at] = scale * float(sum);
}

void round_row(const Call& c, int64_t from, const Rounded& to, int64_t row) {
    const Layer& layer = *c.layer;
    const float* wide = static_cast<const float*>(c.x) + from * c.x_row;
    const uint16_t* narrow = static_cast<const uint16_t*>(c.x) + from * c.x_row;
    if (layer.order)
        for (int64_t i = 0; i < layer.in; ++i)
            to.row[i] = layer.type == FLOAT32 ? wide[layer.order[i]] : widened(narrow[layer.order[i]]);
    else if (layer.type == FLOAT32)
        std::memcpy(to.row, wide, size_t(4 * layer.in));
    else
        for (int64_t i = 0; i < layer.in; ++i) to.row[i] = widened(narrow[i]);
    for (int64_t block = 0; block < to.blocks; ++block)
        round_block(to.row + block * layer.step, layer.step, to, row, block);
}

// -- products ---------------------------------------------------------------------------------------------------------

// One panel of a layer, and where its results go.
struct Target {
    const Call& c;
    const Part& part;
    int64_t out;  // of the panel's first
};

inline void store(const Target& to, int64_t row, int64_t out, F sums) {
    float all[LANES];
    std::memcpy(all, &sums, sizeof all);
    const int64_t count = std::min<int64_t>(LANES, to.part.out - out), at = row * to.c.y_row + to.part.column + out;
    if (to.part.bias)
        for (int64_t i = 0; i < count; ++i) all[i] += to.part.bias[out + i];
    if (to.c.layer->type == FLOAT32)
        std::memcpy(static_cast<float*>(to.c.y) + at, all, size_t(4 * count));
    else
        for (int64_t i = 0; i < count; ++i) static_cast<uint16_t*>(to.c.y)[at + i] = narrowed(all[i]);
}

// Outputs of TILE vectors of a panel, the first one at `out`, of R rows of `from`, which are rows of y from `row` on.
template <Codes CODES, int STEP, int R>
void tile(const Target& to, const Rounded& from, int64_t first, int64_t out, int64_t row) {
    constexpr int A_LINE = CODES == BYTES ? 4 : 8;  // inputs in one line of a panel
    constexpr int32_t ADDED = CODES == NIBBLES ? 8 : 128;  // to the weights
    const Part& part = to.part;
    const int64_t lines = from.blocks * STEP / A_LINE, groups = (from.blocks * STEP + part.group - 1) / part.group;
    const uint8_t* w = static_cast<const uint8_t*>(part.panels) + out / PANEL * lines * (4 * PANEL) + out % PANEL * 4;
    const int32_t* words = from.words + first * from.words_a_row;
    const Table table(CODES == LOOKED_UP ? part.table : reinterpret_cast<const uint8_t*>("0123456789abcdef"));
    int64_t scales = out / PANEL * groups * PANEL + out % PANEL;
    F sums[R][TILE] = {};
    for (int64_t block = 0, left = part.group; block < from.blocks; ++block) {
        I ints[R][TILE];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
            for (int n = 0; n < TILE; ++n) ints[r][n] = every(-ADDED * from.counts[(first + r) * from.blocks + block]);
#pragma GCC unroll 8
        for (int line = 0; line < STEP / A_LINE; ++line, w += 4 * PANEL, words += A_LINE / 4 * WORDS) {
            __builtin_prefetch(w + 4096);
            __builtin_prefetch(w + 4096 + 64);
            U low[TILE], high[TILE];
#pragma GCC unroll 2
            for (int n = 0; n < TILE; ++n) {
                low[n] = load<U>(w + n * 4 * LANES);
                if (CODES != BYTES) {
                    high[n] = (low[n] >> 4) & 0x0f0f0f0fu;
                    low[n] &= 0x0f0f0f0fu;
                }
                if (CODES == LOOKED_UP) low[n] = table.at(low[n]), high[n] = table.at(high[n]);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
                for (int n = 0; n < TILE; ++n) {
                    const int32_t* x = words + r * from.words_a_row;
                    ints[r][n] = dot(ints[r][n], low[n], x);
                    if (CODES != BYTES) ints[r][n] = dot(ints[r][n], high[n], x + WORDS);
                }
        }
        F scale[TILE];
#pragma GCC unroll 2
        for (int n = 0; n < TILE; ++n) scale[n] = scales_at(part.scales, scales + n * LANES, part.scale_type);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
            for (int n = 0; n < TILE; ++n) {
                const F value = __builtin_convertvector(ints[r][n], F);
                sums[r][n] += value * every(from.scales[(first + r) * from.blocks + block]) * scale[n];
            }
        if (part.mins) {
#pragma GCC unroll 2
            for (int n = 0; n < TILE; ++n) {
                const F least = scales_at(part.mins, scales + n * LANES, part.scale_type);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r)
                    sums[r][n] += every(from.sums[(first + r) * from.blocks + block]) * least;
            }
        }
        if ((left -= STEP) <= 0) left = part.group, scales += PANEL;
    }
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < TILE; ++n)
            if (out + n * LANES < part.out) store(to, row + r, out + n * LANES, sums[r][n]);
}

template <Codes CODES, int STEP>
void rows_of(const Target& to, const Rounded& from, int64_t first, int64_t rows, int64_t out, int64_t row) {
    for (; rows >= TILE_ROWS; rows -= TILE_ROWS, first += TILE_ROWS, row += TILE_ROWS)
        tile<CODES, STEP, TILE_ROWS>(to, from, first, out, row);
    switch (rows) {
        case 1: return tile<CODES, STEP, 1>(to, from, first, out, row);
#if defined(__AVX2__)
        case 2: return tile<CODES, STEP, 2>(to, from, first, out, row);
#endif
#if defined(__AVX512BW__)
        case 3: return tile<CODES, STEP, 3>(to, from, first, out, row);
        case 4: return tile<CODES, STEP, 4>(to, from, first, out, row);
        case 5: return tile<CODES, STEP, 5>(to, from, first, out, row);
#endif
        default: return;
    }
}

// All outputs of one panel, of `rows` rows of `from`, which are rows of y from `row` on.
template <int STEP>
void panel_of(const Target& to, const Rounded& from, int64_t rows, int64_t row) {
    const Part& part = to.part;
    for (int64_t out = to.out; out < std::min(to.out + PANEL, part.out); out += TILE * LANES)
        if (part.bits == 8) rows_of<BYTES, STEP>(to, from, 0, rows, out, row);
        else if (part.table) rows_of<LOOKED_UP, STEP>(to, from, 0, rows, out, row);
        else rows_of<NIBBLES, STEP>(to, from, 0, rows, out, row);
}

// Memory of a thread for rounded inputs, kept between calls: at most `NEAR` bytes, or one row.
struct Scratch {
    char* at = nullptr;
    size_t size = 0;
    ~Scratch() { std::free(at); }
    char* of(size_t bytes) {
        if (bytes > size) {
            std::free(at);
            size = 0;
            at = static_cast<char*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
            if (at) size = bytes;
        }
        return at;
    }
};

}  // namespace

// Returns 1 if there is not enough memory.
extern "C" int kvcellar_quantised(const void* call) {
    const Call& c = *static_cast<const Call*>(call);
    const Layer& layer = *c.layer;
    thread_local Scratch scratch;
    const int64_t padded = (layer.in + PANEL - 1) / PANEL * PANEL, blocks = padded / layer.step;
    const int64_t words = padded / 4 * WORDS, a_row = 4 * (words + 3 * blocks);
    const int64_t most = std::max<int64_t>(1, NEAR / a_row / TILE_ROWS * TILE_ROWS);
    const int64_t at_once = std::min(most, c.rows);
    char* at = scratch.of(size_t(4 * padded + at_once * a_row));
    if (!at) return 1;
    Rounded to{};
    to.row = reinterpret_cast<float*>(at);
    to.words = reinterpret_cast<int32_t*>(to.row + padded);
    to.scales = reinterpret_cast<float*>(to.words + at_once * words);
    to.counts = reinterpret_cast<int32_t*>(to.scales + at_once * blocks);
    to.sums = reinterpret_cast<float*>(to.counts + at_once * blocks);
    to.words_a_row = words, to.blocks = blocks;
    std::fill(to.row + layer.in, to.row + padded, 0.0f);
    const int64_t panels = panels_of(layer, PANEL);
    for (int64_t first = 0; first < c.rows; first += at_once) {
        const int64_t rows = std::min(at_once, c.rows - first);
        for (int64_t row = 0; row < rows; ++row) round_row(c, first + row, to, row);
        const int64_t together = std::max<int64_t>(1, ITEM / (PANEL * padded * (rows + 8)));
        for_each_item(layer.threads, c.threads, (panels + together - 1) / together, [&](int64_t item) noexcept {
            each_panel_of(layer, PANEL, item * together, (item + 1) * together, [&](const Part& part, int64_t panel) {
                const Target target{c, part, panel * PANEL};
                layer.step == 32 ? panel_of<32>(target, to, rows, first) : panel_of<16>(target, to, rows, first);
            });
        });
    }
    return 0;
}
