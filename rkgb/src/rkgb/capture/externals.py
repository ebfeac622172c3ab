"""The names of what a step finds: parameters, buffers, and tensors among its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from rkgb.elements.op import Ref
from rkgb.recording.facts import refuse_result
from rkgb.recording.recorder import Recorder
from rkgb.torch_api.tensor_facts import placed_parameters


class Externals:
    """Names what a model and its arguments have; `parameters` and `buffers` are paths by name."""

    def __init__(self, recorder: Recorder, twin: nn.Module, given: Sequence[Any]) -> None:
        self.recorder, add = recorder, recorder.add_external
        self.leaves: dict[int, str] = {}  # that get gradients, by identity
        self.parameters: dict[str, str] = {}
        self.buffers: dict[str, str] = {}
        self.inputs: list[str | None] = []
        self._own_buffers: dict[int, str] = {}  # by identity
        tensors = (t for t in given if isinstance(t, Tensor))
        self._found = {*map(id, (*twin.parameters(), *twin.buffers(), *tensors))}
        for target, parameter in placed_parameters(twin, remove_duplicate=False):
            name = add(f"p_{_identifier(target)}", parameter, "parameter")
            self.parameters.setdefault(name, target)
            if parameter.requires_grad:
                self.leaves[id(parameter)] = name
        for target, buffer in twin.named_buffers(remove_duplicate=False):
            name = add(f"b_{_identifier(target)}", buffer, "buffer")
            self._own_buffers[id(buffer)] = name
            if name not in self.parameters:
                self.buffers.setdefault(name, target)
                if buffer.requires_grad:  # it is trained although it is no parameter
                    self.leaves[id(buffer)] = name
        for place, leaf in enumerate(given):
            if not isinstance(leaf, Tensor):
                self.inputs.append(None)
                continue
            name = add(f"args_{place}", leaf, "input")
            self.inputs.append(name)
            if leaf.requires_grad:
                self.leaves[id(leaf)] = name

    def named(self, output: Any) -> Any:
        """Return a tensor that the forward returns as its name; what is no tensor as it is.

        Raises:
            NotRecordedError: a step would return another one.
        """
        if not isinstance(output, Tensor):
            return output
        if id(output) not in self._found:
            refuse_result(output)
        # A buffer is itself, whatever has been written to it.
        name = self._own_buffers.get(id(output)) or self.recorder.name_of(output)
        if name is None:
            name = self.recorder.add_external(f"c_output_{id(output)}", output, "constant")
        self.recorder.refuse_unwritten(name)
        if not output.requires_grad and name in self.recorder.wanting:
            name = self.recorder.detached(name)  # y.detach() beside y
        return Ref(name)


def _identifier(target: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in target)
