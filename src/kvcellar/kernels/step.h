// What all layers of a group share in a step. `memory/attention/cpu.py` fills it for each step, always at the same address.
#pragma once
#include <cstdint>

struct Step {
    const int64_t* segments;  // [S,4]: first row in `rows` and how many, first run in `runs` and how many
    const int64_t* rows;      // [R,3]: row of the step, the keys [low,high) that it sees; neither ever falls in a segment
    const int64_t* runs;      // [.,2]: first key and cell of each run; behind a segment's last run, its end
    const int64_t* storing;   // [t]: rows of the step that are stored
    const int64_t* cells;     // [t]: where
    int64_t n_segments, n_storing;
};
