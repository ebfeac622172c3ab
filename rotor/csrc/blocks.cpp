#include "blocks.hpp"

#include <algorithm>
#include <limits>
#include <utility>

// One build serves every processor of its family: the widest vectors it has are picked when it
// runs.
#if defined(__GNUC__) && defined(__x86_64__)
#define ROTOR_HAS_AVX2_BUILD
#endif
#if defined(__GNUC__)
#define ROTOR_INLINE inline __attribute__((always_inline))
#else
#define ROTOR_INLINE inline
#endif

namespace rotor {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Added from at + kBlock - low on, it makes the first `low` entries of a block infinite. What lies
// before a row may be anything: where the sum is no number, no comparison keeps it.
struct Ramp {
    float at[2 * kBlock];
    constexpr Ramp() : at() {
        for (int i = 0; i < kBlock; ++i) at[i] = kInfinity;
    }
};
constexpr Ramp kRamp;

// A vector of a few floats. Compilers do not keep an array of floats in registers across a loop by
// themselves; where there are no vector types the same is written with arrays, and is slower.
template <int kBytes>
struct Lanes {
    static constexpr int kCount = kBytes / 4;
#if defined(__GNUC__) && !defined(ROTOR_PLAIN_LANES)
    typedef float Floats __attribute__((vector_size(kBytes), aligned(4), may_alias));
    Floats lane;
    // A sum, since a list of equal floats is put together one by one.
    ROTOR_INLINE void set(float value) { lane = Floats{} + value; }
    ROTOR_INLINE void load(const float* from) { lane = *reinterpret_cast<const Floats*>(from); }
    ROTOR_INLINE void add(float value) { lane += value; }
    ROTOR_INLINE void add(const float* from) { lane += *reinterpret_cast<const Floats*>(from); }
    ROTOR_INLINE void keep_smaller(const Lanes& other) {
        lane = other.lane < lane ? other.lane : lane;
    }
    ROTOR_INLINE void store(float* out) const { *reinterpret_cast<Floats*>(out) = lane; }
#else
    float lane[kCount];
    void set(float value) {
        for (float& x : lane) x = value;
    }
    void load(const float* from) {
        for (int i = 0; i < kCount; ++i) lane[i] = from[i];
    }
    void add(float value) {
        for (float& x : lane) x += value;
    }
    void add(const float* from) {
        for (int i = 0; i < kCount; ++i) lane[i] += from[i];
    }
    void keep_smaller(const Lanes& other) {
        for (int i = 0; i < kCount; ++i)
            lane[i] = other.lane[i] < lane[i] ? other.lane[i] : lane[i];
    }
    void store(float* out) const {
        for (int i = 0; i < kCount; ++i) out[i] = lane[i];
    }
#endif
};

// kBlock floats. Folds, not loops: the vectors must be registers before loops are unrolled.
template <typename L, typename Index = std::make_index_sequence<kBlock / L::kCount>>
struct Block;
template <typename L, std::size_t... i>
struct Block<L, std::index_sequence<i...>> {
    L v[sizeof...(i)];
    ROTOR_INLINE void set(float value) { (v[i].set(value), ...); }
    ROTOR_INLINE void load(const float* from) { (v[i].load(from + i * L::kCount), ...); }
    ROTOR_INLINE void add(float value) { (v[i].add(value), ...); }
    ROTOR_INLINE void add(const float* from) { (v[i].add(from + i * L::kCount), ...); }
    ROTOR_INLINE void keep_smaller(const Block& other) { (v[i].keep_smaller(other.v[i]), ...); }
    ROTOR_INLINE void drop_below(std::int32_t low) { add(kRamp.at + kBlock - low); }
    ROTOR_INLINE void store(float* out) const { (v[i].store(out + i * L::kCount), ...); }
};

// Takes the next `count` splits into the minimum.
template <typename L>
ROTOR_INLINE void keep_splits(Block<L>& least, const float*& then, const float*& next,
                              std::int64_t count) {
    Block<L> candidate;
    for (std::int64_t s = 0; s < count; ++s, then += kBlock, next += kBlock) {
        candidate.load(then);
        candidate.add(next);
        least.keep_smaller(candidate);
    }
}

template <typename L>
ROTOR_INLINE void fill_with(float* out, float* later, float later_time, const BlockWork& work) {
    Block<L> least, candidate;
    least.set(kInfinity);
    for (std::int64_t o = 0; o < work.steady; ++o) {
        candidate.load(work.rest + std::min(work.m - work.held[o], work.rest_end));
        candidate.add(work.times[o]);
        least.keep_smaller(candidate);
    }
    for (std::int64_t o = 0; o < work.shifted_count; ++o) {
        candidate.load(work.shifted[o].from);
        candidate.add(work.shifted[o].time);
        candidate.drop_below(work.shifted[o].low);
        least.keep_smaller(candidate);
    }
    const float *then = work.then, *next = work.next;
    keep_splits(least, then, next, work.whole);
    for (std::int64_t r = 0; r < work.run_count; ++r) {
        Block<L> of_run;
        of_run.set(kInfinity);
        keep_splits(of_run, then, next, work.runs[r].count);
        of_run.drop_below(work.runs[r].low);
        least.keep_smaller(of_run);
    }
    least.store(out);
    least.add(later_time);
    least.store(later);
}

template <typename L>
ROTOR_INLINE void copy_with(float* out, const Shifted& copied) {
    Block<L> block;
    block.load(copied.from);
    block.add(copied.time);
    if (copied.low > 0) block.drop_below(copied.low);
    block.store(out);
}

#if defined(ROTOR_HAS_AVX2_BUILD)
__attribute__((target("avx2"))) void fill_avx2(float* out, float* later, float later_time,
                                               const BlockWork& work) {
    fill_with<Lanes<32>>(out, later, later_time, work);
}
__attribute__((target("avx2"))) void copy_avx2(float* out, const Shifted& copied) {
    copy_with<Lanes<32>>(out, copied);
}
const bool kHasAvx2 = __builtin_cpu_supports("avx2");
#endif

}  // namespace

void fill_block(float* out, float* later, float later_time, const BlockWork& work) {
#if defined(ROTOR_HAS_AVX2_BUILD)
    if (kHasAvx2) return fill_avx2(out, later, later_time, work);
#endif
    fill_with<Lanes<16>>(out, later, later_time, work);
}

void copy_block(float* out, const Shifted& copied) {
#if defined(ROTOR_HAS_AVX2_BUILD)
    if (kHasAvx2) return copy_avx2(out, copied);
#endif
    copy_with<Lanes<16>>(out, copied);
}

}  // namespace rotor
