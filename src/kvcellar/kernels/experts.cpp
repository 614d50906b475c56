// Linear layers of experts: row i of the result is expert index[i] of row i / share of the inputs. `experts.py` calls it.
//
// The rows of an expert are copied behind each other, and multiplied by the kernel of its layer, whose function is passed
// in. A single row is multiplied where it is.
//
// Always true: the bits of a row of results depend only on its row of inputs and on its expert.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

#include "layers.h"

namespace {

struct Call {
    int (*linear)(const void*);    // of the kernel of the layers
    const Layer* const* layers;    // [experts]
    const void* x;                 // [rows,in]
    const int64_t* index;          // [rows * share]
    void* y;                       // [rows * share,out]
    int64_t experts, rows, share, in, out, x_row, y_row;  // strides, in elements
    int64_t element, threads;   // bytes of an element
};

// The numbers 0 to n - 1, sorted by expert; those of expert e begin at first[e]. Those of none are left out.
struct Sorted {
    std::unique_ptr<int64_t[]> numbers, first;

    explicit Sorted(const Call& c)
        : numbers(new (std::nothrow) int64_t[size_t(c.rows * c.share + 1)]),
          first(new (std::nothrow) int64_t[size_t(c.experts + 2)]) {
        if (!*this) return;
        std::memset(first.get(), 0, size_t(c.experts + 2) * sizeof(int64_t));
        const auto is_one = [&](int64_t i) { return c.index[i] >= 0 && c.index[i] < c.experts; };
        for (int64_t i = 0; i < c.rows * c.share; ++i)
            if (is_one(i)) ++first[c.index[i] + 2];
        for (int64_t e = 1; e < c.experts; ++e) first[e + 2] += first[e + 1];
        for (int64_t i = 0; i < c.rows * c.share; ++i)
            if (is_one(i)) numbers[first[c.index[i] + 1]++] = i;
    }
    explicit operator bool() const { return numbers && first; }
};

int multiply(const Call& c, int64_t expert, const int64_t* numbers, int64_t n, char* rows, char* results) {
    const int64_t in = c.in * c.element, out = c.out * c.element;
    const auto x = [&](int64_t i) { return static_cast<const char*>(c.x) + numbers[i] / c.share * c.x_row * c.element; };
    const auto y = [&](int64_t i) { return static_cast<char*>(c.y) + numbers[i] * c.y_row * c.element; };
    if (n == 1) {
        const LayerCall call{c.layers[expert], x(0), y(0), 1, c.x_row, c.y_row, c.threads};
        return c.linear(&call);
    }
    for (int64_t i = 0; i < n; ++i) std::memcpy(rows + i * in, x(i), size_t(in));
    const LayerCall call{c.layers[expert], rows, results, n, c.in, c.out, c.threads};
    if (c.linear(&call)) return 1;
    for (int64_t i = 0; i < n; ++i) std::memcpy(y(i), results + i * out, size_t(out));
    return 0;
}

}  // namespace

// A row of an index that is no expert is zeros. Returns 1 if there is not enough memory.
extern "C" int kvcellar_experts(const void* call) {
    const Call& c = *static_cast<const Call*>(call);
    const Sorted sorted(c);
    if (!sorted) return 1;
    int64_t most = 1;
    for (int64_t e = 0; e < c.experts; ++e) {
        const int64_t n = sorted.first[e + 1] - sorted.first[e];
        if (n > most) most = n;
    }
    const size_t bytes = most == 1 ? 1 : size_t(most * c.element);
    const std::unique_ptr<char[]> rows(new (std::nothrow) char[bytes * size_t(c.in)]);
    const std::unique_ptr<char[]> results(new (std::nothrow) char[bytes * size_t(c.out)]);
    if (!rows || !results) return 1;
    for (int64_t i = 0; i < c.rows * c.share; ++i)
        if (c.index[i] < 0 || c.index[i] >= c.experts)
            std::memset(static_cast<char*>(c.y) + i * c.y_row * c.element, 0, size_t(c.out * c.element));
    for (int64_t e = 0; e < c.experts; ++e) {
        const int64_t first = sorted.first[e], n = sorted.first[e + 1] - first;
        if (n && multiply(c, e, sorted.numbers.get() + first, n, rows.get(), results.get())) return 1;
    }
    return 0;
}
