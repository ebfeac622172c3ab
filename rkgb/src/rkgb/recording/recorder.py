"""Records every operation of a running step, below autograd, without keeping a tensor alive.

Names are attached to live tensor objects by weak references. So tensors are freed as without a
recording, and the engine adds gradients in place exactly where it does so without one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from rkgb.device.rng import RngState
from rkgb.elements.op import BATCH_NORMS, Op, Ref
from rkgb.elements.spread import memory_of
from rkgb.elements.tensor_info import same_values, storage_id
from rkgb.errors import (
    DrawsAgainError,
    InvalidGraphError,
    NotRecordedError,
    RkgbError,
    SideEffectError,
    WritesInputError,
    in_module,
)
from rkgb.guards.code_watch import CodeWatch
from rkgb.module_state.kept_writes import KeptWrites
from rkgb.outside.known import note_written
from rkgb.recording.kernels import (
    tensors_returned,
    traits_of,
    without_generator,
    without_shape_reads,
)
from rkgb.recording.numbers import NumberTrace
from rkgb.recording.places import Places
from rkgb.recording.reads import CHECKS, Reads, refuse_shell
from rkgb.torch_api.kernel_choice import Flags, FlagWatch, UnknownFlagError
from rkgb.torch_api.patches import Patches
from rkgb.torch_api.private.autograd import current_autograd_node, latest_sequence_nr
from rkgb.torch_api.private.modes import DispatchMode, unwatched

_aten = torch.ops.aten
# Views that the tensor itself becomes.
_VIEWS_IN_PLACE = {
    _aten.transpose_.default: _aten.transpose.int,
    _aten.t_.default: _aten.t.default,
    _aten.unsqueeze_.default: _aten.unsqueeze.default,
    _aten.squeeze_.default: _aten.squeeze.default,
    _aten.squeeze_.dim: _aten.squeeze.dim,
    _aten.squeeze_.dims: _aten.squeeze.dims,
    _aten.as_strided_.default: _aten.as_strided.default,
}
# They return their argument: same memory, same geometry.
_IDENTITIES = frozenset((_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default))


class Recorder(Reads, DispatchMode):
    """While active, appends operations to `forward`, or with `in_backward` to `backward`."""

    only_watches = True

    def __init__(
        self, model_name: str, device: torch.device, places: Places, *, guards: bool = True
    ) -> None:
        Reads.__init__(self, device, places, guards=guards)
        DispatchMode.__init__(self)
        self.model_name, self.device = model_name, device
        self.backward: list[Op] = []
        # The operation of each metered kernel; None is a kernel of a guard.
        self.metered: list[Op | None] = []
        self.numbers: NumberTrace | None = None  # of the call, if they are tracked
        self.kept_writes: KeptWrites | None = None  # restores parameters that are written
        self.following: CodeWatch | None = None  # notes which functions of the user run
        self._taken: tuple[int, ...] = ()  # numbers that the running call takes
        self._patches: list[Patches] = []
        self.random_state = RngState.save(device)
        self._flags = FlagWatch()

    @property
    def count(self) -> int:
        """The number of operations so far."""
        return len(self.forward) + len(self.backward)

    def refuse_overwritten(self, name: str, since: int) -> None:
        """Refuse a saved tensor whose memory was written after operation number `since`.

        Raises:
            InvalidGraphError: it was.
        """
        for place, written in self.written.get(self.infos[name].alias_of, ()):
            with self.paused():
                if place < since or not self.names.overlap(name, written):
                    continue
            op = (*self.forward, *self.backward)[place]
            raise InvalidGraphError.to_capture(
                self.model_name,
                f"replace the in-place operation '{op.target_name}'",
                "it overwrites a tensor that the backward needs; eager PyTorch refuses this "
                "backward too",
                f"{op.module_path or 'root'}, {op.source}",
            )

    # ------------------------------------------------------------------ operations

    @contextmanager
    def taking(self, numbers: Sequence[int]) -> Iterator[None]:
        """While active, operations may take these numbers of the call."""
        before, self._taken = self._taken, tuple(numbers)
        try:
            yield
        finally:
            self._taken = before

    def patched(self, patches: Sequence[tuple[Any, str, Any]]) -> Patches:
        """Return replacements of torch's functions, which `unwatched` undoes."""
        self._patches.append(Patches(patches))
        return self._patches[-1]

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """While active, operations run as without a recording."""
        with ExitStack() as stack:
            stack.enter_context(self.paused())
            stack.enter_context(unwatched())
            for patches in self._patches:
                stack.enter_context(patches.undone())
            yield

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        watch = None if self.is_paused else self.following
        if watch is not None:
            watch.pause()
        try:
            return self._recorded(func, args, kwargs)
        except Exception as error:
            if not self.is_paused and not isinstance(error, RkgbError):
                self.refuse_caught(func, args, kwargs)
            raise
        finally:
            if watch is not None:
                watch.go_on()

    def _recorded(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self.is_paused:
            return func(*args, **kwargs)
        traits = traits_of(func)
        if func in _IDENTITIES:
            result = func(*args, **kwargs)
            name = self.argument(args[0])
            if func is _aten.lift_fresh.default:  # Python makes it from numbers
                self.known.add(name)
            self.names.bind(name, result, storage_id(result))
            return result
        if func in _VIEWS_IN_PLACE:
            return self._view_in_place(func, args, kwargs)
        if func in CHECKS and self.guards and not self.in_backward:
            if self.argument(args[0]) not in self.known:
                self.add_check(self._recorded(_aten.any.default, args[:1], {}))
            with self.paused():
                return func(*args, **kwargs)
        inputs: list[str] = []
        named_args = self._named(args, inputs)
        named_kwargs = self._named(kwargs, inputs)
        known = self.known.issuperset(inputs)
        given = self.guards and not self.in_backward and self.given.issuperset(inputs)
        if traits.is_dynamic and not known:
            self.look_at_size(func, named_args, named_kwargs, given)
        writes = traits.writes(named_args, named_kwargs)
        self.note_writes(writes, self.count)
        if traits.name in BATCH_NORMS and named_args[5] is True:  # autograd does not see it either
            writes += tuple(v.name for v in named_args[3:5] if isinstance(v, Ref))
        if writes:
            self._refuse_writes(traits.name, writes, _is_differentiated(args, kwargs))
            if self.kept_writes is not None:
                self.kept_writes.keep(func, args, kwargs)
        old = self._snapshots(inputs, writes)
        is_skipped = is_metered = False
        if traits.is_foreign:  # it runs as a whole again, and may read values by itself
            with self.paused():
                result = self._run(func, args, kwargs)
        elif self.repeated is None or known or given:
            result = self._run(func, args, kwargs)
        elif writes:
            result, is_skipped = self._overwrite(func, writes, args, kwargs)
        elif traits.is_repeatable:
            try:
                result = self.repeated.run(func, args, kwargs)
            finally:  # also of a kernel that fails: the forward may catch the error
                is_metered = self.repeated.spans > len(self.metered)
                self.metered += [None] * is_metered
        else:
            result = self.repeated.compute(func, args, kwargs)
        tensors, many = tensors_returned(result)
        if tensors is None:
            if known:  # made from numbers: no operation of the step
                return result
            if not given and isinstance(result, bool) and self.is_check(args):
                return result
            if not given or not isinstance(result, (bool, int, float)) or result != result:
                raise self.reads_data("control flow or a Python number")
            self.note("number", self.op(func, named_args, named_kwargs, ()), result)
            return result
        for tensor in tensors:
            refuse_shell(tensor)
        is_random = traits.may_be_random and (
            is_skipped or self._has_drawn(func, named_args, named_kwargs)
        )
        if is_random:
            self._refuse_other_draws()
        writes += tuple(n for n, copy in old.items() if not self._unchanged(n, copy))
        results = self.results_of(traits.name, tensors, may_alias=bool(inputs))
        if self.blank:
            self.refuse_blank(inputs, results)
        if traits.is_blank and tensors[0] is not None and tensors[0].numel():
            self.blank.add(results[0])
        self.follow(results, writes, known=known, given=given, is_random=is_random)
        if self._taken:
            self._note_numbers((*results, *writes))
        node = current_autograd_node() if self.in_backward else None
        path, source = ("", "") if self.in_backward else self.places.here()
        target: Any = func
        if traits.like is not None and tensors[0] is not None and "out" not in kwargs:
            target, named_args, named_kwargs = without_shape_reads(
                func, traits.like, named_args, named_kwargs, tensors[0]
            )
        made = Op(
            name=next(filter(None, results), None) or self.names.fresh(traits.name),
            target=target,
            args=named_args,
            kwargs=named_kwargs,
            results=results,
            returns_many=many,
            module_path=path,
            source=source,
            sequence_nr=latest_sequence_nr() if node is None else int(node._sequence_nr()),
            is_random=is_random,
            writes=writes,
            flags=self.flags(),
        )
        if is_metered:
            self.metered[-1] = made
        (self.backward if self.in_backward else self.forward).append(made)
        return result

    def _view_in_place(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """Record a view, which the tensor itself becomes: in a program, others read it as it was.

        A kernel that gets it with other sizes than it was recorded with may overwrite memory.
        """
        view = self._recorded(_VIEWS_IN_PLACE[func], args, kwargs)
        tensor: Tensor = args[0]
        func(*args, **kwargs)
        self.names.bind(self.argument(view), tensor, storage_id(tensor))
        return tensor

    def claim(self, size_bytes: int) -> None:
        """Called before memory is allocated; see `BoundedRecorder`."""

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self.repeated is None:
            return func(*args, **kwargs)
        return self.repeated.compute(func, args, kwargs)

    def _overwrite(
        self, func: Any, writes: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, bool]:
        """Run an overwriting kernel; return its result and whether it was skipped."""
        assert self.repeated is not None
        is_own = not any(map(self.is_resident, writes)) and traits_of(func).is_overwriting
        if is_own and len(writes) == 1:
            return self.repeated.overwrite(func, args, kwargs)
        return self.repeated.compute(func, args, kwargs), False

    def flags(self) -> Flags:
        """Return the flags that the forward has set for the running operation.

        Raises:
            NotRecordedError: one of them cannot be set again.
        """
        try:
            return self._flags.changed()
        except UnknownFlagError:
            raise NotRecordedError("sets a global flag of torch that a plan cannot set") from None

    def _note_numbers(self, changed: Sequence[str]) -> None:
        """Note that an operation may take tracked numbers; reading its result reads them."""
        assert self.numbers is not None
        if self.in_backward:
            self.numbers.escape("a backward in Python")
        self.numbers.uses[len(self.forward)] = self._taken
        self.forget_origin(changed)

    def detached(self, name: str) -> str:
        """Return a separate name for a value, without a gradient."""
        own = self.names.fresh("detach")
        self.infos[own] = self.infos[name]
        self.forward.append(self.op(_aten.alias.default, (Ref(name),), {}, (own,)))
        return own

    def follow_random(self) -> None:
        """Accept random numbers that were drawn without a recording."""
        before, self.random_state = self.random_state, RngState.save(self.device)
        if not before.equals(self.random_state):
            self._refuse_other_draws()

    def _refuse_other_draws(self) -> None:
        """Refuse to draw where plain PyTorch draws other random numbers in the backward.

        Raises:
            DrawsAgainError: it is in a checkpoint that does not keep the random state.
        """
        if self.places.draws_again and not self.in_backward:
            path, source = self.places.here()
            raise DrawsAgainError.at(self.model_name, f"{source} in {in_module(path)}")

    def _named(self, tree: Any, inputs: list[str]) -> Any:
        if isinstance(tree, Tensor):
            if tree.layout is not torch.strided:
                raise NotRecordedError("computes with sparse tensors")
            if memory_of(tree) is not tree:
                raise NotRecordedError("computes with distributed tensors")
            name = self.argument(tree)
            inputs.append(name)
            return Ref(name)
        kind = type(tree)
        if kind is tuple:
            return tuple([self._named(value, inputs) for value in tree])
        if kind is list:
            return [self._named(value, inputs) for value in tree]
        if kind is dict:
            return {key: self._named(value, inputs) for key, value in tree.items()}
        return without_generator(tree) if kind is torch.Generator else tree

    # ------------------------------------------------------------------ unseen effects

    def _snapshots(self, inputs: Sequence[str], writes: Sequence[str]) -> dict[str, Tensor]:
        # A custom kernel may write to buffers although its schema does not say so.
        if self.in_backward or self.buffers.keys().isdisjoint(inputs):
            return {}
        names = [n for n in inputs if n in self.buffers and n not in writes]
        with self.paused(), torch.no_grad():
            return {name: self.buffers[name].clone() for name in names}

    def _unchanged(self, name: str, copy: Tensor) -> bool:
        with self.paused(), torch.no_grad():
            return same_values(self.buffers[name], copy)

    def _has_drawn(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        with self.paused():
            now = RngState.save(self.device)
            moved = not now.equals(self.random_state)
        self.random_state = now
        return moved

    # ------------------------------------------------------------------ refusals

    def _refuse_writes(self, what_writes: str, writes: Sequence[str], is_grad: bool) -> None:
        for name in writes:
            root = self.infos[name].alias_of
            # One that is reached by another way than the module may lie on memory of a parameter.
            kind = "constant" if name in self.constants else self.kinds.get(root, "")
            # Tensors that autograd makes unseen in a backward are constants too.
            kept = (
                ("parameter", "input") if self.in_backward else ("parameter", "input", "constant")
            )
            if kind == "input" and not self.in_backward and root not in self.wanting:
                raise WritesInputError(root, what_writes, *self.places.here())
            if kind == "parameter" and not self.in_backward and not is_grad:
                continue  # under no_grad, for example: restored after the recording
            if kind in kept:
                if kind == "constant" and not self.in_backward:
                    note_written(self.constants[name if name in self.constants else root])
                what = "input" if kind == "input" else "parameter or constant"
                path, source = self.places.here()
                raise SideEffectError(
                    f"cannot place '{what_writes}' ({path or 'root'}, {source}): it overwrites "
                    f"the {what} '{root}' of {self.model_name}, which a second run of it would see "
                    "changed. Work on a copy: x = x.clone()."
                )


def _is_differentiated(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether autograd records an operation on these arguments."""
    values = (*args, *kwargs.values())
    return torch.is_grad_enabled() and any(
        isinstance(value, Tensor) and value.requires_grad for value in values
    )
