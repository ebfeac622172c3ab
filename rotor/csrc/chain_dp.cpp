#include "chain_dp.hpp"

#include <algorithm>
#include <limits>
#include <new>
#include <numeric>
#include <stdexcept>
#include <unordered_map>
#include <utility>

// One build serves every processor of its family: the loader picks the widest vectors it has.
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__ELF__)
#define ROTOR_VECTOR_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define ROTOR_VECTOR_CLONES
#endif

#if defined(_MSC_VER)
#define ROTOR_RESTRICT __restrict
#else
#define ROTOR_RESTRICT __restrict__
#endif

namespace rotor {
namespace {

constexpr std::size_t kCacheLine = 64;  // bytes
constexpr std::uint64_t kLineFloats = kCacheLine / sizeof(float);

std::uint64_t padded_row(std::uint64_t entries) {
    std::uint64_t lines = (entries + kLineFloats - 1) / kLineFloats;
    if (lines > 0 && lines % 2 == 0) ++lines;
    return lines * kLineFloats;
}

// out[i] = min(out[i], next[i] + time)
ROTOR_VECTOR_CLONES
void take_option(float* ROTOR_RESTRICT out, const float* ROTOR_RESTRICT next, float time,
                 std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
        const float candidate = next[i] + time;
        out[i] = candidate < out[i] ? candidate : out[i];
    }
}

// out[i] = min(out[i], next[i] + then[i] + time)
ROTOR_VECTOR_CLONES
void take_split(float* ROTOR_RESTRICT out, const float* ROTOR_RESTRICT next,
                const float* ROTOR_RESTRICT then, float time, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
        const float candidate = (next[i] + then[i]) + time;
        out[i] = candidate < out[i] ? candidate : out[i];
    }
}

// out[i] = min(out[i], value)
ROTOR_VECTOR_CLONES
void take_constant(float* out, float value, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) out[i] = value < out[i] ? value : out[i];
}

// The same order of additions as above, so that a walk finds the minima that were stored.
float add_split(float next, float then, float time) { return (next + then) + time; }

struct PairHash {
    std::size_t operator()(const std::pair<std::int32_t, std::int32_t>& key) const {
        return static_cast<std::size_t>(
            static_cast<std::uint64_t>(static_cast<std::uint32_t>(key.first)) *
                0x9E3779B97F4A7C15ull ^
            static_cast<std::uint64_t>(static_cast<std::uint32_t>(key.second)) *
                0xC2B2AE3D27D4EB4Full);
    }
};

}  // namespace

ChainCells::ChainCells(std::vector<Stage> stages, std::int64_t unit_bytes, bool share)
    : stages_(std::move(stages)),
      unit_(unit_bytes),
      length_(static_cast<std::int32_t>(stages_.size())) {
    if (stages_.empty()) throw std::invalid_argument("a chain needs at least one stage");
    if (unit_ < 1) throw std::invalid_argument("a slot needs at least one byte");
    for (const Stage& stage : stages_)
        if (stage.options.empty()) throw std::invalid_argument("a stage needs at least one option");
    // Divisions are slow beside the rows they guard: the ones that repeat are done once.
    for (const Stage& stage : stages_) output_slots_.push_back(round_up(stage.output));
    name_cells(share);
    find_ranges();
}

void ChainCells::name_cells(bool share) {
    // Equal stages get equal types; a chain has few enough distinct ones for a plain search, and
    // measured stages, all distinct, differ in their first comparison.
    std::vector<std::int32_t> type(length_);
    std::vector<std::int32_t> first_of_type;
    for (std::int32_t k = 0; k < length_; ++k) {
        auto same = [&](std::int32_t other) { return stages_[other] == stages_[k]; };
        auto found = share ? std::find_if(first_of_type.begin(), first_of_type.end(), same)
                           : first_of_type.end();
        type[k] = static_cast<std::int32_t>(found - first_of_type.begin());
        if (found == first_of_type.end()) first_of_type.push_back(k);
    }

    // name(a, b) = unique(name(a, b - 1), type(b)); the stage that ends the chain is a type of its
    // own. Names run from the right end so that column b needs only column b - 1.
    cell_of_.resize(triangular(0, length_));
    std::unordered_map<std::pair<std::int32_t, std::int32_t>, std::int32_t, PairHash> names;
    for (std::int32_t b = 0; b < length_; ++b) {
        const std::int32_t end_type = b == length_ - 1 ? -2 - type[b] : type[b];
        for (std::int32_t a = b; a >= 0; --a) {
            const auto next = static_cast<std::int32_t>(place_of_.size());
            std::int32_t name = next;
            if (share) {
                const std::int32_t prefix = a == b ? -1 : cell(a, b - 1);
                name = names.emplace(std::make_pair(prefix, end_type), next).first->second;
            }
            if (name == next) place_of_.push_back({a, b});
            cell_of_[triangular(a, b)] = name;
        }
    }
}

template <typename Visit>
void ChainCells::for_each_choice(std::int32_t a, std::int32_t b, Visit visit) const {
    // No gradient exists while the chain's last stage has not run: see the reference.
    const std::int64_t held_grad = b < length_ - 1 ? stages_[b].output_grad : 0;
    const Stage& first = stages_[a];
    const std::int32_t rest = a < b ? cell(a + 1, b) : -1;
    for (std::size_t o = 0; o < first.options.size(); ++o) {
        const Option& option = first.options[o];
        Choice choice{};
        choice.held = round_up(option.saved);
        choice.least = round_up(std::max(option.saved + option.fwd_overhead + held_grad,
                                         option.saved + first.output_grad + option.bwd_overhead));
        if (rest >= 0) choice.least = std::max(choice.least, choice.held + floor_[rest]);
        choice.time = option.time;
        choice.split = -1;
        choice.option = static_cast<std::int32_t>(o);
        choice.next = rest;
        choice.then = -1;
        visit(choice);
    }
    std::int64_t peak = -1;
    std::int64_t peak_slots = 0;
    double time = 0;
    for (std::int32_t j = a + 1; j <= b; ++j) {
        const std::int32_t k = j - 1;
        const std::int64_t input = k > a ? stages_[k - 1].output : 0;
        if (input + stages_[k].forward_peak > peak) {
            peak = input + stages_[k].forward_peak;
            peak_slots = round_up(peak + held_grad);
        }
        time += stages_[k].forward_time;
        Choice choice{};
        choice.held = output_slots_[k];
        choice.next = cell(j, b);
        choice.then = cell(a, k);
        choice.least =
            std::max({peak_slots, choice.held + floor_[choice.next], floor_[choice.then]});
        choice.time = time;
        choice.split = j;
        choice.option = -1;
        visit(choice);
    }
}

void ChainCells::find_ranges() {
    floor_.resize(place_of_.size());
    top_.resize(place_of_.size());
    tight_time_.resize(place_of_.size());
    // Cells were named column by column, right to left: all parts of a cell come before it.
    for (std::size_t c = 0; c < place_of_.size(); ++c) {
        std::int64_t floor = std::numeric_limits<std::int64_t>::max();
        std::int64_t top = 0;
        double tight = std::numeric_limits<double>::infinity();
        for_each_choice(place_of_[c].a, place_of_[c].b, [&](const Choice& choice) {
            top = std::max(top, choice.least);
            if (choice.next >= 0) top = std::max(top, choice.held + top_[choice.next]);
            if (choice.then >= 0) top = std::max(top, top_[choice.then]);
            if (choice.least > floor) return;
            double time = choice.time;
            if (choice.next >= 0) time += tight_time_[choice.next];
            if (choice.then >= 0) time += tight_time_[choice.then];
            if (choice.least < floor || time < tight) tight = time;
            floor = choice.least;
        });
        floor_[c] = floor;
        top_[c] = top;
        tight_time_[c] = tight;
    }
}

template <typename Cost>
std::vector<Op> ChainCells::walk(std::int64_t m, Cost cost) const {
    if (m < smallest_slot()) throw std::invalid_argument("below the smallest feasible memory");
    struct Task {
        std::int32_t a, b;  // b < 0: the backward of stage a, with option -1 - b
        std::int64_t free;
    };
    std::vector<Op> ops;
    std::vector<Task> todo{{0, length_ - 1, m}};
    while (!todo.empty()) {
        const Task task = todo.back();
        todo.pop_back();
        if (task.b < 0) {
            ops.push_back({OpKind::kBackward, task.a, -1 - task.b});
            continue;
        }
        Choice best{};
        auto best_cost = std::numeric_limits<decltype(cost(best, m))>::infinity();
        bool found = false;
        for_each_choice(task.a, task.b, [&](const Choice& choice) {
            if (choice.least > task.free) return;
            const auto total = cost(choice, task.free);
            if (!found || total < best_cost) {
                best = choice;
                best_cost = total;
                found = true;
            }
        });
        if (best.split >= 0) {
            ops.push_back({OpKind::kForwardCheckpoint, task.a, -1});
            for (std::int32_t k = task.a + 1; k < best.split; ++k)
                ops.push_back({OpKind::kForwardNoGrad, k, -1});
            todo.push_back({task.a, best.split - 1, task.free});
            todo.push_back({best.split, task.b, task.free - best.held});
        } else {
            ops.push_back({OpKind::kForwardEnableGrad, task.a, best.option});
            todo.push_back({task.a, -1 - best.option, 0});
            if (task.a < task.b) todo.push_back({task.a + 1, task.b, task.free - best.held});
        }
    }
    return ops;
}

std::vector<Op> ChainCells::tight_ops(std::int64_t m) const {
    return walk(m, [this](const Choice& choice, std::int64_t) {
        double time = choice.time;
        if (choice.next >= 0) time += tight_time_[choice.next];
        if (choice.then >= 0) time += tight_time_[choice.then];
        return time;
    });
}

ChainTable::ChainTable(std::vector<Stage> stages, std::int64_t unit_bytes, std::int64_t slots,
                       bool share)
    : ChainCells(std::move(stages), unit_bytes, share), slots_(slots) {
    if (slots_ < 0) throw std::invalid_argument("a table needs at least zero slots");
    // Rows of equal a lie together: a cell (a, b) streams through all (a, j) with j < b, while the
    // (j, b) that it also reads stay in the cache from the cells computed just before.
    std::vector<std::int32_t> order(floor_.size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [this](std::int32_t left, std::int32_t right) {
        const Place &p = place_of_[left], &q = place_of_[right];
        return p.a != q.a ? p.a < q.a : p.b < q.b;
    });
    for (std::int64_t& top : top_) top = std::min(top, slots_);
    offset_.resize(floor_.size());
    for (const std::int32_t c : order) {
        offset_[c] = table_floats_;
        if (floor_[c] <= slots_)
            table_floats_ += padded_row(static_cast<std::uint64_t>(top_[c] - floor_[c] + 1));
    }
}

void ChainTable::Free::operator()(float* data) const {
    ::operator delete[](data, std::align_val_t(kCacheLine));
}

void ChainTable::fill() {
    if (table_) return;
    void* data = ::operator new[](table_bytes() > 0 ? table_bytes() : kCacheLine,
                                  std::align_val_t(kCacheLine));
    table_.reset(static_cast<float*>(data));
    for (std::int32_t c = 0; c < cell_count(); ++c)
        if (floor_[c] <= slots_) fill_cell(c);
}

void ChainTable::fill_cell(std::int32_t c) {
    float* out = row(c);
    const std::int64_t floor = floor_[c], top = top_[c];
    std::fill(out, out + (top - floor + 1), std::numeric_limits<float>::infinity());
    for_each_choice(place_of_[c].a, place_of_[c].b, [&](const Choice& choice) {
        if (choice.least > top) return;
        updates_ += static_cast<std::uint64_t>(top - choice.least + 1);
        const auto time = static_cast<float>(choice.time);
        // Above its top a row is constant. So the slots from `least` on fall into three pieces:
        // both parts vary, one of them does, none does.
        const bool has_next = choice.next >= 0, has_then = choice.then >= 0;
        const std::int64_t next_end = has_next ? choice.held + top_[choice.next] : -1;
        const std::int64_t then_end = has_then ? top_[choice.then] : -1;
        std::int64_t m = choice.least;
        if (has_next && has_then) {
            const std::int64_t end = std::min({next_end, then_end, top});
            if (end >= m) {
                take_split(out + (m - floor), entry(choice.next, m - choice.held),
                           entry(choice.then, m), time, end - m + 1);
                m = end + 1;
            }
        }
        if (has_next && m <= std::min(next_end, top)) {
            const float rest = has_then ? value(choice.then, m) + time : time;
            const std::int64_t end = std::min(next_end, top);
            take_option(out + (m - floor), entry(choice.next, m - choice.held), rest, end - m + 1);
            m = end + 1;
        } else if (has_then && m <= std::min(then_end, top)) {
            const float rest = value(choice.next, m - choice.held) + time;
            const std::int64_t end = std::min(then_end, top);
            take_option(out + (m - floor), entry(choice.then, m), rest, end - m + 1);
            m = end + 1;
        }
        if (m <= top) {
            float total = time;
            if (has_next) total += value(choice.next, m - choice.held);
            if (has_then) total += value(choice.then, m);
            take_constant(out + (m - floor), total, top - m + 1);
        }
    });
}

float ChainTable::makespan(std::int64_t m) const {
    if (!table_) throw std::logic_error("the table has not been filled");
    if (m > slots_) throw std::invalid_argument("above the table");
    return m < smallest_slot() ? std::numeric_limits<float>::infinity() : value(root(), m);
}

std::vector<Op> ChainTable::ops(std::int64_t m) const {
    if (!table_) throw std::logic_error("the table has not been filled");
    if (m > slots_) throw std::invalid_argument("above the table");
    return walk(m, [this](const Choice& choice, std::int64_t free) {
        const auto time = static_cast<float>(choice.time);
        if (choice.next < 0) return time;
        const float next = value(choice.next, free - choice.held);
        return choice.then < 0 ? next + time : add_split(next, value(choice.then, free), time);
    });
}

}  // namespace rotor
