// A recorded step: instructions on tensors at fixed addresses, in order (`recorded_kernel.py` writes and runs them).
// A span of instructions that treat rows alike runs row by row, so that its values stay in the core's first cache.
#include "step_types.h"

#include <algorithm>
#include <chrono>

#include "step_functions.h"
#include "step_lines.h"

namespace step {
namespace {

constexpr int64_t PIECE = 256;  // elements of a line whose strides are others than 0 and 1

inline char* at(const Operand& x, int64_t row, int64_t i, int64_t j, int64_t k) {
    return x.at + (x.row * row + x.stride[0] * i + x.stride[1] * j + x.stride[2] * k) * BYTES[x.type];
}

inline void spread(char* to, int64_t to_step, const char* from, int64_t from_step, int64_t n, int64_t bytes) {
    for (int64_t i = 0; i < n; i++) std::memcpy(to + i * to_step * bytes, from + i * from_step * bytes, bytes);
}

// Through contiguous copies, piece by piece.
void scattered(const Instruction& I, const Line& whole, const int64_t (&step)[3], int64_t out_step) {
    alignas(64) char in[3][PIECE * 8], out[PIECE * 8];
    for (int64_t first = 0; first < whole.n; first += PIECE) {
        Line piece = whole;
        piece.n = std::min(PIECE, whole.n - first);
        for (int x = 0; x < 3; x++) {
            if (whole.in[x] == nullptr || step[x] == 0) continue;
            const int64_t bytes = BYTES[I.in[x].type];
            piece.in[x] = whole.in[x] + first * step[x] * bytes;
            if (step[x] != 1) {
                spread(in[x], 1, piece.in[x], step[x], piece.n, bytes);
                piece.in[x] = in[x];
            }
            piece.step[x] = 1;
        }
        char* to = whole.out + first * out_step * BYTES[I.out.type];
        piece.out = out_step == 1 ? to : out;
        I.line(piece);
        if (out_step != 1) spread(to, out_step, out, 1, piece.n, BYTES[I.out.type]);
    }
}

int each(const Instruction& I, int64_t row) {
    int64_t step[3];
    bool plain = I.out.stride[3] == 1;
    for (int x = 0; x < 3; x++) {
        step[x] = I.in[x].stride[3];
        plain = plain && (step[x] == 0 || step[x] == 1);
    }
    for (int64_t i = 0; i < I.size[0]; i++)
        for (int64_t j = 0; j < I.size[1]; j++)
            for (int64_t k = 0; k < I.size[2]; k++) {
                Line line{at(I.out, row, i, j, k), {}, {}, I.size[3], I.of};
                for (int x = 0; x < 3; x++) {
                    line.in[x] = I.in[x].at == nullptr ? nullptr : at(I.in[x], row, i, j, k);
                    line.step[x] = step[x];
                }
                if (plain)
                    I.line(line);
                else
                    scattered(I, line, step, I.out.stride[3]);
            }
    return NONE;
}

typedef float Lanes __attribute__((vector_size(32), aligned(4)));

inline void add(Lanes& to, const float* from) {
    Lanes v;
    std::memcpy(&v, from, sizeof v);
    to += v;
}

// The sum of a line, in torch's order: eight lanes, four interleaved sums of them, each in a cascade of four levels,
// then what is left, and at last the lanes one by one. Fewer than eight elements are four interleaved sums.
float sum(const float* x, int64_t n) {
    if (n < 8) {
        float part[4] = {};
        for (int64_t k = 0; k < n / 4 * 4; k++) part[k] += x[k];
        for (int64_t e = n / 4 * 4; e < n; e++) part[0] += x[e];
        return part[0] + part[1] + part[2] + part[3];
    }
    const int64_t vectors = n / 8, blocks = vectors / 4;
    int64_t log = 0;
    while ((int64_t(1) << log) < blocks) log++;
    const int64_t power = std::max<int64_t>(4, log / 4), step = int64_t(1) << power;
    Lanes level[4][4] = {};
    int64_t i = 0;
    while (i + step <= blocks) {
        for (int64_t end = i + step; i < end; i++)
            for (int k = 0; k < 4; k++) add(level[0][k], x + (i * 4 + k) * 8);
        for (int64_t j = 1; j < 4; j++) {
            for (int k = 0; k < 4; k++) {
                level[j][k] += level[j - 1][k];
                level[j - 1][k] = Lanes{};
            }
            if (i & ((step - 1) << (j * power))) break;
        }
    }
    for (; i < blocks; i++)
        for (int k = 0; k < 4; k++) add(level[0][k], x + (i * 4 + k) * 8);
    for (int j = 1; j < 4; j++)
        for (int k = 0; k < 4; k++) level[0][k] += level[j][k];
    for (int64_t v = blocks * 4; v < vectors; v++) add(level[0][0], x + v * 8);
    for (int k = 1; k < 4; k++) level[0][0] += level[0][k];
    float total = 0;
    for (int64_t e = vectors * 8; e < n; e++) total += x[e];
    for (int lane = 0; lane < 8; lane++) total += level[0][0][lane];
    return total;
}

template <class T>
float largest(const T* x, int64_t n) {
    float found = -INFINITY;
    for (int64_t e = 0; e < n; e++) found = Maximum::of(widened(x[e]), found);
    return found;
}

// Over the last dimension, whose stride is 1.
template <class Of>
int over_last(const Instruction& I, int64_t row, Of of) {
    for (int64_t i = 0; i < I.size[0]; i++)
        for (int64_t j = 0; j < I.size[1]; j++)
            for (int64_t k = 0; k < I.size[2]; k++) of(at(I.in[0], row, i, j, k), at(I.out, row, i, j, k));
    return NONE;
}

int sums(const Instruction& I, int64_t row) {
    return over_last(I, row, [&](const char* x, char* out) {
        *reinterpret_cast<float*>(out) = sum(reinterpret_cast<const float*>(x), I.size[3]);
    });
}

int means(const Instruction& I, int64_t row) {
    return over_last(I, row, [&](const char* x, char* out) {
        *reinterpret_cast<float*>(out) = sum(reinterpret_cast<const float*>(x), I.size[3]) / float(I.size[3]);
    });
}

template <class T>
int maxima(const Instruction& I, int64_t row) {
    return over_last(I, row, [&](const char* x, char* out) {
        *reinterpret_cast<T*>(out) = narrowed<T>(largest(reinterpret_cast<const T*>(x), I.size[3]));
    });
}

// Rows of in[0] that in[1] names: size[2] of them, of size[3] elements. Negative ones count from the end if `of` is set.
int take(const Instruction& I, int64_t row) {
    for (int64_t k = 0; k < I.size[2]; k++) {
        int64_t index = *reinterpret_cast<const int64_t*>(at(I.in[1], row, 0, 0, k));
        if (I.of != nullptr && index < 0) index += I.count;
        if (index < 0 || index >= I.count) return INDEX;
        std::memcpy(at(I.out, row, 0, 0, k), at(I.in[0], 0, 0, 0, index), I.size[3] * BYTES[I.out.type]);
    }
    return NONE;
}

int native(const Instruction& I, int64_t) {
    return as<int (*)(const void*)>(I.line)(I.of);
}

struct Reduction {
    const char* name;
    int64_t type;
    int (*run)(const Instruction&, int64_t);
};

const Reduction REDUCTIONS[] = {
    {"sum", FLOAT32, sums},
    {"mean", FLOAT32, means},
    {"amax", FLOAT32, maxima<float>},
    {"amax", BFLOAT16, maxima<bfloat16>},
};

bool named(const char* one, const char* other) { return std::strcmp(one, other) == 0; }

}  // namespace
}  // namespace step

using namespace step;

// What `Instruction.run` and `line` are for an operator; null where it is not known for these types.
extern "C" const void* kvcellar_run_of(const char* name, int64_t type) {
    if (named(name, "each")) return reinterpret_cast<const void*>(each);
    if (named(name, "take")) return reinterpret_cast<const void*>(take);
    if (named(name, "native")) return reinterpret_cast<const void*>(native);
    for (const Reduction& one : REDUCTIONS)
        if (named(one.name, name) && one.type == type) return reinterpret_cast<const void*>(one.run);
    return nullptr;
}

extern "C" const void* kvcellar_line_of(const char* name, int64_t a, int64_t b, int64_t c, int64_t out) {
    for (const Known& one : KNOWN)
        if (named(one.name, name) && one.a == a && one.b == b && one.c == c && one.out == out)
            return reinterpret_cast<const void*>(one.line);
    return nullptr;
}

// Rows of a plane that `rows` names, to or from `values`, where they are one after the other. Row 0 is never written.
struct Rows {
    const int64_t* rows;
    char *plane, *values;
    int64_t step, count, bytes, writes;  // `step`: from one number of a row to the next
};

extern "C" int kvcellar_rows(const void* given) {
    const Rows& call = *static_cast<const Rows*>(given);
    for (int64_t i = 0; i < call.count; i++) {
        const int64_t row = call.rows[i * call.step];
        char *stored = call.plane + row * call.bytes, *value = call.values + i * call.bytes;
        if (!call.writes)
            std::memcpy(value, stored, call.bytes);
        else if (row)
            std::memcpy(stored, value, call.bytes);
    }
    return NONE;
}

// Elements of a vector that functions take; 0 if this build has no vectors.
extern "C" int64_t kvcellar_lanes() {
#ifdef KVCELLAR_VECTORS
    return LANES;
#else
    return 0;
#endif
}

extern "C" int64_t kvcellar_instruction_size() { return sizeof(Instruction); }

// Runs instructions. Returns 0 or an `Error`; `failed` is then the index of its instruction. `nanoseconds` is null, or
// the time of each instruction (of a span: at its beginning) is added to it.
extern "C" int kvcellar_run(const Instruction* first, int64_t n, int64_t* failed, int64_t* nanoseconds) {
    using Clock = std::chrono::steady_clock;
    for (int64_t i = 0; i < n; i++) {
        const int64_t at = i, span = first[i].span, rows = span ? first[i].rows : 1;
        const Clock::time_point start = nanoseconds ? Clock::now() : Clock::time_point();
        const int64_t begin = span ? i + 1 : i, end = span ? begin + span : begin + 1;
        for (int64_t row = 0; row < rows; row++)
            for (int64_t j = begin; j < end; j++)
                if (const int error = first[j].run(first[j], row)) {
                    *failed = j;
                    return error;
                }
        i = end - 1;
        if (nanoseconds)
            nanoseconds[at] += std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
    }
    return NONE;
}
