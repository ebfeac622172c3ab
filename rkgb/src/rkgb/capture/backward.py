"""The backward of a step while it is recorded, and the parts of gradients that it hands over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.errors import RkgbError, TraceError
from rkgb.graphs.basic import BackwardKind, HandOver, autocast_as
from rkgb.recording.recorder import Recorder
from rkgb.recording.watch import no_backward_inside, tensors_of
from rkgb.safeguards.explain import explained
from rkgb.torch_api.placed import placed_parameters
from rkgb.torch_api.torch_private import run_backward

# A kind of backward, or what tells it from the usual one; None is the usual one.
AskedKind = BackwardKind | Callable[[BackwardKind], BackwardKind] | None


class RecordedBackward:
    """The backward of one step, from the outputs to the leaves."""

    def __init__(
        self, recorder: Recorder, twin: nn.Module, leaves: Mapping[int, str], *, keep_content: bool
    ) -> None:
        self.recorder, self.twin, self.leaves = recorder, twin, leaves
        self.keep_content = keep_content
        self.hand_overs: list[HandOver] = []
        self._edges: list[tuple[int, int, str]] = []  # number of a node, which edge, to which leaf
        self._complete: list[str] = []  # leaves, in the order in which their gradients were whole

    @property
    def leaf_edges(self) -> tuple[tuple[str, int], ...]:
        """The edges to leaves of all nodes of the forward, in the order in which they are run.

        Of one node that has several, the engine decides which leaf comes first, and has shown it.
        What runs whole has shown its own order, in which the leaves are there.
        """
        ranks = {leaf: rank for rank, leaf in enumerate(self._complete)}
        whole = {op.sequence_nr for op in self.recorder.backward if hasattr(op.target, "piece")}

        def turn(edge: tuple[int, int, str]) -> tuple[int, int, int]:
            number, index, leaf = edge
            return -number, 0 if number in whole else ranks.get(leaf, len(ranks)), index

        order = sorted(self._edges, key=turn)
        return tuple((leaf, number) for number, _, leaf in order)

    def roots(self, outputs: Sequence[Any]) -> list[Tensor]:
        """Return the outputs that a gradient can flow back from; leaves are handed through."""
        found = [t for t in tensors_of(outputs) if t.requires_grad and t.grad_fn is not None]
        return list({self.recorder.name_of(t): t for t in found}.values())

    def kind(
        self, asked: AskedKind, roots: Sequence[Tensor], returned: Sequence[Any]
    ) -> BackwardKind:
        """Return the kind of backward that is asked for.

        Raises:
            TraceError: it is for other outputs than those that a gradient can flow back from.
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
        """Say that gradients lie as an elementwise operation on the outputs computes them.

        They come to what the forward has returned; nobody trains on what it only leaves behind.
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

    def run(self, roots: list[Tensor], kind: BackwardKind) -> tuple[str | None, ...]:
        """Run it, and return the names of the gradients that it was given, one a root.

        Raises:
            TraceError: it raised; see `record`.
        """
        recorder = self.recorder
        names: list[str | None] = []
        given: list[Tensor] = []
        for place, strides in enumerate(kind.tangents):
            if strides is None:
                names.append(None)
                continue
            root = roots[place]
            recorder.claim(root.nbytes)
            with recorder.paused(), torch.no_grad():
                content = torch.empty_strided(
                    root.shape, strides, dtype=root.dtype, device=root.device
                )
                if content.numel():
                    (content if 0 not in strides else content.as_strided((), ())).fill_(1)
            names.append(recorder.add_external(f"tangent_{place}", content, "tangent"))
            given.append(content)
        hooks = self._watch_leaves(roots)
        roots[:] = [root for root, name in zip(roots, names, strict=True) if name is not None]
        if roots:
            recorder.in_backward = True
            try:
                with autocast_as(kind.autocast), no_backward_inside(recorder, roots):
                    run_backward(roots, given)
            except RkgbError:
                raise
            except Exception as error:
                if not self.keep_content:  # perhaps it has looked at what stands in
                    raise recorder.reads_data("what a backward does") from error
                refusal = explained(self.twin, recorder.model_name, error)
                refusal.module_path = getattr(error, "module_path", None)
                raise refusal from error
            finally:
                recorder.in_backward = False
                roots.clear()  # a graph that has not run to its end holds on to the recorder
                for hook in hooks:
                    hook.remove()
        return tuple(names)

    def _watch_leaves(self, roots: Sequence[Tensor]) -> list[Any]:
        """Let each part of a leaf's gradient be noted and dropped where it is made.

        Autograd would add the parts of a leaf that is used more than once; each is handed over by
        itself instead, and autograd adds them at run time, together with those from outside.
        """
        hooks = []
        accumulators = {}
        stack = [root.grad_fn for root in roots]
        seen = set(stack)
        for node in stack:  # grows while it is walked
            edges: dict[int, str] = {}
            for index, (source, _) in enumerate(node.next_functions):  # type: ignore[union-attr]
                if source is None:
                    continue
                variable = getattr(source, "variable", None)
                if variable is not None and id(variable) in self.leaves:
                    edges[index] = self.leaves[id(variable)]
                    accumulators[source] = edges[index]
                elif source not in seen:
                    if variable is not None:
                        self._refuse_foreign(variable)
                    seen.add(source)
                    stack.append(source)
            if edges:
                number = node._sequence_nr()  # type: ignore[union-attr]
                self._edges += [(number, index, leaf) for index, leaf in edges.items()]
                hooks.append(node.register_hook(self._noting(edges, number)))  # type: ignore[union-attr]
        for source, leaf in accumulators.items():
            hooks.append(source.register_hook(lambda *_, leaf=leaf: self._complete.append(leaf)))
        return hooks

    def _refuse_foreign(self, leaf: Tensor) -> None:
        """Refuse a leaf from elsewhere: it would get no gradient of ours, and got one of this step.

        A function in the place of a forward reads such: it holds on to the module that it was made
        for, also in a copy of it. A leaf that the forward itself makes is none.
        """
        name = self.recorder.name_of(leaf)
        if name in self.recorder.kinds:
            raise TraceError(
                f"cannot capture {self.recorder.model_name}: its forward reads "
                f"{self._in_words(leaf)}, which requires a gradient, from elsewhere than the "
                "module it is called on, as a function set as the forward of a module does. Take "
                "parameters from self, in a method of the class or a bound one; what belongs to "
                "none of its submodules is to be registered as one."
            )

    def _in_words(self, leaf: Tensor) -> str:
        """Return what a leaf from elsewhere is."""
        for module in self.recorder.places.outside.values():
            for name, parameter in placed_parameters(module):
                if parameter is leaf:
                    return f"'{name}' of a {type(module).__name__} that is none of its submodules"
        known = self.recorder.name_of(leaf)
        op = next((op for op in self.recorder.forward if known in op.inputs), None)
        where = "" if op is None else f", read at {op.source}"
        return f"a tensor ({'x'.join(map(str, leaf.shape))}{where})"

    def _noting(self, edges: Mapping[int, str], sequence_nr: int) -> Callable[[Any, Any], Any]:
        def note(grad_inputs: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
            for index, leaf in edges.items():
                part = grad_inputs[index]
                if part is None:
                    continue
                value = self.recorder.name_of(part)
                assert value is not None, "a gradient that no operation has made"
                self.hand_overs.append(HandOver(leaf, value, sequence_nr))
            return tuple(None if i in edges else grad for i, grad in enumerate(grad_inputs))

        return note
