// Draws the token of each row of logits in one pass per row: edits, temperature, filters, the draw, log-probabilities.
// `sampling.py` calls it; `engine/sample/draw.py` defines every operation, and the order in which they are applied.
//
// Nothing is sorted but short lists. The best scores come from the largest of each block of scores: at least k scores
// are not smaller than the k-th largest of these, and only blocks that reach it are read. The nucleus of a flat row is
// found between two scores of a sample, whose order is known: what lies between them is a small part, which is divided
// again.
//
// Always true:
//   * the result of a row depends on its `Row` alone, not on other rows or on threads;
//   * a weight is 2^40 exp((score - best) / temperature), rounded to a whole number: sums of weights are exact;
//   * logits are not changed; what is written lies in the scratch memory of the thread, or in what the row names.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=off")  // edits round after each operation, as torch does
#else
#pragma STDC FP_CONTRACT OFF
#endif
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "threads.h"
#include "vectors.h"

namespace {

using vectors::F;
using vectors::I;
using vectors::W;

struct Row {
    const void* logits;             // [vocab]
    const int64_t* biased;          // ids
    const double* biases;
    const int64_t* prompt;          // ids that only the repetition penalty applies to
    const int64_t* seen;            // ids of the completion
    const int64_t* counts;          // how often each is in it
    const int64_t* ends;
    const int64_t* forbidden;
    const int32_t* mask;            // [vocab/32], a bit for each token that is allowed, or null
    int64_t* weights;               // [vocab], filled with what is drawn from, or null
    int64_t* top;                   // [logprobs] ids of the best logits
    double* values;                 // [logprobs] their log-probabilities
    int64_t n_biased, n_prompt, n_seen, n_ends, n_forbidden;
    float repetition, frequency, presence, boost;
    double temperature, typical_p, top_p, min_p, epsilon, eta;
    double top_h;                   // 0: without
    double chance;                  // draws the token: [0,1)
    int64_t top_k, greedy;
    int64_t logprobs;               // -1: without
    int64_t scores;                 // nothing is drawn: `token` is given, and has its log-probability and rank found
    // Results. Without a finite best score there is no token: it is -1.
    int64_t token, rank;            // rank: 1 for the best
    double best, log_sum, value;    // the best edited score; of the logits, log(sum(exp)); log-probability of the token
};

struct Call {
    Row* rows;
    char* scratch;        // [threads,kvcellar_sample_bytes(vocab)]
    Threads* threads;     // null: one
    int64_t n_rows, vocab, type, n_threads;
};

constexpr int64_t BFLOAT16 = 0;      // of logits; otherwise they are float32
constexpr int64_t BLOCK = 128;       // scores
constexpr int64_t WEIGHT_BITS = 40;  // the largest weight of a row is 2^40
constexpr int64_t ENTROPY_OF = 100;  // candidates of top-h
constexpr int64_t SHORT = 256;       // blocks among whose scores a nucleus is looked for first
constexpr int64_t SAMPLE = 256;      // keys that divide the others
constexpr int64_t MARGIN = 16;       // of them, on either side of where the edge is expected
constexpr float NONE = vectors::NONE;

typedef float Half __attribute__((vector_size(vectors::BYTES / 2)));
typedef double D __attribute__((vector_size(vectors::BYTES)));
typedef int64_t L __attribute__((vector_size(vectors::BYTES)));
constexpr int WD = W / 2;  // doubles of a vector

int64_t blocks_of(int64_t vocab) { return (vocab + BLOCK - 1) / BLOCK; }

// Weights by key: of each token, or of some of them in order of their ids.
template <class Key>
struct Set {
    Key* keys;
    int64_t* weights;
    int32_t* ids;  // null: of each token
    int64_t n;

    int32_t id(int64_t i) const { return ids ? ids[i] : int32_t(i); }
};

// Memory of a thread for one row.
struct Space {
    float* scores;     // [padded vocab], filled with minus infinity behind the vocabulary
    int64_t* weights;  // [vocab]
    float* maxima;     // [blocks], the largest of each block of scores
    float* order;      // [blocks], to be ordered
    float* shortlist;  // scores of a short list, with
    int64_t* short_weights;
    int32_t* short_ids;
    double* keys;      // of the typical filter
    double* rest;      // keys of what is divided further, with
    int64_t* rest_weights;
    int32_t* rest_ids;

    // Lays it out from `at`, if that is not null. Returns its bytes.
    int64_t place(char* at, int64_t vocab) {
        const int64_t blocks = blocks_of(vocab), all = blocks * BLOCK;
        int64_t size = 0;
        const auto next = [&](auto*& field, int64_t count) {
            if (at) field = reinterpret_cast<std::remove_reference_t<decltype(field)>>(at + size);
            size += (count * int64_t(sizeof *field) + 63) / 64 * 64;
        };
        next(scores, all), next(weights, all), next(maxima, blocks), next(order, blocks);
        next(shortlist, all), next(short_weights, all), next(short_ids, all);
        next(keys, all), next(rest, all), next(rest_weights, all), next(rest_ids, all);
        return size;
    }
};

struct Best {
    float score;
    bool nan;
};

// -- scores ----------------------------------------------------------------------------------------------------------

// Logits [BLOCK] as float32.
template <bool narrow>
KV_INLINE F widened(const void* logits, int64_t at) {
    if constexpr (narrow) {
        typedef uint16_t H __attribute__((vector_size(vectors::BYTES / 2)));
        typedef uint32_t U __attribute__((vector_size(vectors::BYTES)));
        H bits;
        std::memcpy(&bits, static_cast<const uint16_t*>(logits) + at, sizeof bits);
        return (F)(__builtin_convertvector(bits, U) << 16);
    } else {
        return vectors::load(static_cast<const float*>(logits) + at);
    }
}

// The largest of a block, and whether one is NaN; written to `to` if it is not null.
template <bool narrow>
KV_INLINE float one_block(const void* logits, int64_t at, float* to, I& nan) {
    F most = vectors::all(NONE);
    for (int64_t i = 0; i < BLOCK; i += W) {
        const F x = widened<narrow>(logits, at + i);
        nan |= x != x;
        most = vectors::larger(x, most);
        if (to) vectors::store(to + at + i, x);
    }
    return vectors::largest(most);
}

// The same of the last block, whose logits end with the vocabulary.
template <bool narrow>
float last_block(const void* logits, int64_t at, int64_t vocab, float* to, I& nan) {
    constexpr int64_t size = narrow ? 2 : 4;
    alignas(64) char whole[BLOCK * size];
    const uint16_t none = 0xff80;
    for (int64_t i = 0; i < BLOCK; ++i)
        if (narrow) std::memcpy(whole + i * size, &none, size);
        else std::memcpy(whole + i * size, &NONE, size);
    std::memcpy(whole, static_cast<const char*>(logits) + at * size, size_t((vocab - at) * size));
    return one_block<narrow>(whole, 0, to ? to + at : nullptr, nan);
}

bool any(const I& mask) {
    int32_t bits = 0;
    for (int i = 0; i < W; ++i) bits |= mask[i];
    return bits != 0;
}

// The largest of each block; with `to`, scores are written there.
template <bool narrow>
Best read(const void* logits, int64_t vocab, float* maxima, float* to) {
    const int64_t blocks = blocks_of(vocab), whole = vocab / BLOCK;
    float best = NONE;
    I nan{};
    for (int64_t b = 0; b < whole; ++b) maxima[b] = one_block<narrow>(logits, b * BLOCK, to, nan);
    if (whole < blocks) maxima[whole] = last_block<narrow>(logits, whole * BLOCK, vocab, to, nan);
    for (int64_t b = 0; b < blocks; ++b) best = std::max(best, maxima[b]);
    return {best, any(nan)};
}

Best read(const Call& call, const Row& row, float* maxima, float* to) {
    return call.type == BFLOAT16 ? read<true>(row.logits, call.vocab, maxima, to)
                                 : read<false>(row.logits, call.vocab, maxima, to);
}

float logit(const Call& call, const Row& row, int64_t id) {
    if (call.type == BFLOAT16) return vectors::widened(static_cast<const uint16_t*>(row.logits)[id]);
    return static_cast<const float*>(row.logits)[id];
}

bool edits(const Row& row) {
    return row.n_biased || row.n_prompt || row.n_seen || row.boost != 0.f || row.n_forbidden || row.mask;
}

float repeated(float score, float repetition) { return score < 0.f ? score * repetition : score / repetition; }

// In place. `temporary` has room for a score of each token.
void edit(const Row& row, float* scores, float* temporary) {
    for (int64_t i = 0; i < row.n_biased; ++i) scores[row.biased[i]] += float(row.biases[i]);
    // Of tokens that the prompt has as well, the score before its penalty counts.
    for (int64_t i = 0; i < row.n_seen; ++i) {
        const float count = float(row.counts[i]), score = repeated(scores[row.seen[i]], row.repetition);
        temporary[i] = score - count * row.frequency - row.presence;
    }
    for (int64_t i = 0; i < row.n_prompt; ++i)
        scores[row.prompt[i]] = repeated(scores[row.prompt[i]], row.repetition);
    for (int64_t i = 0; i < row.n_seen; ++i) scores[row.seen[i]] = temporary[i];
    if (row.boost != 0.f)
        for (int64_t i = 0; i < row.n_ends; ++i)
            if (float& score = scores[row.ends[i]]; std::isfinite(score)) score = score + std::fabs(score) * row.boost;
    for (int64_t i = 0; i < row.n_forbidden; ++i) scores[row.forbidden[i]] = NONE;
}

// Scores of tokens whose bit is not set become minus infinity.
void apply_mask(const int32_t* mask, int64_t vocab, float* scores) {
    const int64_t words = (vocab + 31) / 32;
    I lanes;
    for (int i = 0; i < W; ++i) lanes[i] = i;
    for (int64_t word = 0; word < words; ++word)
        for (int64_t i = 0; i < 32; i += W) {
            float* at = scores + word * 32 + i;
            const I bits = ((I{} + int32_t(uint32_t(mask[word]) >> i)) >> lanes) & 1;
            vectors::store(at, bits ? vectors::load(at) : vectors::all(NONE));
        }
}

// -- weights ---------------------------------------------------------------------------------------------------------

KV_INLINE D fused(D a, D b, D c) {
#if KV_AVX512
    return (D)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif KV_AVX2
    return (D)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#else
    return a * b + c;
#endif
}

// 2^(40 + x) as a whole number, for x of at most 0. The relative error of the polynomials is below 9.0e-15.
#if KV_AVX512
alignas(64) constexpr double POWERS[16] = {  // 2^(i/16)
    0x1.0000000000000p+0, 0x1.0b5586cf9890fp+0, 0x1.172b83c7d517bp+0, 0x1.2387a6e756238p+0,
    0x1.306fe0a31b715p+0, 0x1.3dea64c123422p+0, 0x1.4bfdad5362a27p+0, 0x1.5ab07dd485429p+0,
    0x1.6a09e667f3bcdp+0, 0x1.7a11473eb0187p+0, 0x1.8ace5422aa0dbp+0, 0x1.9c49182a3f090p+0,
    0x1.ae89f995ad3adp+0, 0x1.c199bdd85529cp+0, 0x1.d5818dcfba487p+0, 0x1.ea4afa2a490dap+0};

KV_INLINE L whole_power(D x) {
    const __m512d shift = _mm512_set1_pd(0x1.8p48);  // added, it rounds to a multiple of 1/16, which is in the last bits
    const __m512d y = _mm512_max_pd((__m512d)x, _mm512_set1_pd(-64.)), shifted = _mm512_add_pd(y, shift);
    const __m512d n = _mm512_sub_pd(shifted, shift), r = _mm512_sub_pd(y, n);
    const __m512d power = _mm512_permutex2var_pd(_mm512_load_pd(POWERS), _mm512_castpd_si512(shifted),
                                                 _mm512_load_pd(POWERS + 8));
    D p = fused(D{} + 0x1.5d897e525c216p-10, (D)r, D{} + 0x1.3b2c9b8a6caeap-7);
    p = fused(p, (D)r, D{} + 0x1.c6b08d6f2a289p-5);
    p = fused(p, (D)r, D{} + 0x1.ebfbdff555824p-3);
    p = fused(p, (D)r, D{} + 0x1.62e42fefa39f3p-1);
    p = fused(p * (D)r, (D)power, (D)power);
    return (L)_mm512_cvtpd_epi64(_mm512_scalef_pd((__m512d)p, _mm512_add_pd(n, _mm512_set1_pd(WEIGHT_BITS))));
}
#else
KV_INLINE L whole_power(D x) {
    constexpr double shift = 0x1.8p52;  // added, it rounds to a whole number, which is in the last bits
    x = x > -64. ? x : D{} - 64.;
    const D shifted = x + shift, r = x - (shifted - shift);
    D p = fused(D{} + 0x1.e6063f7217bc6p-28, r, D{} + 0x1.b675bca4eeebbp-24);
    p = fused(p, r, D{} + 0x1.62bfd47773353p-20);
    p = fused(p, r, D{} + 0x1.ffcb54062e698p-17);
    p = fused(p, r, D{} + 0x1.430913096fd9fp-13);
    p = fused(p, r, D{} + 0x1.5d87fe9d7a584p-10);
    p = fused(p, r, D{} + 0x1.3b2ab6fba1ddap-7);
    p = fused(p, r, D{} + 0x1.c6b08d703ce49p-5);
    p = fused(p, r, D{} + 0x1.ebfbdff82c598p-3);
    p = fused(p, r, D{} + 0x1.62e42fefa3a19p-1);
    p = fused(p, r, D{} + 1.);
    const D scaled = (D)((L)p + ((L)shifted << 52) + (WEIGHT_BITS << 52)) + 0x1p52;
    return (L)scaled & ((int64_t(1) << 52) - 1);
}
#endif

// Weights of scores [n], and their sum.
int64_t weigh(const float* scores, int64_t n, float best, double temperature, int64_t* weights) {
    const double factor = 1.44269504088896340736 / temperature;
    L sum{};
    const auto some = [&](int64_t i, size_t count) {
        Half x = Half{} + NONE;
        std::memcpy(&x, scores + i, count * sizeof *scores);
        const L weight = whole_power((__builtin_convertvector(x, D) - double(best)) * factor);
        std::memcpy(weights + i, &weight, count * sizeof *weights);
        sum += weight;
    };
    for (int64_t i = 0; i + WD <= n; i += WD) some(i, WD);
    if (n % WD) some(n - n % WD, size_t(n % WD));
    int64_t all = 0;
    for (int i = 0; i < WD; ++i) all += sum[i];
    return all;
}

int64_t sum_of(const int64_t* weights, int64_t n) {
    int64_t sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += weights[i];
    return sum;
}

// `mass` of a sum of weights, rounded up to a whole weight.
int64_t part_of(double mass, int64_t total) { return int64_t(std::ceil(mass * double(total))); }

// -- the best --------------------------------------------------------------------------------------------------------

// A score that at least k scores reach, if so many are finite.
float reached(Space& space, int64_t blocks, int64_t k) {
    if (k > blocks) return NONE;
    std::memcpy(space.order, space.maxima, size_t(blocks) * sizeof(float));
    std::nth_element(space.order, space.order + (k - 1), space.order + blocks, [](float a, float b) { return a > b; });
    return space.order[k - 1];
}

// A bit for each of 64 keys from `low` to `high`.
template <class Key>
KV_INLINE uint64_t between(const Key* keys, Key low, Key high) {
    uint64_t bits = 0;
#if KV_AVX512 || KV_AVX2
    if constexpr (sizeof(Key) == 4) {
        KV_UNROLL for (int i = 0; i < 64; i += W) {
            const F x = vectors::load(keys + i);
            const I inside = (x >= low) & (x <= high);
#if KV_AVX512
            bits |= uint64_t(_mm512_movepi32_mask((__m512i)inside)) << i;
#else
            bits |= uint64_t(uint32_t(_mm256_movemask_ps((__m256)inside))) << i;
#endif
        }
        return bits;
    }
#endif
    for (int i = 0; i < 64; ++i) bits |= uint64_t(keys[i] >= low && keys[i] <= high) << i;
    return bits;
}

// Scores that reach `least`, in order of ids, to the short list; and weights, if there are any. Returns how many.
int64_t gather(Space& space, int64_t blocks, float least, const int64_t* weights) {
    int64_t n = 0;
    for (int64_t b = 0; b < blocks; ++b) {
        if (!(space.maxima[b] >= least)) continue;
        for (int64_t at = b * BLOCK; at < (b + 1) * BLOCK; at += 64)
            for (uint64_t bits = between(space.scores + at, least, -NONE); bits; bits &= bits - 1) {
                const int64_t id = at + __builtin_ctzll(bits);
                space.shortlist[n] = space.scores[id];
                space.short_ids[n] = int32_t(id);
                if (weights) space.short_weights[n] = weights[id];
                ++n;
            }
    }
    return n;
}

constexpr float FINITE = -std::numeric_limits<float>::max();

// The k best scores, with the lowest ids among equals, best first, as the short list. Returns how many: not more than
// there are finite scores.
int64_t ranked(Space& space, int64_t blocks, int64_t k) {
    const int64_t n = gather(space, blocks, std::max(FINITE, reached(space, blocks, k)), nullptr), few = std::min(n, k);
    auto* pairs = reinterpret_cast<std::pair<float, int32_t>*>(space.rest);
    for (int64_t i = 0; i < n; ++i) pairs[i] = {-space.shortlist[i], space.short_ids[i]};
    std::partial_sort(pairs, pairs + few, pairs + n);
    for (int64_t i = 0; i < few; ++i) space.shortlist[i] = -pairs[i].first, space.short_ids[i] = pairs[i].second;
    return few;
}

// -- a part of the weights, the largest keys first -------------------------------------------------------------------

template <class Key>
struct Edge {  // all larger keys are in, and of keys that are equal those up to the id `last`
    Key key;
    int32_t last;
};

constexpr int32_t ALL = std::numeric_limits<int32_t>::max();

// Where keys, in falling order and by id among equals, have `limit` of their `total` weight together. `rest` has room for
// them, and keys of both can be read in blocks of 64. The keys are divided by two of a sample, between which the edge is
// expected; the part that has it is divided further.
template <class Key>
Edge<Key> edge_of(Set<Key> set, int64_t limit, int64_t total, Set<Key> rest) {
    constexpr Key infinity = std::numeric_limits<Key>::infinity();
    const auto falling = [](const auto& a, const auto& b) { return a.first > b.first; };
    int64_t before = 0;  // the weight of larger keys
    bool apart = true;   // whether the last division left something out
    while (set.n > SAMPLE) {
        std::pair<Key, int64_t> sample[SAMPLE];
        double sampled = 0;
        for (int64_t i = 0; i < SAMPLE; ++i) {
            const int64_t at = i * set.n / SAMPLE;
            sample[i] = {set.keys[at], set.weights[at]};
            sampled += double(set.weights[at]);
        }
        std::sort(sample, sample + SAMPLE, falling);
        const double share = double(limit - before) / double(total) * sampled;
        int64_t j = 0;
        for (double sum = double(sample[0].second); sum < share && j + 1 < SAMPLE; sum += double(sample[j].second)) ++j;
        const int64_t margin = apart ? MARGIN : 0;
        Key high = j >= margin ? sample[j - margin].first : infinity;
        Key low = j + margin < SAMPLE ? sample[j + margin].first : -infinity;
        const bool equal = high == low;
        int64_t above = 0, inside = 0;
        for (int64_t i = 0; i < set.n; ++i) {
            above += set.keys[i] > high ? set.weights[i] : 0;
            inside += (set.keys[i] <= high) & (set.keys[i] >= low) ? set.weights[i] : 0;
        }
        const bool larger = limit - before <= above, smaller = limit - before > above + inside;
        if (larger) {
            low = std::nextafter(high, infinity), high = infinity, total = above;
        } else if (smaller) {
            high = std::nextafter(low, -infinity), low = -infinity, before += above + inside, total -= above + inside;
        } else {
            before += above, total = inside;
        }
        int64_t n = 0;
        for (int64_t at = 0; at < set.n; at += 64) {
            uint64_t bits = between(set.keys + at, low, high);
            if (set.n - at < 64) bits &= (uint64_t(1) << (set.n - at)) - 1;
            for (; bits; bits &= bits - 1, ++n) {
                const int64_t i = at + __builtin_ctzll(bits);
                rest.keys[n] = set.keys[i], rest.weights[n] = set.weights[i], rest.ids[n] = set.id(i);
            }
        }
        apart = n < set.n;
        set = {rest.keys, rest.weights, rest.ids, n};  // divided further in place
        if (equal && !larger && !smaller) break;
    }
    if (set.n <= SAMPLE) {
        std::pair<Key, int32_t> order[SAMPLE];
        for (int32_t i = 0; i < int32_t(set.n); ++i) order[i] = {set.keys[i], i};
        std::stable_sort(order, order + set.n, falling);
        for (int64_t i = 0; i < set.n; ++i)
            if ((before += set.weights[order[i].second]) >= limit) return {order[i].first, set.id(order[i].second)};
    } else {  // all are equal
        for (int64_t i = 0; i < set.n; ++i)
            if ((before += set.weights[i]) >= limit) return {set.keys[i], set.id(i)};
    }
    return {-infinity, ALL};
}

// -- filters: what they remove weighs nothing ------------------------------------------------------------------------

// Keeps what is above an edge, and of equal keys those up to its id. Ids rise. Returns the sum of weights that are left.
template <class Key>
int64_t cut(const Set<Key>& set, Edge<Key> edge) {
    int64_t i = 0;
    const int64_t end = set.ids ? std::upper_bound(set.ids, set.ids + set.n, edge.last) - set.ids
                                : std::min<int64_t>(set.n, int64_t(edge.last) + 1);
    int64_t sum = 0;
    for (; i < end; ++i) sum += set.weights[i] = set.keys[i] >= edge.key ? set.weights[i] : 0;
    for (; i < set.n; ++i) sum += set.weights[i] = set.keys[i] > edge.key ? set.weights[i] : 0;
    return sum;
}

int64_t most_of(const Set<float>& set) {
    int64_t most = 0;
    for (int64_t i = 0; i < set.n; ++i) most = std::max(most, set.weights[i]);
    return most;
}

void keep_from(Set<float>& set, double least) {
    for (int64_t i = 0; i < set.n; ++i) set.weights[i] = double(set.weights[i]) >= least ? set.weights[i] : 0;
}

// One row, after its edits.
class Filters {
  public:
    Filters(const Row& row, Space& space, int64_t vocab, float best, int64_t* dense)
        : row_(row), space_(space), blocks_(blocks_of(vocab)), best_(best) {
        if (row.top_h > 0.) {
            top_h();
        } else if (row.top_k > 0 && row.top_k < vocab) {
            n_ = gather(space, blocks_, std::max(FINITE, reached(space, blocks_, row.top_k)), nullptr);
        } else {
            set_ = {space.scores, dense, nullptr, vocab};
            total_ = weigh(space.scores, vocab, best, row.temperature, dense);
            return;
        }
        if (row.top_k > 0) top_k();
        set_ = short_set();
        total_ = weigh(set_.keys, set_.n, best, row.temperature, set_.weights);
    }

    // What is drawn from.
    const Set<float>& run() {
        if (row_.typical_p < 1.) typical();
        if (row_.top_p < 1.) top_p();
        if (row_.min_p > 0.) keep_from(set_, row_.min_p * double(most_of(set_))), sum();
        if (row_.epsilon > 0. && row_.epsilon < 1.) epsilon(row_.epsilon);
        if (row_.eta > 0. && row_.eta < 1.) {
            const double entropy = surprise() / double(total_) + std::log(double(total_) * 0x1p-40);
            epsilon(std::min(row_.eta, std::sqrt(row_.eta) * std::exp(-entropy)));
        }
        return set_;
    }

    // The token where the running sum of weights, in order of ids, passes `chance` of all.
    int64_t pick(double chance) const {
        const int64_t target = std::min(int64_t(chance * double(total_)), total_ - 1);
        int64_t sum = 0, at = 0;
        for (; at + BLOCK < set_.n; at += BLOCK) {
            const int64_t more = sum_of(set_.weights + at, BLOCK);
            if (sum + more > target) break;
            sum += more;
        }
        for (; at + 1 < set_.n && (sum += set_.weights[at]) <= target; ++at) {}
        return set_.id(at);
    }

  private:
    Set<float> short_set() { return {space_.shortlist, space_.short_weights, space_.short_ids, n_}; }

    void sum() { total_ = sum_of(set_.weights, set_.n); }

    double below(int64_t i) const { return (double(set_.keys[i]) - double(best_)) / row_.temperature; }

    // The sum of weights by their surprise, without the constant log of the total.
    double surprise() const {
        int64_t sum = 0;
        for (int64_t i = 0; i < set_.n; ++i)
            if (set_.weights[i]) sum += int64_t(double(set_.weights[i]) * -below(i));
        return double(sum);
    }

    // The short list: the best, whose terms of the entropy sum to a share of it.
    void top_h() {
        n_ = ranked(space_, blocks_, ENTROPY_OF);
        int64_t terms[ENTROPY_OF], all = 0, part = 0;
        const int64_t sum = weigh(space_.shortlist, n_, best_, row_.temperature, space_.short_weights);
        for (int64_t i = 0; i < n_; ++i) {
            const double p = double(space_.short_weights[i]) / double(sum);
            all += terms[i] = p > 0. ? std::llrint(-p * std::log(p) * 0x1p40) : 0;
        }
        int64_t kept = 0;
        while (kept < n_ && double(part += terms[kept]) <= row_.top_h * double(all)) ++kept;
        n_ = std::max<int64_t>(kept, 1);
        auto* pairs = reinterpret_cast<std::pair<int32_t, float>*>(space_.rest);
        for (int64_t i = 0; i < n_; ++i) pairs[i] = {space_.short_ids[i], space_.shortlist[i]};
        std::sort(pairs, pairs + n_);
        for (int64_t i = 0; i < n_; ++i) space_.short_ids[i] = pairs[i].first, space_.shortlist[i] = pairs[i].second;
    }

    // The short list without scores below the k-th.
    void top_k() {
        if (row_.top_k >= n_) return;
        float* order = reinterpret_cast<float*>(space_.rest);
        std::memcpy(order, space_.shortlist, size_t(n_) * sizeof(float));
        std::nth_element(order, order + (row_.top_k - 1), order + n_, [](float a, float b) { return a > b; });
        const float edge = order[row_.top_k - 1];
        int64_t kept = 0;
        for (int64_t i = 0; i < n_; ++i)
            if (space_.shortlist[i] >= edge)
                space_.shortlist[kept] = space_.shortlist[i], space_.short_ids[kept++] = space_.short_ids[i];
        n_ = kept;
    }

    void typical() {
        const double expected = surprise() / double(total_);
        for (int64_t i = 0; i < set_.n; ++i)
            space_.keys[i] = set_.weights[i] ? -std::fabs(-below(i) - expected) : double(NONE);
        Set<double> near{space_.keys, set_.weights, set_.ids, set_.n};
        Edge<double> edge = edge_of(near, part_of(row_.typical_p, total_), total_,
                                    Set<double>{space_.rest, space_.rest_weights, space_.rest_ids, 0});
        total_ = cut(near, Edge<double>{edge.key, ALL});
    }

    void top_p() {
        const int64_t limit = part_of(row_.top_p, total_);
        int64_t total = total_;
        if (!set_.ids) {  // most nuclei are in the blocks with the best scores
            const int64_t few = std::max<int64_t>(1, std::min(SHORT, blocks_ / 4));
            n_ = gather(space_, blocks_, std::max(FINITE, reached(space_, blocks_, few)), set_.weights);
            const int64_t found = sum_of(space_.short_weights, n_);
            if (found >= limit) set_ = short_set(), total = found;
        }
        const Set<float> rest{reinterpret_cast<float*>(space_.rest), space_.rest_weights, space_.rest_ids, 0};
        total_ = cut(set_, edge_of(set_, limit, total, rest));
    }

    void epsilon(double least) {
        const int64_t most = most_of(set_);
        keep_from(set_, std::min(least * double(total_), double(most)));
        sum();
    }

    const Row& row_;
    Space& space_;
    const int64_t blocks_;
    const float best_;
    Set<float> set_{};
    int64_t n_ = 0, total_ = 0;  // of the short list; of all weights
};

// -- a row -----------------------------------------------------------------------------------------------------------

// log(sum(exp(scores))), the exponentials in float32, their sum in float64.
double log_sum(const float* scores, int64_t n, float best) {
    double sums[4] = {};
    for (int64_t i = 0; i < n; i += BLOCK) {
        F part[4] = {};
        for (int64_t j = 0; j < BLOCK; j += 4 * W)
            KV_UNROLL for (int k = 0; k < 4; ++k)
                part[k] += vectors::power_of_two((vectors::load(scores + i + j + k * W) - best) * vectors::LOG2E);
        KV_UNROLL for (int k = 0; k < 4; ++k) sums[k] += double(vectors::total(part[k]));
    }
    return double(best) + std::log((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

void log_probabilities(Row& row, Space& space, int64_t vocab, float best) {
    row.log_sum = log_sum(space.scores, vocab, best);
    const int64_t n = row.logprobs > 0 ? ranked(space, blocks_of(vocab), row.logprobs) : 0;
    int64_t found = n;
    for (int64_t i = 0; i < n; ++i)
        row.top[i] = space.short_ids[i], row.values[i] = double(float(double(space.shortlist[i]) - row.log_sum));
    for (int64_t id = 0; found < row.logprobs; ++id)  // as no other score is finite
        if (space.scores[id] == NONE) row.top[found] = id, row.values[found++] = double(NONE);
}

template <bool narrow>
int64_t first_of(const void* logits, const float* maxima, float best) {
    int64_t b = 0;
    while (maxima[b] != best) ++b;
    for (int64_t id = b * BLOCK;; ++id) {
        const float x = narrow ? vectors::widened(static_cast<const uint16_t*>(logits)[id])
                               : static_cast<const float*>(logits)[id];
        if (x == best) return id;
    }
}

void draw(const Call& call, Row& row, Space& space) {
    const bool edited = edits(row), copies = edited || !row.greedy || row.logprobs >= 0;
    Best best = read(call, row, space.maxima, copies ? space.scores : nullptr);
    row.log_sum = best.nan ? std::numeric_limits<double>::quiet_NaN() : double(best.score);
    if (row.logprobs >= 0 && !best.nan && std::isfinite(best.score)) log_probabilities(row, space, call.vocab, best.score);
    if (row.scores) {
        const float given = logit(call, row, row.token);
        row.rank = 1 + std::count_if(space.scores, space.scores + call.vocab, [=](float x) { return x > given; });
        row.value = double(float(double(given) - row.log_sum));
        return;
    }
    row.token = -1;
    if (edited) {
        edit(row, space.scores, reinterpret_cast<float*>(space.rest));
        if (row.mask) apply_mask(row.mask, call.vocab, space.scores);
        best = read<false>(space.scores, blocks_of(call.vocab) * BLOCK, space.maxima, nullptr);
    }
    row.best = best.nan ? std::numeric_limits<double>::quiet_NaN() : double(best.score);
    if (!std::isfinite(row.best)) return;
    if (row.greedy) {
        row.token = edited || call.type != BFLOAT16
                        ? first_of<false>(edited ? space.scores : row.logits, space.maxima, best.score)
                        : first_of<true>(row.logits, space.maxima, best.score);
    } else {
        Filters filters(row, space, call.vocab, best.score, row.weights ? row.weights : space.weights);
        const Set<float>& set = filters.run();
        row.token = filters.pick(row.chance);
        if (row.weights && set.ids) {
            std::memset(row.weights, 0, size_t(call.vocab) * sizeof *row.weights);
            for (int64_t i = 0; i < set.n; ++i) row.weights[set.ids[i]] = set.weights[i];
        }
    }
    if (row.logprobs >= 0) row.value = double(float(double(logit(call, row, row.token)) - row.log_sum));
}

}  // namespace

extern "C" int64_t kvcellar_sample_bytes(int64_t vocab) { return Space().place(nullptr, vocab); }

// Draws the token of every row. Returns 0.
extern "C" int kvcellar_sample(const void* call) {
    const Call& c = *static_cast<const Call*>(call);
    const int64_t items = std::min(c.n_threads, c.n_rows), bytes = kvcellar_sample_bytes(c.vocab);
    for_each_item(c.threads, c.n_threads, items, [&](int64_t item) noexcept {
        Space space;
        space.place(c.scratch + item * bytes, c.vocab);
        for (int64_t i = item * c.n_rows / items; i < (item + 1) * c.n_rows / items; ++i) draw(c, c.rows[i], space);
    });
    return 0;
}
