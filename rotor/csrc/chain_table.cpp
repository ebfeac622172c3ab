#include <algorithm>
#include <limits>
#include <new>
#include <stdexcept>
#include <utility>

#include "blocks.hpp"
#include "chain_dp.hpp"

namespace rotor {
namespace {

constexpr std::size_t kCacheLine = 64;  // bytes
constexpr std::uint64_t kLineFloats = kCacheLine / sizeof(float);
constexpr float kInfinity = std::numeric_limits<float>::infinity();
// More than any memory: larger tables are refused by their size, which must not overflow.
constexpr std::uint64_t kMostFloats = std::uint64_t{1} << 60;

std::uint64_t padded_row(std::uint64_t entries) {
    const std::uint64_t lines = (entries + kLineFloats - 1) / kLineFloats;
    return (lines % 2 == 0 ? lines + 1 : lines) * kLineFloats;
}

// A fraction that the sum of `stages` times may lose when it is formed in float32, and more.
double rounding(std::int32_t stages) {
    return 8.0 * stages * std::numeric_limits<float>::epsilon();
}

}  // namespace

// One block of slots, m..m+kBlock-1, of all cells, and what repeats in it.
struct ChainTable::Panel {
    std::int64_t m;
    Splits splits;  // of the row that is being filled
    // Blocks. First k -> Opt(a, k, .) + ms of the forwards of a..k, for the row. Then, column by
    // column, (j, b) -> Opt(j, b, . - output(j - 1)).
    Floats work;
    std::int32_t last_then;                // blocks of `then` above it hold nothing feasible
    std::vector<std::int32_t> first_next;  // b -> the same of blocks (j, b) with smaller j
    std::vector<Shifted> shifted;
    std::vector<Run> runs;
};

ChainTable::ChainTable(std::vector<Stage> stages, std::int64_t unit_bytes, std::int64_t slots,
                       bool share)
    : ChainCells(std::move(stages), unit_bytes, share), slots_(slots) {
    if (slots_ < 0) throw std::invalid_argument("a table needs at least zero slots");
    next_of_.assign(length_, 0);
    // A block that begins below a row's floor is read from before the row, and masked there.
    table_floats_ = kBlock;
    for (std::int32_t c = 0; c < cell_count(); ++c) {
        Cell& cell = cells_[c];
        cell.top = std::min(cell.top, slots_);
        offset_.push_back(table_floats_);
        if (cell.floor <= slots_) table_floats_ += padded_row(cell.top + 1 + kBlock - first_of(c));
        table_floats_ = std::min(table_floats_, kMostFloats);
        if (place_of_[c].b > 0) next_of_[place_of_[c].b] = 1;
    }
    work_floats_ = static_cast<std::uint64_t>(length_) * kBlock;
    for (std::int32_t b = 0; b < length_; ++b) {
        if (next_of_[b] == 0) continue;
        columns_.push_back(b);
        next_of_[b] = work_floats_;
        work_floats_ += (b + std::uint64_t{1}) * kBlock;
    }
}

std::int64_t ChainTable::first_of(std::int32_t c) const { return cells_[c].floor & -kBlock; }

void ChainTable::Free::operator()(float* data) const {
    ::operator delete[](data, std::align_val_t(kCacheLine));
}

ChainTable::Floats ChainTable::allocate(std::uint64_t count) {
    return Floats(
        static_cast<float*>(::operator new[](count * sizeof(float), std::align_val_t(kCacheLine))));
}

void ChainTable::fill() {
    if (table_) return;
    table_ = allocate(table_floats_);
    Panel panel;
    panel.work = allocate(work_floats_);
    panel.first_next.resize(length_);
    panel.runs.resize(length_);
    panel.shifted.resize(held_.size());
    std::int64_t first = slots_ + 1, last = -1;
    for (const Cell& cell : cells_) {
        if (cell.floor > slots_) continue;
        first = std::min(first, cell.floor);
        last = std::max(last, cell.top);
    }
    for (panel.m = first & -kBlock; panel.m <= last; panel.m += kBlock) fill_panel(panel);
}

void ChainTable::fill_panel(Panel& panel) {
    std::fill(panel.first_next.begin(), panel.first_next.end(), length_);
    for (std::int32_t a = length_ - 1; a >= 0; --a) {
        if (a + 1 < length_) shift_row(a + 1, panel);
        fill_row(a, panel);
    }
}

// Done when the row above needs them, not when they are made: what has just been stored is slow to
// load at another alignment.
void ChainTable::shift_row(std::int32_t a, Panel& panel) {
    const std::int64_t m = panel.m, held = output_slots_[a - 1];
    for (auto b = std::lower_bound(columns_.begin(), columns_.end(), a); b != columns_.end(); ++b) {
        const std::int32_t c = cell(a, *b);
        const std::int64_t floor = cells_[c].floor, low = held + floor - m;
        float* to = panel.work.get() + next_of_[*b] + a * kBlock;
        if (floor <= slots_ && low < kBlock) {
            panel.first_next[*b] = a;
            const float* from = row(c) + std::min(m - held, cells_[c].top + 1);
            copy_block(to, {from, 0, static_cast<std::int32_t>(std::max<std::int64_t>(low, 0))});
        } else {
            std::fill_n(to, kBlock, kInfinity);
        }
    }
}

void ChainTable::fill_row(std::int32_t a, Panel& panel) {
    begin_splits(a, panel.splits);
    panel.last_then = -1;
    const std::int64_t m = panel.m;
    float* then = panel.work.get() + a * kBlock;
    for (std::int32_t b = a; b < length_; ++b, then += kBlock) {
        const std::int32_t c = cell(a, b);
        const Cell& cell = cells_[c];
        if (cell.floor > slots_ || cell.floor >= m + kBlock) {
            std::fill_n(then, kBlock, kInfinity);
            continue;
        }
        const auto time = static_cast<float>(panel.splits.time[b + 1]);
        if (m <= cell.top && place_of_[c].a == a && place_of_[c].b == b) {
            fill_cell(c, panel, then, time);
            panel.last_then = b;
            if (m + kBlock <= cell.top) continue;
            float* at = row(c);
            std::fill_n(at + cell.top + 1, kBlock, at[cell.top]);
        }
        panel.last_then = b;
        const auto low = static_cast<std::int32_t>(std::max<std::int64_t>(cell.floor - m, 0));
        copy_block(then, {row(c) + std::min(m, cell.top + 1), time, low});
    }
}

void ChainTable::fill_cell(std::int32_t c, Panel& panel, float* later, float later_time) {
    const auto [a, b] = place_of_[c];
    const std::int64_t m = panel.m;
    float* at = row(c);
    BlockWork work{};
    std::int64_t splits = 0;
    add_options(a, b, panel, work);
    const std::int32_t first = std::max(a + 1, panel.first_next[b]);
    std::int32_t last = std::min(b, panel.last_then + 1);
    if (first <= last) {
        work.then = panel.work.get() + (first - 1) * kBlock;
        work.next = panel.work.get() + next_of_[b] + first * kBlock;
        work.runs = panel.runs.data();
        const float* before = m > first_of(c) ? at + m - 1 : nullptr;
        last = last_useful(a, b, first, last, before, panel);
        splits = add_splits(b, first, last, panel, work);
    }
    updates_ += static_cast<std::uint64_t>(kBlock * (work.steady + work.shifted_count + splits));
    fill_block(at + m, later, later_time, work);
}

void ChainTable::add_options(std::int32_t a, std::int32_t b, Panel& panel, BlockWork& work) const {
    alignas(kCacheLine) static const float nothing[2 * kBlock] = {};
    const std::int64_t m = panel.m;
    const Cell& cell = cells_[this->cell(a, b)];
    const std::size_t first = first_way_[a], count = first_way_[a + 1] - first;
    work.rest = nothing + kBlock;
    std::int64_t floor = 0;
    if (a < b) {
        const std::int32_t rest = this->cell(a + 1, b);
        work.rest = row(rest);
        work.rest_end = cells_[rest].top + 1;
        floor = cells_[rest].floor;
    }
    work.m = m;
    if (m >= cell.steady) {
        work.held = useful_held_.data() + first_useful_[a];
        work.times = useful_time_.data() + first_useful_[a];
        work.steady = static_cast<std::int64_t>(first_useful_[a + 1] - first_useful_[a]);
        return;
    }
    const std::int64_t held_grad = grad_held(b), end = std::min(m + kBlock, cell.top + 1);
    for (std::size_t o = 0; o < count; ++o) {
        std::int64_t least = std::max(least_[first + o], a < b ? held_[first + o] + floor : 0);
        if (least >= end) continue;
        const std::int64_t forward = forward_bytes_[first + o] + held_grad;
        if (forward > m * unit_) least = std::max(least, round_up(forward));
        if (least >= end) continue;
        const float* from = work.rest + std::min(m - held_[first + o], work.rest_end);
        const auto low = static_cast<std::int32_t>(std::max<std::int64_t>(least - m, 0));
        panel.shifted[work.shifted_count++] = {from, time_[first + o], low};
    }
    work.shifted = panel.shifted.data();
}

// No schedule of a..b that begins with a split at j is faster than its forwards of a..j-1, and the
// fastest options of all stages after them. Where that is slower than what fits into one slot less,
// beyond any rounding, there is no need to look.
std::int32_t ChainTable::last_useful(std::int32_t a, std::int32_t b, std::int32_t first,
                                     std::int32_t last, const float* before,
                                     const Panel& panel) const {
    if (!before) return last;
    const double fastest = fastest_until_[b + 1] - fastest_until_[a];
    const double spare = *before * (1 + rounding(length_)) - fastest;
    constexpr std::int32_t kStep = 8;  // a branch for every split costs more than it saves
    while (last - kStep >= first && panel.splits.time[last - kStep + 1] > spare) last -= kStep;
    return last;
}

std::int64_t ChainTable::add_splits(std::int32_t b, std::int32_t first, std::int32_t last,
                                    Panel& panel, BlockWork& work) const {
    // Peaks grow with the split: the first ones fit from m on, the next ones from within the block.
    const std::int64_t m = panel.m, held_grad = grad_held(b), room = m * unit_ - held_grad;
    const std::vector<std::int64_t>& peak = panel.splits.peak;
    if (peak[last] <= room) return work.whole = last - first + 1;
    const std::vector<std::int32_t>& rises = panel.splits.rises;
    auto rise = rises.begin();
    while (peak[*rise] <= room) ++rise;
    std::int32_t j = std::max(first, *rise);
    work.whole = j - first;
    for (; j <= last; ++rise) {
        const std::int32_t end = rise + 1 == rises.end() ? last + 1 : std::min(last + 1, rise[1]);
        if (end <= j) continue;
        const std::int64_t low = round_up(peak[j] + held_grad) - m;
        if (low >= kBlock) break;
        panel.runs[work.run_count++] = {static_cast<std::int32_t>(low), end - j};
        j = end;
    }
    return j - first;
}

float ChainTable::makespan(std::int64_t m) const {
    if (!table_) throw std::logic_error("the table has not been filled");
    if (m > slots_) throw std::invalid_argument("above the table");
    return m < smallest_slot() ? std::numeric_limits<float>::infinity() : value(root(), m);
}

std::vector<Op> ChainTable::ops(std::int64_t m) const {
    if (!table_) throw std::logic_error("the table has not been filled");
    if (m > slots_) throw std::invalid_argument("above the table");
    return walk(m, [this](const Choice& choice, std::int64_t free) -> double {
        const auto time = static_cast<float>(choice.time);
        if (choice.next < 0) return time;
        const float next = value(choice.next, free - choice.held);
        return choice.then < 0 ? next + time : next + (value(choice.then, free) + time);
    });
}

}  // namespace rotor
