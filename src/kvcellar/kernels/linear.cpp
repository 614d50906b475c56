// Linear layers whose weights, bfloat16 or float32, lie in panels of 64 outputs. `layers.py` calls it.
//
//     bfloat16   [out/64][in/2][64][2]   the last panel, and the last pair of an odd number of inputs, filled with zeros
//     float32    [out/64][in][64]
//
// A CPU with AVX512-BF16 multiplies pairs of bfloat16. On others they are widened to float32: a few rows in registers,
// more rows with a part of a panel that is widened first.
//
// Always true: each output is one sum, from the first input to the last, in float32, rounded once after the bias was
// added. So the bits of a row do not depend on the number of rows, on its place among them, on the blocks in which it is
// computed, or on threads.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "layers.h"

namespace {

constexpr int64_t PANEL = 64;  // outputs
constexpr int ROWS = 6;        // that are computed at once
#if defined(__AVX512F__)
constexpr int LANES = 16, WIDE = 4;  // WIDE x ROWS sums stay in registers
#elif defined(__AVX__)
constexpr int LANES = 8, WIDE = 2;
#else
constexpr int LANES = 4, WIDE = 2;
#endif
constexpr int64_t FIRST = 32 << 10;    // bytes of a panel that stay in the first cache
constexpr int64_t SECOND = 256 << 10;  // and in the second
constexpr int64_t NEAR = 384 << 10;    // bytes of rows that do, too
constexpr int64_t MOST = 192;          // rows of an item
constexpr int64_t ITEM = 1 << 20;      // products that are worth an item of work
constexpr int64_t AHEAD = 2048;        // bytes from a weight that is used to the one that is fetched

typedef float F __attribute__((vector_size(4 * LANES)));
typedef uint32_t U __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

using Call = LayerCall;  // x and y are of the type of the weights

template <class To, class From>
INLINE To as(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

template <class V>
INLINE V load(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

INLINE void store(void* to, const F& v) { std::memcpy(to, &v, sizeof v); }

int64_t pairs_of(int64_t in) { return (in + 1) / 2; }

// To nearest, ties to even.
INLINE void store_narrowed(uint16_t* to, const F& from) {
#if defined(__AVX512BF16__)
    const __m256bh narrow = _mm512_cvtneps_pbh(as<__m512>(from));
    std::memcpy(to, &narrow, sizeof narrow);
#else
    const U bits = as<U>(from), rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const U is_nan = as<U>(I(from != from));
    const U narrow = (rounded & ~is_nan) | (0x7fc0 & is_nan);
    for (int i = 0; i < LANES; ++i) to[i] = uint16_t(narrow[i]);
#endif
}

// Weights that are fetched while others are used, as distances in bytes: of one row of a panel, 4 lines of 64 bytes, all
// of them or two.
struct Fetch {
    int64_t some, others;
};

template <bool ALL>
INLINE void fetch(const void* used, const Fetch& ahead) {
    const char* at = static_cast<const char*>(used);
    if constexpr (ALL) {
        UNROLL for (int i = 0; i < 4; ++i) __builtin_prefetch(at + AHEAD + 64 * i);
    } else {
        __builtin_prefetch(at + ahead.some, 0, 2);
        __builtin_prefetch(at + ahead.others, 0, 2);
    }
}

// -- products: sums of R rows and V * LANES outputs, over n inputs ----------------------------------------------------

template <bool ALL, int V, int R>
INLINE void add(const float* w, const float* x, int64_t x_row, int64_t n, const Fetch& ahead, F (&sums)[R][V]) {
    for (int64_t k = 0; k < n; ++k, w += PANEL) {
        fetch<ALL>(w, ahead);
        F weights[V];
        UNROLL for (int j = 0; j < V; ++j) weights[j] = load<F>(w + j * LANES);
        UNROLL for (int r = 0; r < R; ++r) {
            const float one = x[r * x_row + k];
            UNROLL for (int j = 0; j < V; ++j) sums[r][j] += weights[j] * one;
        }
    }
}

// The same sums, of weights in pairs; `x` has an even number of inputs.
template <bool ALL, int V, int R>
INLINE void add_widened(const uint16_t* w, const float* x, int64_t x_row, int64_t n, const Fetch& ahead,
                        F (&sums)[R][V]) {
    for (int64_t k = 0; k < n; k += 2, w += 2 * PANEL) {
        fetch<ALL>(w, ahead);
        UNROLL for (int j = 0; j < V; ++j) {
            const U both = load<U>(w + 2 * j * LANES);
            const F first = as<F>(both << 16), second = as<F>(both & 0xffff0000u);
            UNROLL for (int r = 0; r < R; ++r) {
                sums[r][j] += first * x[r * x_row + k];
                sums[r][j] += second * x[r * x_row + k + 1];
            }
        }
    }
}

#if defined(__AVX512BF16__)
template <int V, int R>
INLINE void add_pair(const uint16_t* w, const uint32_t (&pair)[R], F (&sums)[R][V]) {
    __m512bh weights[V];
    UNROLL for (int j = 0; j < V; ++j) weights[j] = load<__m512bh>(w + 2 * j * LANES);
    UNROLL for (int r = 0; r < R; ++r) {
        const __m512bh one = as<__m512bh>(_mm512_set1_epi32(int(pair[r])));
        UNROLL for (int j = 0; j < V; ++j)
            sums[r][j] = as<F>(_mm512_dpbf16_ps(as<__m512>(sums[r][j]), weights[j], one));
    }
}

template <bool ALL, int V, int R>
INLINE void add_pairs(const uint16_t* w, const uint16_t* x, int64_t x_row, int64_t n, const Fetch& ahead,
                      F (&sums)[R][V]) {
    uint32_t pair[R];
    for (int64_t k = 0; k + 1 < n; k += 2, w += 2 * PANEL) {
        fetch<ALL>(w, ahead);
        UNROLL for (int r = 0; r < R; ++r) pair[r] = load<uint32_t>(x + r * x_row + k);
        add_pair(w, pair, sums);
    }
    if (n % 2) {  // what is behind a row is not its own
        UNROLL for (int r = 0; r < R; ++r) pair[r] = x[r * x_row + n - 1];
        add_pair(w, pair, sums);
    }
}
#endif

// How weights are multiplied: their type, that of the inputs, vectors of outputs at once, and bytes of weights that are
// used for many rows before the next ones.
struct Floats {
    using In = float;
    using Weight = float;
    static constexpr int64_t SPAN = FIRST;
    static constexpr int V = WIDE;
    template <bool ALL, int W, int R>
    static INLINE void sum(const float* w, const float* x, int64_t x_row, int64_t n, const Fetch& ahead,
                           F (&sums)[R][W]) {
        add<ALL>(w, x, x_row, n, ahead, sums);
    }
};

struct Few {
    using In = float;
    using Weight = uint16_t;
    static constexpr int64_t SPAN = FIRST;
    static constexpr int V = LANES == 16 ? 4 : 2;
    template <bool ALL, int W, int R>
    static INLINE void sum(const uint16_t* w, const float* x, int64_t x_row, int64_t n, const Fetch& ahead,
                           F (&sums)[R][W]) {
        add_widened<ALL>(w, x, x_row, n, ahead, sums);
    }
};

#if defined(__AVX512BF16__)
struct Pairs {
    using In = uint16_t;
    using Weight = uint16_t;
    static constexpr int64_t SPAN = SECOND;
    static constexpr int V = 4;
    template <bool ALL, int W, int R>
    static INLINE void sum(const uint16_t* w, const uint16_t* x, int64_t x_row, int64_t n, const Fetch& ahead,
                           F (&sums)[R][W]) {
        add_pairs<ALL>(w, x, x_row, n, ahead, sums);
    }
};
#endif

// -- tiles of an item: some rows and the outputs of one panel ---------------------------------------------------------

// Some inputs of a panel, and some rows. Their sums are in `sums`, [MOST,PANEL]; the first inputs begin them.
template <class How>
struct Block {
    const typename How::Weight* w;
    const typename How::In* x;
    int64_t x_row, inputs, rows, outputs;
    bool first;
    int64_t next;  // bytes from weights to those of the next block
    float* sums;
};

template <class How, bool ALL, int R>
void tile(const Block<How>& b, int64_t row, const Fetch& ahead) {
    constexpr int V = R == 1 ? std::max<int>(How::V, LANES == 4 ? 8 : 64 / LANES) : How::V;
    constexpr int per = sizeof(typename How::Weight) == 2 ? 2 : 1;  // weights of an output beside each other
    for (int64_t output = 0; output < b.outputs; output += V * LANES) {
        F sums[R][V];
        float* at = b.sums + row * PANEL + output;
        UNROLL for (int r = 0; r < R; ++r) UNROLL for (int j = 0; j < V; ++j)
            sums[r][j] = b.first ? F{} : load<F>(at + r * PANEL + j * LANES);
        How::template sum<ALL>(b.w + per * output, b.x + row * b.x_row, b.x_row, b.inputs, ahead, sums);
        UNROLL for (int r = 0; r < R; ++r) UNROLL for (int j = 0; j < V; ++j)
            store(at + r * PANEL + j * LANES, sums[r][j]);
    }
}

template <class How, bool ALL>
INLINE void tile_of(int64_t rows, const Block<How>& b, int64_t row, const Fetch& ahead) {
    switch (rows) {
        case 1: return tile<How, ALL, 1>(b, row, ahead);
        case 2: return tile<How, ALL, 2>(b, row, ahead);
        case 3: return tile<How, ALL, 3>(b, row, ahead);
        case 4: return tile<How, ALL, 4>(b, row, ahead);
        case 5: return tile<How, ALL, 5>(b, row, ahead);
        default: return tile<How, ALL, ROWS>(b, row, ahead);
    }
}

// Rows in tiles, of which the first ones fetch the weights of the next block.
template <class How>
void tiles(const Block<How>& b) {
    if (b.rows <= ROWS) return tile_of<How, true>(b.rows, b, 0, {});
    const int64_t count = (b.rows + ROWS - 1) / ROWS;
    for (int64_t row = 0, i = 0; row < b.rows; ++i) {
        const int64_t left = b.rows - row, some = left <= ROWS ? left : left < 2 * ROWS ? (left + 1) / 2 : ROWS;
        Fetch ahead{b.next + 64 * i, b.next + 64 * i};
        if (count < 4) ahead = {b.next + 128 * i, b.next + 128 * i + 64};
        if (i < (count < 4 ? 2 : 4)) tile_of<How, false>(some, b, row, ahead);
        else tile_of<How, true>(some, b, row, {});
        row += some;
    }
}

// Where the outputs of a panel go.
template <class Out>
struct Target {
    Out* y;  // of the first row and output
    int64_t y_row;
    const float* bias;  // of the first output, or null
    int64_t outputs;
};

template <class Out>
void put(const float* sums, int64_t rows, const Target<Out>& to) {
    alignas(64) float bias[PANEL] = {};
    if (to.bias) std::memcpy(bias, to.bias, size_t(4 * to.outputs));
    for (int64_t row = 0; row < rows; ++row) {
        Out all[PANEL];
        Out* at = to.y + row * to.y_row;
        Out* into = to.outputs == PANEL ? at : all;
        for (int64_t o = 0; o < PANEL; o += LANES) {
            const F whole = load<F>(sums + row * PANEL + o) + load<F>(bias + o);
            if constexpr (sizeof(Out) == 4) store(into + o, whole);
            else store_narrowed(into + o, whole);
        }
        if (into == all) std::memcpy(at, all, size_t(to.outputs) * sizeof(Out));
    }
}

// `weights(k, n)`: those of a panel for n inputs from k on.
template <class How, class Out, class Weights>
INLINE void panel(const Weights& weights, const typename How::In* x, int64_t x_row, int64_t in, int64_t rows,
                  const Target<Out>& to) {
    alignas(64) float sums[MOST * PANEL];
    constexpr int64_t size = PANEL * sizeof(typename How::Weight);
    const int64_t span = rows <= ROWS ? in : How::SPAN / size;
    for (int64_t k = 0; k < in; k += span) {
        const int64_t n = std::min(span, in - k);
        tiles(Block<How>{weights(k, n), x + k, x_row, n, rows, to.outputs, k == 0, n * size, sums});
    }
    put(sums, rows, to);
}

#if !defined(__AVX512BF16__)
// Part of a panel in pairs as float32, [n,PANEL].
void widen(const uint16_t* pairs, int64_t n, float* to) {
    for (int64_t k = 0; k < n; k += 2, pairs += 2 * PANEL, to += 2 * PANEL) {
        fetch<true>(pairs, {});
        UNROLL for (int64_t o = 0; o < PANEL; o += LANES) {
            const U both = load<U>(pairs + 2 * o);
            store(to + o, as<F>(both << 16));
            store(to + PANEL + o, as<F>(both & 0xffff0000u));
        }
    }
}
#endif

// -- items ------------------------------------------------------------------------------------------------------------

struct Item {
    int64_t row, rows, panel, panels;
};

#if !defined(__AVX512BF16__)
// Rows [rows,even in] as float32, with zeros behind an odd number of inputs; null: no memory.
std::unique_ptr<float[]> widened_rows(const Call& c, const Item& item, int64_t even) {
    std::unique_ptr<float[]> found(new (std::nothrow) float[size_t(item.rows * even)]);
    if (!found) return found;
    const int64_t in = c.layer->in;
    for (int64_t r = 0; r < item.rows; ++r) {
        const uint16_t* from = static_cast<const uint16_t*>(c.x) + (item.row + r) * c.x_row;
        float* to = found.get() + r * even;
        for (int64_t k = 0; k < in; ++k) to[k] = as<float>(uint32_t(from[k]) << 16);
        if (even > in) to[in] = 0;
    }
    return found;
}
#endif

// Calls each(panel's weights, target) for each panel of an item.
template <class Out, class Each>
INLINE void each_panel(const Call& c, const Item& item, int64_t panel_size, const Each& each) {
    each_panel_of(*c.layer, PANEL, item.panel, item.panel + item.panels, [&](const Part& part, int64_t p) {
        const int64_t o = p * PANEL;
        Out* y = static_cast<Out*>(c.y) + item.row * c.y_row + part.column + o;
        const Target<Out> to{y, c.y_row, part.bias ? part.bias + o : nullptr, std::min(PANEL, part.out - o)};
        each(static_cast<const Out*>(part.panels) + p * panel_size, to);
    });
}

void float_item(const Call& c, const Item& item) {
    const int64_t in = c.layer->in;
    const float* x = static_cast<const float*>(c.x) + item.row * c.x_row;
    each_panel<float>(c, item, in * PANEL, [&](const float* w, const Target<float>& to) {
        panel<Floats>([&](int64_t k, int64_t) { return w + k * PANEL; }, x, c.x_row, in, item.rows, to);
    });
}

// Whether there was enough memory.
bool bfloat16_item(const Call& c, const Item& item) {
    const int64_t in = c.layer->in, even = 2 * pairs_of(in);
#if defined(__AVX512BF16__)
    const uint16_t* x = static_cast<const uint16_t*>(c.x) + item.row * c.x_row;
    each_panel<uint16_t>(c, item, even * PANEL, [&](const uint16_t* w, const Target<uint16_t>& to) {
        panel<Pairs>([&](int64_t k, int64_t) { return w + k * PANEL; }, x, c.x_row, in, item.rows, to);
    });
#else
    const std::unique_ptr<float[]> x = widened_rows(c, item, even);
    if (!x) return false;
    each_panel<uint16_t>(c, item, even * PANEL, [&](const uint16_t* w, const Target<uint16_t>& to) {
        if (item.rows <= ROWS) {
            panel<Few>([&](int64_t k, int64_t) { return w + k * PANEL; }, x.get(), even, even, item.rows, to);
            return;
        }
        alignas(64) float wide[FIRST / sizeof(float)];
        const auto weights = [&](int64_t k, int64_t n) {
            widen(w + k * PANEL, n, wide);
            return static_cast<const float*>(wide);
        };
        panel<Floats>(weights, x.get(), even, even, item.rows, to);
    });
#endif
    return true;
}

int64_t rows_at_once(const Layer& layer) {
#if defined(__AVX512BF16__)
    const int64_t size = layer.type == BFLOAT16 ? 2 : 4;
#else
    const int64_t size = 4;
#endif
    return std::max<int64_t>(ROWS, std::min(MOST, NEAR / (size * layer.in)) / ROWS * ROWS);
}

}  // namespace

// How bfloat16 is multiplied: 0 in pairs, 1 widened, 2 widened although this CPU has instructions that are faster.
extern "C" int kvcellar_multiplies() {
#if defined(__AMX_BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return 2;
#elif defined(__AVX512BF16__)
    return 0;
#else
    return 1;
#endif
}

namespace {

struct RowsCall {
    const void* panels;
    const int64_t* ids;  // [rows]
    void* to;            // [rows,in], of the type of the weights
    int64_t rows, out, in, type;
};

}  // namespace

// Rows of a weight [out,in] in panels. Returns 2 if an id is none of its rows.
extern "C" int kvcellar_weight_rows(const void* call) {
    const RowsCall& c = *static_cast<const RowsCall*>(call);
    for (int64_t row = 0; row < c.rows; ++row) {
        const int64_t id = c.ids[row], panel = id / PANEL, o = id % PANEL;
        if (id < 0 || id >= c.out) return 2;
        if (c.type == FLOAT32) {
            const float* from = static_cast<const float*>(c.panels) + panel * PANEL * c.in + o;
            float* to = static_cast<float*>(c.to) + row * c.in;
            for (int64_t k = 0; k < c.in; ++k) to[k] = from[k * PANEL];
            continue;
        }
        const uint16_t* from = static_cast<const uint16_t*>(c.panels) + 2 * (panel * PANEL * pairs_of(c.in) + o);
        uint16_t* to = static_cast<uint16_t*>(c.to) + row * c.in;
        for (int64_t k = 0; k + 1 < c.in; k += 2) std::memcpy(to + k, from + k * PANEL, 4);
        if (c.in % 2) to[c.in - 1] = from[(c.in - 1) * PANEL];
    }
    return 0;
}

// w [out,in], with rows at a distance of `row` elements, into panels.
extern "C" void kvcellar_pack(const void* w, void* panels, int64_t out, int64_t in, int64_t row, int64_t type,
                              Threads* threads, int64_t count) {
    for_each_item(threads, count, (out + PANEL - 1) / PANEL, [&](int64_t p) noexcept {
        const int64_t width = std::min(PANEL, out - p * PANEL);
        if (type == FLOAT32) {
            const float* from = static_cast<const float*>(w) + p * PANEL * row;
            float* to = static_cast<float*>(panels) + p * PANEL * in;
            for (int64_t k = 0; k < in; ++k)
                for (int64_t o = 0; o < PANEL; ++o) *to++ = o < width ? from[o * row + k] : 0;
            return;
        }
        const uint16_t* from = static_cast<const uint16_t*>(w) + p * PANEL * row;
        uint32_t* to = static_cast<uint32_t*>(panels) + p * PANEL * pairs_of(in);
        for (int64_t k = 0; k < in; k += 2)
            for (int64_t o = 0; o < PANEL; ++o, ++to) {
                const uint16_t* pair = from + o * row + k;
                *to = o >= width ? 0 : k + 1 < in ? load<uint32_t>(pair) : *pair;
            }
    });
}

// Returns 1 if there is not enough memory.
extern "C" int kvcellar_linear(const void* call) {
    const Call& c = *static_cast<const Call*>(call);
    const Layer& layer = *c.layer;
    const int64_t panels = panels_of(layer, PANEL), some = rows_at_once(layer), chunks = (c.rows + some - 1) / some;
    const int64_t work = PANEL * layer.in * (std::min(some, c.rows) + 8);  // reading weights takes as long as 8 rows
    const int64_t group = std::max<int64_t>(1, ITEM / work), groups = (panels + group - 1) / group;
    std::atomic<bool> enough{true};
    for_each_item(layer.threads, c.threads, chunks * groups, [&](int64_t i) noexcept {
        const int64_t row = i / groups * some, first = i % groups * group;
        const Item item{row, std::min(some, c.rows - row), first, std::min(group, panels - first)};
        if (layer.type == FLOAT32) float_item(c, item);
        else if (!bfloat16_item(c, item)) enough = false;
    });
    return enough ? 0 : 1;
}
