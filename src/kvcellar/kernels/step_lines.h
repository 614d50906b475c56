// Elementwise operators on a line of elements. Each computes in float32 and rounds once, as torch does, so results are
// torch's bits whatever instructions the compiler chooses: there is one operation between a load and a store.
#pragma once
#include <cmath>
#include "step_functions.h"
#include "step_types.h"

namespace step {

struct Add {
    static float of(float a, float b) { return a + b; }
};
struct Sub {
    static float of(float a, float b) { return a - b; }
};
struct Mul {
    static float of(float a, float b) { return a * b; }
};
struct Div {
    static float of(float a, float b) { return a / b; }
};
// A NaN of either input is the result.
struct Minimum {
    static float of(float a, float b) { return (a < b) | (a != a) ? a : b; }
};
struct Maximum {
    static float of(float a, float b) { return (a > b) | (a != a) ? a : b; }
};
struct Copy {
    static float of(float a) { return a; }
};
struct Neg {
    static float of(float a) { return -a; }
};
struct Abs {
    static float of(float a) { return std::fabs(a); }
};
struct Relu {
    static float of(float a) { return a < 0 ? 0 : a; }
};
struct Square {
    static float of(float a) { return a * a; }
};
struct Sqrt {
    static float of(float a) { return std::sqrt(a); }
};
struct Rsqrt {
    static float of(float a) { return 1 / std::sqrt(a); }
};
struct Reciprocal {
    static float of(float a) { return 1 / a; }
};

template <class Op, class A, class O>
void unary(const Line& line) {
    const A* a = reinterpret_cast<const A*>(line.in[0]);
    O* out = reinterpret_cast<O*>(line.out);
    if (line.step[0] == 0) {
        const O one = narrowed<O>(Op::of(widened(*a)));
        for (int64_t i = 0; i < line.n; i++) out[i] = one;
        return;
    }
#pragma GCC ivdep
    for (int64_t i = 0; i < line.n; i++) out[i] = narrowed<O>(Op::of(widened(a[i])));
}

template <class Op, class A, class B, class O>
void binary(const Line& line) {
    const A* a = reinterpret_cast<const A*>(line.in[0]);
    const B* b = reinterpret_cast<const B*>(line.in[1]);
    O* out = reinterpret_cast<O*>(line.out);
    if (line.step[1] == 0) {
        const float y = widened(*b);
        if (line.step[0] == 0) {
            const O one = narrowed<O>(Op::of(widened(*a), y));
            for (int64_t i = 0; i < line.n; i++) out[i] = one;
            return;
        }
#pragma GCC ivdep
        for (int64_t i = 0; i < line.n; i++) out[i] = narrowed<O>(Op::of(widened(a[i]), y));
    } else if (line.step[0] == 0) {
        const float x = widened(*a);
#pragma GCC ivdep
        for (int64_t i = 0; i < line.n; i++) out[i] = narrowed<O>(Op::of(x, widened(b[i])));
    } else {
#pragma GCC ivdep
        for (int64_t i = 0; i < line.n; i++) out[i] = narrowed<O>(Op::of(widened(a[i]), widened(b[i])));
    }
}

// Of bfloat16, by a table of what torch computes for each of its 65536 values.
inline void looked_up(const Line& line) {
    const uint16_t* a = reinterpret_cast<const uint16_t*>(line.in[0]);
    const uint16_t* table = static_cast<const uint16_t*>(line.of);
    uint16_t* out = reinterpret_cast<uint16_t*>(line.out);
    for (int64_t i = 0; i < line.n; i++) out[i] = table[a[i * line.step[0]]];
}

// Elements as they are.
template <class T>
void moved(const Line& line) {
    const T* a = reinterpret_cast<const T*>(line.in[0]);
    T* out = reinterpret_cast<T*>(line.out);
    if (line.step[0] == 1)
        std::memmove(out, a, line.n * sizeof(T));
    else
        for (int64_t i = 0; i < line.n; i++) out[i] = *a;
}

template <class T>
void chosen(const Line& line) {
    const uint8_t* which = reinterpret_cast<const uint8_t*>(line.in[0]);
    const T *a = reinterpret_cast<const T*>(line.in[1]), *b = reinterpret_cast<const T*>(line.in[2]);
    T* out = reinterpret_cast<T*>(line.out);
    for (int64_t i = 0; i < line.n; i++)
        out[i] = which[i * line.step[0]] ? a[i * line.step[1]] : b[i * line.step[2]];
}

inline void integer_to_float(const Line& line) {
    const int64_t* a = reinterpret_cast<const int64_t*>(line.in[0]);
    float* out = reinterpret_cast<float*>(line.out);
    for (int64_t i = 0; i < line.n; i++) out[i] = float(a[i * line.step[0]]);
}

// An operator on elements of these types. The types of unused inputs are -1.
struct Known {
    const char* name;
    int64_t a, b, c, out;
    void (*line)(const Line&);
};

#define KVCELLAR_BINARY(NAME, OP)                                                  \
    {NAME, FLOAT32, FLOAT32, -1, FLOAT32, binary<OP, float, float, float>},        \
    {NAME, BFLOAT16, BFLOAT16, -1, BFLOAT16, binary<OP, bfloat16, bfloat16, bfloat16>}, \
    {NAME, BFLOAT16, FLOAT32, -1, FLOAT32, binary<OP, bfloat16, float, float>},    \
    {NAME, FLOAT32, BFLOAT16, -1, FLOAT32, binary<OP, float, bfloat16, float>},    \
    {NAME, BFLOAT16, FLOAT32, -1, BFLOAT16, binary<OP, bfloat16, float, bfloat16>} /* a number */

#define KVCELLAR_UNARY(NAME, OP)                                      \
    {NAME, FLOAT32, -1, -1, FLOAT32, unary<OP, float, float>},        \
    {NAME, BFLOAT16, -1, -1, BFLOAT16, unary<OP, bfloat16, bfloat16>}

const Known KNOWN[] = {
    KVCELLAR_BINARY("add", Add),
    KVCELLAR_BINARY("sub", Sub),
    KVCELLAR_BINARY("mul", Mul),
    KVCELLAR_BINARY("div", Div),
    KVCELLAR_BINARY("minimum", Minimum),
    KVCELLAR_BINARY("maximum", Maximum),
    KVCELLAR_UNARY("neg", Neg),
    KVCELLAR_UNARY("abs", Abs),
    KVCELLAR_UNARY("relu", Relu),
    KVCELLAR_UNARY("square", Square),
    KVCELLAR_UNARY("sqrt", Sqrt),
    {"rsqrt", FLOAT32, -1, -1, FLOAT32, unary<Rsqrt, float, float>},
    KVCELLAR_UNARY("reciprocal", Reciprocal),
    {"table", BFLOAT16, -1, -1, BFLOAT16, looked_up},
    {"of lines", FLOAT32, -1, -1, FLOAT32, of_lines},
#ifdef KVCELLAR_VECTORS
    {"of vectors", FLOAT32, -1, -1, FLOAT32, of_vectors<Plain>},
    {"sigmoid", FLOAT32, -1, -1, FLOAT32, of_vectors<Sigmoid>},
    {"silu", FLOAT32, -1, -1, FLOAT32, of_vectors<Silu>},
    {"softplus", FLOAT32, -1, -1, FLOAT32, of_vectors<Softplus>},
#endif
    {"copy", FLOAT32, -1, -1, FLOAT32, moved<uint32_t>},
    {"copy", BFLOAT16, -1, -1, BFLOAT16, moved<uint16_t>},
    {"copy", INT64, -1, -1, INT64, moved<uint64_t>},
    {"copy", BOOL, -1, -1, BOOL, moved<uint8_t>},
    {"copy", BFLOAT16, -1, -1, FLOAT32, unary<Copy, bfloat16, float>},
    {"copy", FLOAT32, -1, -1, BFLOAT16, unary<Copy, float, bfloat16>},
    {"copy", INT64, -1, -1, FLOAT32, integer_to_float},
    {"where", BOOL, FLOAT32, FLOAT32, FLOAT32, chosen<uint32_t>},
    {"where", BOOL, BFLOAT16, BFLOAT16, BFLOAT16, chosen<uint16_t>},
    {"where", BOOL, INT64, INT64, INT64, chosen<uint64_t>},
};

}  // namespace step
