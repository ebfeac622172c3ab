// The recurrence of test_support/oracles/recurrence.py, compiled: that is the specification.
//
// Cells. (a, b) and (a', b') have the same values whenever stages a..b and a'..b' are equal one by
// one and both or neither end the chain: they share one cell. L identical stages need 2L of them
// instead of L²/2.
//
// Table. One row of float32 per cell, over consecutive slots m = floor..top, where floor is the
// smallest feasible m, and top one above which no choice gets cheaper: what is infeasible and what
// is constant takes neither memory nor time. Rows start at a whole block of slots and on a cache
// line, end with a block of their last value, and fill an odd number of lines, because rows a power
// of two apart compete for the same cache sets. There is no table of back pointers: the path
// through the recurrence is found by taking its minima again.
//
// Order. Blocks of 32 slots outermost: Opt(a, b, m) needs no larger m. Within one, the two parts of
// all splits of a cell lie side by side, those that run next shifted by what the split holds, so
// that a cell is one pass over two short arrays with its minima in registers (blocks.hpp); the
// working set is a sixteenth of the table at 500 slots. Splits that cannot be the fastest are left
// out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "blocks.hpp"
#include "chain.hpp"

namespace rotor {

// What does not depend on m: which cells are shared, and the smallest feasible memory of each.
class ChainCells {
  public:
    ChainCells(std::vector<Stage> stages, std::int64_t unit_bytes, bool share);

    std::int64_t smallest_slot() const { return cells_[root()].floor; }
    std::int32_t cell_count() const { return static_cast<std::int32_t>(cells_.size()); }
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
    // Takes minima again, from the whole chain down: cost(choice, m) is what is minimised.
    using Cost = std::function<double(const Choice&, std::int64_t)>;
    std::vector<Op> walk(std::int64_t m, const Cost& cost) const;

    std::int64_t round_up(std::int64_t bytes) const { return (bytes + unit_ - 1) / unit_; }
    static std::size_t triangular(std::int32_t a, std::int32_t b) {
        return static_cast<std::size_t>(b) * (static_cast<std::size_t>(b) + 1) / 2 + a;
    }
    std::int32_t cell(std::int32_t a, std::int32_t b) const { return cell_of_[triangular(a, b)]; }
    std::int32_t root() const { return cell(0, length_ - 1); }

    // No gradient exists while the chain's last stage has not run: see the reference.
    std::int64_t grad_held(std::int32_t b) const {
        return b < length_ - 1 ? stages_[b].output_grad : 0;
    }
    // Smallest m with which the steps of an option fit, whatever comes after.
    std::int64_t least_with(std::int32_t a, std::size_t option, std::int64_t held_grad) const {
        const std::int64_t forward = forward_bytes_[first_way_[a] + option] + held_grad;
        const std::int64_t least = least_[first_way_[a] + option];
        return forward > least * unit_ ? round_up(forward) : least;
    }

    struct Place {
        std::int32_t a, b;
    };
    struct Cell {
        std::int64_t floor;   // smallest feasible m
        std::int64_t top;     // no choice gets cheaper above this m
        std::int64_t steady;  // from this m on every option is feasible
        double tight_time;    // ms of one schedule at the floor
    };
    // What the splits of all cells that begin at the same stage a share.
    struct Splits {
        std::vector<std::int64_t> peak;   // j -> bytes of the forwards of a..j-1 at their peak
        std::vector<std::int32_t> rises;  // the j at which the peak rises
        std::vector<double> time;         // j -> ms of those forwards
    };

    void add_useful();
    void name_cells(bool share);
    void find_ranges();
    Cell without_splits(std::int32_t a, std::int32_t b) const;
    void begin_splits(std::int32_t a, Splits& splits) const;

    std::vector<Stage> stages_;
    std::int64_t unit_;
    std::int32_t length_;
    std::vector<std::int64_t> output_slots_;
    std::vector<double> fastest_until_{0.0};  // b -> ms of the fastest options of stages 0..b-1
    // Options, stage by stage.
    std::vector<std::size_t> first_way_;       // stage -> its first
    std::vector<std::int64_t> forward_bytes_;  // of its forward, but for the gradient held
    std::vector<std::int64_t> held_;           // slots of what it saves
    std::vector<std::int64_t> least_;          // slots of its backward
    std::vector<float> time_;                  // ms
    // Those of a stage's options that are faster than all that hold less or as much: where memory
    // is no question but for what is held, no other is ever chosen.
    std::vector<std::size_t> first_useful_;
    std::vector<std::int64_t> useful_held_;
    std::vector<float> useful_time_;
    std::vector<std::int32_t> cell_of_;  // triangular index of (a, b) -> cell
    std::vector<Place> place_of_;        // cell -> the first (a, b) that it stands for
    std::vector<Cell> cells_;
};

class ChainTable : public ChainCells {
  public:
    // Allocates nothing of the size of the table; fill() does.
    ChainTable(std::vector<Stage> stages, std::int64_t unit_bytes, std::int64_t slots, bool share);

    // What fill() allocates: the table, and room to work in that it gives back.
    std::uint64_t table_bytes() const { return (table_floats_ + work_floats_) * sizeof(float); }
    std::uint64_t updates() const { return updates_; }  // min operations on table entries by fill()
    void fill();
    float makespan(std::int64_t m) const;
    std::vector<Op> ops(std::int64_t m) const;

  private:
    struct Free {
        void operator()(float* data) const;
    };
    using Floats = std::unique_ptr<float[], Free>;
    struct Panel;

    static Floats allocate(std::uint64_t count);
    // Where the entry for m = 0 would be.
    float* row(std::int32_t c) const { return table_.get() + offset_[c] - first_of(c); }
    std::int64_t first_of(std::int32_t c) const;
    float value(std::int32_t c, std::int64_t m) const {
        return row(c)[m < cells_[c].top ? m : cells_[c].top];
    }
    void fill_panel(Panel& panel);
    void shift_row(std::int32_t a, Panel& panel);
    void fill_row(std::int32_t a, Panel& panel);
    void fill_cell(std::int32_t c, Panel& panel, float* later, float later_time);
    void add_options(std::int32_t a, std::int32_t b, Panel& panel, BlockWork& work) const;
    std::int32_t last_useful(std::int32_t a, std::int32_t b, std::int32_t first, std::int32_t last,
                             const float* before, const Panel& panel) const;
    // Returns how many of them have an entry that is feasible.
    std::int64_t add_splits(std::int32_t b, std::int32_t first, std::int32_t last, Panel& panel,
                            BlockWork& work) const;

    std::int64_t slots_;
    std::uint64_t table_floats_ = 0;
    std::uint64_t work_floats_ = 0;
    std::uint64_t updates_ = 0;
    std::vector<std::uint64_t> offset_;   // cell -> start of its row, in floats
    std::vector<std::int32_t> columns_;   // every b with a cell to fill
    std::vector<std::uint64_t> next_of_;  // b -> start of its column of shifted blocks, in floats
    Floats table_;
};

}  // namespace rotor
