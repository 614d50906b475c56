// A few query rows over packed keys and values of one chunk: scores, weights, weighted sums.
//
// A row's numbers do not depend on the rows beside it: each key's score is one chain of products, and a sum over keys is
// taken in order of their places in the chunk. Keys that a row does not see have the weight 0, which adds nothing.
#pragma once
#include <algorithm>
#include <cstdint>

#include "cells.h"
#include "vectors.h"

namespace tiles {
using namespace vectors;
using cells::Half;
using cells::PANEL;
using cells::SCALED;

constexpr int64_t CHUNK = 512;  // keys whose scores are weighed together; chunks begin at multiples of it
constexpr int TALL = REGISTERS == 32 ? 8 : 6;  // rows of a tile, at most: their sums stay in registers

// Vectors that R rows can sum at once in registers.
constexpr int across(int rows) { return rows * 4 + 5 <= REGISTERS ? 4 : 2; }

// Memory that is prefetched while products run, a little at each step: all at once would wait for the few misses that a
// core can have in flight. Asking is never wrong.
struct Ahead {
    const char* at = nullptr;  // null: nothing
    int64_t step = 0;          // bytes

    KV_INLINE void fetch() {
        if (!at) return;
        for (int64_t i = 0; i < step; i += 64) __builtin_prefetch(at + i);
        at += step;
    }
};

struct Tile {
    int64_t count;                  // of rows
    int64_t low[TALL], high[TALL];  // keys that each sees, relative to the chunk; they may lie outside of it
    int64_t first, end;             // keys of the chunk that some of them see, rounded outwards to bundles
    const uint32_t* queries;        // [count,words]
    float* scores;                  // [count,CHUNK]; then weights in float32
    uint32_t* weights;              // [count,CHUNK]: weights in pairs of bfloat16, or times a scale
    float *state, *sums;            // of all chunks so far: [count,2] maximum and total of weights, [count,width]
    float* part;                    // [count,width], of this chunk
    float before[TALL], now[TALL];  // factors of the earlier sums and of this chunk's
    F most[TALL];
};

// What all tiles of a call have in common.
struct Shape {
    int64_t words, head_words;   // 32-bit words of a packed key, and of those that are of its first plane
    int64_t width;               // elements of a packed value
    int64_t key_blocks, head_blocks;  // with scales of their own, and those that are of the first plane
    bool scaled_keys, scaled_values;
    float scale, softcap;        // softcap 0: none
};

// s[R][V] += x[R][n] of words times V vectors of packed words, which are rows of `stride` words.
template <bool NARROW, int R, int V>
KV_INLINE void product(const uint32_t* at, int64_t stride, const uint32_t* const (&x)[R], int64_t n, F (&s)[R][V],
                       Ahead& ahead) {
    for (int64_t k = 0; k < n; ++k, at += stride) {
        F w[V];
        ahead.fetch();
        KV_UNROLL for (int j = 0; j < V; ++j) w[j] = load(at + j * W);
        KV_UNROLL for (int r = 0; r < R; ++r) {
#if KV_PAIRS
            if constexpr (NARROW) {
                const __m512bh b = (__m512bh)_mm512_set1_epi32(x[r][k]);
                KV_UNROLL for (int j = 0; j < V; ++j) s[r][j] = (F)_mm512_dpbf16_ps((__m512)s[r][j], (__m512bh)w[j], b);
                continue;
            }
#endif
            const F b = all(reinterpret_cast<const float*>(x[r])[k]);
            KV_UNROLL for (int j = 0; j < V; ++j) s[r][j] = fused(w[j], b, s[r][j]);
        }
    }
}

// Sums of products made into scores of V vectors of keys from `at` on.
template <bool NARROW, int R, int V>
KV_INLINE void keep_scores(const Shape& c, Tile& t, const F (&s)[R][V], int64_t at) {
    I lane;
    for (int i = 0; i < W; ++i) lane[i] = i;
    const float scale = NARROW && c.softcap == 0 ? c.scale * LOG2E : c.scale;
    KV_UNROLL for (int r = 0; r < R; ++r) {
        const bool cut = t.low[r] > at || t.high[r] < at + V * W;
        const int32_t low = std::clamp<int64_t>(t.low[r] - at, 0, CHUNK), high = std::clamp<int64_t>(t.high[r] - at, 0, CHUNK);
        KV_UNROLL for (int j = 0; j < V; ++j) {
            F y = s[r][j] * scale;
            if (__builtin_expect(c.softcap != 0, 0)) {
                y = capped(y, c.softcap);
                if (NARROW) y *= LOG2E;
            }
            if (cut) {
                const I place = lane + W * j;
                y = (place >= low) & (place < high) ? y : all(NONE);
            }
            t.most[r] = larger(y, t.most[r]);
            store(t.scores + r * CHUNK + at + W * j, y);
        }
    }
}

// Scores of V vectors of keys from `at` on, whose packed words begin at `keys`. `scales` [blocks,CHUNK] of the chunk.
template <bool NARROW, int R, int V>
KV_INLINE void score(const Shape& c, Tile& t, const uint32_t* keys, int64_t stride, const float* scales, int64_t at,
                     Ahead& ahead) {
    constexpr int64_t BLOCK = NARROW ? SCALED / 2 : SCALED;
    F s[R][V];
    const uint32_t* q[R];
    KV_UNROLL for (int r = 0; r < R; ++r) {
        q[r] = t.queries + r * c.words;
        KV_UNROLL for (int j = 0; j < V; ++j) s[r][j] = F{};
    }
    const int64_t first = c.scaled_keys ? std::min(BLOCK, c.head_words) : c.words;
    product<NARROW, R, V>(keys, stride, q, first, s, ahead);
    if (c.scaled_keys) {
        KV_UNROLL for (int j = 0; j < V; ++j) {
            const F scale = load(scales + at + W * j);
            KV_UNROLL for (int r = 0; r < R; ++r) s[r][j] *= scale;
        }
        int64_t done = first;
        for (int64_t b = 1; b < c.key_blocks; ++b) {
            // A block is of one plane.
            const int64_t n = std::min(BLOCK, (b < c.head_blocks ? c.head_words : c.words) - done);
            F y[R][V];
            KV_UNROLL for (int r = 0; r < R; ++r) {
                q[r] = t.queries + r * c.words + done;
                KV_UNROLL for (int j = 0; j < V; ++j) y[r][j] = F{};
            }
            product<NARROW, R, V>(keys + done * stride, stride, q, n, y, ahead);
            done += n;
            KV_UNROLL for (int j = 0; j < V; ++j) {
                const F scale = load(scales + b * CHUNK + at + W * j);
                KV_UNROLL for (int r = 0; r < R; ++r) s[r][j] = fused(y[r][j], scale, s[r][j]);
            }
        }
    }
    keep_scores<NARROW, R, V>(c, t, s, at);
}

// Scores of keys [at,end) of the chunk, multiples of a bundle within one row of panels.
template <bool NARROW, int R>
__attribute__((noinline)) void score_keys(const Shape& c, Tile& t, const uint32_t* keys, int64_t stride, const float* scales, int64_t at,
                          int64_t end, Ahead& ahead) {
    constexpr int V = across(R);
    for (; at + V * W <= end; at += V * W, keys += V * W) score<NARROW, R, V>(c, t, keys, stride, scales, at, ahead);
    for (; at < end; at += 2 * W, keys += 2 * W) score<NARROW, R, 2>(c, t, keys, stride, scales, at, ahead);
}

// Adds a chunk's maximum and total to those of the chunks before it: the factors of its sums and of theirs.
template <bool NARROW>
KV_INLINE void merge(float* state, float top, float weight, float& before, float& now) {
    const float most = std::max(state[0], top);
    const auto factor = [&](float x) { return x == NONE ? 0.f : power_of_two(NARROW ? x - most : (x - most) * LOG2E); };
    before = factor(state[0]), now = factor(top);
    state[0] = most;
    state[1] = fused(all(weight), all(now), all(state[1] * before))[0];
}

// Scores made into weights, which are relative to the chunk's own maximum.
template <bool NARROW, int R>
void weigh(const Shape& c, Tile& t) {
    KV_UNROLL for (int r = 0; r < R; ++r) {
        const float top = largest(t.most[r]);
        const F base = all(top == NONE ? 0.f : top);  // none seen, or all are NaN or minus infinity
        float* x = t.scores + r * CHUNK;
        F sum = {};
#if KV_PAIRS
        if constexpr (NARROW) {
            const __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3f803f80);
            Half* halves = (Half*)(t.weights + r * CHUNK);
            for (int64_t i = t.first; i < t.end; i += 2 * W) {
                const F low = power_of_two<true>(load(x + i) - base), high = power_of_two<true>(load(x + i + W) - base);
                if (c.scaled_values) {
                    store(x + i, low), store(x + i + W, high);
                    sum += low, sum += high;
                    continue;
                }
                const __m512bh both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
                _mm512_storeu_si512(halves + i, (__m512i)both);
                sum = (F)_mm512_dpbf16_ps((__m512)sum, both, ones);
            }
        }
#endif
        if constexpr (!NARROW)
            for (int64_t i = t.first; i < t.end; i += W) {
                const F w = power_of_two((load(x + i) - base) * LOG2E);
                store(x + i, w);
                sum += w;
            }
        merge<NARROW>(t.state + 2 * r, top, total(sum), t.before[r], t.now[r]);
    }
}

// Weights of keys [first,end) times the values' scales [CHUNK], for one block of elements.
template <bool NARROW, int R>
void scale_weights(Tile& t, const float* scales, int64_t first, int64_t end) {
    KV_UNROLL for (int r = 0; r < R; ++r) {
        const float* x = t.scores + r * CHUNK;
#if KV_PAIRS
        if constexpr (NARROW) {
            Half* halves = (Half*)(t.weights + r * CHUNK);
            for (int64_t i = first; i < end; i += 2 * W) {
                const F low = load(x + i) * load(scales + i), high = load(x + i + W) * load(scales + i + W);
                _mm512_storeu_si512(halves + i, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
            }
        }
#endif
        if constexpr (!NARROW)
            for (int64_t i = first; i < end; i += W) store(t.weights + r * CHUNK + i, load(x + i) * load(scales + i));
    }
}

// Keeps a vector of row r's weighted sums in this chunk; if it `ends`, adds them to those of the chunks before.
KV_INLINE void keep_sum(const Shape& c, Tile& t, int r, int64_t d, F sum, bool ends) {
    float* sums = t.sums + r * c.width + d;
    if (ends) store(sums, fused(sum, all(t.now[r]), load(sums) * t.before[r]));
    else store(t.part + r * c.width + d, sum);
}

// V vectors of elements from `d` on of the weighted sums of n words of keys from word `from` of the chunk on.
template <bool NARROW, int R, int V>
KV_INLINE void add(const Shape& c, Tile& t, const uint32_t* values, int64_t d, int64_t from, int64_t n, bool begins,
                   bool ends, Ahead& ahead) {
    F s[R][V];
    const uint32_t* w[R];
    const uint32_t* weights = NARROW || c.scaled_values ? t.weights : reinterpret_cast<const uint32_t*>(t.scores);
    KV_UNROLL for (int r = 0; r < R; ++r) {
        w[r] = weights + r * CHUNK + from;
        KV_UNROLL for (int j = 0; j < V; ++j) s[r][j] = begins ? F{} : load(t.part + r * c.width + d + W * j);
    }
    product<NARROW, R, V>(values, PANEL, w, n, s, ahead);
    KV_UNROLL for (int r = 0; r < R; ++r)
        KV_UNROLL for (int j = 0; j < V; ++j) keep_sum(c, t, r, d + W * j, s[r][j], ends);
}

// Adds the values of keys [at,end) of the chunk, packed in panels that are `panel` words apart and begin with key `at`.
// `scales` [blocks,CHUNK] of the chunk. `begins`, `ends`: the first and the last keys that the tile adds in this chunk.
template <bool NARROW, int R>
__attribute__((noinline)) void add_values(const Shape& c, Tile& t, const uint32_t* values, int64_t panel, const float* scales, int64_t at,
                          int64_t end, bool begins, bool ends, Ahead& ahead) {
    constexpr int V = across(R), per = NARROW ? 2 : 1;
    const int64_t from = at / per, n = (end - at) / per;
    for (int64_t d = 0; d < c.width;) {
        if (c.scaled_values && d % SCALED == 0) scale_weights<NARROW, R>(t, scales + d / SCALED * CHUNK, at, end);
        const uint32_t* packed = values + d / PANEL * panel + d % PANEL;
        if (d + V * W <= c.width) add<NARROW, R, V>(c, t, packed, d, from, n, begins, ends, ahead), d += V * W;
        else add<NARROW, R, 2>(c, t, packed, d, from, n, begins, ends, ahead), d += 2 * W;
    }
}

}  // namespace tiles
