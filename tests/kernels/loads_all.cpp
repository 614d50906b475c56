// Loads every library that is named, and computes linear layers with those of linear.cpp and threads.cpp, on two threads:
// returns 0 where each output is the sum of products, in double, within the rounding of its type.
#include <dlfcn.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "layers.h"

namespace {

using Pack = void(const void*, void*, int64_t, int64_t, int64_t, int64_t, Threads*, int64_t);

constexpr int64_t ROWS = 7, IN = 37, OUT = 130, PANELS = 3 * 64;

float value(int64_t i) { return float((i * 7919 + 13) % 257 - 128) / 64; }

uint16_t bfloat16(float x) {  // exact for what `value` returns
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return uint16_t(bits >> 16);
}

float widened(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}

template <class T>
bool right(Pack* pack, int (*linear)(const void*), Threads* threads, int64_t type, T (*made)(float), float (*read)(T),
           double within) {
    std::vector<T> w(OUT * IN), x(ROWS * IN), y(ROWS * OUT), panels(PANELS * (IN + 1));
    for (size_t i = 0; i < w.size(); ++i) w[i] = made(value(int64_t(i)));
    for (size_t i = 0; i < x.size(); ++i) x[i] = made(value(int64_t(3 * i + 1)));
    pack(w.data(), panels.data(), OUT, IN, IN, type, threads, 2);
    const Part part{panels.data(), nullptr, nullptr, nullptr, nullptr, OUT, 0, 0, 0, 0};
    const Layer layer{&part, nullptr, threads, 1, IN, type, 0};
    const LayerCall call{&layer, x.data(), y.data(), ROWS, IN, OUT, 2};
    if (linear(&call)) return false;
    for (int64_t r = 0; r < ROWS; ++r)
        for (int64_t o = 0; o < OUT; ++o) {
            double sum = 0;
            for (int64_t k = 0; k < IN; ++k) sum += double(read(w[o * IN + k])) * read(x[r * IN + k]);
            if (!(std::fabs(read(y[r * OUT + o]) - sum) <= within * (1 + std::fabs(sum)))) return false;
        }
    return true;
}

}  // namespace

int main(int count, char** paths) {
    void *linear = nullptr, *threads = nullptr;
    for (int i = 1; i < count; ++i) {
        void* found = dlopen(paths[i], RTLD_NOW);
        if (!found) return std::puts(dlerror()), 1;
        if (std::strstr(paths[i], "/linear")) linear = found;
        if (std::strstr(paths[i], "/threads")) threads = found;
    }
    const auto pack = reinterpret_cast<Pack*>(dlsym(linear, "kvcellar_pack"));
    const auto run = reinterpret_cast<int (*)(const void*)>(dlsym(linear, "kvcellar_linear"));
    Threads* const pool = reinterpret_cast<Threads* (*)()>(dlsym(threads, "kvcellar_threads"))();
    const bool floats = right<float>(pack, run, pool, FLOAT32, [](float x) { return x; }, [](float x) { return x; }, 1e-5);
    const bool halves = right<uint16_t>(pack, run, pool, BFLOAT16, bfloat16, widened, 1e-2);
    return std::printf("float32 %s, bfloat16 %s\n", floats ? "right" : "wrong", halves ? "right" : "wrong"), !(floats && halves);
}
