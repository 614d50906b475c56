// Functions of float32 as torch computes them: by the functions of its own library, whose addresses are given, on lines
// or on vectors; and convolutions of single channels. The end of a line is computed as part of a vector.
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

// out[i,c,p] = bias[c] + the sum over k of x[i,c,p+k] w[c,k], each product added with one rounding: with one sum, which
// begins with the bias, or with PARTS of them, which take products in turn as long as there is one for each, and the
// first one the others; the bias is added at the end. So do torch's own products of bfloat16, with four sums (`sum` in
// aten/src/ATen/native/cpu/BlasKernel.cpp), and oneDNN's do the former. size: p, i, c, k.
template <class T, int PARTS>
int convolved(const Instruction& I, int64_t) {
    const Operand &x = I.in[0], &w = I.in[1], &bias = I.in[2], &out = I.out;
    const auto at = [](const Operand& of, int64_t p, int64_t i, int64_t c) {
        return reinterpret_cast<T*>(of.at) + of.stride[0] * p + of.stride[1] * i + of.stride[2] * c;
    };
    const int64_t inner = I.size[3], whole = inner - inner % PARTS;
    for (int64_t i = 0; i < I.size[1]; i++)
        for (int64_t c = 0; c < I.size[2]; c++)
            for (int64_t p = 0; p < I.size[0]; p++) {
                const T *from = at(x, p, i, c), *factors = at(w, 0, 0, c);
                const float more = bias.at == nullptr ? 0 : widened(*at(bias, 0, 0, c));
                float sums[PARTS] = {PARTS == 1 ? more : 0};
                for (int64_t k = 0; k < inner; k++) {
                    float& sum = sums[k < whole ? k % PARTS : 0];
                    sum = __builtin_fmaf(widened(from[k * x.stride[3]]), widened(factors[k * w.stride[3]]), sum);
                }
                for (int part = 1; part < PARTS; part++) sums[0] += sums[part];
                *at(out, p, i, c) = narrowed<T>(PARTS == 1 || bias.at == nullptr ? sums[0] : sums[0] + more);
            }
    return NONE;
}

}  // namespace step
