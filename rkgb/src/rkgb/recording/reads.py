"""What Python reads of the values of a running step: guards for it, or a refusal.

What follows from inputs alone is computed again at the start of each step, and has to be the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from rkgb.elements.op import Op, Ref, map_refs
from rkgb.elements.spread import is_running
from rkgb.elements.tensor_info import storage_id
from rkgb.errors import NeedsContentError, NotRecordedError, ReadsDataError
from rkgb.graphs.basic import Read
from rkgb.recording.places import Places, only_raises
from rkgb.recording.repeated import Blanks, RepeatedKernels
from rkgb.recording.values import Values
from rkgb.torch_api.private.autograd import current_autograd_node
from rkgb.torch_api.private.tables import pytree

_aten = torch.ops.aten
_MOST_READ = 1 << 16  # limit of elements in one guard, if Python reads all of a tensor
# They return nothing, and raise an error for some values: a program would leave them out.
CHECKS = frozenset(
    (_aten._linalg_check_errors.default, _aten._assert_async.default, _aten._assert_async.msg)
)
# The size of their result depends only on masks among their arguments.
_MASKS = (torch.bool, torch.uint8)
_SELECTIONS = (_aten.index.Tensor, _aten._unsafe_index.Tensor, _aten.masked_select.default)


class Reads(Values):
    """The values of a step, and what Python has read of them."""

    def __init__(self, device: torch.device, places: Places, *, guards: bool) -> None:
        super().__init__(device)
        self.places = places
        self.guards = guards  # reads of values that follow from inputs are allowed
        self.forward: list[Op] = []
        self.in_backward = False
        # Skips repeated kernels. None: every kernel runs, so that all contents are real.
        self.repeated: RepeatedKernels | None = RepeatedKernels(Blanks(self.names.empty))
        self.is_paused = False  # operations are not recorded at present
        self.reads: list[Read] = []
        self.checks: list[tuple[str, str, Tensor]] = []  # path of the module, line, what it saw

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While active, operations run unrecorded."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def argument(self, tensor: Tensor) -> str:
        """Return the name of an argument; one without a name is a constant."""
        name = self.name_of(tensor)
        if name is None:
            refuse_shell(tensor)
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
        self.note("content", self.op(_aten.alias.default, (Ref(name),), {}, ()), value)

    def look_at_size(
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
            op = self.op(target, its_args, its_kwargs, ())
            with self.paused(), torch.no_grad():
                keywords = map_refs(dict(its_kwargs), self.names.tensor)
                made = target(*map_refs(its_args, self.names.tensor), **keywords)
            shapes = [tuple(t.shape) for t in (made if isinstance(made, tuple) else (made,))]
            self.note("size", op, tuple(shapes))

    def is_check(self, args: tuple[Any, ...]) -> bool:
        """Return whether a computed value is read only by an assertion; the step repeats it."""
        fits = self.guards and not self.in_backward and len(args) == 1 and only_raises()
        if fits:
            self.add_check(args[0])
        return fits

    def add_check(self, seen: Tensor) -> None:
        """Note a computed value that decides whether the forward raises; steps compare it."""
        if self.repeated is not None and self.repeated.has_repeated:
            raise NeedsContentError
        self.checks.append((*self.places.here(), seen))

    def refuse_caught(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Refuse an operation that has raised an error in a recording, where that may be caught.

        Unrecorded, or for other values, it would not.

        Raises:
            NotRecordedError, ReadsDataError: so it is.
        """
        if not self.places.may_catch() or func in CHECKS:
            return
        with self.paused(), contextlib.suppress(Exception):
            func(*args, **kwargs)
            raise NotRecordedError(f"runs '{func}' on tensors that cannot be followed")
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if self.in_backward or self.known.issuperset(map(self.argument, tensors)):
            return
        if self.repeated is not None and self.repeated.has_repeated:
            raise NeedsContentError
        with self.paused():
            try:
                like = pytree.tree_map(_without_content, (args, dict(kwargs)))
                func(*like[0], **like[1])
            except NotImplementedError:
                pass
            except Exception:  # already for their shapes and types
                return
        raise self.reads_data(f"whether '{func}' raises an error")

    def refuse_blank(self, inputs: Sequence[str], results: Sequence[str]) -> None:
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

    def op(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], results: tuple[str, ...]
    ) -> Op:
        """Return an operation of the code that runs, which no kernel has shown."""
        path, source = self.places.here()
        return Op((*results, "read")[0], func, args, kwargs, results, False, path, source)

    def note(self, kind: Literal["number", "size", "content"], op: Op, value: Any) -> None:
        """Note what Python has read."""
        self.reads.append(Read(kind, op, len(self.forward), value))


def _without_content(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def refuse_shell(tensor: Tensor | None) -> None:
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
