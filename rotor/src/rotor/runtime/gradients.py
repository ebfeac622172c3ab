"""The gradients of one recorded stage, as autograd can take them over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge


def uses_of_leaves(outputs: Iterable[torch.Tensor]) -> Counter[torch.Tensor]:
    """Return the leaves that the graph of some tensors reaches, and how often it uses each."""
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
    """Return the gradients of `wanted`, each as autograd can take it over without a copy."""
    with _quiet_hooks(wanted):
        # Tensors and edges may be mixed, which the annotation does not know.
        found = torch.autograd.grad(
            edges, cast("list[torch.Tensor]", wanted), grads, allow_unused=True
        )
    # Autograd would copy a parameter's gradient of other strides while it accumulates, outside of
    # what has been measured.
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
    """Silence tensor hooks of parameters: they are for the gradient that autograd accumulates.

    They would run twice otherwise, on the gradient inside the stage and on the one it returns.
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
