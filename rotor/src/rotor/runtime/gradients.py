"""The gradients of one recorded stage, in the form that autograd takes over without a copy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge


def uses_of_leaves(outputs: Iterable[torch.Tensor]) -> Counter[torch.Tensor]:
    """Return the leaves in the graph of some tensors, with the number of uses of each."""
    uses: Counter[torch.Tensor] = Counter()
    seen: set[Any] = set()
    todo: list[Any] = [get_gradient_edge(t).node for t in outputs if t.requires_grad]
    while todo:
        node = todo.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            uses[leaf] += 1
        if node in seen:
            continue
        seen.add(node)
        todo.extend(following for following, _ in node.next_functions if following is not None)
    return uses


def stage_gradients(
    edges: list[GradientEdge],
    wanted: Sequence[torch.Tensor | GradientEdge],
    grads: list[torch.Tensor],
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of `wanted`, with the strides that autograd needs to avoid a copy."""
    with _quiet_hooks(wanted):
        # torch accepts a mixture of tensors and edges; its annotation does not say so.
        found = torch.autograd.grad(
            edges, cast("list[torch.Tensor]", wanted), grads, allow_unused=True
        )
    # Autograd copies a gradient whose strides differ from its parameter's. That copy would not be
    # among the measured bytes.
    return tuple(
        _with_strides_of(variable, grad) if isinstance(variable, torch.nn.Parameter) else grad
        for variable, grad in zip(wanted, found, strict=True)
    )


def _with_strides_of(parameter: torch.Tensor, grad: torch.Tensor | None) -> torch.Tensor | None:
    if grad is None or grad.layout != torch.strided or grad.stride() == parameter.stride():
        return grad
    return torch.empty_like(parameter).copy_(grad)


@contextmanager
def _quiet_hooks(variables: Sequence[torch.Tensor | GradientEdge]) -> Iterator[None]:
    """Disable tensor hooks of parameters inside a stage.

    Autograd calls them on the gradient that the stage returns; here they would run a second time.
    """
    silenced = []
    for variable in variables:
        hooks = getattr(variable, "_backward_hooks", None)
        if hooks:
            silenced.append((hooks, list(hooks.items())))
            hooks.clear()
    try:
        yield
    finally:
        for hooks, items in silenced:
            hooks.update(items)
