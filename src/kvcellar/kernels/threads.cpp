// The threads of all kernels of this process: workers that take items of work from a counter, beside the caller.
//
// Always true:
//   * an item is computed once, by the caller or by a worker; `run` returns when none is being computed;
//   * an item does not throw (its type is noexcept), so the caller's frame outlives all calls of its items;
//   * nothing waits for a worker that has not begun an item: the caller computes what no worker has begun;
//   * one caller has the workers at a time; another one meanwhile computes all of its items itself, as does every caller
//     in a fork of the process, in which there are no workers;
//   * who waits longer than `SPIN` sleeps;
//   * on a machine with several memory nodes, each worker stays on one, and takes items of its node's share before others:
//     panels that a node has touched first (`kvcellar_threads_touch`) are mostly read there. Of n workers that may take
//     part these are the first n, which are spread over the nodes. With one node nothing is pinned.
//
// On a busy CPU a worker may be suspended in the middle of an item, for which the caller must wait, and one that waits for
// work takes time from others. So a worker that was suspended while it waited sleeps at once, and workers that cost more
// than they gain are not used for a while (`balance.h`).
#include <pthread.h>
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>

#include "balance.h"
#include "threads.h"

// What has happened so far.
struct Counts {
    int64_t shared;    // calls in which workers could take part: the caller waited for them at the end
    int64_t wakes;     // those at whose beginning a worker slept
    int64_t rests;     // times that workers were given up for a while
    int64_t workers;   // that were started
    int64_t sleeping;  // of them, now
};

namespace {

constexpr int64_t SPIN = 50'000;  // nanoseconds of waiting before sleeping
constexpr int64_t LATE = 25'000;  // between two looks at the clock of a thread that was suspended
constexpr int MOST = 255;         // workers
constexpr int64_t NODES = 16;     // of memory; CPUs of those behind them count as of the last
constexpr int64_t PAGE = 4096;    // bytes that are touched at once
constexpr size_t KINDS = 256;     // of calls that are told apart: by what is done, and on how many items

// The state of the workers in one number: the number of the current work, how many workers may take part in it (0: it is
// over), and how many do.
constexpr uint64_t INSIDE = 0xffff, ALLOWED = 0xffff0000, WORK = uint64_t(1) << 32;

int64_t now() {
    timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * int64_t(1'000'000'000) + at.tv_nsec;
}

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Waits for a short time. False: it was in vain, or the thread was suspended meanwhile.
template <class Ready>
bool spun(Ready ready) {
    for (int64_t since = now(), before = since, at; !ready(); before = at) {
        for (int i = 0; i < 32 && !ready(); ++i) pause();
        if ((at = now()) - since > SPIN || at - before > LATE) return ready();
    }
    return true;
}

// The items that a node has of the current work.
struct alignas(64) Share {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
};

// CPUs by memory node. Where the system has no calls for it, there is one node.
struct Places {
#if defined(__linux__)
    cpu_set_t cpus[NODES];
    int8_t of[CPU_SETSIZE] = {};

    int64_t here() const {
        const int cpu = sched_getcpu();
        return cpu < 0 || cpu >= CPU_SETSIZE ? 0 : of[cpu];
    }
    static void stay(const cpu_set_t& where) { sched_setaffinity(0, sizeof where, &where); }
#else
    int64_t here() const { return 0; }
#endif
};

thread_local int64_t worker_node = -1;  // of a worker that stays on one

// As std::condition_variable, which asks for the libstdc++ of GCC 12 where that compiles it.
struct Condition {
    pthread_cond_t under = PTHREAD_COND_INITIALIZER;

    template <class Done>
    void wait(std::unique_lock<std::mutex>& held, const Done& done) {
        while (!done()) pthread_cond_wait(&under, held.mutex()->native_handle());
    }
    void notify_one() { pthread_cond_signal(&under); }
    void notify_all() { pthread_cond_broadcast(&under); }
};

struct Pool : Threads {
    alignas(64) std::atomic<uint64_t> gate{0};
    Share shares[NODES];
    // Of the current work; they change only while no worker is inside.
    alignas(64) int64_t items = 0;
    Places places;
    void (*work)(void*, int64_t) noexcept = nullptr;
    void* what = nullptr;

    std::atomic<bool> taken{false}, forked{false};
    Balance balance;  // the caller's that has `taken`, as is `kinds`
    Alone kinds[KINDS];
    std::mutex lock;
    Condition awake, left;
    std::atomic<bool> waited_for{false};  // the caller sleeps until no worker is inside
    std::atomic<int64_t> shared{0}, wakes{0}, rests{0}, workers{0}, sleeping{0};  // `Counts`

    void items_left() {
        const int64_t here = nodes < 2 ? 0 : worker_node >= 0 ? worker_node : places.here();
        for (int64_t i = 0; i < nodes; ++i) {
            Share& of = shares[(here + i) % nodes];
            for (int64_t item = of.next++; item < of.end; item = of.next++) work(what, item);
        }
    }

    void divide() {
        for (int64_t node = 0; node < nodes; ++node)
            shares[node].next = items * node / nodes, shares[node].end = items * (node + 1) / nodes;
    }

    bool opened_since(uint64_t seen) const { return (gate.load() ^ seen) / WORK != 0; }

    void worker(int64_t index, int64_t node) {
        uint64_t seen = 0;
#if defined(__linux__)
        if (nodes > 1) Places::stay(places.cpus[worker_node = node]);
#endif
        for (;;) {
            if (!spun([&] { return opened_since(seen); })) {
                std::unique_lock<std::mutex> held(lock);
                ++sleeping;
                awake.wait(held, [&] { return opened_since(seen); });
                --sleeping;
            }
            uint64_t at = gate.load();
            while ((at & INSIDE) < (at & ALLOWED) >> 16 && (nodes < 2 || index < int64_t((at & ALLOWED) >> 16)))
                if (gate.compare_exchange_weak(at, at + 1)) {
                    items_left();
                    leave();
                    break;
                }
            seen = at;
        }
    }

    void leave() {
        if ((--gate & INSIDE) || !waited_for) return;
        std::lock_guard<std::mutex> held(lock);
        left.notify_one();
    }

    // Start workers, as far as the system lets us.
    void reach(int64_t wanted) {
        for (const int64_t here = places.here(); workers < wanted; ++workers) {
            try {
                std::thread([this, i = workers.load(), here] { worker(i, (here + 1 + i) % nodes); }).detach();
            } catch (const std::exception&) {
                return;
            }
        }
    }

    void compute(int64_t others) {
        const uint64_t kind = (reinterpret_cast<uintptr_t>(work) + uint64_t(items)) * 0x9e3779b97f4a7c15;
        Alone& alone = kinds[kind >> 56];
        alone.of(kind);
        divide();
        const int64_t began = now();
        if (balance.rests(began) || alone.next(others + 1)) {
            items_left();
            alone.took(now() - began);
            return;
        }
        with_workers(others);
        const int64_t done = now();
        rests += balance.add(done, alone.gain(done - began));
    }

    void with_workers(int64_t others) {
        ++shared;
        gate = (gate / WORK + 1) * WORK + (uint64_t(others) << 16);
        if (sleeping) {
            ++wakes;
            std::lock_guard<std::mutex> held(lock);
            awake.notify_all();
        }
        items_left();
        gate &= ~ALLOWED;  // from now on no worker begins
        const auto none = [&] { return !(gate & INSIDE); };
        if (spun(none)) return;
        std::unique_lock<std::mutex> held(lock);
        waited_for = true;
        left.wait(held, none);
        waited_for = false;
    }
};

Pool* pool;  // never deleted: its workers end with the process

void run(Threads*, int64_t threads, int64_t items, void (*work)(void*, int64_t) noexcept, void* what) {
    const int64_t others = std::min<int64_t>({threads - 1, items - 1, MOST});
    if (others < 1 || pool->forked || pool->taken.exchange(true)) {
        for (int64_t item = 0; item < items; ++item) work(what, item);
        return;
    }
    pool->items = items, pool->work = work, pool->what = what;
    pool->reach(others);
    pool->compute(std::min<int64_t>(others, pool->workers));
    pool->taken = false;
}

}  // namespace

extern "C" Threads* kvcellar_threads() {
    static Pool* const made = [] {
        pool = new Pool;
        pool->run = run, pool->nodes = 1;
        pthread_atfork(nullptr, nullptr, [] { pool->forked = true; });
        return pool;
    }();
    return made;
}

// The memory node of each CPU, or -1 for one that is not used. It counts if no worker was started before; what is the
// same as before is not written, as kernels of one thread may be reading it.
extern "C" void kvcellar_threads_nodes(const int64_t* of_cpus, int64_t cpus) {
#if defined(__linux__)
    if (pool->workers || pool->taken.exchange(true)) return;
    Places found;
    int64_t nodes = 1;
    for (cpu_set_t& one : found.cpus) CPU_ZERO(&one);
    for (int64_t cpu = 0; cpu < std::min<int64_t>(cpus, CPU_SETSIZE); ++cpu) {
        if (of_cpus[cpu] < 0) continue;
        const int64_t node = std::min(of_cpus[cpu], NODES - 1);
        CPU_SET(cpu, &found.cpus[node]);
        found.of[cpu] = int8_t(node);
        nodes = std::max(nodes, node + 1);
    }
    pool->places = found;
    if (nodes != pool->nodes) pool->nodes = nodes;
    pool->taken = false;
#endif
}

// Writes zeros to memory that nothing has written yet, each node's share of it on that node, which has its pages then.
// With one node it does nothing.
extern "C" void kvcellar_threads_touch(char* at, int64_t bytes) {
#if defined(__linux__)
    cpu_set_t before;
    if (pool->nodes < 2 || sched_getaffinity(0, sizeof before, &before)) return;
    for (int64_t node = 0; node < pool->nodes; ++node) {
        Places::stay(pool->places.cpus[node]);
        const int64_t end = bytes * (node + 1) / pool->nodes;
        for (int64_t byte = bytes * node / pool->nodes; byte < end; byte += PAGE) *static_cast<volatile char*>(at + byte) = 0;
    }
    Places::stay(before);
#endif
}

extern "C" void kvcellar_threads_counts(Counts* counts) {
    *counts = {pool->shared, pool->wakes, pool->rests, pool->workers, pool->sleeping};
}
