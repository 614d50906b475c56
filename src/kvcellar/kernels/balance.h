// Whether workers are used beside a caller: by what calls took with them and without them, in nanoseconds. No other measure
// tells: where other processes want the cores, workers wait for a turn, and so does a caller alone.
//
// Always true: what workers cost altogether is at most what they gained, one part in `REST` of the time that passed, and
// `CREDIT` with the loss of one call. So threads are never much slower than one, whatever else runs here.
#pragma once
#include <algorithm>
#include <cstdint>

class Balance {
public:
    static constexpr int64_t CREDIT = 30'000'000;    // that workers may cost before they are given up: several turns of
                                                     // other processes on a core
    static constexpr int64_t REST = 30;              // times what they cost: how long they are not used then
    static constexpr int64_t LONGEST = 10 * CREDIT;  // of what they cost: a machine may be suspended in a call

    bool rests(int64_t now) const { return now < until; }

    // Workers have gained so much, or cost it if it is negative, in a call that ends now. Whether they rest from now on.
    bool add(int64_t now, int64_t gain) {
        credit = std::min(CREDIT, credit + gain);
        if (credit >= 0) return false;
        until = now + REST * std::min(LONGEST, CREDIT - credit);
        credit = CREDIT;
        return true;
    }

private:
    int64_t credit = CREDIT, until = 0;
};

// How long calls of one kind take without workers.
class Alone {
public:
    static constexpr int64_t SOME = 64;  // of so many calls, times threads, one has no workers, to measure it

    // From now on of this kind.
    void of(uint64_t now) {
        if (now != kind) *this = Alone();
        kind = now;
    }

    // Whether the next call is measured.
    bool next(int64_t threads) { return ++calls % (SOME * threads) == SOME / 2; }

    void took(int64_t nanoseconds) {
        mean += mean ? (nanoseconds - mean) / 16 : nanoseconds;
    }

    // What workers gained in a call that took so long; 0 where that is not known.
    int64_t gain(int64_t nanoseconds) const { return mean ? mean - nanoseconds : 0; }

private:
    uint64_t kind = 0;
    int64_t calls = 0, mean = 0;
};
