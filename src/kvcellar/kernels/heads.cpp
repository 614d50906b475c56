// A linear layer for each head: head h of a row of the result is layer h of head h of that row of the inputs.
// `heads.py` calls it.
//
// Always true: the bits of a row of results depend only on that row of inputs.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "layers.h"

namespace {

struct Call {
    int (*linear)(const void*);  // of the kernel of the layers
    const Layer* const* layers;  // [heads]
    const char* x;               // [rows,heads,in + tail]
    char* y;                     // [rows,heads,out + tail]: behind what a layer makes, the tail of its inputs as it is
    int64_t heads, rows, in, out, tail, x_row, x_head, y_row, y_head;  // strides, in elements
    int64_t element, threads;    // bytes of an element
};

}  // namespace

// Returns 1 if there is not enough memory.
extern "C" int kvcellar_heads(const void* call) {
    const Call& c = *static_cast<const Call*>(call);
    for (int64_t head = 0; head < c.heads; ++head) {
        const char* x = c.x + head * c.x_head * c.element;
        char* y = c.y + head * c.y_head * c.element;
        const LayerCall one{c.layers[head], x, y, c.rows, c.x_row, c.y_row, c.threads};
        if (c.linear(&one)) return 1;
        if (c.tail == 0) continue;
        for (int64_t row = 0; row < c.rows; ++row)
            std::memcpy(y + (row * c.y_row + c.out) * c.element, x + (row * c.x_row + c.in) * c.element,
                        size_t(c.tail * c.element));
    }
    return 0;
}
