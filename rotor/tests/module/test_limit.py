"""Memory limits as text, as bytes, and as a fraction of what a step takes without recomputation."""

import pickle

import numpy as np
import pytest
import torch

import rotor
from oracles.checkpointables import one_millisecond, plain_peak
from rotor import Checkpointable, InfeasibleBudgetError
from rotor.limit import parse_limit
from rotor.runtime.measure import measure_module
from zoo.chains import images, mlp, residual_net


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (1, 1),
        (700 * 1024 * 1024, 734003200),
        (np.int64(10**12), 10**12),
        ("2GiB", 2 * 2**30),
        ("800 MB", 800 * 10**6),
        (" 1.5 kib ", 1536),
        ("1.9 KiB", 1945),  # bytes round down
        ("1.005GB", 1005000000),  # exact, where a float would have one byte less
        ("8G", 8 * 10**9),
        ("8Gi", 8 * 2**30),
        ("300k", 300_000),
        ("1_000_000", 1_000_000),
        ("12345", 12345),
        ("1e9", 10**9),
        ("0.6", 0.6),
        (".25", 0.25),
        ("60%", 0.6),
        (".5 tib", 2**39),
        ("40%", 0.4),
        ("100 %", 1.0),
        (0.25, 0.25),
        (1.0, 1.0),
        (np.float32(0.5), 0.5),
    ],
)
def test_what_a_limit_may_be(limit, expected):
    found = parse_limit(limit)
    assert found == expected
    assert type(found) is type(expected)
    assert parse_limit(found) == found


@pytest.mark.parametrize(
    ("limit", "problem"),
    [
        (0, "is not positive"),
        (-5, "is not positive"),
        (-0.5, "is not positive"),
        (float("nan"), "is not positive"),
        (2.5, "is a float above 1, which could mean bytes or a factor"),
        (5e8, "is a float above 1, which could mean bytes or a factor"),
        (float("inf"), "is a float above 1, which could mean bytes or a factor"),
        (True, "is a bool"),
        ([1], "is a list"),
        ("many", "cannot be read"),
        ("-1 GB", "cannot be read"),
        ("1e999 GB", "cannot be read"),
        ("", "cannot be read"),
        ("2 GBit", "has an unknown unit 'GBit'"),
        ("0 %", "is not in (0 %, 100 %]"),
        ("140%", "is not in (0 %, 100 %]"),
        ("0.2 B", "is not positive"),
        ("0", "is not positive"),
        ("8", "has no unit, and could mean 8 bytes or 8 GB"),
        ("1", "has no unit, and could mean 1 bytes or 100 %"),
        ("1.5", "has no unit, and could mean 1.5 bytes or 1.5 GB"),
        ("1e3", "has no unit, and could mean 1e3 bytes or 1e3 GB"),
        ("1__0", "cannot be read"),
        ("_1", "cannot be read"),
        ("8 Gb i", "cannot be read"),
    ],
)
def test_limits_that_cannot_be_read(limit, problem):
    for make in (
        lambda: Checkpointable(mlp(2), mem_limit=limit),
        lambda: Checkpointable(mlp(1), torch.randn(2, 32), timer=one_millisecond).compute_sequence(
            limit
        ),
    ):
        with pytest.raises(rotor.MemoryLimitFormatError) as caught:
            make()
        assert caught.value.limit is limit
        assert caught.value.problem == problem
        assert str(caught.value).startswith(f"mem_limit {limit!r} {problem}. Give an int (bytes), ")
    assert isinstance(caught.value, rotor.MemoryLimitError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_text_plans_as_the_same_number_of_bytes():
    sample = images(1)[0]
    net = residual_net(4)
    chk = Checkpointable(net, sample, "0.25 MiB", timer=one_millisecond)
    assert chk.mem_limit == 2**18
    assert chk.schedule == Checkpointable(net, sample, 2**18, timer=one_millisecond).schedule
    chk.compute_sequence("1 GB")
    assert chk.mem_limit == 10**9
    assert "limit      953.67 MiB (1000000000 bytes)" in str(chk)


@pytest.mark.parametrize("limit", [0.75, "75%"])
def test_a_fraction_is_of_the_peak_without_recomputation(limit):
    chk = Checkpointable(residual_net(), images(1)[0], limit, timer=one_millisecond)
    assert chk.schedule.forward_count > len(chk.chain)
    asked = chk.mem_limit
    assert chk.get_expected_memory() <= asked == int(0.75 * plain_peak(chk))
    chk.compute_sequence(limit)
    assert chk.mem_limit == asked


def test_the_whole_of_it_recomputes_nothing():
    chk = Checkpointable(residual_net(), images(1)[0], timer=one_millisecond)
    chk.compute_sequence(1.0)
    assert chk.schedule.forward_count == len(chk.chain)
    assert chk.mem_limit == chk.get_expected_memory()
    with pytest.raises(InfeasibleBudgetError) as caught:
        chk.compute_sequence(1)
    assert caught.value.budget_bytes == 1  # an int is bytes


def test_a_fraction_is_of_the_first_input_and_the_same_bytes_for_others():
    chk = Checkpointable(residual_net(4), mem_limit=0.8, timer=one_millisecond)
    assert chk.mem_limit == 0.8
    chk(images(1, batch=4)[0]).sum().backward()
    limit = chk.mem_limit
    assert chk.schedule.forward_count > len(chk.chain)
    assert isinstance(limit, int)
    chk(images(1, batch=2)[0]).sum().backward()  # half of the batch fits as it is
    assert chk.schedule.forward_count == len(chk.chain)
    assert chk.mem_limit == limit


def test_a_fraction_that_is_too_small_names_the_smallest_limit_and_the_plain_peak():
    chk = Checkpointable(residual_net(4), images(1)[0], timer=one_millisecond)
    plain = plain_peak(chk)
    with pytest.raises(InfeasibleBudgetError, match=rf"takes .*\({plain} bytes\)") as caught:
        chk.compute_sequence("1%")
    assert caught.value.budget_bytes == plain // 100
    assert chk.mem_limit == 10**12  # the plan that works is kept
    chk.compute_sequence(caught.value.minimum_bytes)


def test_another_device_is_refused_by_name() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2, device="meta"))
    with pytest.raises(rotor.StageError, match="'meta'"):
        measure_module(module, torch.ones(1, 2, device="meta"))
