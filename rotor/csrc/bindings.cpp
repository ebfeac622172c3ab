// Conversion only: Python sequences to the plain structs, operations back to tuples.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "chain_dp.hpp"

namespace py = pybind11;

namespace {

using OptionTuple = std::tuple<std::int64_t, std::int64_t, std::int64_t, double>;
using StageTuple =
    std::tuple<std::int64_t, std::int64_t, std::int64_t, double, std::vector<OptionTuple>>;
using OpTuple = std::tuple<int, int, int>;

std::vector<rotor::Stage> to_stages(const std::vector<StageTuple>& tuples) {
    std::vector<rotor::Stage> stages;
    stages.reserve(tuples.size());
    for (const auto& [output, output_grad, forward_peak, forward_time, options] : tuples) {
        rotor::Stage stage{output, output_grad, forward_peak, forward_time, {}};
        for (const auto& [saved, fwd_overhead, bwd_overhead, time] : options)
            stage.options.push_back({saved, fwd_overhead, bwd_overhead, time});
        stages.push_back(std::move(stage));
    }
    return stages;
}

std::vector<OpTuple> to_tuples(const std::vector<rotor::Op>& ops) {
    std::vector<OpTuple> tuples;
    tuples.reserve(ops.size());
    for (const rotor::Op& op : ops)
        tuples.emplace_back(static_cast<int>(op.kind), op.stage, op.option);
    return tuples;
}

}  // namespace

PYBIND11_MODULE(_core, module) {
    module.doc() =
        "Compiled dynamic program over a chain of stages; see test_support/oracles/recurrence.py.";
    using rotor::ChainTable;
    py::class_<ChainTable>(module, "ChainTable")
        .def(py::init([](const std::vector<StageTuple>& stages, std::int64_t unit_bytes,
                         std::int64_t slots, bool share) {
                 auto plain = to_stages(stages);
                 py::gil_scoped_release release;
                 return new ChainTable(std::move(plain), unit_bytes, slots, share);
             }),
             py::arg("stages"), py::arg("unit_bytes"), py::arg("slots"), py::kw_only(),
             py::arg("share") = true)
        .def_property_readonly("table_bytes", &ChainTable::table_bytes)
        .def_property_readonly("cell_count", &ChainTable::cell_count)
        .def_property_readonly("updates", &ChainTable::updates)
        .def_property_readonly("smallest_slot", &ChainTable::smallest_slot)
        .def("fill", &ChainTable::fill, py::call_guard<py::gil_scoped_release>())
        .def("makespan", &ChainTable::makespan, py::arg("m"))
        .def(
            "ops", [](const ChainTable& table, std::int64_t m) { return to_tuples(table.ops(m)); },
            py::arg("m"))
        .def(
            "tight_ops",
            [](const ChainTable& table, std::int64_t m) { return to_tuples(table.tight_ops(m)); },
            py::arg("m"));
}
