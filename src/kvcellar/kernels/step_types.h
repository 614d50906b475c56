// The instruction of a recorded step, and types of elements. `step.cpp` runs instructions, `step_lines.h` has the
// operators on elements. `recorded_kernel.py` has the same fields.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace step {

enum Type : int64_t { FLOAT32, BFLOAT16, INT64, BOOL };
constexpr int64_t BYTES[] = {4, 2, 8, 1};
constexpr int DIMS = 4;

// A tensor in fixed memory. An unused operand has no address.
struct Operand {
    char* at;
    int64_t row;           // elements from one row to the next; 0: all rows share it
    int64_t stride[DIMS];  // in elements
    int64_t type;
};

struct Line;
struct Instruction;

struct Instruction {
    int (*run)(const Instruction&, int64_t row);  // 0, or an `Error`
    void (*line)(const Line&);                    // of elementwise operators
    int64_t span;  // 0, or: this is no operator, the next `span` instructions run row by row
    int64_t rows;  // of such a span
    int64_t size[DIMS];
    Operand out, in[3];
    const void* of;  // a table of 65536 results, the structure of a native call, or null
    int64_t count;   // rows that an index may name
};

enum Error : int { NONE, MEMORY, INDEX };

// The last dimension of an elementwise operator: each stride is 0 or 1.
struct Line {
    char* out;
    const char* in[3];
    int64_t step[3];  // of the inputs
    int64_t n;
    const void* of;
};

template <class To, class From>
inline To as(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

struct bfloat16 {
    uint16_t bits;
};

inline float widened(float x) { return x; }
inline float widened(bfloat16 x) { return as<float>(uint32_t(x.bits) << 16); }

template <class T>
inline T narrowed(float x);
template <>
inline float narrowed<float>(float x) {
    return x;
}
// To nearest, ties to even; one NaN for all.
template <>
inline bfloat16 narrowed<bfloat16>(float x) {
    const uint32_t bits = as<uint32_t>(x);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return {uint16_t(x != x ? 0x7fc0 : rounded)};
}

}  // namespace step
