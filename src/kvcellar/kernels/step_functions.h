// Functions of float32 as torch computes them: by the functions of its own library, whose addresses are given, on lines
// or on vectors. The end of a line is computed as part of a vector.
#pragma once
#include "step_types.h"

namespace step {

// Functions that an operator calls: one on lines, or up to two on vectors.
struct Functions {
    const void* at[2];
};

// A function of MKL's on `n` elements: high accuracy, subnormal numbers as they are, no error handling.
inline void of_lines(const Line& line) {
    using Function = void (*)(const int32_t* n, const float* a, float* out, const int64_t* mode);
    const int64_t mode = 0x140102;
    const int32_t n = line.step[0] ? line.n : 1;
    float* out = reinterpret_cast<float*>(line.out);
    as<Function>(static_cast<const Functions*>(line.of)->at[0])(&n, reinterpret_cast<const float*>(line.in[0]), out, &mode);
    for (int64_t i = n; i < line.n; i++) out[i] = out[0];
}

#if defined(__AVX512F__) || defined(__AVX__)
#define KVCELLAR_VECTORS 1
#if defined(__AVX512F__)
typedef float Vector __attribute__((vector_size(64)));
constexpr int64_t LANES = 16;
#else
typedef float Vector __attribute__((vector_size(32)));
constexpr int64_t LANES = 8;
#endif
using OfVector = Vector (*)(Vector);

struct Plain {
    static Vector of(const Functions& f, Vector x) { return as<OfVector>(f.at[0])(x); }
};
struct Sigmoid {
    static Vector of(const Functions& f, Vector x) { return 1 / (1 + as<OfVector>(f.at[0])(-x)); }
};
struct Silu {
    static Vector of(const Functions& f, Vector x) { return x / (1 + as<OfVector>(f.at[0])(-x)); }
};
struct Softplus {
    static Vector of(const Functions& f, Vector x) {
        const Vector found = as<OfVector>(f.at[1])(as<OfVector>(f.at[0])(x));
        return x > 20 ? x : found;
    }
};

template <class Op>
void of_vectors(const Line& line) {
    const Functions& functions = *static_cast<const Functions*>(line.of);
    const float* a = reinterpret_cast<const float*>(line.in[0]);
    float* out = reinterpret_cast<float*>(line.out);
    const int64_t n = line.step[0] ? line.n : 1;
    for (int64_t i = 0; i < n; i += LANES) {
        const int64_t bytes = (n - i < LANES ? n - i : LANES) * sizeof(float);
        Vector x{};
        std::memcpy(&x, a + i, bytes);
        const Vector made = Op::of(functions, x);
        std::memcpy(out + i, &made, bytes);
    }
    for (int64_t i = n; i < line.n; i++) out[i] = out[0];
}
#endif

}  // namespace step
