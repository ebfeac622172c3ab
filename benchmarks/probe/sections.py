"""The sections of the probe, in order, each with the seconds that it may take."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from probe import basics, plans
from probe.machine import Machine, Row

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Section:
    """One process of the probe."""

    name: str
    run: Callable[[Machine], Iterator[Row]]
    limit_s: float
    call: int  # of the two in which a machine is looked at
    expandable: bool = False  # with expandable segments of the allocator


# One by one: to look for tests takes longer than some of them, and nothing else may be met.
GPU_TESTS = {
    "rkgb/tests/offload/test_gpu_moves.py": (
        "test_bits_and_requested_bytes_are_as_without_delays",
        "test_pinned_memory_has_the_exact_size_and_goes_with_its_last_user",
        "test_the_host_goes_on_while_copies_wait",
        "test_a_link_of_pinned_memory_is_measured",
    ),
    "rotor/tests/device/test_gpu.py": (
        "test_measured_peak_is_within_the_limit_and_results_are_equal",
        "test_the_limit_is_what_is_free_when_none_is_given",
    ),
    "rockmate/tests/bits/test_gpu_bits.py": (
        "test_training_is_bit_equal_in_deterministic_mode",
        "test_half_precision_is_planned_and_close_to_eager",
        "test_every_kernel_of_attention_trains_as_eager_does",
        "test_a_wrong_gradient_is_found",
        "test_precision_of_products_is_part_of_a_plan",
        "test_a_scaler_skips_a_step_with_infinite_gradients",
        "test_side_streams_compute_the_same",
        "test_another_device_than_the_current_one",
        "test_what_adds_by_atomics_is_never_run_again_where_it_differs",
        "test_a_step_is_captured_as_a_graph_or_refused",
    ),
    "rockmate/tests/bits/test_gpu_features.py": (
        "test_every_option_trains_as_eager_does",
        "test_other_sums_are_near_eager",
        "test_recurrent_layers_train_as_eager_does",
        "test_blocks_train_as_eager_does",
        "test_blocks_of_code_are_planned_at_the_first_step",
        "test_images_in_mixed_precision_and_channels_last",
        "test_a_file_of_a_plan_serves_again",
        "test_the_largest_batch_fits",
    ),
    "rockmate/tests/bytes/test_gpu_memory.py": (
        "test_requests_are_as_predicted_and_blocks_within_the_budget",
        "test_the_first_work_of_a_process_may_be_planning",
        "test_settings_of_the_allocator_keep_the_budget",
        "test_an_allocator_that_does_not_count_is_refused",
        "test_a_second_kind_of_input_leaves_nothing_behind",
        "test_an_eager_step_that_does_not_fit_is_not_needed",
        "test_planning_in_the_middle_of_training",
        "test_planning_takes_little_more_than_the_budget",
        "test_events_tell_kernels_from_their_launch",
    ),
}
_ENDED = re.compile(r"(\S+::\S.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b")
_WHY = re.compile(r"(?:FAILED|ERROR) (\S+::.*?) - (.*)")


def gpu_tests(_: Machine) -> Iterator[Row]:
    """The tests marked `gpu`, a row as each one ends; all are skipped on a CPU."""
    named = [f"{path}::{name}" for path, names in GPU_TESTS.items() for name in names]
    command = [sys.executable, "-u", "-m", "pytest", "-v", "--tb=no", "-rfE", "-m", "gpu"]
    command += ["-p", "no:cacheprovider", "-W", "default", *named]  # other versions warn of more
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as tests:
        assert tests.stdout is not None
        yield from rows_of_tests(tests.stdout)
    if tests.returncode > 1:  # neither all passed nor some failed
        yield {"error": f"pytest ended with {tests.returncode}"}


def rows_of_tests(said: Iterable[str]) -> Iterator[Row]:
    """Return how tests have ended, from the lines that pytest prints as it goes."""
    for line in said:
        if ended := _ENDED.match(line):
            yield {"test": ended[1], "ended": ended[2].lower()}
        elif why := _WHY.match(line):
            yield {"test": why[1], "message": why[2][:300]}


SECTIONS = (
    Section("versions", basics.versions, 30, call=1),
    Section("allocator", basics.allocator, 30, call=1),
    Section("times", basics.times, 30, call=1),
    Section("eager_noise", basics.eager_noise, 110, call=1),
    Section("as_users", plans.as_users, 110, call=1),
    Section("matrix", plans.matrix, 140, call=1),
    Section("features", plans.features, 80, call=1),
    Section("matrix_expandable", plans.matrix, 120, call=2, expandable=True),
    Section("link", basics.link, 20, call=2),
    Section("node_times", plans.node_times, 60, call=2),
    Section("ballast", plans.ballast, 60, call=2),
    Section("whole_steps", plans.whole_steps, 50, call=2),
    Section("gpu_tests", gpu_tests, 220, call=2),
)
