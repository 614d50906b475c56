// Attention of a few new rows of each sequence over its cells, read in place. `attention/cpu.py` calls it; nothing is kept
// between calls.
//
// Keys are taken in chunks, each of which gives every row a maximum, a sum and an unnormalised output; the chunks of a
// sequence are then merged in order. So what a row answers depends neither on other sequences nor on the threads.
// Cells outside the keys that some row of a block sees are never read: they may hold anything.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <new>
#include <thread>
#include <vector>
#if defined(__AVX512F__) && defined(__AVX512BW__)
#include <immintrin.h>
#define WIDE 1
#if defined(__AVX512BF16__)
#define PAIRS 1
#endif
#endif

namespace {

// Bytes of a vector register. A vector type wider than the CPU's registers would be kept in memory by the compiler.
#if WIDE
constexpr int BYTES = 64;
#elif defined(__AVX2__)
constexpr int BYTES = 32;
#else
constexpr int BYTES = 16;
#endif
constexpr int64_t W = BYTES / 4;  // floats of a vector
typedef float F __attribute__((vector_size(BYTES)));
typedef int32_t I __attribute__((vector_size(BYTES)));
typedef uint32_t U __attribute__((vector_size(BYTES)));
typedef uint16_t H __attribute__((vector_size(BYTES / 2)));

constexpr int64_t LANES = 16;   // keys that are turned at once; a multiple of W
constexpr int64_t BUNDLE = 32;  // keys whose values are added up before sums go back to memory; a multiple of 2 * W
constexpr int64_t ROWS = 8;     // query rows of a block, at most: their sums stay in registers
constexpr int64_t CHUNK = 512;  // keys of a chunk, at most; `attention/cpu.py` allocates their partial sums
constexpr int64_t AHEAD = 64;   // cells whose memory is asked for before they are needed
constexpr float NONE = -std::numeric_limits<float>::infinity();
enum Type : int32_t { FLOAT32 = 0, BFLOAT16 = 1 };

struct Call {
    const char *q, *k, *v;         // q [T,H,D], k [C,G,D], v [C,G,Dv], with the strides below, the last of which is 1
    char* out;                     // [T,H,Dv], contiguous, of q's type
    const float* sinks;            // [H], or null
    float* partials;               // room for what each chunk's rows come to: [.,H / G,2 + padded Dv]
    const int64_t* segments;       // [S,4]: first row in `rows` and how many, first run in `runs` and how many
    const int64_t* rows;           // [R,3]: row of the step, the keys [low,high) that it sees; neither ever falls
    const int64_t* runs;           // [.,2]: first key and cell of each run; behind a segment's last run, its end
    int64_t q_row, q_head, k_cell, k_head, v_cell, v_head;  // strides in elements
    int64_t heads, groups, size, value_size;
    int64_t n_segments, threads;
    int32_t q_type, k_type, v_type;
    float scale, softcap;  // softcap 0: none
};

// Keys [low,high) of a segment, the first of them in `run`; the rows of earlier chunks are so many.
struct Chunk {
    int64_t segment, low, high, run, before;
};

// The chunks of all segments, in order, and which of them is each segment's first.
struct Chunks {
    std::vector<Chunk> all;
    std::vector<int64_t> first;

    explicit Chunks(const Call& c) {
        int64_t before = 0;
        for (int64_t s = 0; s < c.n_segments; ++s) {
            const int64_t *segment = c.segments + s * 4, *rows = c.rows + segment[0] * 3;
            first.push_back(all.size());
            const int64_t end = segment[3] == 0 ? rows[1] : rows[(segment[1] - 1) * 3 + 2];
            int64_t run = segment[2];
            for (int64_t low = rows[1]; low < end; low += CHUNK) {
                while (low >= c.runs[(run + 1) * 2]) ++run;
                all.push_back({s, low, std::min(low + CHUNK, end), run, before});
                before += segment[1];
            }
        }
        first.push_back(all.size());
    }
};

int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

F load(const void* from) {
    F x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

void store(void* to, F x) { std::memcpy(to, &x, sizeof x); }

F all(float x) { return F{} + x; }

F widened(const uint16_t* from) {
    H x;
    std::memcpy(&x, from, sizeof x);
    return (F)(__builtin_convertvector(x, U) << 16);
}

float widened(uint16_t x) {
    uint32_t bits = uint32_t(x) << 16;
    float y;
    std::memcpy(&y, &bits, sizeof y);
    return y;
}

// To the nearest, ties to even; NaN stays NaN.
uint16_t narrowed(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if (x != x) return uint16_t((bits >> 16) | 64);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// e^x for x <= 88, within two units of the last place; 0 below the least normal number; NaN stays NaN.
F exponential(F x) {
    const F low = all(-87.3f), magic = all(12582912.f);
    F at = x < low ? low : x;
    F n = (at * 1.44269504f + magic) - magic;
    F r = (at - n * 0.693359375f) - n * -2.12194440e-4f;
    F p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.f;
    F power = (F)((__builtin_convertvector(n, I) + 127) << 23);
    return x < low ? F{} : p * power;
}

// softcap * tanh(x / softcap)
F capped(F x, float softcap) {
    F y = x * (2.f / softcap);
    y = y > all(80.f) ? all(80.f) : y;
    y = y < all(-80.f) ? all(-80.f) : y;
    return softcap - 2.f * softcap / (exponential(y) + 1.f);
}

// What one thread works with. Rows of q and of sums belong to one block, the rest to one chunk of it.
struct Scratch {
    int64_t key_words, value_width;  // 32-bit words of a key, elements of a value, both padded
    std::unique_ptr<char[]> memory;
    uint32_t *turned, *q, *key_rows, *value_rows;  // [key_words,16], [ROWS,key_words * 2], [16,.], [32,.]
    float *scores, *sums;                          // [ROWS,CHUNK], [ROWS,value_width]
    uint16_t* halves;                              // [ROWS,CHUNK]
    char* nothing;                                 // zeros, as long as a key or a value

    explicit Scratch(const Call& c) {
        int64_t key_bytes = padded(c.size * (c.k_type == BFLOAT16 ? 2 : 4), 64);
        key_words = key_bytes / 4;
        value_width = padded(c.value_size, 32);
        int64_t longest = std::max(key_bytes, value_width * 4);
        const int64_t bytes[] = {
            key_words * 64,   ROWS * key_words * 8,   LANES * key_bytes, BUNDLE * value_width * 4,
            ROWS * CHUNK * 4, ROWS * value_width * 4, ROWS * CHUNK * 2,  longest,
        };
        int64_t total = 64;
        for (int64_t b : bytes) total += padded(b, 64);
        memory.reset(new char[total]);
        char* at = memory.get() + (64 - reinterpret_cast<uintptr_t>(memory.get()) % 64) % 64;
        char* parts[8];
        for (int i = 0; i < 8; ++i) parts[i] = at, at += padded(bytes[i], 64);
        turned = (uint32_t*)parts[0], q = (uint32_t*)parts[1], key_rows = (uint32_t*)parts[2];
        value_rows = (uint32_t*)parts[3], scores = (float*)parts[4], sums = (float*)parts[5];
        halves = (uint16_t*)parts[6], nothing = parts[7];
        std::memset(nothing, 0, longest);
        std::memset(key_rows, 0, LANES * key_bytes);
        std::memset(value_rows, 0, BUNDLE * value_width * 4);
    }
};

// Asks for what will soon be read, or what lies where a run ends: asking is never wrong.
void fetch(const char* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}

// Walks the cells of a segment in order of key.
struct Walk {
    const int64_t* run;  // [first key, cell]; the next run's first key is where this one ends
    int64_t key;

    int64_t next() {
        while (key >= run[2]) run += 2;
        return run[1] + (key++ - run[0]);
    }
};

// -- scores -----------------------------------------------------------------------------------------------------------

// 16 keys of so many words each, in `rows`, made into [words,16].
void turn(const char* const* rows, int64_t words, uint32_t* out) {
#if WIDE
    for (int64_t w = 0; w < words; w += 16) {
        __m512i a[16], b[16];
        for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows[i] + w * 4);
        for (int i = 0; i < 16; i += 2) {
            b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
            b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
        }
        for (int i = 0; i < 16; i += 4)
            for (int j = 0; j < 2; ++j) {
                a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + 2 + j]);
                a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + 2 + j]);
            }
        for (int i = 0; i < 16; i += 8)
            for (int j = 0; j < 4; ++j) {
                b[i + j] = _mm512_shuffle_i32x4(a[i + j], a[i + 4 + j], 0x88);
                b[i + 4 + j] = _mm512_shuffle_i32x4(a[i + j], a[i + 4 + j], 0xdd);
            }
        for (int j = 0; j < 8; ++j) {
            _mm512_storeu_si512(out + (w + j) * 16, _mm512_shuffle_i32x4(b[j], b[8 + j], 0x88));
            _mm512_storeu_si512(out + (w + 8 + j) * 16, _mm512_shuffle_i32x4(b[j], b[8 + j], 0xdd));
        }
    }
#else
    for (int64_t i = 0; i < 16; ++i) {
        const char* row = rows[i];
        for (int64_t w = 0; w < words; ++w) std::memcpy(out + w * 16 + i, row + w * 4, 4);
    }
#endif
}

// Scores of R rows with 16 turned keys. q is [R,words] of what a word of a key meets: pairs of bfloat16, or one or two
// floats.
template <int R, bool NARROW, Type K>
void score(const uint32_t* turned, int64_t words, const uint32_t* q, float scale, float* scores) {
    for (int64_t part = 0; part < LANES; part += W) {
        F sums[R] = {};
        for (int64_t w = 0; w < words; ++w) {
            const uint32_t* at = turned + w * LANES + part;
#if PAIRS
            if constexpr (NARROW) {
                const __m512bh keys = (__m512bh)_mm512_load_si512(at);
                for (int r = 0; r < R; ++r)
                    sums[r] = (F)_mm512_dpbf16_ps((__m512)sums[r], keys, (__m512bh)_mm512_set1_epi32(q[r * words + w]));
                continue;
            }
#endif
            const float* wide = reinterpret_cast<const float*>(q);
            if constexpr (K == FLOAT32) {
                const F keys = load(at);
                for (int r = 0; r < R; ++r) sums[r] += keys * wide[r * words + w];
            } else {
                const U both = (U)load(at);
                const F even = (F)(both << 16), odd = (F)(both & 0xffff0000u);
                for (int r = 0; r < R; ++r)
                    sums[r] += even * wide[(r * words + w) * 2] + odd * wide[(r * words + w) * 2 + 1];
            }
        }
        for (int r = 0; r < R; ++r) store(scores + r * CHUNK + part, sums[r] * scale);
    }
}

// The same for `count` rows.
template <bool NARROW, Type K>
void score_rows(int64_t count, const uint32_t* turned, int64_t words, const uint32_t* q, float scale, float* scores) {
    switch (count) {
        case 1: return score<1, NARROW, K>(turned, words, q, scale, scores);
        case 2: return score<2, NARROW, K>(turned, words, q, scale, scores);
        case 3: return score<3, NARROW, K>(turned, words, q, scale, scores);
        case 4: return score<4, NARROW, K>(turned, words, q, scale, scores);
        case 5: return score<5, NARROW, K>(turned, words, q, scale, scores);
        case 6: return score<6, NARROW, K>(turned, words, q, scale, scores);
        case 7: return score<7, NARROW, K>(turned, words, q, scale, scores);
        default: return score<8, NARROW, K>(turned, words, q, scale, scores);
    }
}

// -- values -----------------------------------------------------------------------------------------------------------

// Adds up R rows' weighted values of 32 cells. Weights [R,CHUNK] begin at the first of them.
template <int R, bool NARROW, Type V>
void add(const char* const* rows, const float* weights, const uint16_t* halves, int64_t width, float* sums) {
    for (int64_t j = 0; j < width; j += 2 * W) {
        F a[R], b[R];
        for (int r = 0; r < R; ++r) a[r] = load(sums + r * width + j), b[r] = load(sums + r * width + j + W);
#if PAIRS
        if constexpr (NARROW) {
            for (int64_t c = 0; c < BUNDLE; c += 2) {  // two cells at a time, in the order that `column` undoes
                const __m512i one = _mm512_loadu_si512(rows[c] + j * 2), two = _mm512_loadu_si512(rows[c + 1] + j * 2);
                const __m512bh x = (__m512bh)_mm512_unpacklo_epi16(one, two);
                const __m512bh y = (__m512bh)_mm512_unpackhi_epi16(one, two);
                for (int r = 0; r < R; ++r) {
                    int32_t pair;
                    std::memcpy(&pair, halves + r * CHUNK + c, 4);
                    const __m512bh w = (__m512bh)_mm512_set1_epi32(pair);
                    a[r] = (F)_mm512_dpbf16_ps((__m512)a[r], x, w), b[r] = (F)_mm512_dpbf16_ps((__m512)b[r], y, w);
                }
            }
        }
#endif
        if constexpr (!NARROW) {
            for (int64_t c = 0; c < BUNDLE; ++c) {
                F x, y;
                if constexpr (V == FLOAT32) {
                    x = load((const float*)rows[c] + j), y = load((const float*)rows[c] + j + W);
                } else {
                    x = widened((const uint16_t*)rows[c] + j), y = widened((const uint16_t*)rows[c] + j + W);
                }
                for (int r = 0; r < R; ++r) a[r] += x * weights[r * CHUNK + c], b[r] += y * weights[r * CHUNK + c];
            }
        }
        for (int r = 0; r < R; ++r) store(sums + r * width + j, a[r]), store(sums + r * width + j + W, b[r]);
    }
}

template <bool NARROW, Type V>
void add_rows(int64_t count, const char* const* rows, const float* weights, const uint16_t* halves, int64_t width,
              float* sums) {
    switch (count) {
        case 1: return add<1, NARROW, V>(rows, weights, halves, width, sums);
        case 2: return add<2, NARROW, V>(rows, weights, halves, width, sums);
        case 3: return add<3, NARROW, V>(rows, weights, halves, width, sums);
        case 4: return add<4, NARROW, V>(rows, weights, halves, width, sums);
        case 5: return add<5, NARROW, V>(rows, weights, halves, width, sums);
        case 6: return add<6, NARROW, V>(rows, weights, halves, width, sums);
        case 7: return add<7, NARROW, V>(rows, weights, halves, width, sums);
        default: return add<8, NARROW, V>(rows, weights, halves, width, sums);
    }
}

// Where element i of a value is among its sums.
template <bool NARROW>
int64_t column(int64_t i) {
    if (!NARROW) return i;
    return i / 32 * 32 + (i % 8 / 4) * 16 + i % 32 / 8 * 4 + i % 4;
}

// -- one block of rows over one chunk ---------------------------------------------------------------------------------

// Scores of a row made into weights: of [low,high) among n, which are more than there are keys; the others become 0.
// Answers the maximum and the sum.
template <bool NARROW>
void weigh(float* scores, uint16_t* halves, int64_t low, int64_t high, int64_t n, float softcap, float* partial) {
    if (softcap != 0)
        for (int64_t i = 0; i < n; i += W) store(scores + i, capped(load(scores + i), softcap));
    for (int64_t i = 0; i < std::min(low, n); ++i) scores[i] = NONE;
    for (int64_t i = std::max<int64_t>(high, 0); i < n; ++i) scores[i] = NONE;
    F most = all(NONE), sum = {};
    for (int64_t i = 0; i < n; i += W) {
        const F x = load(scores + i);
        most = x > most ? x : most;
    }
    float top = NONE;
    for (int i = 0; i < W; ++i) top = std::max(top, most[i]);
    const float base = high > low && top == NONE ? 0 : top;  // all NaN, or all minus infinity
    for (int64_t i = 0; i < n; i += W) {
        F w = high > low ? exponential(load(scores + i) - base) : F{};
#if PAIRS
        if constexpr (NARROW) {
            const __m256i rounded = (__m256i)_mm512_cvtneps_pbh((__m512)w);
            _mm256_store_si256((__m256i*)(halves + i), rounded);
            w = widened(halves + i);
        }
#endif
        store(scores + i, w);
        sum += w;
    }
    float total = 0;
    for (int i = 0; i < W; ++i) total += sum[i];
    partial[0] = top, partial[1] = total;
}

struct Block {
    const int64_t* rows;   // [.,3] of its segment
    int64_t first, count;  // of the rows that share a KV head: row i is query head i % share of token i / share
    int64_t low, high;     // keys that some of them see, within the chunk
    int64_t group, share;
    Walk walk;  // at `low`
    float* partial;  // of the first row: maximum, sum, value_width sums
};

// The block's queries as `score` wants them: as they are, or widened; zeros behind the last element.
template <bool NARROW>
void take_queries(const Call& c, Scratch& s, const Block& block, int64_t elements) {
    for (int64_t r = 0; r < block.count; ++r) {
        const int64_t i = block.first + r, head = block.group * block.share + i % block.share;
        const int64_t at = block.rows[i / block.share * 3] * c.q_row + head * c.q_head;
        if (NARROW) {
            uint16_t* q = (uint16_t*)s.q + r * elements;
            std::memcpy(q, c.q + at * 2, c.size * 2);
            std::fill(q + c.size, q + elements, 0);
            continue;
        }
        float* q = (float*)s.q + r * elements;
        if (c.q_type == FLOAT32) std::memcpy(q, c.q + at * 4, c.size * 4);
        else for (int64_t d = 0; d < c.size; ++d) q[d] = widened(((const uint16_t*)c.q)[at + d]);
        std::fill(q + c.size, q + elements, 0.f);
    }
}

template <bool NARROW, Type K, Type V>
void attend_block(const Call& c, Scratch& s, const Block& block) {
    constexpr int64_t key_bytes = K == BFLOAT16 ? 2 : 4, value_bytes = V == BFLOAT16 ? 2 : 4;
    const int64_t words = s.key_words, width = s.value_width, n = block.high - block.low;
    take_queries<NARROW>(c, s, block, words * 4 / key_bytes);
    const char* rows[BUNDLE];
    Walk keys = block.walk;
    const bool whole_keys = c.size * key_bytes % 64 == 0, whole_values = c.value_size % 32 == 0;
    for (int64_t i = 0; i < n; i += LANES) {
        for (int64_t lane = 0; lane < LANES; ++lane) {
            if (i + lane >= n) {
                rows[lane] = s.nothing;
                continue;
            }
            rows[lane] = c.k + (keys.next() * c.k_cell + block.group * c.k_head) * key_bytes;
            fetch(rows[lane] + AHEAD * c.k_cell * key_bytes, c.size * key_bytes);
            if (whole_keys) continue;
            char* copy = (char*)s.key_rows + lane * words * 4;
            rows[lane] = (char*)std::memcpy(copy, rows[lane], c.size * key_bytes);
        }
        turn(rows, words, s.turned);
        score_rows<NARROW, K>(block.count, s.turned, words, s.q, c.scale, s.scores + i);
    }
    const int64_t whole = padded(n, BUNDLE);
    for (int64_t r = 0; r < block.count; ++r) {
        const int64_t* seen = block.rows + (block.first + r) / block.share * 3;
        weigh<NARROW>(s.scores + r * CHUNK, s.halves + r * CHUNK, seen[1] - block.low,
                      std::min(seen[2], block.high) - block.low, whole, c.softcap, block.partial + r * (width + 2));
    }
    std::memset(s.sums, 0, block.count * width * 4);
    Walk values = block.walk;
    for (int64_t i = 0; i < n; i += BUNDLE) {
        for (int64_t lane = 0; lane < BUNDLE; ++lane) {
            if (i + lane >= n) {
                rows[lane] = s.nothing;
                continue;
            }
            rows[lane] = c.v + (values.next() * c.v_cell + block.group * c.v_head) * value_bytes;
            fetch(rows[lane] + AHEAD * c.v_cell * value_bytes, c.value_size * value_bytes);
            if (whole_values) continue;
            char* copy = (char*)s.value_rows + lane * width * value_bytes;
            rows[lane] = (char*)std::memcpy(copy, rows[lane], c.value_size * value_bytes);
        }
        add_rows<NARROW, V>(block.count, rows, s.scores + i, s.halves + i, width, s.sums);
    }
    for (int64_t r = 0; r < block.count; ++r)
        std::memcpy(block.partial + r * (width + 2) + 2, s.sums + r * width, width * 4);
}

// All rows of one KV head over one chunk.
template <bool NARROW, Type K, Type V>
void attend_chunk(const Call& c, Scratch& s, const Chunk& chunk, int64_t group) {
    const int64_t *segment = c.segments + chunk.segment * 4, *rows = c.rows + segment[0] * 3;
    const int64_t share = c.heads / c.groups, count = segment[1] * share, each = s.value_width + 2;
    float* partial = c.partials + (chunk.before * c.groups + group * segment[1]) * share * each;
    for (int64_t first = 0; first < count; first += ROWS) {
        Block block{rows, first, std::min(ROWS, count - first), 0, 0, group, share, {}, partial + first * each};
        const int64_t last = first + block.count - 1;
        block.low = std::max(chunk.low, rows[first / share * 3 + 1]);
        block.high = std::min(chunk.high, rows[last / share * 3 + 2]);
        if (block.high <= block.low) {
            for (int64_t r = 0; r < block.count; ++r) {
                std::memset(block.partial + r * each, 0, each * 4);
                block.partial[r * each] = NONE;
            }
            continue;
        }
        block.walk = {c.runs + chunk.run * 2, block.low};
        attend_block<NARROW, K, V>(c, s, block);
    }
}

// -- a call -----------------------------------------------------------------------------------------------------------

template <bool NARROW>
void merge(const Call& c, const Chunks& chunks, int64_t width) {
    const int64_t share = c.heads / c.groups, each = width + 2;
    std::vector<float> sums(width);
    for (int64_t s = 0; s < c.n_segments; ++s) {
        const int64_t* segment = c.segments + s * 4;
        const int64_t first = chunks.first[s], end = chunks.first[s + 1];
        for (int64_t row = 0; row < segment[1]; ++row)
            for (int64_t head = 0; head < c.heads; ++head) {
                const int64_t group = head / share;
                auto partial = [&](int64_t n) {
                    const int64_t before = chunks.all[n].before * c.groups + group * segment[1] + row;
                    return c.partials + (before * share + head % share) * each;
                };
                float most = NONE, total = 0;
                for (int64_t n = first; n < end; ++n) most = std::max(most, partial(n)[0]);
                const bool sink = c.sinks != nullptr && end > first;
                if (sink) most = std::max(most, c.sinks[head]);
                if (most == NONE) most = 0;
                if (sink) total = std::exp(c.sinks[head] - most);
                std::fill(sums.begin(), sums.end(), 0.f);
                for (int64_t n = first; n < end; ++n) {
                    const float* part = partial(n);
                    if (part[1] == 0) continue;  // it sees none of these keys
                    const float factor = part[0] == NONE ? 1 : std::exp(part[0] - most);
                    total += part[1] * factor;
                    for (int64_t i = 0; i < width; ++i) sums[i] += part[i + 2] * factor;
                }
                const int64_t at = (c.rows[(segment[0] + row) * 3] * c.heads + head) * c.value_size;
                const float share_of = total == 0 ? 0 : 1 / total;
                for (int64_t i = 0; i < c.value_size; ++i) {
                    const float x = sums[column<NARROW>(i)] * share_of;
                    if (c.q_type == FLOAT32) ((float*)c.out)[at + i] = x;
                    else ((uint16_t*)c.out)[at + i] = narrowed(x);
                }
            }
    }
}

template <bool NARROW, Type K, Type V>
void attend(const Call& c) {
    const Chunks chunks(c);
    const int64_t items = chunks.all.size() * c.groups, workers = std::max<int64_t>(1, std::min(c.threads, items));
    std::vector<Scratch> scratch;
    for (int64_t i = 0; i < workers; ++i) scratch.emplace_back(c);
    const int64_t width = scratch[0].value_width;
    std::atomic<int64_t> next{0};
    auto work = [&](int64_t worker) {
        for (int64_t item = next++; item < items; item = next++)
            attend_chunk<NARROW, K, V>(c, scratch[worker], chunks.all[item / c.groups], item % c.groups);
    };
    std::vector<std::thread> others;
    others.reserve(workers);
    try {
        for (int64_t i = 1; i < workers; ++i) others.emplace_back(work, i);
    } catch (const std::exception&) {
        // No more threads are to be had: those that there are do all the work.
    }
    work(0);
    for (std::thread& other : others) other.join();
    merge<NARROW>(c, chunks, width);
}

template <Type K>
void attend_any(const Call& c) {
    if (c.v_type == BFLOAT16) attend<false, K, BFLOAT16>(c);
    else attend<false, K, FLOAT32>(c);
}

}  // namespace

// Shared with `attention/cpu.py`, which compares them at load.
struct Shared {
    const char* name;
    int64_t offset, size;  // of a field of `Call`; of a constant, its value and 0
};
#define FIELD(name) {#name, offsetof(Call, name), sizeof(Call::name)}
extern "C" const Shared kvcellar_shared[] = {
    FIELD(q), FIELD(k), FIELD(v), FIELD(out), FIELD(sinks), FIELD(partials), FIELD(segments), FIELD(rows),
    FIELD(runs), FIELD(q_row), FIELD(q_head), FIELD(k_cell), FIELD(k_head), FIELD(v_cell), FIELD(v_head),
    FIELD(heads), FIELD(groups), FIELD(size), FIELD(value_size), FIELD(n_segments), FIELD(threads),
    FIELD(q_type), FIELD(k_type), FIELD(v_type), FIELD(scale), FIELD(softcap), {"CHUNK", CHUNK, 0},
    {"BUNDLE", BUNDLE, 0}, {"FLOAT32", FLOAT32, 0}, {"BFLOAT16", BFLOAT16, 0}, {nullptr, 0, 0},
};

// 0, or 1 if there is not enough memory.
extern "C" int kvcellar_attend(const Call* call) {
    const Call& c = *call;
    try {
#if PAIRS
        if (c.q_type == BFLOAT16 && c.k_type == BFLOAT16 && c.v_type == BFLOAT16)
            return attend<true, BFLOAT16, BFLOAT16>(c), 0;
#endif
        if (c.k_type == BFLOAT16) attend_any<BFLOAT16>(c);
        else attend_any<FLOAT32>(c);
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}
