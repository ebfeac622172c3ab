"""Records every operation of a running step, below autograd, without keeping a tensor alive.

Names are attached to live tensor objects by weak references. So tensors are freed as without a
recording, and the engine adds gradients in place exactly where it does so without one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from rkgb.device.rng import RngState
from rkgb.elements.op import BATCH_NORMS, Op, Ref, map_refs
from rkgb.elements.spread import is_running, memory_of
from rkgb.elements.tensor_info import same_values, storage_id
from rkgb.errors import (
    InvalidGraphError,
    NeedsContentError,
    NotRecordedError,
    ReadsDataError,
    SideEffectError,
    WritesInputError,
)
from rkgb.graphs.basic import Read
from rkgb.guards.code_watch import CodeWatch
from rkgb.module_state.kept_writes import KeptWrites
from rkgb.recording.kernels import (
    tensors_returned,
    traits_of,
    without_generator,
    without_shape_reads,
)
from rkgb.recording.numbers import NumberTrace
from rkgb.recording.places import Places, only_raises
from rkgb.recording.repeated import Blanks, RepeatedKernels
from rkgb.recording.values import Values
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
_MOST_READ = 1 << 16  # limit of elements in one guard, if Python reads all of a tensor
# The size of their result depends only on masks among their arguments.
_MASKS = (torch.bool, torch.uint8)
_SELECTIONS = (_aten.index.Tensor, _aten._unsafe_index.Tensor, _aten.masked_select.default)


class Recorder(Values, DispatchMode):
    """While active, appends operations to `forward`, or with `in_backward` to `backward`."""

    only_watches = True

    def __init__(
        self, model_name: str, device: torch.device, places: Places, *, guards: bool = True
    ) -> None:
        Values.__init__(self, device)
        DispatchMode.__init__(self)
        self.model_name, self.device, self.places = model_name, device, places
        self.forward: list[Op] = []
        self.backward: list[Op] = []
        self.in_backward = False
        self.guards = guards  # reads of values that follow from inputs are allowed
        # Skips repeated kernels. None: every kernel runs, so that all contents are real.
        self.repeated: RepeatedKernels | None = RepeatedKernels(Blanks(self.names.empty))
        # The operation of each metered kernel; None is a kernel of a guard.
        self.metered: list[Op | None] = []
        self.numbers: NumberTrace | None = None  # of the call, if they are tracked
        self.kept_writes: KeptWrites | None = None  # restores parameters that are written
        self.following: CodeWatch | None = None  # notes which functions of the user run
        self._taken: tuple[int, ...] = ()  # numbers that the running call takes
        self.is_paused = False  # operations are not recorded at present
        self._patches: list[Patches] = []
        self.reads: list[Read] = []
        self.checks: list[tuple[str, str, Tensor]] = []  # path of the module, line, what it saw
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
    def paused(self) -> Iterator[None]:
        """While active, operations run unrecorded."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

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
        watch = self.following
        if self.is_paused or watch is None:
            return self._recorded(func, args, kwargs)
        watch.pause()
        try:
            return self._recorded(func, args, kwargs)
        finally:
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
        inputs: list[str] = []
        named_args = self._named(args, inputs)
        named_kwargs = self._named(kwargs, inputs)
        known = self.known.issuperset(inputs)
        given = self.guards and not self.in_backward and self.given.issuperset(inputs)
        if traits.is_dynamic and not known:
            self._look_at_size(func, named_args, named_kwargs, given)
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
            result, is_metered = self.repeated.run(func, args, kwargs)
            self.metered += [None] * is_metered
        else:
            result = self.repeated.compute(func, args, kwargs)
        tensors, many = tensors_returned(result)
        if tensors is None:
            if known:  # made from numbers: no operation of the step
                return result
            if not given and isinstance(result, bool) and self._is_check(args):
                return result
            if not given or not isinstance(result, (bool, int, float)) or result != result:
                raise self.reads_data("control flow or a Python number")
            self._note("number", self._op(func, named_args, named_kwargs, ()), result)
            return result
        for tensor in tensors:
            _refuse_shell(tensor)
        is_random = traits.may_be_random and (
            is_skipped or self._has_drawn(func, named_args, named_kwargs)
        )
        writes += tuple(n for n, copy in old.items() if not self._unchanged(n, copy))
        results = self.results_of(traits.name, tensors, may_alias=bool(inputs))
        if self.blank:
            self._refuse_blank(inputs, results)
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

    def _is_check(self, args: tuple[Any, ...]) -> bool:
        """Return whether a computed value is read only by an assertion; the step repeats it."""
        fits = self.guards and not self.in_backward and len(args) == 1 and only_raises()
        if fits:
            if self.repeated is not None and self.repeated.has_repeated:
                raise NeedsContentError
            path, source = self.places.here()
            self.checks.append((path, source, args[0]))
        return fits

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

    def _op(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], results: tuple[str, ...]
    ) -> Op:
        path, source = self.places.here()
        return Op((*results, "read")[0], func, args, kwargs, results, False, path, source)

    def _note(self, kind: Literal["number", "size", "content"], op: Op, value: Any) -> None:
        self.reads.append(Read(kind, op, len(self.forward), value))

    def _refuse_blank(self, inputs: Sequence[str], results: Sequence[str]) -> None:
        """Refuse to read memory that no operation has written; an unseen kernel must have.

        A view reads nothing. Raises NotRecordedError.
        """
        read = self.blank.intersection(self.infos[name].alias_of for name in inputs)
        if read and not all(n and self.infos[n].alias_of in read for n in results):
            self.refuse_unwritten(min(read))

    def refuse_unwritten(self, name: str) -> None:
        """Refuse a value whose content no operation has written.

        Raises:
            NotRecordedError: no operation has written it.
        """
        if self.infos[name].alias_of in self.blank:
            raise NotRecordedError(
                "fills a tensor in a way that no operation shows, as kernels outside of torch do",
                module_path=self.reads_data("").module_path,
            )

    def read_content(self, tensor: Tensor, what: str) -> None:
        """Note that Python or another library reads all elements of a tensor.

        Raises:
            ReadsDataError: they depend on more than the inputs; `what` says how they are read.
        """
        if self.is_paused:
            return
        name = self.argument(tensor)
        if name in self.known:
            return
        may_look = self.guards and not self.in_backward
        readable = what != "data_ptr" and tensor.numel() <= _MOST_READ
        if name not in self.given or not may_look or not readable:
            raise self.reads_data(f"control flow or what '{what}' gives")
        with self.paused(), torch.no_grad():
            value = (tuple(tensor.shape), *tensor.detach().reshape(-1).tolist())
        self._note("content", self._op(_aten.alias.default, (Ref(name),), {}, ()), value)

    def detached(self, name: str) -> str:
        """Return a separate name for a value, without a gradient."""
        own = self.names.fresh("detach")
        self.infos[own] = self.infos[name]
        self.forward.append(self._op(_aten.alias.default, (Ref(name),), {}, (own,)))
        return own

    def follow_random(self) -> None:
        """Accept random numbers that were drawn without a recording."""
        self.random_state = RngState.save(self.device)

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

    def argument(self, tensor: Tensor) -> str:
        """Return the name of an argument; one without a name is a constant."""
        name = self.name_of(tensor)
        if name is None:
            _refuse_shell(tensor)
            root = self.names.alias_of(storage_id(tensor))
            if root is not None and root not in self.resident:
                raise NotRecordedError(
                    f"looks at the memory of '{root}' in a way that no operation shows",
                    "use a view made by torch's operations",
                )
            name = self.add_external(self.names.fresh("c_constant"), tensor, "constant")
        if tensor.requires_grad:
            self.wanting.add(name)
        return name

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

    def _look_at_size(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: bool
    ) -> None:
        """Add a guard on the size of a result; a selection's size depends only on the mask.

        Raises:
            ReadsDataError: it depends on more than the inputs.
        """
        looks = [(func, args, kwargs)]
        if func in _SELECTIONS:
            indices = args[1] if isinstance(args[1], (list, tuple)) else (args[1],)
            given_by = [i for i in indices if isinstance(i, Ref)]
            masks = [i for i in given_by if self.infos[i.name].dtype in _MASKS]
            may_look = self.guards and not self.in_backward
            given = may_look and self.given.issuperset(mask.name for mask in masks)
            looks = [(_aten.nonzero.default, (mask,), {}) for mask in masks]
        for target, its_args, its_kwargs in looks:
            if not given:
                raise self.reads_data(f"the size of what '{func}' returns")
            op = self._op(target, its_args, its_kwargs, ())
            with self.paused(), torch.no_grad():
                keywords = map_refs(dict(its_kwargs), self.names.tensor)
                made = target(*map_refs(its_args, self.names.tensor), **keywords)
            shapes = [tuple(t.shape) for t in (made if isinstance(made, tuple) else (made,))]
            self._note("size", op, tuple(shapes))

    def _refuse_writes(self, what_writes: str, writes: Sequence[str], is_grad: bool) -> None:
        for name in writes:
            root = self.infos[name].alias_of
            kind = self.kinds.get(root, "")
            # Tensors that autograd makes unseen in a backward are constants too.
            kept = (
                ("parameter", "input") if self.in_backward else ("parameter", "input", "constant")
            )
            if kind == "input" and not self.in_backward and root not in self.wanting:
                raise WritesInputError(root, what_writes, *self.places.here())
            if kind == "parameter" and not self.in_backward and not is_grad:
                continue  # under no_grad, for example: restored after the recording
            if kind in kept:
                what = "input" if kind == "input" else "parameter or constant"
                path, source = self.places.here()
                raise SideEffectError(
                    f"cannot place '{what_writes}' ({path or 'root'}, {source}): it overwrites "
                    f"the {what} '{root}' of {self.model_name}, which a second run of it would see "
                    "changed. Work on a copy: x = x.clone()."
                )

    def reads_data(self, what: str) -> ReadsDataError:
        """Return the error that `what`, in the running code, depends on data."""
        node = current_autograd_node() if self.in_backward else None
        if node is None:
            return ReadsDataError(what, "")
        number = int(node._sequence_nr())
        made = next((op for op in self.forward if op.sequence_nr == number), None)
        if made is None:
            return ReadsDataError(what, f"'{node.name()}'")
        place = f"of module '{made.module_path or '(root)'}' ({made.source})"
        return ReadsDataError(what, f"'{node.name()}' {place}", made.module_path)


def _refuse_shell(tensor: Tensor | None) -> None:
    """Refuse what a forward makes of a type that keeps its content in other tensors.

    Raises:
        NotRecordedError: it is of such a type, and no collective that still runs.
    """
    kind = type(tensor)
    if kind is not Tensor and hasattr(kind, "__tensor_flatten__") and not is_running(tensor):
        raise NotRecordedError(
            f"computes with tensors of a type of its own ({kind.__name__}), whose memory and "
            "content lie in others"
        )


def _is_differentiated(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether autograd records an operation on these arguments."""
    values = (*args, *kwargs.values())
    return torch.is_grad_enabled() and any(
        isinstance(value, Tensor) and value.requires_grad for value in values
    )
