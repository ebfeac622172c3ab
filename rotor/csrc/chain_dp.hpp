// The recurrence of rotor/solver/reference.py, compiled. That file is the specification.
//
// Cells. (a, b) and (a', b') have the same values whenever stages a..b and a'..b' are equal one by
// one and both or neither end the chain: they share one cell. L identical stages need 2L of them
// instead of L²/2.
//
// Table. One row of float32 per cell, over consecutive slots m = floor..top, where floor is the
// smallest feasible m, and top one above which no choice gets cheaper: what is infeasible and what
// is constant takes neither memory nor time. Rows start on a cache line and fill an
// odd number of them, because rows a power of two apart compete for the same cache sets. There is
// no table of back pointers: the path through the recurrence is found by taking its minima again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "chain.hpp"

namespace rotor {

// What does not depend on m: which cells are shared, and the smallest feasible memory of each.
class ChainCells {
  public:
    ChainCells(std::vector<Stage> stages, std::int64_t unit_bytes, bool share);

    std::int64_t smallest_slot() const { return floor_[root()]; }
    std::int32_t cell_count() const { return static_cast<std::int32_t>(floor_.size()); }
    // A schedule for any m >= smallest_slot(), built on the fastest ways to run at the floors.
    std::vector<Op> tight_ops(std::int64_t m) const;

  protected:
    struct Choice {
        std::int64_t least;   // smallest m with which the choice and all that follows is feasible
        std::int64_t held;    // slots taken from the part that runs next
        double time;          // ms of the choice itself
        std::int32_t split;   // a+1..b, or -1
        std::int32_t option;  // or -1
        std::int32_t next;    // cell of the part that runs next, or -1
        std::int32_t then;    // cell of the part that runs after it, or -1
    };

    // Calls visit(choice) for the options of a, then for every split, as the reference does.
    template <typename Visit>
    void for_each_choice(std::int32_t a, std::int32_t b, Visit visit) const;
    template <typename Cost>
    std::vector<Op> walk(std::int64_t m, Cost cost) const;

    std::int64_t round_up(std::int64_t bytes) const { return (bytes + unit_ - 1) / unit_; }
    static std::size_t triangular(std::int32_t a, std::int32_t b) {
        return static_cast<std::size_t>(b) * (static_cast<std::size_t>(b) + 1) / 2 + a;
    }
    std::int32_t cell(std::int32_t a, std::int32_t b) const { return cell_of_[triangular(a, b)]; }
    std::int32_t root() const { return cell(0, length_ - 1); }

    void name_cells(bool share);
    void find_ranges();

    struct Place {
        std::int32_t a, b;
    };

    std::vector<Stage> stages_;
    std::int64_t unit_;
    std::int32_t length_;
    std::vector<std::int64_t> output_slots_;
    std::vector<std::int32_t> cell_of_;  // triangular index of (a, b) -> cell
    std::vector<Place> place_of_;        // cell -> the first (a, b) that it stands for
    std::vector<std::int64_t> floor_;    // cell -> smallest feasible m
    std::vector<std::int64_t> top_;      // cell -> no choice gets cheaper above this m
    std::vector<double> tight_time_;     // cell -> ms of one schedule at its floor
};

class ChainTable : public ChainCells {
  public:
    // Allocates nothing of the size of the table; fill() does.
    ChainTable(std::vector<Stage> stages, std::int64_t unit_bytes, std::int64_t slots, bool share);

    std::uint64_t table_bytes() const { return table_floats_ * sizeof(float); }
    std::uint64_t updates() const { return updates_; }  // min operations on table entries by fill()
    void fill();
    float makespan(std::int64_t m) const;
    std::vector<Op> ops(std::int64_t m) const;

  private:
    struct Free {
        void operator()(float* data) const;
    };

    float* row(std::int32_t cell) const { return table_.get() + offset_[cell]; }
    const float* entry(std::int32_t cell, std::int64_t m) const {
        return row(cell) + (m - floor_[cell]);
    }
    float value(std::int32_t cell, std::int64_t m) const {
        return *entry(cell, m < top_[cell] ? m : top_[cell]);
    }
    void fill_cell(std::int32_t cell);

    std::int64_t slots_;
    std::uint64_t table_floats_ = 0;
    std::uint64_t updates_ = 0;
    std::vector<std::uint64_t> offset_;  // cell -> start of its row, in floats
    std::unique_ptr<float[], Free> table_;
};

}  // namespace rotor
