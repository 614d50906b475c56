// Work of a kernel, divided among threads. The threads are in `threads.cpp`, a library of its own, so that all kernels
// of a process share them; a kernel gets a pointer in its `Call`, which is null for one thread.
#pragma once
#include <cstdint>
#include <type_traits>

struct Threads {
    // Calls work(what, item) once for each item of [0,items), on the calling thread and on up to threads - 1 others, and
    // returns when all calls have returned. Items are started in order, on a machine with several memory nodes those of
    // each node: node k of n begins with item items * k / n. `work` must not call `run`, and must not throw: an item
    // that may run out of memory records that it did, or uses memory that was allocated before the first item.
    void (*run)(Threads*, int64_t threads, int64_t items, void (*work)(void* what, int64_t item) noexcept, void* what);
    int64_t nodes;  // of memory, among which items are divided
};

// Calls work(item), which is noexcept, for each item of [0,items), on up to `count` threads.
template <class Work>
inline void for_each_item(Threads* threads, int64_t count, int64_t items, Work&& work) {
    static_assert(noexcept(work(int64_t())), "an exception cannot leave a thread of the pool");
    if (threads && count > 1 && items > 1) {
        const auto one = [](void* what, int64_t item) noexcept { (*static_cast<std::remove_reference_t<Work>*>(what))(item); };
        threads->run(threads, count, items, one, &work);
    } else {
        for (int64_t item = 0; item < items; ++item) work(item);
    }
}
