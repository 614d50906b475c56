// Recurrences of state spaces and of linear attention, token by token, with states in float32; and the convolutions in
// front of them. `scans.py` calls it.
//
// Runs of tokens of a sequence follow one another: each begins with the state of a row, and leaves the one behind it in
// another row, so that a state in the middle of a text costs no second pass.
//
// Always true: the bits of an output, and of a state behind a token, depend only on the state before the token and on
// the token. They do not depend on how a text is cut into runs and calls, on other sequences, or on threads.
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include "threads.h"
#include "vectors.h"

// A tensor [sequence,token,head,element]; strides count elements, and are 0 where it has one element for all.
struct Input {
    const void* at;  // null: there is none
    int64_t wide;    // float32; else bfloat16
    int64_t sequence, token, head, element;
};

struct States {
    const int64_t* runs;  // [.,4]: row before, row behind (0: not kept), tokens, and the run that goes on (0: none)
    float* read;          // [rows,heads,...], the elements of a head one after the other
    float* write;
    int64_t read_row, write_row, head;  // strides
    Threads* threads;                   // null: one
    int64_t n_threads, sequences;       // of which run i is the first of sequence i
};

// h_t = exp(dt_t a) h_(t-1) + dt_t x_t B_t and y_t = C_t h_t + D x_t, for each of `rows` elements of x.
struct Space {
    States states;
    Input x, dt, b, c, z, bias, a, d, y;  // elements are rows, those of b and c entries of the state; y is written
    int64_t heads, groups, rows, size;    // h [rows,size]; heads of a group share b and c
    int64_t by_entry;                     // a has one number for each entry of a row, one after the other; else one
    int64_t softplus;
    float least, most;                    // limits of dt
};

// S_t = decay S_(t-1) + k_t (beta_t (v_t - k_t decay S_(t-1)))^T and o_t = q_t S_t.
struct Delta {
    States states;
    Input q, k, v, g, beta, o;  // decay = exp(g), for each head or for each key's element; o is written
    int64_t heads, groups, keys, values;  // S [keys,values]; heads of a group share q and k
    int64_t by_key, normed;
    float scale;  // of queries
};

// y_t = sum over i of w_i x_(t-size+1+i), plus a bias, of each channel by itself; tokens before the first are zero.
struct Convolution {
    Input x, w, bias, y;  // elements are channels; tokens of w are its `size` factors; y is written
    Threads* threads;
    int64_t n_threads, sequences, tokens, channels, size;
    int64_t silu;  // of the result
};

namespace {

using namespace vectors;

constexpr int64_t TOKENS = 16;  // of a block, whose inputs are widened once for all rows
constexpr int64_t ROWS = 64;    // of a state space that are one item
constexpr int64_t BESIDE = 2;   // vectors of values that are computed together
constexpr int64_t CHANNELS = 256;  // of a convolution that are one item
constexpr float EPSILON = 1e-6f;

KV_INLINE const char* place(const Input& x, int64_t sequence, int64_t token, int64_t head) {
    const int64_t at = x.sequence * sequence + x.token * token + x.head * head;
    return static_cast<const char*>(x.at) + at * (x.wide ? 4 : 2);
}

// n elements from `first` on, as float32.
void widen(const Input& x, int64_t sequence, int64_t token, int64_t head, int64_t first, int64_t n, float* to) {
    const char* from = place(x, sequence, token, head);
    if (x.wide) {
        const float* wide = reinterpret_cast<const float*>(from) + first * x.element;
        if (x.element == 1)
            std::memcpy(to, wide, size_t(n) * 4);
        else
            for (int64_t i = 0; i < n; ++i) to[i] = wide[i * x.element];
        return;
    }
    const uint16_t* narrow = reinterpret_cast<const uint16_t*>(from) + first * x.element;
    if (x.element == 1)
        for (int64_t i = 0; i < n; ++i) to[i] = widened(narrow[i]);
    else
        for (int64_t i = 0; i < n; ++i) to[i] = widened(narrow[i * x.element]);
}

// The same of all `n` elements, and zeros up to `padded`.
KV_INLINE void widen_line(const Input& x, int64_t sequence, int64_t token, int64_t head, int64_t n, int64_t padded, float* to) {
    widen(x, sequence, token, head, 0, n, to);
    for (int64_t i = n; i < padded; ++i) to[i] = 0.f;
}

void narrow(const Input& x, int64_t sequence, int64_t token, int64_t head, int64_t first, int64_t n, const float* from) {
    char* to = const_cast<char*>(place(x, sequence, token, head));
    if (x.wide)
        for (int64_t i = 0; i < n; ++i) reinterpret_cast<float*>(to)[(first + i) * x.element] = from[i];
    else if (x.element == 1)
        for (int64_t i = 0; i < n; ++i) reinterpret_cast<uint16_t*>(to)[first + i] = narrowed(from[i]);
    else
        for (int64_t i = 0; i < n; ++i) reinterpret_cast<uint16_t*>(to)[(first + i) * x.element] = narrowed(from[i]);
}

KV_INLINE F exponential(F x) { return power_of_two(x * LOG2E); }

KV_INLINE F magnitude(F x) { return (F)((I)x & 0x7fffffff); }

// log(1 + e^x): log(1 + y) is 2 artanh(y / (2 + y)), here of y = e^-|x|.
KV_INLINE F softplus(F x) {
    const F y = exponential(-magnitude(x)), s = y / (2.f + y), square = s * s;
    F sum = all(1.f / 15);
    KV_UNROLL for (int odd = 13; odd > 0; odd -= 2) sum = fused(sum, square, all(1.f / float(odd)));
    return fused(sum, 2.f * s, x > 0.f ? x : (x != x ? x : F{}));
}

KV_INLINE F silu(F x) { return x / (1.f + exponential(-x)); }

// The sums of neighbours in a, then of those in b.
KV_INLINE F pairs(F a, F b) {
#if KV_AVX512
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    return (F)_mm512_permutex2var_ps((__m512)a, even, (__m512)b) + (F)_mm512_permutex2var_ps((__m512)a, odd, (__m512)b);
#else
    F sum;
    KV_UNROLL for (int i = 0; i < W / 2; ++i) {
        sum[i] = a[2 * i] + a[2 * i + 1];
        sum[W / 2 + i] = b[2 * i] + b[2 * i + 1];
    }
    return sum;
#endif
}

// Totals of vectors, W of them at a time, each written to its place.
class Totals {
  public:
    KV_INLINE void add(F sums, float* to) {
        waiting[count] = sums;
        places[count++] = to;
        if (count == W) finish();
    }

    void finish() {
        F level[W];
        KV_UNROLL for (int i = 0; i < W; ++i) level[i] = waiting[i];
        KV_UNROLL for (int half = W / 2; half > 0; half /= 2)
            KV_UNROLL for (int i = 0; i < half; ++i) level[i] = pairs(level[2 * i], level[2 * i + 1]);
        for (int i = 0; i < count; ++i) *places[i] = level[0][i];
        count = 0;
    }

  private:
    F waiting[W] = {};
    float* places[W];
    int count = 0;
};

KV_INLINE int64_t vectors_of(int64_t n) { return (n + W - 1) / W; }

// Floats of one item.
class Scratch {
  public:
    explicit Scratch(int64_t size) : floats(new (std::nothrow) float[size_t(size)]) {}
    explicit operator bool() const { return bool(floats); }
    float* take(int64_t size) { return floats.get() + std::exchange(used, used + size); }
    float* zeros(int64_t size) {
        float* found = take(size);
        std::memset(found, 0, size_t(size) * 4);
        return found;
    }

  private:
    std::unique_ptr<float[]> floats;
    int64_t used = 0;
};

// Calls each(first token, tokens, state before, state behind) for blocks of a sequence's tokens; states are those of
// head 0, and `scratch` is the state behind runs whose state is not kept.
template <class Each>
void each_block(const States& s, int64_t sequence, int64_t offset, float* scratch, const Each& each) {
    int64_t token = 0;
    for (int64_t i = sequence;;) {
        const int64_t* run = s.runs + 4 * i;
        const float* before = s.read + run[0] * s.read_row + offset;
        float* behind = run[1] ? s.write + run[1] * s.write_row + offset : scratch;
        for (int64_t done = 0; done < run[2]; done += TOKENS) {
            const int64_t n = run[2] - done < TOKENS ? run[2] - done : TOKENS;
            each(token + done, n, done ? behind : before, behind);
        }
        token += run[2];
        if (!(i = run[3])) return;
    }
}

// -- state spaces ---------------------------------------------------------------------------------------------------

struct Block {  // inputs of one block of tokens
    float *b, *c;          // [TOKENS, size in vectors]
    float *x, *dt, *z, *y; // [TOKENS, ROWS]
    float *decay;          // [TOKENS], where it is one number for a head
    float *padded;         // [size in vectors]
};

// One row of the state over the tokens of a block. N > 0: it is in so many registers.
template <int N, bool by_entry>
KV_INLINE void row_over(const Space& s, const Block& in, int64_t tokens, int64_t row, const float* before, float* behind,
                        const float* a, Totals& totals) {
    const int64_t n = N ? N : vectors_of(s.size), padded = n * W;
    const bool whole = s.size == padded;
    F held[N ? N : 1];
    float* h = in.padded;
    if (N && whole) {
        KV_UNROLL for (int v = 0; v < N; ++v) held[v] = load(before + v * W);
    } else {
        std::memcpy(h, before, size_t(s.size) * 4);
        if constexpr (N > 0) KV_UNROLL for (int v = 0; v < N; ++v) held[v] = load(h + v * W);
    }
    for (int64_t t = 0; t < tokens; ++t) {
        const float *b = in.b + t * padded, *c = in.c + t * padded;
        const float dt = in.dt[t * ROWS + (by_entry ? row : 0)];
        const F drive = all(dt * in.x[t * ROWS + row]), decay = all(in.decay[t]), exponent = all(dt * LOG2E);
        const auto next = [&](int64_t v, F state) __attribute__((always_inline)) {
            const F keeps = by_entry ? power_of_two(exponent * load(a + v * W)) : decay;
            return fused(state, keeps, drive * load(b + v * W));
        };
        F sums[2] = {};
        if constexpr (N > 0) {
            KV_UNROLL for (int v = 0; v < N; ++v) {
                held[v] = next(v, held[v]);
                sums[v % 2] = fused(held[v], load(c + v * W), sums[v % 2]);
            }
        } else {
            for (int64_t v = 0; v < n; ++v) {
                const F state = next(v, load(h + v * W));
                store(h + v * W, state);
                sums[v % 2] = fused(state, load(c + v * W), sums[v % 2]);
            }
        }
        totals.add(sums[0] + sums[1], in.y + t * ROWS + row);
    }
    if (N && whole) {
        KV_UNROLL for (int v = 0; v < N; ++v) store(behind + v * W, held[v]);
    } else {
        if constexpr (N > 0) KV_UNROLL for (int v = 0; v < N; ++v) store(h + v * W, held[v]);
        std::memcpy(behind, h, size_t(s.size) * 4);
    }
}

template <int N, bool by_entry>
void rows_over(const Space& s, const Block& in, int64_t tokens, int64_t rows, const float* before, float* behind,
               const float* a) {
    const int64_t padded = vectors_of(s.size) * W;
    Totals totals;
    for (int64_t row = 0; row < rows; ++row)
        row_over<N, by_entry>(s, in, tokens, row, before + row * s.size, behind + row * s.size, a + row * padded, totals);
    totals.finish();
}

// dt of a line of a block: numbers of one row for all tokens, or of all rows for one token.
KV_INLINE void steps(const Space& s, float* dt, const float* bias, int64_t n) {
    for (int64_t i = 0; i < n; i += W) {
        F x = load(dt + i) + load(bias + i);
        if (s.softplus) x = softplus(x);
        x = x < s.least ? all(s.least) : x;
        store(dt + i, x > s.most ? all(s.most) : x);
    }
}

bool space_item(const Space& s, int64_t sequence, int64_t head, int64_t first, int64_t rows) {
    const int64_t n = vectors_of(s.size), padded = n * W, group = head / (s.heads / s.groups);
    Scratch scratch(TOKENS * (2 * padded + 4 * ROWS + 2) + padded + ROWS * (s.size + (s.by_entry ? padded : 0) + 2) + 4 * W);
    if (!scratch) return false;
    Block in{};
    in.b = scratch.take(TOKENS * padded), in.c = scratch.take(TOKENS * padded);
    in.x = scratch.take(TOKENS * ROWS), in.dt = scratch.take(TOKENS * ROWS);
    in.z = scratch.take(TOKENS * ROWS), in.y = scratch.take(TOKENS * ROWS);
    in.decay = scratch.take(TOKENS + W), in.padded = scratch.zeros(padded);
    float *line = scratch.take(TOKENS + W), *unkept = scratch.take(ROWS * s.size);
    float *bias = scratch.zeros(ROWS), *d = scratch.zeros(ROWS), *a = s.by_entry ? scratch.zeros(ROWS * padded) : nullptr;
    if (s.bias.at) widen(s.bias, 0, 0, head, first, rows, bias);
    if (s.d.at) widen(s.d, 0, 0, head, first, rows, d);
    const float* factors = reinterpret_cast<const float*>(place(s.a, 0, 0, head)) + first * s.a.element;
    if (s.by_entry)
        for (int64_t r = 0; r < rows; ++r) std::memcpy(a + r * padded, factors + r * s.a.element, size_t(s.size) * 4);
    const auto block = [&](int64_t from, int64_t tokens, const float* before, float* behind) {
        for (int64_t t = 0; t < tokens; ++t) {
            widen_line(s.b, sequence, from + t, group, s.size, padded, in.b + t * padded);
            widen_line(s.c, sequence, from + t, group, s.size, padded, in.c + t * padded);
            widen(s.x, sequence, from + t, head, first, rows, in.x + t * ROWS);
            if (s.z.at) widen(s.z, sequence, from + t, head, first, rows, in.z + t * ROWS);
            widen(s.dt, sequence, from + t, head, first, s.by_entry ? rows : 1, in.dt + t * ROWS);
        }
        if (s.by_entry) {
            for (int64_t t = 0; t < tokens; ++t) steps(s, in.dt + t * ROWS, bias, rows);
            if (n == 1)
                rows_over<1, true>(s, in, tokens, rows, before, behind, a);
            else
                rows_over<0, true>(s, in, tokens, rows, before, behind, a);
        } else {
            float biases[TOKENS + W];
            for (float& one : biases) one = bias[0];
            for (int64_t t = 0; t < tokens; ++t) line[t] = in.dt[t * ROWS];
            steps(s, line, biases, tokens);
            for (int64_t t = 0; t < tokens; t += W) store(in.decay + t, exponential(load(line + t) * *factors));
            for (int64_t t = 0; t < tokens; ++t) in.dt[t * ROWS] = line[t];
            if (n == 8 && REGISTERS == 32)
                rows_over<8, false>(s, in, tokens, rows, before, behind, factors);
            else if (n == 4)
                rows_over<4, false>(s, in, tokens, rows, before, behind, factors);
            else
                rows_over<0, false>(s, in, tokens, rows, before, behind, factors);
        }
        for (int64_t t = 0; t < tokens; ++t) {
            for (int64_t r = 0; r < rows; r += W) {
                float* y = in.y + t * ROWS + r;
                F made = fused(load(in.x + t * ROWS + r), load(d + r), load(y));
                if (s.z.at) made *= silu(load(in.z + t * ROWS + r));
                store(y, made);
            }
            narrow(s.y, sequence, from + t, head, first, rows, in.y + t * ROWS);
        }
    };
    each_block(s.states, sequence, head * s.states.head + first * s.size, unkept, block);
    return true;
}

// -- the delta rule -------------------------------------------------------------------------------------------------

struct Tokens {  // of one block
    float *q, *k, *decayed, *decay;  // [TOKENS, keys in vectors]; `decayed` are keys
    float *v, *o;                    // [TOKENS, values in blocks of vectors]
    float *beta, *g;                 // [TOKENS]
    float *s;                        // [keys, BESIDE * W]
};

KV_INLINE void normalise(float* x, int64_t padded) {
    F sums{};
    for (int64_t i = 0; i < padded; i += W) sums = fused(load(x + i), load(x + i), sums);
    const float by = 1.f / std::sqrt(total(sums) + EPSILON);
    for (int64_t i = 0; i < padded; i += W) store(x + i, load(x + i) * by);
}

// Some values of the state over the tokens of a block.
template <bool by_key>
void values_over(const Delta& s, const Tokens& in, int64_t tokens, int64_t padded, int64_t wide, int64_t first) {
    constexpr int64_t step = BESIDE * W;
    for (int64_t t = 0; t < tokens; ++t) {
        const float *q = in.q + t * padded, *k = in.k + t * padded, *decayed = in.decayed + t * padded;
        const float* by = in.decay + t * padded;
        F found[2][BESIDE] = {}, made[2][BESIDE] = {}, missing[BESIDE];
        const auto seen = [&](int64_t i, int part) __attribute__((always_inline)) {
            KV_UNROLL for (int v = 0; v < BESIDE; ++v)
                found[part][v] = fused(load(in.s + i * step + v * W), all(decayed[i]), found[part][v]);
        };
        int64_t i = 0;
        for (; i + 1 < s.keys; i += 2) seen(i, 0), seen(i + 1, 1);
        if (i < s.keys) seen(i, 0);
        KV_UNROLL for (int v = 0; v < BESIDE; ++v)
            missing[v] = (load(in.v + t * wide + first + v * W) - (found[0][v] + found[1][v])) * in.beta[t];
        const F same = all(by[0]);
        const auto changed = [&](int64_t i, int part) __attribute__((always_inline)) {
            KV_UNROLL for (int v = 0; v < BESIDE; ++v) {
                float* at = in.s + i * step + v * W;
                const F state = fused(load(at), by_key ? all(by[i]) : same, missing[v] * k[i]);
                store(at, state);
                made[part][v] = fused(state, all(q[i]), made[part][v]);
            }
        };
        for (i = 0; i + 1 < s.keys; i += 2) changed(i, 0), changed(i + 1, 1);
        if (i < s.keys) changed(i, 0);
        KV_UNROLL for (int v = 0; v < BESIDE; ++v) store(in.o + t * wide + first + v * W, made[0][v] + made[1][v]);
    }
}

bool delta_item(const Delta& s, int64_t sequence, int64_t head) {
    constexpr int64_t step = BESIDE * W;
    const int64_t padded = vectors_of(s.keys) * W, wide = (s.values + step - 1) / step * step;
    const int64_t group = head / (s.heads / s.groups);
    Scratch scratch(TOKENS * (4 * padded + 2 * wide + 2) + s.keys * (step + s.values) + 4 * W);
    if (!scratch) return false;
    Tokens in{};
    in.q = scratch.take(TOKENS * padded), in.k = scratch.take(TOKENS * padded);
    in.decayed = scratch.take(TOKENS * padded), in.decay = scratch.take(TOKENS * padded);
    in.v = scratch.take(TOKENS * wide), in.o = scratch.take(TOKENS * wide);
    in.beta = scratch.take(TOKENS), in.g = scratch.take(TOKENS);
    in.s = scratch.take(s.keys * step);
    float* unkept = scratch.take(s.keys * s.values);
    const auto block = [&](int64_t from, int64_t tokens, const float* before, float* behind) {
        for (int64_t t = 0; t < tokens; ++t) {
            float *q = in.q + t * padded, *k = in.k + t * padded, *by = in.decay + t * padded;
            widen_line(s.q, sequence, from + t, group, s.keys, padded, q);
            widen_line(s.k, sequence, from + t, group, s.keys, padded, k);
            widen(s.v, sequence, from + t, head, 0, s.values, in.v + t * wide);
            widen(s.beta, sequence, from + t, head, 0, 1, in.beta + t);
            widen(s.g, sequence, from + t, head, 0, s.by_key ? s.keys : 1, by);
            if (s.normed) normalise(q, padded), normalise(k, padded);
            const F same = all(by[0]);
            for (int64_t i = 0; i < padded; i += W) {
                store(q + i, load(q + i) * s.scale);
                store(by + i, exponential(s.by_key ? load(by + i) : same));
                store(in.decayed + t * padded + i, load(k + i) * load(by + i));
            }
        }
        for (int64_t first = 0; first < s.values; first += step) {
            const size_t bytes = size_t(s.values - first < step ? s.values - first : step) * 4;
            for (int64_t i = 0; i < s.keys; ++i) std::memcpy(in.s + i * step, before + i * s.values + first, bytes);
            if (s.by_key)
                values_over<true>(s, in, tokens, padded, wide, first);
            else
                values_over<false>(s, in, tokens, padded, wide, first);
            for (int64_t i = 0; i < s.keys; ++i) std::memcpy(behind + i * s.values + first, in.s + i * step, bytes);
        }
        for (int64_t t = 0; t < tokens; ++t) narrow(s.o, sequence, from + t, head, 0, s.values, in.o + t * wide);
    };
    each_block(s.states, sequence, head * s.states.head, unkept, block);
    return true;
}

// -- convolutions -----------------------------------------------------------------------------------------------------

bool convolution_item(const Convolution& s, int64_t sequence, int64_t first, int64_t channels) {
    Scratch scratch((2 * s.size + 2) * CHANNELS);
    if (!scratch) return false;
    float *held = scratch.zeros(s.size * CHANNELS), *w = scratch.take(s.size * CHANNELS);  // a ring of the last tokens
    float *bias = scratch.zeros(CHANNELS), *y = scratch.take(CHANNELS);
    for (int64_t i = 0; i < s.size; ++i) widen(s.w, 0, i, 0, first, channels, w + i * CHANNELS);
    if (s.bias.at) widen(s.bias, 0, 0, 0, first, channels, bias);
    for (int64_t t = 0; t < s.tokens; ++t) {
        widen(s.x, sequence, t, 0, first, channels, held + t % s.size * CHANNELS);
        for (int64_t c = 0; c < channels; c += W) {
            F sum = load(bias + c);
            for (int64_t i = 0; i < s.size; ++i)
                sum = fused(load(held + (t + 1 + i) % s.size * CHANNELS + c), load(w + i * CHANNELS + c), sum);
            store(y + c, s.silu ? silu(sum) : sum);
        }
        narrow(s.y, sequence, t, 0, first, channels, y);
    }
    return true;
}

template <class Item>
int all_items(Threads* threads, int64_t n_threads, int64_t items, const Item& one) {
    std::atomic<bool> full{false};
    for_each_item(threads, n_threads, items, [&](int64_t item) noexcept {
        if (!one(item)) full = true;
    });
    return full;
}

}  // namespace

// All return 1 if there is not enough memory.
extern "C" int kvcellar_space(const void* call) {
    const Space& s = *static_cast<const Space*>(call);
    const int64_t parts = (s.rows + ROWS - 1) / ROWS, of_sequence = s.heads * parts;
    return all_items(s.states.threads, s.states.n_threads, s.states.sequences * of_sequence, [&](int64_t item) {
        const int64_t first = item % parts * ROWS, rows = s.rows - first < ROWS ? s.rows - first : ROWS;
        return space_item(s, item / of_sequence, item % of_sequence / parts, first, rows);
    });
}

extern "C" int kvcellar_delta(const void* call) {
    const Delta& s = *static_cast<const Delta*>(call);
    return all_items(s.states.threads, s.states.n_threads, s.states.sequences * s.heads,
                     [&](int64_t item) { return delta_item(s, item / s.heads, item % s.heads); });
}

extern "C" int kvcellar_convolution(const void* call) {
    const Convolution& s = *static_cast<const Convolution*>(call);
    const int64_t parts = (s.channels + CHANNELS - 1) / CHANNELS;
    return all_items(s.threads, s.n_threads, s.sequences * parts, [&](int64_t item) {
        const int64_t first = item % parts * CHANNELS, left = s.channels - first;
        return convolution_item(s, item / parts, first, left < CHANNELS ? left : CHANNELS);
    });
}
