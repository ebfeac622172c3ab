"""The code of a piece, for its size or for any, and the form of the tensors that it returns.

Forward and backward are run on stand-ins, and their results are compared with the recording. Values
that other nodes read must have the recorded shape and strides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rkgb.compiled.code.halves import Flops, Kind, Place, is_heavy
from rkgb.compiled.code.sizes import SizeRule
from rkgb.compiled.pieces.joint import Joint
from rkgb.elements.op import Op
from rkgb.elements.target import Boxed, Target
from rkgb.elements.tensor_info import TensorInfo, storage_bytes, storage_id
from rkgb.run.stand_ins import Drawn, StandIns
from rkgb.torch_api.private.autograd import straight_to_kernels
from rkgb.torch_api.private.inductor import AnySize


class CompiledCall(Target):
    """The forward or the backward of a class of pieces, as the target of an operation.

    The arguments at the positions `frees` are donated: the call frees each after its last use.
    """

    is_half = True
    run: Boxed

    def __init__(
        self,
        run: Boxed,
        name: str,
        digest: str,
        side: str,
        flops_of_one: int,
        frees: frozenset[int] = frozenset(),
    ) -> None:
        self.run, self.digest, self.side, self.flops_of_one = run, digest, side, flops_of_one
        self.frees = frees
        self.__name__ = name

    def __repr__(self) -> str:  # the same in every process: a key of recorded costs
        freed = f" frees {sorted(self.frees)}" if self.frees else ""
        return f"compiled {self.digest} {self.side}{freed}"

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        return self.run(list(tensors))

    def flops(self, count: Callable[[Op], int]) -> int:
        return self.flops_of_one

    def freeing(self, places: frozenset[int], own: frozenset[int]) -> CompiledCall:
        """Return the same call, with the arguments at these positions donated to it."""
        return CompiledCall(
            self.run, self.__name__, self.digest, self.side, self.flops_of_one, places
        )


class NotCompiledError(Exception):
    """A piece stays eager; the text says why."""


@dataclass(frozen=True, slots=True)
class Returned:
    """A tensor that compiled code returns: its layout, and the value whose storage it lies in."""

    info: TensorInfo  # of no name
    home: Place  # the first value in the same storage


@dataclass(frozen=True)
class CompiledClass:
    """The compiled forward and backward of a piece; values are numbered as in its joint.

    The forward returns the results of the joint, then its statistics, then the saved tensors.
    """

    forward: CompiledCall
    backward: CompiledCall
    takes: tuple[int, ...]  # primals
    results: tuple[Returned, ...]
    takes_back: tuple[Place, ...]
    gradients: tuple[Returned, ...]
    keeps_more: bool = False  # whether it saves tensors that could be recomputed


@dataclass(frozen=True)
class Sizes:
    """The sizes that code is valid for."""

    rule: SizeRule
    symbol: AnySize

    def of(self, joint: Joint) -> int | None:
        """Return the size of a piece, or None if the code is not valid for it."""
        size = self.rule.size_of(joint.numbers)
        return size if size is not None and self.symbol.is_valid(size) else None


def value_of(sizes: Sizes | None, size: int | None, number: Any) -> int:
    """Return the value of a number of compiled code, which may depend on its size."""
    if sizes is None or size is None:
        return int(number)
    return sizes.symbol.of(number, size)


@dataclass(frozen=True)
class CompiledCode:
    """The code that inductor made of a piece, for its size or for many."""

    halves: tuple[Boxed, Boxed]  # called with `takes` and `takes_back`, sizes included
    takes: tuple[Place, ...]
    takes_back: tuple[Place, ...]
    flops: tuple[Flops, Flops]
    keeps_more: bool
    sizes: Sizes | None = None  # for which it is valid; None: one

    def class_of(self, joint: Joint, device: torch.device, size: int | None) -> CompiledClass:
        """Return the class of a piece that this code serves, after a run on stand-ins.

        Raises:
            NotCompiledError: its results do not match the recording.
        """
        forward, backward = (
            bound(run, taken, size)
            for run, taken in zip(self.halves, (self.takes, self.takes_back), strict=True)
        )
        takes = tuple(at for kind, at in self.takes if kind != "size")
        takes_back = tuple(place for place in self.takes_back if place[0] != "size")
        given, made = made_by(joint, device, forward, takes)
        known = {**given, "result": made}
        gradients = _called(backward, [known[kind][at] for kind, at in takes_back])
        owners: dict[int, Place] = {}
        _described(given["primal"], owners, "primal")
        _described(given["tangent"], owners, "tangent")
        results = _described(made, owners, "result")
        found = _described(gradients, owners, "gradient")
        check_form(joint, joint.results, results)
        check_form(joint, joint.gradients, found)
        name = max(joint.forward, key=lambda op: is_heavy(op.target)).target_name
        digest = joint.digest + ("_keeping" if self.keeps_more else "")
        digest += "" if size is None else "_of_any_size"
        value = functools.partial(value_of, self.sizes, size)
        flops = [each.count(value) for each in self.flops]
        return CompiledClass(
            forward=CompiledCall(forward, f"compiled_{name}", digest, "forward", flops[0]),
            backward=CompiledCall(
                *(backward, f"compiled_{name}_backward", digest, "backward"), flops[1]
            ),
            takes=takes,
            results=results,
            takes_back=takes_back,
            gradients=found,
            keeps_more=self.keeps_more,
        )


def bound(run: Boxed, takes: Sequence[Place], size: int | None) -> Boxed:
    """Return a forward or backward that takes only tensors: the size is read off them."""
    places = [at for at, (kind, _) in enumerate(takes) if kind == "size"]
    if not places:
        return run
    (place,) = places

    def of_size(tensors: list[Any]) -> Sequence[Tensor]:
        tensors.insert(place, size)
        return run(tensors)

    return of_size


def made_by(
    joint: Joint, device: torch.device, forward: Boxed, takes: Sequence[int]
) -> tuple[dict[str, list[Tensor]], list[Tensor]]:
    """Run a forward on stand-ins; return the stand-ins and its results."""
    stand_ins = StandIns(joint.infos, device, {}, drawn=Drawn())
    given = {
        "primal": [stand_ins[name] for name in joint.primals],
        "tangent": [stand_ins[name] for name in joint.tangents],
    }
    return given, _called(forward, [given["primal"][place] for place in takes])


def check_form(joint: Joint, names: Sequence[str], made: Sequence[Returned]) -> None:
    """Compare the layout of a joint's results or gradients with the recording.

    Raises:
        NotCompiledError: a value that other nodes read has another layout.
    """
    infos = joint.infos
    homes: dict[str, Place] = {}  # recorded storage -> value that has it now
    for at, name in enumerate(joint.primals):
        homes.setdefault(infos[name].alias_of, ("primal", at))
    for at, name in enumerate(joint.tangents):
        homes.setdefault(infos[name].alias_of, ("tangent", at))
    for name, found in zip(names, made, strict=False):
        info = infos[name]
        theirs, ours = (
            (one.shape, one.dtype, _plain(one.shape, one.stride)) for one in (info, found.info)
        )
        if theirs != ours:
            raise NotCompiledError(f"'{name}' lies in memory as {ours}, not as {theirs}")
        if _root_of(joint, found.home) != info.alias_of:
            raise NotCompiledError(
                f"'{name}' shares memory with a value that was recorded in another storage"
            )
        home = homes.setdefault(info.alias_of, found.home)
        if _are_apart(home, found.home) and info.alias_of in joint.written:
            raise NotCompiledError(f"'{name}' has memory of its own, and others write to it")


def _are_apart(one: Place, other: Place) -> bool:
    incoming = ("primal", "tangent")
    return one != other and not (one[0] in incoming and other[0] in incoming)


def _root_of(joint: Joint, place: Place) -> str:
    kind, at = place
    names = {
        **{"primal": joint.primals, "tangent": joint.tangents},
        **{"result": joint.results, "gradient": joint.gradients},
    }[kind]
    return joint.infos[names[at]].alias_of if at < len(names) else ""


def _called(run: Any, tensors: list[Tensor]) -> list[Tensor]:
    with torch.no_grad(), straight_to_kernels():
        return list(run(tensors))


def _described(
    tensors: Sequence[Tensor], owners: dict[int, Place], kind: Kind
) -> tuple[Returned, ...]:
    """Return the layouts of tensors; `owners` maps storages to their first values, and grows."""
    return tuple(
        Returned(
            TensorInfo.of(tensor, "", storage_bytes(tensor)),
            owners.setdefault(storage_id(tensor), (kind, at)),
        )
        for at, tensor in enumerate(tensors)
    )


def _plain(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    return tuple(0 if n <= 1 else step for n, step in zip(shape, strides, strict=True))
