// The problem as the dynamic program sees it: a chain of stages, bytes and milliseconds only.
#pragma once

#include <cstdint>
#include <vector>

namespace rotor {

struct Option {
    std::int64_t saved;         // bytes kept from forward to backward, output included
    std::int64_t fwd_overhead;  // bytes, above input + saved
    std::int64_t bwd_overhead;  // bytes, above input + saved + output gradient
    double time;                // ms, forward + backward

    bool operator==(const Option& other) const {
        return saved == other.saved && fwd_overhead == other.fwd_overhead &&
               bwd_overhead == other.bwd_overhead && time == other.time;
    }
};

struct Stage {
    std::int64_t output;        // bytes of the boundary tensor
    std::int64_t output_grad;   // bytes of gradient alive before the stage's backward
    std::int64_t forward_peak;  // bytes of a forward that keeps nothing, output included
    double forward_time;        // ms of that forward
    std::vector<Option> options;

    bool operator==(const Stage& other) const {
        return output == other.output && output_grad == other.output_grad &&
               forward_peak == other.forward_peak && forward_time == other.forward_time &&
               options == other.options;
    }
};

enum class OpKind : std::int32_t {
    kForwardNoGrad,
    kForwardCheckpoint,
    kForwardEnableGrad,
    kBackward
};

struct Op {
    OpKind kind;
    std::int32_t stage;
    std::int32_t option;  // -1 where the operation has none
};

}  // namespace rotor
