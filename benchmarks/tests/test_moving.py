"""The bound of plans that move storages, on a recorded instance of few large ones."""

from __future__ import annotations

import dataclasses

from planning.instances import INSTANCES, Instance
from rockmate.planning import Link, lower_bound, no_recomputation, simulate
from zoo.problems import movable


def test_six_cuts_bound_a_unet_over_a_slow_link_better_than_two() -> None:
    text = (INSTANCES / "unet-cpu-cpu.json").read_text(encoding="utf-8")
    bare = dataclasses.replace(Instance.from_json(text).problem, link=None)
    saved = sum(storage.size_bytes for storage in bare.storages if storage.bwd_users)
    # In the forward the link carries a tenth of what is saved.
    rate = 0.1 * saved / sum(node.fwd_time_ms for node in bare.nodes)
    problem = movable(bare, Link(rate, rate))
    budget = simulate(bare, no_recomputation(bare)).peak_bytes // 2
    # 0.1259 with two cuts, and less with six if a storage counts as little for each of its moves.
    assert lower_bound(problem, budget) >= 0.127 * problem.base_time_ms
