#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "chain_dp.hpp"

namespace rotor {
namespace {

struct PairHash {
    std::size_t operator()(const std::pair<std::int32_t, std::int32_t>& key) const {
        return static_cast<std::size_t>(
            static_cast<std::uint64_t>(static_cast<std::uint32_t>(key.first)) *
                0x9E3779B97F4A7C15ull ^
            static_cast<std::uint64_t>(static_cast<std::uint32_t>(key.second)) *
                0xC2B2AE3D27D4EB4Full);
    }
};

// Sums of sizes and whole slots, of any part of a chain, stay far below 2^63.
constexpr std::int64_t kMost = std::int64_t{1} << 53;

// Throws std::invalid_argument unless all sizes of a chain together are within the bound.
void refuse_overflow(const std::vector<Stage>& stages) {
    std::int64_t total = 0;
    const auto add = [&total](std::int64_t bytes) {
        if (bytes < 0 || bytes > kMost - total)
            throw std::invalid_argument("the sizes of a chain add up to more than 2^53 bytes");
        total += bytes;
    };
    for (const Stage& stage : stages) {
        add(stage.output);
        add(stage.output_grad);
        add(stage.forward_peak);
        for (const Option& option : stage.options) {
            add(option.saved);
            add(option.fwd_overhead);
            add(option.bwd_overhead);
        }
    }
}

}  // namespace

ChainCells::ChainCells(std::vector<Stage> stages, std::int64_t unit_bytes, bool share)
    : stages_(std::move(stages)),
      unit_(unit_bytes),
      length_(static_cast<std::int32_t>(stages_.size())) {
    if (stages_.empty()) throw std::invalid_argument("a chain needs at least one stage");
    if (unit_ < 1) throw std::invalid_argument("a slot needs at least one byte");
    if (unit_ > kMost) throw std::invalid_argument("a slot has at most 2^53 bytes");
    refuse_overflow(stages_);
    for (const Stage& stage : stages_)
        if (stage.options.empty()) throw std::invalid_argument("a stage needs at least one option");
    // Divisions are slow beside the blocks they guard: the ones that repeat are done once.
    for (const Stage& stage : stages_) {
        output_slots_.push_back(round_up(stage.output));
        first_way_.push_back(held_.size());
        double fastest = std::numeric_limits<double>::infinity();
        for (const Option& option : stage.options) {
            held_.push_back(round_up(option.saved));
            least_.push_back(round_up(option.saved + stage.output_grad + option.bwd_overhead));
            forward_bytes_.push_back(option.saved + option.fwd_overhead);
            time_.push_back(static_cast<float>(option.time));
            fastest = std::min(fastest, option.time);
        }
        fastest_until_.push_back(fastest_until_.back() + fastest);
        add_useful();
    }
    first_useful_.push_back(useful_held_.size());
    first_way_.push_back(held_.size());
    name_cells(share);
    find_ranges();
}

void ChainCells::add_useful() {
    first_useful_.push_back(useful_held_.size());
    std::vector<std::size_t> order(held_.size() - first_way_.back());
    std::iota(order.begin(), order.end(), first_way_.back());
    std::sort(order.begin(), order.end(), [this](std::size_t left, std::size_t right) {
        return std::make_pair(held_[left], time_[left]) <
               std::make_pair(held_[right], time_[right]);
    });
    float fastest = std::numeric_limits<float>::infinity();
    for (const std::size_t option : order) {
        if (time_[option] >= fastest) continue;
        fastest = time_[option];
        useful_held_.push_back(held_[option]);
        useful_time_.push_back(fastest);
    }
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

    share = first_of_type.size() < stages_.size();

    // name(a, b) = unique(name(a, b - 1), type(b)); the stage that ends the chain is a type of its
    // own. Rows are named from the last to the first, so that the parts of a cell, and the places
    // that their names come from, are named before it.
    cell_of_.resize(triangular(0, length_));
    std::unordered_map<std::pair<std::int32_t, std::int32_t>, std::int32_t, PairHash> names;
    for (std::int32_t a = length_ - 1; a >= 0; --a) {
        std::int32_t prefix = -1;
        for (std::int32_t b = a; b < length_; ++b) {
            const auto next = static_cast<std::int32_t>(place_of_.size());
            std::int32_t name = next;
            if (share) {
                const std::int32_t end_type = b == length_ - 1 ? -2 - type[b] : type[b];
                name = names.emplace(std::make_pair(prefix, end_type), next).first->second;
            }
            if (name == next) place_of_.push_back({a, b});
            cell_of_[triangular(a, b)] = prefix = name;
        }
    }
}

void ChainCells::begin_splits(std::int32_t a, Splits& splits) const {
    splits.peak.resize(length_ + 1);
    splits.time.resize(length_ + 1);
    splits.rises.clear();
    std::int64_t peak = -1;
    double time = 0;
    for (std::int32_t j = a + 1; j < length_; ++j) {
        const std::int32_t k = j - 1;
        const std::int64_t here = (k > a ? stages_[k - 1].output : 0) + stages_[k].forward_peak;
        if (here > peak) {
            peak = here;
            splits.rises.push_back(j);
        }
        time += stages_[k].forward_time;
        splits.peak[j] = peak;
        splits.time[j] = time;
    }
}

template <typename Visit>
void ChainCells::for_each_choice(std::int32_t a, std::int32_t b, Visit visit) const {
    const std::int64_t held_grad = grad_held(b);
    const std::int32_t rest = a < b ? cell(a + 1, b) : -1;
    for (std::size_t o = 0; o < stages_[a].options.size(); ++o) {
        Choice choice{};
        choice.held = held_[first_way_[a] + o];
        choice.least = least_with(a, o, held_grad);
        if (rest >= 0) choice.least = std::max(choice.least, choice.held + cells_[rest].floor);
        choice.time = stages_[a].options[o].time;
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
        choice.least = std::max(
            {peak_slots, choice.held + cells_[choice.next].floor, cells_[choice.then].floor});
        choice.time = time;
        choice.split = j;
        choice.option = -1;
        visit(choice);
    }
}

void ChainCells::find_ranges() {
    // What a split needs to know of its two parts, where the loop over splits finds it in a row.
    struct Part {
        std::int64_t floor;
        double tight_time;
    };
    std::vector<Part> by_end(cell_of_.size()), of_row(length_);
    Splits splits;
    cells_.reserve(place_of_.size());
    for (std::int32_t a = length_ - 1; a >= 0; --a) {
        begin_splits(a, splits);
        for (std::int32_t b = a; b < length_; ++b) {
            const std::int32_t c = cell(a, b);
            const Part* of_column = by_end.data() + triangular(0, b);
            if (c == cell_count()) {
                Cell found = without_splits(a, b);
                const std::int64_t held_grad = grad_held(b);
                std::int64_t peak = -1, peak_slots = 0;
                for (std::int32_t j = a + 1; j <= b; ++j) {
                    const Part &next = of_column[j], &then = of_row[j - 1];
                    if (splits.peak[j] > peak) {
                        peak = splits.peak[j];
                        peak_slots = round_up(peak + held_grad);
                    }
                    const std::int64_t least =
                        std::max({peak_slots, output_slots_[j - 1] + next.floor, then.floor});
                    if (least > found.floor) continue;
                    const double time = splits.time[j] + next.tight_time + then.tight_time;
                    if (least < found.floor || time < found.tight_time) found.tight_time = time;
                    found.floor = least;
                }
                cells_.push_back(found);
            }
            of_row[b] = by_end[triangular(a, b)] = {cells_[c].floor, cells_[c].tight_time};
        }
    }
}

ChainCells::Cell ChainCells::without_splits(std::int32_t a, std::int32_t b) const {
    Cell found{};
    found.floor = found.top = std::numeric_limits<std::int64_t>::max();
    double fastest = std::numeric_limits<double>::infinity();
    const Cell none{};
    const Cell& rest = a < b ? cells_[cell(a + 1, b)] : none;
    for (std::size_t o = 0; o < stages_[a].options.size(); ++o) {
        const std::int64_t held = held_[first_way_[a] + o];
        const std::int64_t least =
            std::max(least_with(a, o, grad_held(b)), a < b ? held + rest.floor : 0);
        const double option_time = stages_[a].options[o].time;
        const double time = option_time + rest.tight_time;
        if (least < found.floor || (least == found.floor && time < found.tight_time)) {
            found.floor = least;
            found.tight_time = time;
        }
        // Nothing is faster than the fastest options of all stages and no recomputation.
        const std::int64_t top = std::max(least, a < b ? held + rest.top : 0);
        if (option_time < fastest || (option_time == fastest && top < found.top)) {
            fastest = option_time;
            found.top = top;
        }
        found.steady = std::max(found.steady, least);
    }
    return found;
}

std::vector<Op> ChainCells::walk(std::int64_t m, const Cost& cost) const {
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
        double best_cost = std::numeric_limits<double>::infinity();
        bool found = false;
        for_each_choice(task.a, task.b, [&](const Choice& choice) {
            if (choice.least > task.free) return;
            const double total = cost(choice, task.free);
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
        if (choice.next >= 0) time += cells_[choice.next].tight_time;
        if (choice.then >= 0) time += cells_[choice.then].tight_time;
        return time;
    });
}

}  // namespace rotor
