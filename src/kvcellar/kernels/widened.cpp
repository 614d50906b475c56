// Linear layers with bfloat16 weights, on CPUs that cannot multiply them as they are: a few of them are widened in
// registers, used for several rows of input at once, and summed in float32. `widened.py` calls it; nothing is kept
// between calls. What a row answers depends neither on the other rows nor on the threads.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <thread>
#include <vector>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

// Sums of OUTS outputs for INS rows stay in registers, beside OUTS weights and one input.
#if defined(__AVX512F__)
constexpr int LANES = 16, OUTS = 3, INS = 8;  // 32 registers
#elif defined(__AVX2__)
constexpr int LANES = 8, OUTS = 2, INS = 4;  // 16
#else
constexpr int LANES = 4, OUTS = 3, INS = 6;  // 32, as NEON has
#endif
constexpr int64_t NEAR = 1 << 18;  // bytes that stay in a core's own cache

typedef float F __attribute__((vector_size(4 * LANES)));
typedef uint32_t U __attribute__((vector_size(4 * LANES)));
typedef uint16_t H __attribute__((vector_size(2 * LANES)));

struct Call {
    const float* x;        // [rows,in]
    const uint16_t* w;     // [out,in], bfloat16
    const uint16_t* bias;  // [out], bfloat16, or null
    uint16_t* y;           // [rows,out], bfloat16
    int64_t rows, in, out, threads;
};

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

inline F widened(const uint16_t* from) {
#if defined(__AVX512F__)  // compilers convert in two halves otherwise
    return as<F>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load<__m256i>(from)), 16));
#else
    return as<F>(__builtin_convertvector(load<H>(from), U) << 16);
#endif
}

inline float widened(uint16_t from) { return as<float>(uint32_t(from) << 16); }

// To nearest, ties to even, as everywhere.
inline uint16_t narrowed(float from) {
    if (from != from) return 0x7fc0;
    const uint32_t bits = as<uint32_t>(from);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Of N floats, always in the same order: halves are added until one is left.
template <int N>
inline float sum(const float* of) {
    typedef float Half __attribute__((vector_size(2 * N)));
    Half half, other;
    std::memcpy(&half, of, sizeof half);
    std::memcpy(&other, of + N / 2, sizeof other);
    half += other;
    float left[N / 2];
    std::memcpy(left, &half, sizeof left);
    return sum<N / 2>(left);
}
template <>
inline float sum<2>(const float* of) { return of[0] + of[1]; }

// Outputs [o,o+O) of rows [r,r+R).
template <int O, int R>
void tile(const Call& c, int64_t o, int64_t r) {
    const uint16_t* w = c.w + o * c.in;
    const float* x = c.x + r * c.in;
    const int64_t whole = c.in / LANES * LANES;
    F sums[O][R] = {};
    for (int64_t i = 0; i < whole; i += LANES) {
        F some[O];
        for (int a = 0; a < O; ++a) {
            __builtin_prefetch(w + (a + O) * c.in + i);  // the next outputs'; past the end it does nothing
            some[a] = widened(w + a * c.in + i);
        }
        for (int b = 0; b < R; ++b) {
            const F in = load<F>(x + b * c.in + i);
            for (int a = 0; a < O; ++a) sums[a][b] += some[a] * in;
        }
    }
    for (int a = 0; a < O; ++a)
        for (int b = 0; b < R; ++b) {
            float all[LANES];
            std::memcpy(all, &sums[a][b], sizeof all);
            float total = sum<LANES>(all);
            for (int64_t i = whole; i < c.in; ++i) total += widened(w[a * c.in + i]) * x[b * c.in + i];
            if (c.bias) total += widened(c.bias[o + a]);
            c.y[(r + b) * c.out + o + a] = narrowed(total);
        }
}

template <int O>
void rows_of(const Call& c, int64_t o, int64_t low, int64_t high) {
    for (; high - low >= INS; low += INS) tile<O, INS>(c, o, low);
    if (INS > 4 && high - low >= 4) tile<O, 4>(c, o, low), low += 4;
    if (high - low >= 2) tile<O, 2>(c, o, low), low += 2;
    if (high > low) tile<O, 1>(c, o, low);
}

// Outputs [first,last) of all rows: as many rows at once as stay near with the weights.
void outputs(const Call& c, int64_t first, int64_t last) {
    const int64_t step = std::max<int64_t>(1, NEAR / (4 * c.in) / INS) * INS;
    for (int64_t low = 0; low < c.rows; low += step) {
        const int64_t high = std::min(low + step, c.rows);
        int64_t o = first;
        for (; o + OUTS <= last; o += OUTS) rows_of<OUTS>(c, o, low, high);
        for (; o < last; ++o) rows_of<1>(c, o, low, high);
    }
}

}  // namespace

// What `widened.py` has to have, too; it is compared when this is loaded.
struct Shared {
    const char* name;
    int64_t offset, size;  // of a field of `Call`; of a constant, its value and 0
};
#define FIELD(name) {#name, offsetof(Call, name), sizeof(Call::name)}
extern "C" const Shared kvcellar_shared[] = {
    FIELD(x), FIELD(w), FIELD(bias), FIELD(y), FIELD(rows), FIELD(in), FIELD(out), FIELD(threads),
    {nullptr, 0, 0},
};

// Whether this CPU multiplies bfloat16 as it is, so that others do it better.
extern "C" int kvcellar_multiplies() {
#if defined(__AVX512BF16__) || defined(__AMX_BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return 1;
#else
    return 0;
#endif
}

extern "C" void kvcellar_linear(const Call* call) {
    const Call& c = *call;
    const int64_t step = std::max<int64_t>(1, NEAR / (2 * c.in) / OUTS) * OUTS;
    const int64_t items = (c.out + step - 1) / step;
    std::atomic<int64_t> next{0};
    auto work = [&] {
        for (int64_t item = next++; item < items; item = next++)
            outputs(c, item * step, std::min((item + 1) * step, c.out));
    };
    std::vector<std::thread> others;
    try {
        for (int64_t i = 1; i < std::min(c.threads, items); ++i) others.emplace_back(work);
    } catch (const std::exception&) {
        // No more threads are to be had: those that there are do all the work.
    }
    work();
    for (std::thread& other : others) other.join();
}
