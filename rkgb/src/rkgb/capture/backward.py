"""Recording the backward of a step, and the parts of gradients that it hands over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.elements.op import Op, Ref
from rkgb.elements.target import GradientCut, GradientPart, target_of
from rkgb.elements.tensor_info import TensorInfo
from rkgb.errors import RkgbError, StopsRecordingError, TraceError, noting_stops
from rkgb.graphs.basic import BackwardKind, Flow, HandOver, Tangent, autocast_as
from rkgb.recording.recorder import Recorder
from rkgb.recording.watch import no_backward_inside, tensors_of
from rkgb.safeguards.refusals import explained
from rkgb.torch_api.private.autograd import nodes_from, run_backward
from rkgb.torch_api.tensor_facts import placed_parameters

# A kind of backward, or a function that changes the usual kind; None is the usual kind.
AskedKind = BackwardKind | Callable[[BackwardKind], BackwardKind] | None


class RecordedBackward:
    """The backward of one step, from the outputs to the leaves."""

    def __init__(
        self, recorder: Recorder, twin: nn.Module, leaves: Mapping[int, str], *, keep_content: bool
    ) -> None:
        self.recorder, self.twin, self.leaves = recorder, twin, leaves
        self.keep_content = keep_content
        self.hand_overs: list[HandOver] = []
        self.totals: set[str] = set()  # gradients of outputs, as autograd returns them
        self._edges: list[tuple[int, int, str]] = []  # number of a node, which edge, to which leaf
        self._complete: list[str] = []  # leaves, as their gradients were complete

    @property
    def leaf_edges(self) -> tuple[tuple[str, int], ...]:
        """The edges to leaves of all nodes of the forward, in the order of eager's backward.

        The engine decides the order of the leaves of one node; the recorded backward has shown it.
        For an opaque call, its trial has shown the order.
        """
        ranks = {leaf: rank for rank, leaf in enumerate(self._complete)}
        whole = {op.sequence_nr for op in self.recorder.backward if target_of(op).runs_python}

        def turn(edge: tuple[int, int, str]) -> tuple[int, int, int]:
            number, index, leaf = edge
            return -number, 0 if number in whole else ranks.get(leaf, len(ranks)), index

        order = sorted(self._edges, key=turn)
        return tuple((leaf, number) for number, _, leaf in order)

    def roots(self, outputs: Sequence[Any]) -> list[Tensor]:
        """Return the outputs from which gradients can flow; leaves are excluded."""
        found = [t for t in tensors_of(outputs) if t.requires_grad and t.grad_fn is not None]
        return list({self.recorder.name_of(t): t for t in found}.values())

    def kind(
        self, asked: AskedKind, roots: Sequence[Tensor], returned: Sequence[Any]
    ) -> BackwardKind:
        """Return the requested kind of backward.

        Raises:
            TraceError: it is for other outputs than those from which gradients can flow.
        """
        if isinstance(asked, BackwardKind):
            if len(asked.tangents) != len(roots):
                raise TraceError(
                    f"a backward of {self.recorder.model_name} was asked for from "
                    f"{len(asked.tangents)} tensors, and a gradient can flow back from {len(roots)}"
                )
            return asked
        usual = self.usual_kind(roots, returned)
        return usual if asked is None else asked(usual)

    def usual_kind(self, roots: Sequence[Tensor], returned: Sequence[Any]) -> BackwardKind:
        """Return the usual kind: strides of gradients as elementwise operations compute them.

        Only returned outputs get gradients, not tensors that the forward leaves in attributes.
        """
        with self.recorder.paused(), torch.no_grad():
            likes = [torch.empty_like(root, device="meta") for root in roots]
        names = [self.recorder.name_of(root) for root in roots]
        own = {self.recorder.name_of(root) for root in self.roots(returned)} or set(names)
        return BackwardKind(
            tuple(
                tuple(like.stride()) if name in own else None
                for like, name in zip(likes, names, strict=True)
            )
        )

    def run(
        self, roots: list[Tensor], kind: BackwardKind, flows: Sequence[Flow]
    ) -> tuple[tuple[str | None, ...], BackwardKind]:
        """Run it; return the names of its tangents, one per root, and its kind.

        The gradient of an output that other outputs use has the strides in `kind`, or else those of
        its parts.

        Raises:
            TraceError: it raised; see `record`.
        """
        recorder = self.recorder
        names: list[str | None] = [None] * len(roots)
        given: list[Tensor] = []
        starts: list[Tensor] = []
        wholes: dict[Edge, Whole] = {}
        hooks: list[Any] = []
        for place, strides in enumerate(kind.tangents):
            is_inner = kind.is_split and bool(flows) and flows[place].uses > 0
            if strides is None and not is_inner:
                continue
            root = roots[place]
            gets_some = strides is not None and (not is_inner or place in (kind.outside or ()))
            if is_inner:
                whole = Whole(place, recorder.name_of(root) or "", strides, gets_some)
                wholes[edge_of(root)] = whole
                hooks.append(root.register_hook(self._passing(whole, root)))
            if strides is None or not gets_some:
                continue
            content = self._content(root, strides)
            if not is_inner:
                names[place] = recorder.add_external(f"tangent_{place}", content, "tangent")
            given.append(content)
            starts.append(root)
        # Edges to leaves are those of the whole forward, whichever this backward reaches.
        hooks += self._watch_leaves(roots, wholes)
        roots[:] = starts
        del starts
        if roots:
            recorder.in_backward = True
            try:
                region = autocast_as(kind.autocast)
                with region, no_backward_inside(recorder, roots), noting_stops() as stops:
                    run_backward(roots, given)
                if stops:  # an `except` of a backward has gone on
                    raise stops[0]
            except RkgbError:
                raise
            except (Exception, StopsRecordingError) as error:
                if not self.keep_content:  # it may have read a stand-in
                    raise recorder.reads_data("what a backward does") from error
                path = getattr(error, "module_path", None)
                raise explained(self.twin, recorder.model_name, error, module_path=path) from error
            finally:
                recorder.in_backward = False
                roots.clear()  # an unfinished graph would hold the recorder
                for hook in hooks:
                    hook.remove()
        if not kind.is_split:
            return tuple(names), kind
        tangents = list(kind.tangents)
        for whole in wholes.values():
            tangents[whole.place] = None if whole.total is None else whole.total.stride()
        outside = (w.place for w in wholes.values() if w.from_outside and w.total is not None)
        found = replace(kind, tangents=tuple(tangents), outside=tuple(sorted(outside)))
        return tuple(names), found

    def _content(self, like: Tensor, strides: Sequence[int]) -> Tensor:
        """Return a gradient for an output, with these strides."""
        self.recorder.claim(like.nbytes)
        with self.recorder.paused(), torch.no_grad():
            content = torch.empty_strided(like.shape, strides, dtype=like.dtype, device=like.device)
            if content.numel():
                (content if 0 not in strides else content.as_strided((), ())).fill_(1)
        return content

    def _passing(self, whole: Whole, root: Tensor) -> Callable[[Tensor | None], Tensor | None]:
        """Return the hook for the gradient of an output that other outputs use.

        The backward continues with another tensor of unknown value: at run time autograd sums the
        gradients, and the user's hooks may change the sum.
        """
        recorder, number = self.recorder, root.grad_fn._sequence_nr()  # type: ignore[union-attr]

        def passing(grad: Tensor | None) -> Tensor | None:
            if grad is None:
                return None
            with recorder.paused(), torch.no_grad():
                strides = whole.strides or self._sum_strides(whole.parts, grad)
            whole.total = grad if whole.from_outside else self._content(grad, strides)
            name = recorder.add_external(f"total_{whole.place}", whole.total, "tangent")
            self.totals.add(name)
            if whole.given:  # the last part is handed over where the sum comes back
                at = whole.given[-1]
                recorder.backward[at] = replace(recorder.backward[at], sequence_nr=number)
            args = (Ref(whole.held),) if whole.held else ()
            target = GradientCut(whole.name, whole.from_outside)
            recorder.backward.append(Op(name, target, args, {}, (name,), sequence_nr=number))
            return whole.total

        return passing

    def _sum_strides(self, parts: Sequence[str], first: Tensor) -> tuple[int, ...]:
        """Return the strides of autograd's sum of the parts of a gradient."""
        infos = [self.recorder.infos[name] for name in parts]
        likes = [torch.empty_strided(i.shape, i.stride, device="meta") for i in infos]
        return sum(likes[1:], start=likes[0]).stride() if len(likes) > 1 else first.stride()

    def _watch_leaves(self, roots: Sequence[Tensor], wholes: Mapping[Edge, Whole]) -> list[Any]:
        """Register hooks that note and drop each part of a leaf's gradient at the node that makes
        it.

        Otherwise autograd would add the parts of a leaf with several uses. Each part is handed over
        separately, and autograd adds them at run time, together with gradients from outside. The
        same holds for outputs that other outputs use.
        """
        hooks, accumulators = list[Any](), dict[Any, str]()
        for node in nodes_from(root.grad_fn for root in roots):
            edges: dict[int, str | Whole] = {}
            for index, edge in enumerate(node.next_functions):
                # Not by `getattr`, which is watched as the user's.
                is_leaf = type(edge[0]).__name__ == "AccumulateGrad"
                variable = edge[0].variable if is_leaf else None
                if edge in wholes:
                    edges[index] = wholes[edge]
                if id(variable) in self.leaves:
                    edges[index] = accumulators[edge[0]] = self.leaves[id(variable)]
                elif variable is not None:
                    self._refuse_foreign(variable)
            if edges:
                number = node._sequence_nr()
                leaves = ((index, to) for index, to in edges.items() if isinstance(to, str))
                self._edges += [(number, index, leaf) for index, leaf in leaves]
                hooks.append(node.register_hook(self._noting(edges, number)))
        for source, leaf in accumulators.items():
            hooks.append(source.register_hook(lambda *_, leaf=leaf: self._complete.append(leaf)))
        return hooks

    def _refuse_foreign(self, leaf: Tensor) -> None:
        """Refuse a leaf from elsewhere: a planned step would give it no gradient.

        Such leaves are read by a function that replaces a module's forward: in a copy it still
        refers to the original module. Leaves that the forward itself makes are allowed.
        """
        name = self.recorder.name_of(leaf)
        if name in self.recorder.kinds:
            raise TraceError.to_capture(
                self.recorder.model_name,
                "take parameters from self, in a method of the class or a bound one; what "
                "belongs to none of its submodules is to be registered as one",
                f"its forward reads {self._in_words(leaf)}, which requires a gradient, from "
                "elsewhere than the module it is called on, as a function set as the forward "
                "of a module does",
            )

    def _in_words(self, leaf: Tensor) -> str:
        """Return the description of a leaf from elsewhere."""
        for module in self.recorder.places.outside.values():
            for name, parameter in placed_parameters(module):
                if parameter is leaf:
                    return f"'{name}' of a {type(module).__name__} that is none of its submodules"
        known = self.recorder.name_of(leaf)
        op = next((op for op in self.recorder.forward if known in op.inputs), None)
        where = "" if op is None else f", read at {op.source}"
        return f"a tensor ({'x'.join(map(str, leaf.shape))}{where})"

    def _give(self, whole: Whole, part: str, sequence_nr: int) -> None:
        """Note that a part of an output's gradient is handed over to autograd.

        A gradient from outside exists before, and the part is added to it. Otherwise autograd keeps
        the first part and adds the others to it, in place if it can.
        """
        recorder, infos = self.recorder, self.recorder.infos
        info = infos[part]
        held = recorder.names.fresh("held")
        args = (whole.held, part) if whole.held else (part,)
        if whole.from_outside:
            root, size_bytes = held, 0
        elif not whole.held:
            root, size_bytes = info.alias_of, info.storage_bytes
        else:
            first = infos[whole.held]
            root, size_bytes = first.alias_of, first.storage_bytes
            is_kept = root in recorder.kinds and root not in self.totals
            if is_kept or size_bytes != info.size_bytes:
                root, size_bytes = held, info.size_bytes
        infos[held] = TensorInfo((0,), torch.uint8, (1,), False, root, 0, size_bytes)
        whole.given.append(len(recorder.backward))
        whole.parts.append(part)
        whole.held = held
        refs = tuple(map(Ref, args))
        target = GradientPart(whole.name, whole.from_outside and len(whole.parts) == 1)
        op = Op(held, target, refs, {}, (held,), sequence_nr=sequence_nr)
        recorder.backward.append(op)

    def _noting(
        self, edges: Mapping[int, str | Whole], sequence_nr: int
    ) -> Callable[[Any, Any], Any]:
        def note(grad_inputs: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
            kept = list(grad_inputs)
            for index, to in edges.items():
                part = grad_inputs[index]
                if part is None:
                    continue
                value = self.recorder.name_of(part)
                assert value is not None, "a gradient that no operation has made"
                if isinstance(to, str):
                    self.hand_overs.append(HandOver(to, value, sequence_nr))
                    kept[index] = None
                else:
                    self._give(to, value, sequence_nr)
                    if to.from_outside or len(to.parts) > 1:
                        kept[index] = None  # only the first continues
            return tuple(kept)

        return note


@dataclass
class Whole:
    """The gradient of an output that other outputs use, and its parts."""

    place: int
    name: str
    strides: Tangent  # if known
    from_outside: bool
    parts: list[str] = field(default_factory=list)
    given: list[int] = field(default_factory=list)  # positions of the hand-over operations
    held: str = ""  # name of the sum so far
    total: Tensor | None = None


# The end of an edge of autograd's graph: a node, and the index of its result.
Edge = tuple[Any, int]


def edge_of(root: Tensor) -> Edge:
    """Return the edge at which gradients enter for a tensor."""
    return root.grad_fn, root.output_nr


def flows_of(roots: Sequence[Tensor]) -> tuple[Flow, ...]:
    """Return the flow of each output, or () if there is only one output."""
    if len(roots) < 2:
        return ()
    places = {edge_of(root): place for place, root in enumerate(roots)}
    reached = _reached([root.grad_fn for root in roots], places)
    uses: dict[int, int] = {}
    for node in reached:
        for edge in node.next_functions:
            if edge in places:
                uses[places[edge]] = uses.get(places[edge], 0) + 1
    found = (tuple(sorted(reached[root.grad_fn])) for root in roots)
    return tuple(Flow(reaches, uses.get(place, 0)) for place, reaches in enumerate(found))


def _reached(starts: Sequence[Any], places: dict[Edge, int]) -> dict[Any, frozenset[int]]:
    """Return for every node the outputs that it reaches directly, not through other outputs."""
    found: dict[Any, frozenset[int]] = {}
    waiting = list(starts)
    nothing = frozenset[int]()
    while waiting:
        node = waiting[-1]
        if node in found:
            waiting.pop()
            continue
        edges = [edge for edge in node.next_functions if edge[0] is not None]
        # Nodes below come first; also nodes below outputs, for the outputs' own flows.
        unknown = [source for source, _ in edges if source not in found]
        if unknown:
            waiting += unknown
            continue
        direct = frozenset(places[edge] for edge in edges if edge in places)
        through = (found[edge[0]] for edge in edges if edge not in places)
        found[node] = direct.union(*(through or (nothing,)))
        waiting.pop()
    return found
