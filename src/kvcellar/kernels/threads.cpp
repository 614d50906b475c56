// The threads of all kernels of this process: workers that take items of work from a counter, beside the caller.
//
// Always true:
//   * an item is computed once, by the caller or by a worker; `run` returns when none is being computed;
//   * an item does not throw (its type is noexcept), so the caller's frame outlives all calls of its items;
//   * nothing waits for a worker that has not begun an item: the caller computes what no worker has begun;
//   * one caller has the workers at a time; another one meanwhile computes all of its items itself, as does every caller
//     in a fork of the process, in which there are no workers.
//
// A worker on a busy CPU may be suspended in the middle of an item, for which the caller must wait. After such a wait the
// workers are not used for a multiple of its duration, so that they cost little where they gain nothing.
#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>

#include "threads.h"

namespace {

constexpr int64_t SPIN = 50'000;      // nanoseconds that a worker waits for work before it sleeps
constexpr int64_t STALL = 100'000;    // nanoseconds beyond the duration of an item, from which on waiting is a stall
constexpr int64_t REST = 50;          // times the duration of a stall in which workers are not used
constexpr int64_t LONGEST = 1 << 30;  // nanoseconds, of that
constexpr int MOST = 255;             // workers

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

struct Pool : Threads {
    alignas(64) std::atomic<uint64_t> gate{0};
    alignas(64) std::atomic<int64_t> next{0};
    // Of the current work; they change only while no worker is inside.
    alignas(64) int64_t items = 0;
    void (*work)(void*, int64_t) noexcept = nullptr;
    void* what = nullptr;

    std::atomic<bool> taken{false}, forked{false};
    int64_t idle_until = 0;  // until when workers are not used; the caller's that has `taken`, as is `workers`
    int workers = 0;
    std::mutex lock;
    std::condition_variable awake;
    std::atomic<int> sleeping{0};

    void items_left() {
        for (int64_t item = next++; item < items; item = next++) work(what, item);
    }

    bool opened_since(uint64_t seen) const { return (gate.load() ^ seen) / WORK != 0; }

    void worker() {
        uint64_t seen = 0;
        for (;;) {
            for (int64_t since = now(); !opened_since(seen) && now() - since < SPIN;)
                for (int i = 0; i < 32 && !opened_since(seen); ++i) pause();
            if (!opened_since(seen)) {
                std::unique_lock<std::mutex> held(lock);
                ++sleeping;
                awake.wait(held, [&] { return opened_since(seen); });
                --sleeping;
            }
            uint64_t at = gate.load();
            while ((at & INSIDE) < (at & ALLOWED) >> 16)
                if (gate.compare_exchange_weak(at, at + 1)) {
                    items_left();
                    --gate;
                    break;
                }
            seen = at;
        }
    }

    // Start workers, as far as the system lets us.
    void reach(int wanted) {
        for (; workers < wanted; ++workers) {
            try {
                std::thread([this] { worker(); }).detach();
            } catch (const std::exception&) {
                return;
            }
        }
    }

    void with_workers(int others) {
        next = 0;
        const int64_t began = now();
        if (began < idle_until) return items_left();
        gate = (gate / WORK + 1) * WORK + (uint64_t(others) << 16);
        if (sleeping) {
            std::lock_guard<std::mutex> held(lock);
            awake.notify_all();
        }
        int64_t own = 0;
        for (int64_t item = next++; item < items; item = next++, ++own) work(what, item);
        gate &= ~ALLOWED;  // from now on no worker begins
        if (!(gate & INSIDE)) return;
        const int64_t waits = now();
        for (int i = 0; gate & INSIDE; ++i) {
            pause();
            if (i % 1024 == 1023) std::this_thread::yield();  // to a worker that this CPU could run
        }
        const int64_t waited = now() - waits;
        if (waited > STALL + 4 * (waits - began) / (own + 1)) idle_until = waits + std::min(LONGEST, REST * waited);
    }
};

Pool* pool;  // never deleted: its workers end with the process

void run(Threads*, int64_t threads, int64_t items, void (*work)(void*, int64_t) noexcept, void* what) {
    const int others = int(std::min<int64_t>({threads - 1, items - 1, MOST}));
    if (others < 1 || pool->forked || pool->taken.exchange(true)) {
        for (int64_t item = 0; item < items; ++item) work(what, item);
        return;
    }
    pool->items = items, pool->work = work, pool->what = what;
    pool->reach(others);
    pool->with_workers(std::min(others, pool->workers));
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
