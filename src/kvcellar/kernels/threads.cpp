// The threads of all kernels of this process: workers that take items of work from a counter, beside the caller.
//
// Always true:
//   * an item is computed once, by the caller or by a worker; `run` returns when none is being computed;
//   * an item does not throw (its type is noexcept), so the caller's frame outlives all calls of its items;
//   * nothing waits for a worker that has not begun an item: the caller computes what no worker has begun;
//   * one caller has the workers at a time; another one meanwhile computes all of its items itself, as does every caller
//     in a fork of the process, in which there are no workers;
//   * who waits longer than `SPIN` sleeps.
//
// On a busy CPU a worker may be suspended in the middle of an item, for which the caller must wait, and one that waits for
// work takes time from others. So a worker that was suspended while it waited sleeps at once, and workers that cost more
// than they gain are not used for a while (`balance.h`).
#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
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

struct Pool : Threads {
    alignas(64) std::atomic<uint64_t> gate{0};
    alignas(64) std::atomic<int64_t> next{0};
    // Of the current work; they change only while no worker is inside.
    alignas(64) int64_t items = 0;
    void (*work)(void*, int64_t) noexcept = nullptr;
    void* what = nullptr;

    std::atomic<bool> taken{false}, forked{false};
    Balance balance;  // the caller's that has `taken`, as is `kinds`
    Alone kinds[KINDS];
    std::mutex lock;
    std::condition_variable awake, left;
    std::atomic<bool> waited_for{false};  // the caller sleeps until no worker is inside
    std::atomic<int64_t> shared{0}, wakes{0}, rests{0}, workers{0}, sleeping{0};  // `Counts`

    void items_left() {
        for (int64_t item = next++; item < items; item = next++) work(what, item);
    }

    bool opened_since(uint64_t seen) const { return (gate.load() ^ seen) / WORK != 0; }

    void worker() {
        uint64_t seen = 0;
        for (;;) {
            if (!spun([&] { return opened_since(seen); })) {
                std::unique_lock<std::mutex> held(lock);
                ++sleeping;
                awake.wait(held, [&] { return opened_since(seen); });
                --sleeping;
            }
            uint64_t at = gate.load();
            while ((at & INSIDE) < (at & ALLOWED) >> 16)
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
        for (; workers < wanted; ++workers) {
            try {
                std::thread([this] { worker(); }).detach();
            } catch (const std::exception&) {
                return;
            }
        }
    }

    void compute(int64_t others) {
        const uint64_t kind = (reinterpret_cast<uintptr_t>(work) + uint64_t(items)) * 0x9e3779b97f4a7c15;
        Alone& alone = kinds[kind >> 56];
        alone.of(kind);
        next = 0;
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
        pool->run = run;
        pthread_atfork(nullptr, nullptr, [] { pool->forked = true; });
        return pool;
    }();
    return made;
}

extern "C" void kvcellar_threads_counts(Counts* counts) {
    *counts = {pool->shared, pool->wakes, pool->rests, pool->workers, pool->sleeping};
}
