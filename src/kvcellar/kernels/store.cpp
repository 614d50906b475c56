// Stores the keys and values of new tokens in their cells, bit for bit as `memory/kv/history.py` does. `memory/attention/cpu.py`
// calls it. Nothing is kept between calls.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#include "cells.h"
#include "step.h"
#include "vectors.h"

namespace {

using namespace cells;

struct New {
    const char* source;  // [T,G,D]
    int64_t row, head, heads;  // strides in elements; the last is 1
    Plane to;
};

struct Call {
    const Step* step;
    New k, v;
    int32_t type;  // of the new keys and values
};

// float16 of a number >= 0, rounded up.
uint16_t half_above(float x) {
    uint16_t near;
    if (x != x) return 0x7e00;
    if (x >= 65520.f) return 0x7c00;
    if (x < 0x1p-14f) {
        near = uint16_t(std::nearbyint(x * 0x1p24f));
    } else {
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        bits += 0xfff + ((bits >> 13) & 1);
        near = uint16_t((bits - (112u << 23)) >> 13);
    }
    return near + (of_half(near) < x);
}

// e4m3 of a number of at most 448, to the nearest, ties to even.
uint8_t to_fp8(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint8_t sign = uint8_t(bits >> 24 & 0x80);
    const float size = std::fabs(x);
    if (size < 0x1p-6f) return sign | uint8_t(std::nearbyint(size * 0x1p9f));
    bits &= 0x7fffffff;
    bits += 0x7ffff + ((bits >> 20) & 1);
    return sign | uint8_t((bits >> 20) - (120u << 3));
}

// A vector as codes with scales: `quantise` in memory/kv/quantise.py. `x` is overwritten.
void quantise(float* x, const Plane& to, char* codes, char* scales) {
    const float largest = to.kind == FP8 ? 448.f : to.kind == INT8 ? 127.f : 7.f;
    for (int64_t b = 0; b < to.blocks(); ++b) {
        const int64_t first = b * SCALED, end = std::min(first + SCALED, to.size);
        float most = 0;
        for (int64_t i = first; i < end; ++i) {
            const float size = std::fabs(x[i]);
            most = size > most || size != size ? size : most;
            if (most != most) break;
        }
        const uint16_t scale = half_above(most / largest);
        std::memcpy(scales + b * 2, &scale, 2);
        const float wide = of_half(scale), by = wide < 0x1p-24f ? 0x1p-24f : wide;
        for (int64_t i = first; i < end; ++i) {
            const float ratio = x[i] / by;
            x[i] = ratio != ratio ? 0.f : ratio;
        }
    }
    const int64_t half = (to.size + 1) / 2;
    const auto rounded = [&](int64_t i) { return i < to.size ? int(std::nearbyint(x[i])) : 0; };
    if (to.kind == FP8)
        for (int64_t i = 0; i < to.size; ++i) codes[i] = char(to_fp8(x[i]));
    else if (to.kind == INT8)
        for (int64_t i = 0; i < to.size; ++i) codes[i] = char(rounded(i));
    else
        for (int64_t i = 0; i < half; ++i) codes[i] = char((rounded(i) + 8) | (rounded(half + i) + 8) << 4);
}

void store_plane(const Step& step, const New& n, Kind type) {
    const Plane& to = n.to;
    const int64_t bytes = type == FLOAT32 ? 4 : 2;
    std::vector<float> wide(to.size);
    for (int64_t i = 0; i < step.n_storing; ++i)
        for (int64_t g = 0; g < n.heads; ++g) {
            const char* from = n.source + (step.storing[i] * n.row + g * n.head) * bytes;
            char* codes = to.codes + step.cells[i] * to.cell + g * to.head;
            if (to.kind == type) {
                std::memcpy(codes, from, to.size * bytes);
                continue;
            }
            elements(type, from, to.size, wide.data());
            if (to.kind == FLOAT32) {
                std::memcpy(codes, wide.data(), to.size * 4);
            } else if (to.kind == BFLOAT16) {
                for (int64_t d = 0; d < to.size; ++d) ((Half*)codes)[d] = narrowed(wide[d]);
            } else {
                if (to.rotated) rotate(wide.data(), to.size);
                quantise(wide.data(), to, codes, to.scales + step.cells[i] * to.scale_cell + g * to.scale_head);
            }
        }
}

}  // namespace

// 0, or 1 if there is not enough memory.
extern "C" int kvcellar_store(const void* call) {
    const Call& c = *(const Call*)call;
    try {
        store_plane(*c.step, c.k, (Kind)c.type);
        store_plane(*c.step, c.v, (Kind)c.type);
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}
