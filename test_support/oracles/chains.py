"""Oracles and random chains for tests and benchmarks. Needs the `test` extra for `chains()`.

`exhaustive_search` is not the dynamic program written slowly: it is Dijkstra's algorithm over
memory states, and knows only what the four operations do.
"""

from __future__ import annotations

import copy
import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rotor.checkpointable import Checkpointable
from rotor.errors import InfeasibleBudgetError
from rotor.runtime.rng import RngState
from rotor.schedules.chain import Chain, Option, Stage
from rotor.schedules.ops import Backward, ForwardCheckpoint, ForwardEnableGrad, ForwardNoGrad, Op

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


def random_chain(
    generator: random.Random, stages: int, *, options: int = 2, largest: int = 6
) -> Chain:
    """Return a chain of tiny integers: sizes up to `largest`, times up to 9."""

    def size() -> int:
        return generator.randint(0, largest)

    made = []
    for index in range(stages):
        output = generator.randint(1, largest)
        ways = tuple(
            Option(
                saved_bytes=output + size(),
                fwd_time_ms=float(generator.randint(1, 9)),
                bwd_time_ms=float(generator.randint(1, 9)),
                fwd_overhead_bytes=generator.randint(0, 3),
                bwd_overhead_bytes=size(),
            )
            for _ in range(generator.randint(1, options))
        )
        made.append(
            Stage(
                name=f"stage{index}",
                options=ways,
                output_bytes=output,
                output_grad_bytes=size(),
                forward_time_ms=float(generator.randint(1, 9)),
                forward_peak_bytes=output + generator.randint(0, 3),
            )
        )
    return Chain(tuple(made))


def chains(max_stages: int = 5, *, options: int = 2, largest: int = 6) -> SearchStrategy[Chain]:
    """Return a hypothesis strategy of `random_chain`s, shrinking to few stages."""
    from hypothesis import strategies as st

    return st.builds(
        lambda seed, stages: random_chain(
            random.Random(seed), stages, options=options, largest=largest
        ),
        st.integers(0, 2**32 - 1),
        st.integers(1, max_stages),
    )


@dataclass(frozen=True, slots=True, order=True)
class _State:
    """Everything that matters for what can be done next, and what it will cost."""

    backwards: int  # how many have run
    output_made: bool  # the loss has run, and the gradient of the output exists
    held: tuple[int, ...]  # boundary tensors alive outside of saved stages; 0 is the input
    fixed: tuple[int, ...]  # those of them that are checkpoints, and must be kept
    saved: tuple[tuple[int, int], ...]  # (stage, option), from its Fe to its B


def exhaustive_search(
    chain: Chain, budget_bytes: int, *, persistent: bool = True
) -> tuple[float, tuple[Op, ...]] | None:
    """Return the least makespan of any schedule within the budget, and one that attains it.

    `persistent` restricts the search to the class in which the recurrence is optimal: what is
    stored is kept until its own backward, so nothing that Fc or Fe has kept is forgotten before.
    Without it, any boundary tensor may be dropped at any time. Exponential: up to 5 stages.
    """
    start = _State(0, False, (0,), (), ())
    frontier: list[tuple[float, int, _State]] = [(0.0, 0, start)]
    origin: dict[_State, tuple[_State, Op | None]] = {}
    distance = {start: 0.0}
    ticket = 0
    while frontier:
        time_ms, _, state = heapq.heappop(frontier)
        if time_ms > distance[state]:
            continue
        if state.backwards == len(chain):
            return time_ms, tuple(_path(origin, state))
        for op, step_ms, after in _moves(chain, budget_bytes, state, persistent):
            if time_ms + step_ms < distance.get(after, float("inf")):
                distance[after] = time_ms + step_ms
                origin[after] = (state, op)
                ticket += 1
                heapq.heappush(frontier, (time_ms + step_ms, ticket, after))
    return None


def _path(origin: dict[_State, tuple[_State, Op | None]], state: _State) -> list[Op]:
    ops: list[Op] = []
    while state in origin:
        state, op = origin[state]
        if op is not None:
            ops.append(op)
    return ops[::-1]


def _alive_bytes(chain: Chain, state: _State) -> int:
    boundary = sum(chain.stages[x - 1].output_bytes for x in state.held if x > 0)
    saved = sum(chain.stages[k].options[o].saved_bytes for k, o in state.saved)
    newest = len(chain) - state.backwards
    gradient = chain.stages[newest - 1].output_grad_bytes if state.output_made else 0
    return boundary + saved + gradient


def _moves(
    chain: Chain, budget: int, state: _State, persistent: bool
) -> Iterator[tuple[Op | None, float, _State]]:
    free = budget - _alive_bytes(chain, state)
    inside = {k + 1 for k, _ in state.saved}  # boundary tensors that live in a saved stage
    end = len(chain) - state.backwards  # stages below this one still wait for their backward
    last = len(chain) - 1
    if not persistent:
        for x in state.held:
            rest = tuple(y for y in state.held if y != x)
            yield None, 0.0, _State(state.backwards, state.output_made, rest, (), state.saved)
    for k in range(end):
        if k not in state.held and k not in inside:
            continue
        made = state.output_made or k == last
        stage = chain.stages[k]
        if k + 1 not in state.held and k + 1 not in inside:
            if stage.forward_peak_bytes <= free:
                held = tuple(sorted({*state.held, k + 1}))
                fixed = tuple(sorted({*state.fixed, k}))
                kept = _State(state.backwards, made, held, fixed, state.saved)
                yield ForwardCheckpoint(k), stage.forward_time_ms, kept
                if k in state.held and not (persistent and k in state.fixed):
                    rest = tuple(x for x in held if x != k)
                    dropped = _State(state.backwards, made, rest, state.fixed, state.saved)
                    yield ForwardNoGrad(k), stage.forward_time_ms, dropped
            for o, option in enumerate(stage.options):
                if option.saved_bytes + option.fwd_overhead_bytes <= free:
                    fixed = tuple(sorted({*state.fixed, k}))
                    saved = tuple(sorted({*state.saved, (k, o)}))
                    recorded = _State(state.backwards, made, state.held, fixed, saved)
                    yield ForwardEnableGrad(k, o), option.fwd_time_ms, recorded
    k = end - 1
    for o, option in enumerate(chain.stages[k].options):
        if (k, o) not in state.saved or (k not in state.held and k not in inside):
            continue
        if not state.output_made or option.bwd_overhead_bytes > free:
            continue
        held = tuple(x for x in state.held if x < k)
        fixed = tuple(x for x in state.fixed if x < k)
        saved = tuple(pair for pair in state.saved if pair != (k, o))
        after = _State(state.backwards + 1, state.output_made, held, fixed, saved)
        yield Backward(k, o), option.bwd_time_ms, after


class ResidualBlock(nn.Module):
    """Convolution, BatchNorm, in-place ReLU and dropout, added to the input."""

    def __init__(self, channels: int, dropout: float = 0.2) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the input's shape."""
        added: torch.Tensor = x + self.drop(self.relu(self.norm(self.conv(x))))
        return added


def residual_net(blocks: int = 6, channels: int = 8, dropout: float = 0.2) -> nn.Sequential:
    """Return a nested sequential classifier of 3-channel images, with every trap in it."""
    body = nn.Sequential(*(ResidualBlock(channels, dropout) for _ in range(blocks)))
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1),
        body,
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * channels, 10),
    )


def in_place_net(blocks: int = 4, channels: int = 8) -> nn.Sequential:
    """Return a flat classifier of 3-channel images as commonly written: what can is in place."""
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1), nn.ReLU(inplace=True)]
    for block in range(blocks):
        layers += [nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)]
        if block % 2:
            layers += [nn.Hardswish(inplace=True), nn.Dropout(0.1, inplace=True)]
        else:
            layers += [nn.ReLU(inplace=True)]
    layers += [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, 10)]
    return nn.Sequential(*layers, nn.Dropout(0.1, inplace=True))


def mlp(depth: int = 8, width: int = 32, dropout: float = 0.1) -> nn.Sequential:
    """Return a plain deep network with dropout."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.Tanh(), nn.Dropout(dropout)]
    return nn.Sequential(*layers)


def one_millisecond(call: Callable[[], object]) -> float:
    """A timer that reads no clock: every call takes a millisecond."""
    call()
    return 1.0


def assert_trains_like(
    module: nn.Module, twin: nn.Module, inputs: list[Any], learning_rate: float = 1e-3
) -> None:
    """Train both, one step per input, and assert equal bits of everything at every step.

    Outputs, gradients of the input and of parameters, buffers, parameters and the random stream.
    The generator is never seeded in between: each step begins where the other's began.
    """
    optimizers = [
        torch.optim.SGD(m.parameters(), learning_rate, momentum=0.9) for m in (module, twin)
    ]
    devices = {parameter.device for parameter in twin.parameters()}
    for step, value in enumerate(inputs):
        start = RngState.now(devices)
        results = []
        for m, optimizer in zip((module, twin), optimizers, strict=True):
            start.restore()
            x = copy.deepcopy(value)
            leaves = [t for t in (x if isinstance(x, tuple) else (x,)) if t.is_floating_point()]
            for leaf in leaves:
                leaf.requires_grad_()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            output = m(x)
            outputs = output if isinstance(output, tuple | list) else (output,)
            sum(o.square().mean() for o in outputs if o.requires_grad).backward()
            results.append((outputs, [leaf.grad for leaf in leaves], torch.get_rng_state()))
            grads = {name: p.grad for name, p in m.named_parameters()}
            results[-1] += (grads,)  # type: ignore[assignment]
            optimizer.step()
        _assert_same(results[0], results[1], f"step {step}")
        _assert_same(dict(module.state_dict()), dict(twin.state_dict()), f"state after {step}")


def _assert_same(mine: Any, theirs: Any, where: str) -> None:
    if isinstance(mine, dict):
        assert list(mine) == list(theirs), where
        for key in mine:
            _assert_same(mine[key], theirs[key], f"{where}, {key}")
    elif isinstance(mine, tuple | list):
        assert len(mine) == len(theirs), where
        for index, (left, right) in enumerate(zip(mine, theirs, strict=True)):
            _assert_same(left, right, f"{where}, {index}")
    elif mine is None or theirs is None:
        assert mine is theirs, f"{where}: a gradient is missing"
    else:
        assert torch.isfinite(mine).all(), f"{where}: not finite, so equality proves nothing"
        assert torch.equal(mine, theirs), f"{where}: values differ"


def images(count: int = 3, batch: int = 4) -> list[torch.Tensor]:
    """Return inputs of `residual_net`, one for each training step."""
    return [torch.randn(batch, 3, 12, 12) for _ in range(count)]


def least_limit(chk: Checkpointable) -> int:
    """Return the smallest limit that a measured module accepts."""
    try:
        chk.compute_sequence(1)
    except InfeasibleBudgetError as error:
        return error.minimum_bytes
    raise AssertionError("a limit of one byte was accepted")


def plain_peak(chk: Checkpointable) -> int:
    """Return the peak of a measured module that recomputes nothing."""
    chk.compute_sequence(10**12)
    return chk.get_expected_memory()


def at_fraction(chk: Checkpointable, fraction: float) -> int:
    """Plan between the least memory (0) and that of a run without recomputation (1)."""
    least, most = least_limit(chk), plain_peak(chk)
    limit = int(least + fraction * (most - least))
    chk.compute_sequence(limit)
    return limit
