// Attention of new rows of each sequence over its cells, read in place: of one row (decoding) or thousands (prompts).
// `memory/attention/cpu.py` calls it; nothing is kept between calls.
//
// Keys are taken in chunks at absolute positions. Each chunk gives a row a maximum, a total and a weighted sum, which are
// merged in order of position. So the result for a row depends neither on the rows beside it, however they were cut,
// nor on other sequences, nor on threads. A long block of rows packs a chunk once for all of them; a few rows take a bundle
// of 32 keys at a time: one tile of rows in bfloat16 turns it in registers (`direct.h`), more pack it.
//
// Always true: the content of cells that a row does not see has no effect on it, even NaN. Where a row's result is not
// finite, its token is computed again without others, so that it reads the cells that it sees and no more.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "cells.h"
#include "direct.h"
#include "step.h"
#include "threads.h"
#include "tile.h"
#include "vectors.h"

namespace {

using namespace vectors;
using namespace tiles;
using cells::BUNDLE;
using cells::Half;
using cells::Plane;
using cells::Reader;
using cells::Walk;

constexpr int SIX = 6;                      // rows of a tile of many
constexpr int64_t FEW = 16;                 // rows that pack bundles instead of chunks, at most
constexpr int64_t ROWS = 448;               // of a slice, at most
constexpr int64_t SLICE = 384 << 10;        // bytes of the queries and sums of a slice, about
constexpr int64_t AHEAD = 16 << 10;         // bytes by which prefetching is ahead of use
constexpr int64_t PIECES = 2;               // of work for each thread, before a sequence's keys are not cut further

struct Call {
    const Step* step;
    const char* q;       // [T,H,D]
    char* out;           // [T,H,Dv], of q's type
    const float* sinks;  // [H], or null
    Threads* pool;       // null: one thread
    Plane k, v;
    Plane tail;          // of size 0, or: each key is its vector of k and behind that one of this plane
    int64_t q_row, q_head, out_row, out_head;  // strides in elements; the last is 1
    int64_t heads, groups, threads, per_thread;  // per_thread: units of work (`worth`) for which a thread is used
    int32_t type;                              // of q and out
    float scale, softcap;                      // softcap 0: none
};

int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Tokens [begin,end) of a segment, for the query heads of one KV head, over chunks [from,to).
struct Slice {
    int64_t segment, begin, end, group, from, to;
    int64_t partial;  // its rows among those of which chunks are kept apart; -1: it has all chunks
};

template <class E>
struct Layout {
    static constexpr bool NARROW = sizeof(E) == 2;
    static constexpr int64_t IN_WORD = 4 / sizeof(E);
    const Call& call;
    Shape shape;
    int64_t share, tokens;  // rows of a token; tokens of a slice, at most

    explicit Layout(const Call& c) : call(c), share(c.heads / c.groups) {
        const auto words = [](const Plane& plane) { return padded(plane.size, 4 * IN_WORD) / IN_WORD; };
        shape.head_words = words(c.k), shape.words = shape.head_words + words(c.tail);
        shape.width = padded(c.v.size, 32);
        shape.scaled_keys = c.k.scales || c.tail.scales, shape.scaled_values = c.v.scales;
        const auto blocks = [](const Plane& plane) { return padded(plane.size, cells::SCALED) / cells::SCALED; };
        shape.head_blocks = shape.scaled_keys ? blocks(c.k) : 1;
        shape.key_blocks = shape.scaled_keys ? blocks(c.k) + blocks(c.tail) : 1;
        shape.scale = c.scale, shape.softcap = c.softcap;
        const int64_t rows = std::clamp<int64_t>(SLICE / (4 * (shape.words + shape.width)), 48, ROWS);
        tokens = std::max<int64_t>(1, rows / share);
    }
    const int64_t* row(int64_t segment, int64_t token) const {
        return call.step->rows + (call.step->segments[segment * 4] + token) * 3;
    }
    // The keys that tokens of a segment see; none if it has no cells.
    std::pair<int64_t, int64_t> keys(int64_t segment, int64_t begin, int64_t end) const {
        const int64_t low = row(segment, begin)[1];
        return {low, call.step->segments[segment * 4 + 3] ? std::max(low, row(segment, end - 1)[2]) : low};
    }
    int64_t partial_words() const { return 2 + shape.width; }
};

// Bytes of a vector of a plane that is rotated, in float32.
int64_t rotated(const Plane& plane) { return plane.rotated ? padded(plane.size, 64) * 4 : 0; }

// What one thread works with.
template <class E>
struct Scratch {
    std::unique_ptr<char[]> memory;
    uint32_t *queries, *keys, *values, *weights;  // [rows,words], packed keys and values, [FEW,CHUNK]
    float *scores, *state, *sums, *part;          // [FEW,CHUNK], [rows,2], [rows,width], [FEW,width]
    float* wide;                                  // a query or a result that is rotated
    bool* again;                                  // [tokens], those that are computed again
    uint32_t* turned;                             // [words,rows], queries of one tile
    float *key_scales, *value_scales;             // [blocks,CHUNK]
    E *key_rows, *tail_rows, *value_rows;         // of a bundle
    Tile tiles[FEW];

    Scratch(const Layout<E>& of, int64_t rows) {
        const Shape& s = of.shape;
        const bool few = rows <= FEW;
        const int64_t keys_at_once = few ? BUNDLE : CHUNK, panels = padded(s.width, PANEL) / PANEL;
        const int64_t some = std::min(rows, FEW);  // a token of many may be computed alone
        const int64_t bytes[] = {
            rows * s.words * 4,
            padded(keys_at_once, PANEL) * s.words * 4,
            keys_at_once / Layout<E>::IN_WORD * panels * PANEL * 4,
            some * CHUNK * 4,
            some * CHUNK * 4,
            rows * 8,
            rows * s.width * 4,
            some * s.width * 4,
            s.scaled_keys ? s.key_blocks * CHUNK * 4 : 0,
            s.scaled_values ? of.call.v.blocks() * CHUNK * 4 : 0,
            Reader<E>::bytes(s.head_words * Layout<E>::IN_WORD),
            Reader<E>::bytes((s.words - s.head_words) * Layout<E>::IN_WORD),
            Reader<E>::bytes(s.width),
            std::max({rotated(of.call.k), rotated(of.call.tail), rotated(of.call.v)}),
            rows,
            std::min<int64_t>(rows, TALL) * s.words * 4,
        };
        int64_t total = 64;
        for (int64_t b : bytes) total += padded(b, 64) + 64;
        memory.reset(new char[total]);
        char* at = memory.get() + (64 - reinterpret_cast<uintptr_t>(memory.get()) % 64) % 64;
        char* parts[16];
        for (int i = 0; i < 16; ++i) parts[i] = at, at += padded(bytes[i], 64) + 64;
        queries = (uint32_t*)parts[0], keys = (uint32_t*)parts[1], values = (uint32_t*)parts[2];
        weights = (uint32_t*)parts[3], scores = (float*)parts[4], state = (float*)parts[5], sums = (float*)parts[6];
        part = (float*)parts[7], key_scales = (float*)parts[8], value_scales = (float*)parts[9];
        key_rows = (E*)parts[10], tail_rows = (E*)parts[11], value_rows = (E*)parts[12], wide = (float*)parts[13];
        again = (bool*)parts[14], turned = (uint32_t*)parts[15];
    }
};

// -- queries and results ----------------------------------------------------------------------------------------------

// A part of a query that meets vectors of a plane, zeros behind the last element up to `end`.
template <class E>
void take_query(const Call& c, const char* q, const Plane& plane, float* wide, E* row, E* end) {
    if (plane.rotated) {
        elements((cells::Kind)c.type, q, plane.size, wide);
        cells::rotate(wide, plane.size);
        for (int64_t d = 0; d < plane.size; ++d)
            if constexpr (Layout<E>::NARROW) row[d] = narrowed(wide[d]);
            else row[d] = wide[d];
    } else {
        elements((cells::Kind)c.type, q, plane.size, row);
    }
    std::fill(row + plane.size, end, E(0));
}

// Queries of a slice as words of packed elements, zeros behind the last of each plane.
template <class E>
void take_queries(const Layout<E>& of, Scratch<E>& s, const Slice& slice) {
    const Call& c = of.call;
    const int64_t element = c.type == cells::FLOAT32 ? 4 : 2;
    uint32_t* to = s.queries;
    for (int64_t token = slice.begin; token < slice.end; ++token)
        for (int64_t i = 0; i < of.share; ++i, to += of.shape.words) {
            const int64_t at = of.row(slice.segment, token)[0] * c.q_row + (slice.group * of.share + i) * c.q_head;
            const char* q = c.q + at * element;
            E* const tail = (E*)(to + of.shape.head_words);
            take_query(c, q, c.k, s.wide, (E*)to, tail);
            if (c.tail.size) take_query(c, q + c.k.size * element, c.tail, s.wide, tail, (E*)(to + of.shape.words));
        }
    const int64_t rows = (slice.end - slice.begin) * of.share;
    if (rows <= TALL)
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t w = 0; w < of.shape.words; ++w) s.turned[w * rows + r] = s.queries[r * of.shape.words + w];
}

// Whether all of these are finite.
bool finite(const float* x, int64_t n) {
    F any = {};
    for (int64_t i = 0; i < n; i += W) {
        const F y = load(x + i);
        any += y - y;
    }
    return total(any) == 0;
}

// Where the sum of an element of a value is among a row's sums: `cells::pack_values`.
template <class E>
int64_t summed(int64_t element) {
    if (!Layout<E>::NARROW) return element;
    const int64_t lane = element % 32 / 8, in_lane = element % 8;
    return element / 32 * 32 + in_lane / 4 * 16 + lane * 4 + in_lane % 4;
}

// The result of a row.
template <class E>
void write_row(const Layout<E>& of, Scratch<E>& s, int64_t row, int64_t head, bool any, const float* state,
               const float* sums) {
    const Call& c = of.call;
    float weight = state[1], factor = 1;
    if (c.sinks && any) {
        const float sink = c.sinks[head] * (Layout<E>::NARROW ? LOG2E : 1.f);
        float both[2] = {state[0], state[1]};
        float now;
        merge<Layout<E>::NARROW>(both, sink, 1.f, factor, now);
        weight = both[1];
    }
    const float times = weight == 0 ? 0 : factor / weight;
    char* out = c.out + (row * c.out_row + head * c.out_head) * (c.type == cells::FLOAT32 ? 4 : 2);
    const int64_t size = c.v.size;
    if (c.v.rotated) {  // sums of rotated vectors: rotating twice changes nothing
        for (int64_t d = 0; d < size; ++d) s.wide[d] = sums[summed<E>(d)] * times;
        cells::rotate(s.wide, size);
        for (int64_t d = 0; d < size; ++d)
            if (c.type == cells::FLOAT32) ((float*)out)[d] = s.wide[d];
            else ((Half*)out)[d] = narrowed(s.wide[d]);
        return;
    }
#if KV_PAIRS
    if constexpr (Layout<E>::NARROW) {
        for (int64_t d = 0; d < size; d += 32) {
            const __m512i x = cells::in_order(load(sums + d) * times, load(sums + d + 16) * times);
            const int64_t left = size - d;
            _mm512_mask_storeu_epi16(out + d * 2, left >= 32 ? ~__mmask32(0) : (__mmask32(1) << left) - 1, x);
        }
        return;
    }
#endif
    if (c.type == cells::FLOAT32)
        for (int64_t i = 0; i < size; ++i) ((float*)out)[i] = sums[i] * times;
    else
        for (int64_t i = 0; i < size; ++i) ((Half*)out)[i] = narrowed(sums[i] * times);
}

// -- a slice over its chunks ------------------------------------------------------------------------------------------

// For a tile of at most so many rows, 6 or 8.
#define KV_BY_COUNT(tall, count, CASE) \
    switch (count) {                   \
        case 1: CASE(1); break;        \
        case 2: CASE(2); break;        \
        case 3: CASE(3); break;        \
        case 4: CASE(4); break;        \
        case 5: CASE(5); break;        \
        case 6: CASE(6); break;        \
        case 7: CASE((tall > 6 ? 7 : 1)); break;  \
        default: CASE((tall > 6 ? 8 : 1)); break; \
    }

// Rows [first,first + count) of a slice over keys [a,b) of the chunk at `start`.
template <class E>
void lay_out(const Layout<E>& of, Scratch<E>& s, const Slice& slice, Tile& t, int64_t first, int64_t count, int64_t start,
             int64_t a, int64_t b) {
    int64_t low = CHUNK, high = 0;
    for (int64_t r = 0; r < count; ++r) {
        const int64_t* row = of.row(slice.segment, slice.begin + (first + r) / of.share);
        t.low[r] = row[1] - start, t.high[r] = std::min(row[2], b) - start;
        low = std::min(low, t.low[r]), high = std::max(high, t.high[r]);
        t.most[r] = all(NONE);
    }
    t.count = count;
    t.first = std::max(low, a - start) / BUNDLE * BUNDLE, t.end = high <= std::max(low, a - start) ? t.first : padded(high, BUNDLE);
    t.queries = s.queries + first * of.shape.words;
    t.state = s.state + 2 * first, t.sums = s.sums + first * of.shape.width;
}

// Reads a bundle of keys from `at` on, of which [a,b) are there; packs them.
template <class E>
void pack(Reader<E>& reader, Walk& walk, int64_t at, int64_t a, int64_t b, int64_t start, float* scales, bool values,
          int64_t width, uint32_t* to, int64_t stride) {
    const E* rows[BUNDLE];
    const int64_t first = std::clamp<int64_t>(a - at, 0, BUNDLE), end = std::clamp<int64_t>(b - at, first, BUNDLE);
    reader.read(walk, first, end, rows, scales + (at - start), CHUNK);
    if (values) cells::pack_values(rows, width, to, stride);
    else cells::pack_keys(rows, reader.padded, to, stride);
}

// Reads what keys are made of.
template <class E>
struct Keys {
    Reader<E> head, tail;  // `tail` reads nothing where keys have none

    Keys(const Call& c, int64_t group, Scratch<E>& s)
        : head(c.k, group, 4 * Layout<E>::IN_WORD, s.key_rows), tail(c.tail, group, 4 * Layout<E>::IN_WORD, s.tail_rows) {}

    // Packs a bundle: `pack`.
    void pack_bundle(const Shape& c, Walk& walk, int64_t at, int64_t a, int64_t b, int64_t start, float* scales, uint32_t* to,
              int64_t stride) {
        Walk again = walk;
        pack(head, walk, at, a, b, start, scales, false, 0, to, stride);
        if (c.words == c.head_words) return;
        float* const behind = scales + c.head_blocks * CHUNK;
        pack(tail, again, at, a, b, start, behind, false, 0, to + c.head_words * stride, stride);
        if (!c.scaled_keys || (head.scales && tail.scales)) return;
        // Of planes of which one has scales, the other's are 1.
        float* const plain = head.scales ? behind : scales;
        const int64_t blocks = head.scales ? c.key_blocks - c.head_blocks : c.head_blocks;
        for (int64_t block = 0; block < blocks; ++block) std::fill_n(plain + block * CHUNK + (at - start), BUNDLE, 1.f);
    }
};

// What comes so many bytes behind a vector, if a head's vectors lie one behind the other: a bundle, in so many steps.
Ahead behind(const Plane& plane, const char* from, int64_t bytes, int64_t total, int64_t steps) {
    if (plane.cell != plane.bytes()) return {};
    return {from + bytes, total / steps};
}

#if KV_PAIRS
// A bundle of keys, of which [a,b) are there, that is not packed.
Rows bundle(Reader<Half>& reader, Walk& walk, int64_t at, int64_t a, int64_t b, float* scales) {
    const int64_t first = std::clamp<int64_t>(a - at, 0, BUNDLE), end = std::clamp<int64_t>(b - at, first, BUNDLE);
    return reader.rows(walk, first, end, scales, CHUNK);
}

// What is prefetched while a bundle is read: what lies behind it in cells.
const char* behind(const Rows& rows) { return rows.at + (rows.in_place ? AHEAD : 0); }

template <Kind K, int R>
void tile_keys(const Shape& c, Scratch<Half>& s, Tile& t, Walk walk, int64_t start, int64_t a, int64_t b, Reader<Half>& keys) {
    for (int64_t at = t.first; at < t.end; at += BUNDLE) {
        const Rows rows = bundle(keys, walk, start + at, a, b, s.key_scales + at);
        score_bundle<K, R>(c, t, s.turned, rows, keys.plane.size, s.key_scales, at, behind(rows));
    }
}

template <Kind K, int R>
void tile_values(const Shape& c, Scratch<Half>& s, Tile& t, Walk walk, int64_t start, int64_t a, int64_t b,
                 Reader<Half>& values) {
    for (int64_t at = t.first; at < t.end; at += BUNDLE) {
        const Rows rows = bundle(values, walk, start + at, a, b, s.value_scales + at);
        const bool begins = at == t.first, ends = at + BUNDLE == t.end;
        add_bundle<K, R>(c, t, rows, values.plane.size, s.value_scales, at, begins, ends, behind(rows));
    }
}

// One tile of rows, over keys and values that are not packed.
template <int R>
void one_tile(const Shape& c, Scratch<Half>& s, Tile& t, Walk walk, int64_t start, int64_t a, int64_t b,
              Reader<Half>& keys, Reader<Half>& values) {
    const auto by_kind = [](Kind kind, auto&& use) {
        switch (kind) {
#if KV_BYTES
            case cells::INT8: return use(std::integral_constant<Kind, cells::INT8>());
            case cells::INT4: return use(std::integral_constant<Kind, cells::INT4>());
            case cells::FP8: return use(std::integral_constant<Kind, cells::FP8>());
#endif
            default: return use(std::integral_constant<Kind, cells::BFLOAT16>());
        }
    };
    by_kind(keys.kind(), [&](auto kind) { tile_keys<kind.value, R>(c, s, t, walk, start, a, b, keys); });
    weigh<true, R>(c, t);
    by_kind(values.kind(), [&](auto kind) { tile_values<kind.value, R>(c, s, t, walk, start, a, b, values); });
}
#endif

// All rows of a slice at once, a bundle of keys at a time.
template <class E>
void few_rows(const Layout<E>& of, Scratch<E>& s, const Slice& slice, Walk walk, int64_t start, int64_t a, int64_t b,
              Keys<E>& keys, Reader<E>& values) {
    constexpr bool NARROW = Layout<E>::NARROW;
    const Shape& c = of.shape;
    const int64_t rows = (slice.end - slice.begin) * of.share;
    constexpr int PACKED = NARROW ? SIX : TALL;  // rows of a tile over packed keys; fewer are quicker to compile
    const bool direct = NARROW && rows <= TALL && c.words == c.head_words;  // they are not packed
    const int64_t n = direct ? 1 : (rows + PACKED - 1) / PACKED, each = (rows + n - 1) / n;
    for (int64_t i = 0; i < n; ++i) {
        Tile& t = s.tiles[i];
        lay_out(of, s, slice, t, i * each, std::min(each, rows - i * each), start, a, b);
        t.scores = s.scores + i * each * CHUNK, t.weights = s.weights + i * each * CHUNK;
        t.part = s.part + i * each * c.width;
    }
#if KV_PAIRS
    if constexpr (NARROW)
        if (direct) {
            Tile& t = s.tiles[0];
            if (t.first == t.end) return;
#define CASE(R) one_tile<R>(c, s, t, walk, start, a, b, keys.head, values)
            KV_BY_COUNT(TALL, t.count, CASE)
#undef CASE
            return;
        }
#endif
    const int64_t first = (a - start) / BUNDLE * BUNDLE, end = padded(b - start, BUNDLE);
    Walk next = walk;
    for (int64_t at = first; at < end; at += BUNDLE) {
        int64_t cell;
        Walk here = next;
        here.next(1, &cell);
        const Plane& p = of.call.k;
        Ahead ahead = behind(p, keys.head.codes + cell * p.cell, AHEAD, BUNDLE * p.cell, c.words);
        keys.pack_bundle(c, next, start + at, a, b, start, s.key_scales, s.keys, BUNDLE);
        for (int64_t i = 0; i < n; ++i) {
            Tile& t = s.tiles[i];
            if (at < t.first || at >= t.end) continue;
#define CASE(R) score_keys<NARROW, R>(c, t, s.keys, BUNDLE, s.key_scales, at, at + BUNDLE, ahead)
            KV_BY_COUNT(PACKED, t.count, CASE)
#undef CASE
        }
    }
    for (int64_t i = 0; i < n; ++i) {
        Tile& t = s.tiles[i];
        if (t.first == t.end) continue;
#define CASE(R) weigh<NARROW, R>(c, t)
        KV_BY_COUNT(PACKED, t.count, CASE)
#undef CASE
    }
    const int64_t panel = BUNDLE / Layout<E>::IN_WORD * PANEL;
    for (int64_t at = first; at < end; at += BUNDLE) {
        int64_t cell;
        Walk here = walk;
        here.next(1, &cell);
        const Plane& p = of.call.v;
        Ahead ahead = behind(p, values.codes + cell * p.cell, AHEAD, BUNDLE * p.cell, panel / PANEL * (c.width / 32));
        pack(values, walk, start + at, a, b, start, s.value_scales, true, c.width, s.values, panel);
        for (int64_t i = 0; i < n; ++i) {
            Tile& t = s.tiles[i];
            if (at < t.first || at >= t.end) continue;
            const bool begins = at == t.first, ends = at + BUNDLE == t.end;
#define CASE(R) add_values<NARROW, R>(c, t, s.values, panel, s.value_scales, at, at + BUNDLE, begins, ends, ahead)
            KV_BY_COUNT(PACKED, t.count, CASE)
#undef CASE
        }
    }
}

// The chunk is packed, then taken by tiles of rows.
template <class E>
void many_rows(const Layout<E>& of, Scratch<E>& s, const Slice& slice, Walk walk, int64_t start, int64_t a, int64_t b,
               int64_t last, Keys<E>& keys, Reader<E>& values) {
    constexpr bool NARROW = Layout<E>::NARROW;
    constexpr int64_t IN_WORD = Layout<E>::IN_WORD;
    const Shape& c = of.shape;
    const int64_t rows = (slice.end - slice.begin) * of.share, panel = CHUNK / IN_WORD * PANEL;
    const int64_t first = (a - start) / BUNDLE * BUNDLE, end = padded(b - start, BUNDLE);
    Walk of_keys = walk, of_values = walk;
    for (int64_t at = first; at < end; at += BUNDLE) {
        keys.pack_bundle(c, of_keys, start + at, a, b, start, s.key_scales,
                         s.keys + at / PANEL * PANEL * c.words + at % PANEL, PANEL);
        pack(values, of_values, start + at, a, b, start, s.value_scales, true, c.width,
             s.values + at / IN_WORD * PANEL, panel);
    }
    // The next chunk's cells, where they lie behind this one's, are prefetched by the first tiles.
    Ahead next_keys, next_values;
    if (b < last) {
        int64_t cell;
        of_keys.next(1, &cell);
        const Plane &k = of.call.k, &v = of.call.v;
        next_keys = behind(k, keys.head.codes + cell * k.cell, 0, 128, 1);
        next_values = behind(v, values.codes + cell * v.cell, 0, 128, 1);
    }
    const char* const keys_end = next_keys.at + CHUNK * of.call.k.cell;
    const char* const values_end = next_values.at + CHUNK * of.call.v.cell;
    for (int64_t at = 0; at < rows;) {
        const int64_t rest = rows - at, count = rest <= SIX ? rest : rest < 2 * SIX ? (rest + 1) / 2 : SIX;
        Tile& t = s.tiles[0];
        lay_out(of, s, slice, t, at, count, start, a, b);
        t.scores = s.scores, t.weights = s.weights, t.part = s.part;
        at += count;
        if (t.first == t.end) continue;
        if (next_keys.at >= keys_end) next_keys = {};
        if (next_values.at >= values_end) next_values = {};
        for (int64_t key = t.first; key < t.end;) {
            const int64_t until = std::min(t.end, (key / PANEL + 1) * PANEL);
            const uint32_t* packed = s.keys + key / PANEL * PANEL * c.words + key % PANEL;
#define CASE(R) score_keys<NARROW, R>(c, t, packed, PANEL, s.key_scales, key, until, next_keys)
            KV_BY_COUNT(SIX, count, CASE)
#undef CASE
            key = until;
        }
        const uint32_t* packed = s.values + t.first / IN_WORD * PANEL;
#define CASE(R)              \
    weigh<NARROW, R>(c, t); \
    add_values<NARROW, R>(c, t, packed, panel, s.value_scales, t.first, t.end, true, true, next_values)
        KV_BY_COUNT(SIX, count, CASE)
#undef CASE
    }
}

// State and sums of a slice's rows, of its chunks.
template <class E>
void attend_slice(const Layout<E>& of, Scratch<E>& s, const Slice& slice) {
    const Call& c = of.call;
    const auto [low, high] = of.keys(slice.segment, slice.begin, slice.end);
    const int64_t rows = (slice.end - slice.begin) * of.share;
    for (int64_t i = 0; i < rows; ++i) s.state[2 * i] = NONE, s.state[2 * i + 1] = 0;
    std::memset(s.sums, 0, rows * of.shape.width * 4);
    take_queries(of, s, slice);
    Keys<E> keys(c, slice.group, s);
    Reader<E> values(c.v, slice.group, 32, s.value_rows);
    const int64_t* run = c.step->runs + c.step->segments[slice.segment * 4 + 2] * 2;
    for (int64_t chunk = slice.from; chunk < slice.to; ++chunk) {
        const int64_t start = chunk * CHUNK, a = std::max(start, low), b = std::min(start + CHUNK, high);
        if (a >= b) continue;
        while (a >= run[2]) run += 2;
        if (rows <= FEW) few_rows(of, s, slice, {run, a}, start, a, b, keys, values);
        else many_rows(of, s, slice, {run, a}, start, a, b, high, keys, values);
    }
}

// Writes the rows of a slice whose chunks are merged.
template <class E>
void write_slice(const Layout<E>& of, Scratch<E>& s, const Slice& slice) {
    const auto [low, high] = of.keys(slice.segment, slice.begin, slice.end);
    const bool alone = slice.end - slice.begin == 1;
    for (int64_t token = slice.begin; token < slice.end; ++token) {
        bool sound = true;
        for (int64_t i = 0; i < of.share; ++i) {
            const int64_t at = (token - slice.begin) * of.share + i;
            const float *state = s.state + 2 * at, *sums = s.sums + at * of.shape.width;
            sound &= finite(sums, of.shape.width);
            write_row(of, s, of.row(slice.segment, token)[0], slice.group * of.share + i, high > low, state, sums);
        }
        if (!alone) s.again[token - slice.begin] = !sound;
    }
    if (alone) return;
    for (int64_t token = slice.begin; token < slice.end; ++token) {
        if (!s.again[token - slice.begin]) continue;
        const auto [from, to] = of.keys(slice.segment, token, token + 1);
        const Slice one{slice.segment, token, token + 1, slice.group, from / CHUNK, (to + CHUNK - 1) / CHUNK, -1};
        attend_slice(of, s, one);
        write_slice(of, s, one);
    }
}

// -- a call -----------------------------------------------------------------------------------------------------------

// Slices of all segments, and how many threads they are worth.
template <class E>
std::vector<Slice> slices(const Layout<E>& of, int64_t& threads, int64_t& partials) {
    const Call& c = of.call;
    std::vector<Slice> whole;
    int64_t work = 0;
    for (int64_t s = 0; s < c.step->n_segments; ++s) {
        const int64_t count = c.step->segments[s * 4 + 1];
        for (int64_t begin = 0; begin < count; begin += of.tokens) {
            const int64_t end = std::min(begin + of.tokens, count);
            const auto [low, high] = of.keys(s, begin, end);
            const int64_t bytes = c.k.bytes() + c.tail.bytes() + c.v.bytes(), elements = c.k.size + c.tail.size + c.v.size;
            work += (high - low) * c.groups * (bytes + (end - begin) * of.share * elements / 8);
            for (int64_t g = 0; g < c.groups; ++g)
                whole.push_back({s, begin, end, g, low / CHUNK, (high + CHUNK - 1) / CHUNK, -1});
        }
    }
    threads = std::min(c.threads, 1 + work / c.per_thread);
    partials = 0;
    const int64_t count = whole.size();
    if (threads <= 1 || count >= PIECES * threads) return whole;
    std::vector<Slice> found;
    for (const Slice& one : whole) {
        if (one.to - one.from < 2) {
            found.push_back(one);
            continue;
        }
        for (int64_t chunk = one.from; chunk < one.to; ++chunk) {
            found.push_back(one);
            found.back().from = chunk, found.back().to = chunk + 1, found.back().partial = partials;
            partials += (one.end - one.begin) * of.share;
        }
    }
    return found;
}

template <class E>
void attend(const Call& c) {
    const Layout<E> of(c);
    int64_t threads, rows = 1, partial_rows;
    const std::vector<Slice> all_slices = slices(of, threads, partial_rows);
    for (const Slice& one : all_slices) rows = std::max(rows, (one.end - one.begin) * of.share);
    const int64_t workers = std::clamp<int64_t>(threads, 1, std::max<size_t>(1, all_slices.size())), each = of.partial_words();
    std::vector<std::unique_ptr<Scratch<E>>> scratch;
    for (int64_t i = 0; i < workers; ++i) scratch.push_back(std::make_unique<Scratch<E>>(of, rows));
    std::unique_ptr<float[]> partials(partial_rows ? new float[partial_rows * each] : nullptr);
    std::unique_ptr<std::atomic<bool>[]> taken(new std::atomic<bool>[workers]());
    const auto with_scratch = [&](auto&& work) {
        int64_t i = 0;
        while (taken[i].exchange(true)) i = (i + 1) % workers;
        work(*scratch[i]);
        taken[i].store(false);
    };
    for_each_item(c.pool, workers, all_slices.size(), [&](int64_t item) noexcept {
        const Slice& slice = all_slices[item];
        with_scratch([&](Scratch<E>& s) {
            attend_slice(of, s, slice);
            if (slice.partial < 0) return write_slice(of, s, slice);
            const int64_t count = (slice.end - slice.begin) * of.share;
            for (int64_t i = 0; i < count; ++i) {
                float* to = partials.get() + (slice.partial + i) * each;
                std::memcpy(to, s.state + 2 * i, 8);
                std::memcpy(to + 2, s.sums + i * of.shape.width, of.shape.width * 4);
            }
        });
    });
    if (!partial_rows) return;
    // The chunks of one slice are one behind the other: they are merged by the first.
    for_each_item(c.pool, workers, all_slices.size(), [&](int64_t item) noexcept {
        const auto same = [&](size_t i) {
            return all_slices[i].partial >= 0 && all_slices[i].segment == all_slices[item].segment &&
                   all_slices[i].begin == all_slices[item].begin && all_slices[i].group == all_slices[item].group;
        };
        if (!same(item) || (item > 0 && same(item - 1))) return;
        with_scratch([&](Scratch<E>& s) {
            const int64_t count = (all_slices[item].end - all_slices[item].begin) * of.share, width = of.shape.width;
            for (int64_t r = 0; r < count; ++r) {
                float *state = s.state + 2 * r, *sums = s.sums + r * width;
                state[0] = NONE, state[1] = 0;
                std::memset(sums, 0, width * 4);
                for (size_t i = item; i < all_slices.size() && same(i); ++i) {
                    const float* from = partials.get() + (all_slices[i].partial + r) * each;
                    float before, now;
                    merge<Layout<E>::NARROW>(state, from[0], from[1], before, now);
                    for (int64_t d = 0; d < width; d += W)
                        store(sums + d, fused(load(from + 2 + d), all(now), load(sums + d) * before));
                }
            }
            write_slice(of, s, all_slices[item]);
        });
    });
}

}  // namespace

// 0, or 1 if there is not enough memory.
extern "C" int kvcellar_attend(const void* call) {
    const Call& c = *(const Call*)call;
    try {
#if KV_PAIRS
        if (c.type == cells::BFLOAT16 && c.k.kind != cells::FLOAT32 && c.v.kind != cells::FLOAT32 &&
            (!c.tail.size || c.tail.kind != cells::FLOAT32))
            return attend<Half>(c), 0;
#endif
        attend<float>(c);
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}
