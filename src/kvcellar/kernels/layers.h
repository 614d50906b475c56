// A linear layer of ours, and a call of it: what the kernels of plain and of quantised weights have in common, so that
// experts can be layers of both. `layers.py` reads these structures, and fills them.
#pragma once
#include <cstdint>

#include "threads.h"

struct Part {  // the weights of one layer; layers that share an input are one call
    const void* panels;    // in the order of the kernel
    const float* bias;     // [out], or null
    const void* scales;    // of quantised weights only, as the rest
    const void* mins;      // or null
    const uint8_t* table;  // or null
    int64_t out;
    int64_t column;        // of its first output in a row of y
    int64_t bits, group, scale_type;
};

struct Layer {
    const Part* parts;
    const int32_t* order;  // [in], the input at each place, or null: as they are
    Threads* threads;      // null: one
    int64_t n_parts, in, type;
    int64_t step;          // inputs that are rounded together, of quantised weights
};

struct LayerCall {
    const Layer* layer;
    const void* x;         // [rows,in], of the type of the layer
    void* y;               // [rows,out], the same
    int64_t rows, x_row, y_row;  // strides, in elements
    int64_t threads;
};

namespace {

constexpr int64_t BFLOAT16 = 0, FLOAT32 = 1, FLOAT16 = 2;

// All panels of a layer, of `size` outputs each.
inline int64_t panels_of(const Layer& layer, int64_t size) {
    int64_t count = 0;
    for (int64_t i = 0; i < layer.n_parts; ++i) count += (layer.parts[i].out + size - 1) / size;
    return count;
}

// Calls each(part, panel of the part) for some panels of a layer: those of a memory node beside each other, since it has
// its share of each part (`kvcellar_threads_touch`).
template <class Each>
inline void each_panel_of(const Layer& layer, int64_t size, int64_t from, int64_t to, const Each& each) {
    const int64_t nodes = layer.threads ? layer.threads->nodes : 1;
    int64_t first = 0;
    for (int64_t node = 0; node < nodes; ++node)
        for (const Part* part = layer.parts; part != layer.parts + layer.n_parts; ++part) {
            const int64_t panels = (part->out + size - 1) / size, begin = panels * node / nodes;
            const int64_t end = first + panels * (node + 1) / nodes - begin;
            for (int64_t p = from > first ? from : first; p < (to < end ? to : end); ++p) each(*part, begin + p - first);
            first = end;
        }
}

}  // namespace
