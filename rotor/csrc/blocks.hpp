// The inner loops of the dynamic program: minima over blocks of kBlock consecutive table entries.
#pragma once

#include <cstdint>

namespace rotor {

constexpr std::int64_t kBlock = 32;  // entries

// A candidate for a block: from[i] + time for the entries i >= low, none below.
struct Shifted {
    const float* from;
    float time;
    std::int32_t low;
};

// Consecutive splits that are feasible from the same entry of the block on.
struct Run {
    std::int32_t low;
    std::int32_t count;
};

// All candidates for one block of one cell.
struct BlockWork {
    // Options of which every entry is feasible: rest[min(m - held[o], rest_end)] + times[o] on.
    const float* rest;
    std::int64_t m, rest_end;
    const std::int64_t* held;
    const float* times;
    std::int64_t steady;
    // All other options.
    const Shifted* shifted;
    std::int64_t shifted_count;
    // Splits: then[i] + next[i], a block of each for every split. The first `whole` of them are
    // feasible entirely, those of the runs that follow from the entry `low` of their run on.
    const float* then;
    const float* next;
    std::int64_t whole;
    const Run* runs;
    std::int64_t run_count;
};

// out[i] = the smallest candidate, or infinity; later[i] = out[i] + later_time.
void fill_block(float* out, float* later, float later_time, const BlockWork& work);

// out[i] = from[i] + time for i >= low, else infinity.
void copy_block(float* out, const Shifted& copied);

}  // namespace rotor
