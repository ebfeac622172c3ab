"""Compile a joint: partition it, and let inductor compile forward and backward.

Inductor chooses the layout of saved tensors. So the forward is run once on stand-ins, and the
backward is compiled for the layouts that it returns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rkgb.compiled.code.classes import (
    CompiledClass,
    CompiledCode,
    NotCompiledError,
    Sizes,
    bound,
    made_by,
    value_of,
)
from rkgb.compiled.code.halves import Flops, Halves, Place, inputs_of, is_heavy
from rkgb.compiled.code.sizes import SizeRule
from rkgb.compiled.pieces.joint import Joint
from rkgb.elements.target import Boxed
from rkgb.graphs.basic import autocast_as
from rkgb.torch_api.private.inductor import (
    AnySize,
    compiled_by_inductor,
    fake_tensors,
    partitioned,
    traced_for_inductor,
    under_inductor,
)
from rkgb.torch_api.quiet import without_warnings

# Settings of inductor, whatever the process has set: checks on, strides kept, no CUDA graphs.
_OPTIONS = {
    **{"size_asserts": True, "fallback_random": True, "keep_output_stride": True},
    **{"triton.cudagraphs": False, "cpp_wrapper": False, "freezing": False},
    **{"fx_graph_cache": True},
}


def compile_code(
    joint: Joint,
    device: torch.device,
    other: CompiledClass | None = None,
    rule: SizeRule | None = None,
) -> CompiledCode:
    """Compile one piece for `device`, and for its size; with `rule`, for all that it covers.

    The backward recomputes norms and elementwise results from the other saved tensors. If `other`
    is given (a class compiled so), the forward also saves what inductor thinks is worth saving.

    Raises:
        NotCompiledError: inductor cannot compile it, or it saves no more than `other`.
    """
    with refusals():
        return _Compiling(joint, device, other, rule).run()


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Turn errors of tracing, partitioning, lowering and compilers into `NotCompiledError`."""
    try:
        # The recording contains the casts; warnings are about inductor itself.
        with without_warnings(), autocast_as(None):
            yield
    except NotCompiledError:
        raise
    except Exception as error:
        text = str(error).strip() or type(error).__name__
        raise NotCompiledError(f"{type(error).__name__}: {text.splitlines()[0][:200]}") from error


class _Compiling:
    def __init__(
        self, joint: Joint, device: torch.device, other: CompiledClass | None, rule: SizeRule | None
    ) -> None:
        self.joint, self.device, self.other, self.rule = joint, device, other, rule
        self.count = len(joint.results) + 2 * len(joint.statistics)
        self.size = None if rule is None else rule.size_of(joint.numbers)
        self.sizes: Sizes | None = None

    def run(self) -> CompiledCode:
        joint, mode = self.joint, fake_tensors()
        if not joint.results or (joint.backward and not joint.gradients):
            raise NotCompiledError("nobody reads what it makes")
        if self.rule is not None and self.size is not None:
            self.sizes = Sizes(self.rule, AnySize(mode, self.size))
        sizes = [] if self.sizes is None else [self.sizes.symbol.symint]
        laid = self._at(*sizes)
        with mode:
            primals = [laid.infos[name].empty(self.device) for name in joint.primals]
            tangents = [laid.infos[name].empty(self.device) for name in joint.tangents]
        graph = traced_for_inductor(mode, self._run, [*sizes, *primals], tangents)
        kinds: list[Place] = [("size", i) for i in range(len(sizes))]
        kinds += [("primal", i) for i in range(len(primals))]
        kinds += [("tangent", i) for i in range(len(tangents))]
        names = (node.name for node in inputs_of(graph))
        places = dict(zip(names, kinds, strict=True))
        static = [kinds.index(("primal", joint.primals.index(name))) for name in joint.static]
        with under_inductor(mode, _OPTIONS):
            forward, backward = partitioned(
                *(graph, [*sizes, *primals, *tangents], self.count, sorted(static), is_heavy),
                rebuilds=self.other is None,
            )
            halves = Halves(forward, backward, self.count, places, self._number)
            if self.other is not None and halves.kept_bytes <= _kept_bytes(self.other, self.count):
                raise NotCompiledError("keeps no more")
            resident = [
                at
                for at, (kind, i) in enumerate(halves.takes)
                if kind == "primal" and joint.primals[i] in joint.static
            ]
            run = compiled_by_inductor(
                forward, _values(forward), resident, len(joint.results), "forward"
            )
            takes = tuple(at for kind, at in halves.takes if kind != "size")
            _, made = made_by(joint, self.device, bound(run, halves.takes, self.size), takes)
            for node, (kind, at) in zip(inputs_of(backward), halves.takes_back, strict=True):
                if kind == "result":
                    with mode:
                        node.meta["val"] = self._restrided(node.meta["val"], made[at])
            run_back: Boxed = _nothing
            if joint.backward:
                run_back = compiled_by_inductor(
                    backward, _values(backward), (), len(joint.gradients), "backward"
                )
        return CompiledCode(
            (run, run_back),
            *(halves.takes, halves.takes_back),
            flops=(Flops.of(forward), Flops.of(backward)),
            keeps_more=self.other is not None,
            sizes=self.sizes,
        )

    def _at(self, *sizes: Any) -> Joint:
        """Return the piece at its size, which may be a symbol."""
        if self.rule is None:
            return self.joint
        return self.joint.with_numbers(self.rule.numbers(sizes[0]))

    def _run(self, primals: Sequence[Any], tangents: Sequence[Tensor]) -> list[Tensor]:
        count = int(self.rule is not None)
        return self._at(*primals[:count]).run(primals[count:], tangents)

    def _number(self, number: Any) -> int:
        return value_of(self.sizes, self.size, number)

    def _restrided(self, traced: Tensor, made: Tensor) -> Tensor:
        """Return a fake tensor in the layout that inductor chose, also for symbolic sizes."""
        if self.sizes is None:
            stride: Sequence[Any] = made.stride()
        elif tuple(map(self._number, traced.stride())) == made.stride():
            return traced
        else:
            stride = _dense(traced.shape, made.stride())
            if tuple(map(self._number, stride)) != made.stride():
                raise NotCompiledError("what is saved lies in memory in no order of its sizes")
        return torch.empty_strided(traced.shape, stride, dtype=made.dtype, device=self.device)


def _dense(shape: Sequence[Any], stride: Sequence[int]) -> list[Any]:
    """Return dense strides for a shape, with the axes ordered as in `stride`."""
    found: list[Any] = [1] * len(shape)
    step: Any = 1
    for axis in sorted(range(len(shape)), key=lambda axis: (stride[axis], -axis)):
        found[axis] = step
        step = step * shape[axis]
    return found


def _kept_bytes(code: CompiledClass, count: int) -> int:
    return sum(made.info.storage_bytes for made in code.results[count:])


def _nothing(_: list[Any]) -> Sequence[Tensor]:
    """The backward of a series."""
    return ()


def _values(graph: Any) -> list[Any]:
    return [node.meta["val"] for node in inputs_of(graph)]
