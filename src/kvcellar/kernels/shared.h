// What a kernel and its module in Python must both have: `compiled.py` compares them when the kernel is loaded.
#pragma once
#include <cstddef>
#include <cstdint>

struct Shared {
    const char* name;
    int64_t offset, size;  // of a field of a structure; of a constant, its value and 0
};

// A field of `Call`, the structure of the kernel that includes this.
#define FIELD(name) {#name, offsetof(Call, name), sizeof(Call::name)}
