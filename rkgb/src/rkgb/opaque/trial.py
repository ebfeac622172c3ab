"""Trial runs of an opaque call, for its results, memory, inputs of the backward, and costs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.device.base import SpanMemory
from rkgb.device.chosen import trace_memory
from rkgb.device.rng import KeptGenerators, RngState
from rkgb.elements.spread import settled
from rkgb.elements.tensor_info import storage_id, storage_of
from rkgb.elements.trees import flatten
from rkgb.errors import SideEffectError
from rkgb.module_state.kept_writes import KeptTensors
from rkgb.module_state.start_of_call import BufferContents, Lent, ModuleState
from rkgb.opaque.call import Call, TensorKind, changes_arguments, run_call, taken_apart
from rkgb.opaque.gradients import added, as_visited, gradients_of, laid
from rkgb.opaque.inner_graph import is_entry
from rkgb.opaque.left_behind import refuse
from rkgb.opaque.piece import Piece, Seen, Tangents, strides_of
from rkgb.torch_api.by_values import FlopCounter, TakingMost
from rkgb.torch_api.patches import Patches
from rkgb.torch_api.private.autograd import gradients_kept, nodes_from
from rkgb.torch_api.private.memory import weak_storage
from rkgb.torch_api.tensor_facts import facts_of_result, standing_for


@dataclass
class _Trial:
    """One run of a call, forward and backward."""

    made: list[Tensor]
    seen: Seen
    # Of inputs in one part, of parameters in all parts.
    gradients: tuple[tuple[TensorKind, ...], ...]
    needs: tuple[tuple[str, int], ...]
    held_bytes: int
    made_bytes: tuple[int, int]
    time_ms: tuple[float, float]
    transforms: bool  # it has a transform, whose saved tensors were not seen
    foreign: list[Tensor]  # leaves that are no parameters: made inside, or from elsewhere
    strangers: tuple[str, ...]  # leaves that are parameters of other modules
    came: tuple[int, ...]  # inputs, then parameters, that got parts of gradients, in order

    def in_order(self, call: Call) -> tuple[str, ...]:
        """Return the parameters in the order in which their gradients are complete.

        Those that get none in this call come last, what is probably used last before the others.
        """
        turns = {place: turn for turn, place in enumerate(self.came)}
        first, end = len(call.places), len(self.came) + len(call.parameters)
        found = sorted(
            enumerate(call.parameters), key=lambda row: turns.get(first + row[0], end - row[0])
        )
        return tuple(name for _, name in found)


@dataclass
class Trials:
    """The trials of one call, whose parameters turn out to be others, or in another order.

    `tangents` are the strides of the gradients of its differentiable results; those of the results
    themselves are the default. The gradients of its inputs lie accordingly.
    """

    twin: nn.Module
    device: torch.device
    names: Mapping[int, str]  # of the parameters of the whole model that want gradients
    call: Call
    module: nn.Module
    tensors: Sequence[Tensor]
    written: tuple[str, ...]  # parameters
    tangents: Tangents | None
    takes_by_values: bool  # whether a call runs a kernel whose workspace depends on values
    watch: contextlib.AbstractContextManager[Any]  # notes which of the user's functions run
    flops: int | None = None

    def piece(self) -> tuple[Piece, list[Tensor]]:
        """Run the call four times; return the piece and the results of the call.

        Raises:
            SideEffectError: the call changes its arguments, or depends on a tensor that it does
                not take; only a larger submodule can be an opaque call.
        """
        self.before = KeptTensors(map(self.twin.get_parameter, self.written))
        # An inner backward adds to these itself, from the first run on: no memory of the step.
        self.added_to = [p for p in self.twin.parameters() if p.grad is None]
        try:
            return self._piece(is_in_order=False)
        finally:
            self.before.restore()
            for parameter in self.added_to:
                parameter.grad = None

    def _piece(self, *, is_in_order: bool) -> tuple[Piece, list[Tensor]]:
        device, parameters = self.device, map(self.twin.get_parameter, self.written)
        stream, state = RngState.save(device), ModuleState(self.module)
        contents, lent = BufferContents(self.module, parameters), Lent(self.module)
        trials: list[_Trial] = []
        gradients = [(buffer, buffer.grad) for buffer in self.twin.buffers()]

        def again() -> None:
            stream.restore()
            state.restore()
            self.before.restore()  # each trial starts with the parameters' own memory
            contents.restore()
            lent.again()
            for buffer, _ in gradients:  # as at the first step; the next one adds in place
                buffer.grad = None

        def put_back() -> None:
            lent.end()
            for buffer, gradient in gradients:
                buffer.grad = gradient

        def first(span: Any) -> None:
            trials.append(self._trial(span))

        def freeing(span: Any) -> None:
            self._trial(span, frees=True)

        if self.flops is None:  # first: what a backward changes is known before others change it
            self.flops = self._flops()
            again()
        trace = trace_memory(first, device)
        inside = [id(p) for p in self.added_to if p.grad is not None]
        call = self.call
        own = self._without(inside, trials[0])
        if own == call.parameters:
            own = (*own, *trials[0].strangers)
        orders_them = own == call.parameters and not is_in_order
        if orders_them:
            own = trials[0].in_order(call)
        if own != call.parameters:
            again()
            put_back()
            self.call = replace(call, parameters=own)
            return self._piece(is_in_order=orders_them)
        writes = contents.changed()
        again()
        hidden = self._hidden()
        again()
        freed = trace_memory(freeing, device).spans[1]
        again()
        trials.append(self._trial())
        end = RngState.save(device)
        state.restore()
        contents.restore()
        end.restore()
        put_back()
        one, two = trials
        self._refuse_foreign(one, two)
        spans = trace.spans
        held = one.held_bytes
        unseen = spans[0].end_bytes - spans[0].start_bytes - one.made_bytes[0] - held
        held += max(0, unseen)

        def beside(backward: SpanMemory) -> int:
            """Return its peak above its gradients; negative if held tensors are freed meanwhile."""
            return backward.added_peak_bytes - one.made_bytes[1] if trace.is_metered else 0

        return Piece(
            **vars(one.seen),
            call=call,
            gradients=tuple(kind for kinds in one.gradients for kind in kinds or (None,)),
            parts=tuple(max(1, len(kinds)) for kinds in one.gradients),
            needs=tuple(sorted({*one.needs, *hidden})),
            buffer_bytes=sum(b.nbytes for b, _ in contents.copies) if writes else 0,
            written=self.written,
            held_bytes=held,
            workspace_bytes=(
                max(0, spans[0].added_peak_bytes - one.made_bytes[0] - held),
                beside(spans[1]),
            ),
            # Saved tensors of a transform are not seen, and may be inputs.
            freeing_workspace_bytes=beside(spans[1] if one.transforms else freed),
            time_ms=(min(one.time_ms[0], two.time_ms[0]), min(one.time_ms[1], two.time_ms[1])),
            flops=(self.flops // 3, self.flops - self.flops // 3),
        ), two.made

    def _without(self, inside: Sequence[int], trial: _Trial) -> tuple[str, ...]:
        """Return the parameters that may also get a gradient outside of the call."""
        call = self.call
        came = trial.gradients[len(call.places) :]
        return tuple(
            name
            for name, kinds in zip(call.parameters, came, strict=True)
            if kinds or id(self.twin.get_parameter(name)) not in inside
        )

    def _hidden(self) -> list[tuple[str, int]]:
        """Return the inputs and results that a call holds unseen by autograd.

        An example are attributes of a Function's `ctx`. The call runs on copies, which are dropped;
        those that survive are held.
        """
        own = [standing_for(tensor.detach().clone(), tensor) for tensor in self.tensors]
        result, inner, inputs, given = run_call(self.call, self.twin, own)
        _, made, _ = taken_apart(self.call, result, inputs)
        inner.finish(inputs, made)
        resident = {storage_id(t) for t in (*self.twin.parameters(), *self.twin.buffers())}
        watched = {
            (kind, place): weak_storage(storage_of(t))
            for kind, found in (("result", made), ("input", own))
            for place, t in enumerate(found)
            if not t.is_sparse and storage_id(t) not in resident
        }
        del result, inputs, given, made, own
        return [place for place, storage in watched.items() if not storage.expired()]

    def _flops(self) -> int:
        """Return the FLOPs, or 0 if the counter fails."""
        try:
            # After a run under a mode, torch.cond fails for good.
            with FlopCounter() as counter, Patches([(torch, "cond", refuse)]), self.watch:
                self._trial()
        except Exception:  # of the counter: the trials that follow tell others
            return 0
        return int(counter.total)

    def _trial(self, span: Any = None, *, frees: bool = False) -> _Trial:
        """Run the call once; with `frees`, the gradients are donated to its backward."""
        call, tensors, tangents = self.call, self.tensors, self.tangents
        versions, nothing = [t._version for t in tensors], contextlib.nullcontext()
        before = time.perf_counter()
        most = TakingMost() if self.takes_by_values and span is not None else nothing
        with most, _in(span, "forward"):
            result, inner, inputs, given = run_call(call, self.twin, tensors)
            leaves, results, structure = taken_apart(call, result, inputs)
            inner.finish(inputs, results)
        middle = time.perf_counter()
        self._refuse_changes(versions, inputs, given)
        nested = _nested(results)
        leaves_used = inner.strangers()
        cast = inner.casts() if call.autocast is not None else ()
        buffers = {id(buffer) for buffer in self.twin.buffers()}
        given_at = {id(tensor): place for place, tensor in enumerate(inputs)}
        facts = tuple(given_at[id(t)] if id(t) in given_at else facts_of_result(t) for t in results)
        foreign = [t for t in leaves_used if id(t) not in self.names and id(t) not in buffers]
        made = [settled(t.detach()) for t in results]
        differentiable = tuple(t.requires_grad for t in results)
        held = inner.held_bytes([*self.twin.parameters(), *self.twin.buffers()])
        needs = inner.places
        if inner.transforms:  # the transform may hold any of them
            needs = tuple(("input", i) for i in range(len(tensors)))
            needs += tuple(("result", i) for i in range(len(made)))
        found = {("input", i): t.detach() for i, t in enumerate(tensors)}
        found.update({("result", i): t for i, t in enumerate(made)})
        pairs = zip(made, differentiable, strict=True)
        likes = [torch.full_like(t, 0.5) for t, wanted in pairs if wanted]
        if tangents is not None and len(tangents) == len(likes):
            likes = [laid(t, strides) for t, strides in zip(likes, tangents, strict=True)]
        grads: list[Tensor | None] = [*likes]
        layouts = tuple(map(strides_of, likes))
        del likes
        others = [] if frees else list(grads)  # that hold them
        inner.close()
        del result, results, inputs, given
        random = KeptGenerators.keep(self.device)
        after = time.perf_counter()
        with most, gradients_kept(foreign), _in(span, "backward"):
            # Only `others` holds the incoming gradients.
            every = range(len(grads)) if frees else ()
            parts = gradients_of(inner, found, grads, every)
            for own in filter(None, parts[: len(tensors)]):
                own[:] = [added(own)]
        del others
        end = time.perf_counter()
        taken = {storage_id(t): place for place, t in enumerate(tensors)}
        seen = Seen(
            results=structure,
            plain=tuple(leaves),
            kinds=tuple(map(TensorKind.of, made)),
            lies_in=tuple(taken.get(storage_id(t), -1) for t in made),
            inner=nested,
            facts=facts,
            differentiable=differentiable,
            tangents=layouts,
            casts=tuple(n for at, n in enumerate(call.parameters, len(tensors)) if at in cast),
            draws=not RngState.save(self.device).equals(random.state),
            checkpoints=inner.checkpoints,
        )
        return _Trial(
            made=made,
            seen=seen,
            gradients=tuple(tuple(map(TensorKind.of, own)) for own in parts),
            needs=needs,
            held_bytes=held,
            made_bytes=(_bytes_of(made, tensors), _bytes_of([t for own in parts for t in own])),
            time_ms=((middle - before) * 1e3, (end - after) * 1e3),
            transforms=inner.transforms,
            came=as_visited(inner.came, len(tensors)),
            foreign=foreign,
            strangers=tuple(self.names[id(t)] for t in leaves_used if id(t) in self.names),
        )

    def _refuse_changes(
        self, versions: Sequence[int], inputs: Sequence[Tensor], given: Any
    ) -> None:
        call, tensors = self.call, self.tensors
        if any(tensor._backward_hooks or tensor.retains_grad for tensor in inputs):
            raise SideEffectError(
                f"cannot run module {call} whole: it asks for the gradient of an argument, by a "
                "hook or by retain_grad(), and that is put together outside. Ask for the gradient "
                "of what the module computes.",
                module_path=call.path,
            )
        leaves, structure = flatten(given)
        now = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        same = len(now) == len(inputs) and all(a is b for a, b in zip(now, inputs, strict=True))
        changed = [t for t, version in zip(tensors, versions, strict=True) if t._version != version]
        if structure == call.structure and same and not changed:
            return
        raise changes_arguments(call)

    def _refuse_foreign(self, one: _Trial, two: _Trial) -> None:
        """Refuse a leaf from elsewhere, which two runs share; neither has made it."""
        if any(a is b for a in one.foreign for b in two.foreign):
            raise SideEffectError(
                f"cannot run module {self.call} whole: it uses a tensor that requires a gradient "
                "and that it neither takes nor owns.",
                module_path=self.call.path,
            )


def _nested(results: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the results of which others are computed, and those that are arguments.

    A result comes after those that it is computed from.
    """
    ends = {
        (t.grad_fn, t.output_nr): place for place, t in enumerate(results) if t.grad_fn is not None
    }
    reached = {edge for node in nodes_from([n for n, _ in ends]) for edge in node.next_functions}
    found = (end for end in ends if end in reached or is_entry(end[0]))
    return tuple(ends[end] for end in sorted(found, key=lambda end: end[0]._sequence_nr()))


def _in(span: Any, name: str) -> Any:
    return contextlib.nullcontext() if span is None else span(name)


def _bytes_of(tensors: Sequence[Tensor], known: Sequence[Tensor] = ()) -> int:
    own = {storage_id(t) for t in known}
    sizes = {storage_id(t): storage_of(t).nbytes() for t in tensors}
    return sum(size for key, size in sizes.items() if key not in own)
