"""`torch.compile` with a memory budget, as a peer: compile a model, and count its graphs' FLOPs.

`torch._functorch.config.activation_memory_budget` is what torch offers: a fraction of what the
partitioner would save. "inductor" is what people use; "aot_eager" is the same partition, run op
by op, so that its memory is not changed by fusion. FLOPs are counted over the graphs after
partitioning, because what inductor makes of them cannot be counted while it runs.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from rkgb.torch_api import flops_of

_flops: list[int] = []  # of every graph compiled in this process


def compile_within(
    model: nn.Module, sample: Sequence[Tensor], backend: str, budget: float, solver: str
) -> Callable[..., Tensor]:
    """Return the compiled model after its first step, which compiles forward and backward."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    torch._dynamo.reset()
    _flops.clear()
    module = torch.compile(
        model, dynamic=False, backend=backend if backend == "inductor" else counting_backend()
    )
    settings = {
        "activation_memory_budget": budget,
        "activation_memory_budget_solver": solver,
        "enable_autograd_cache": False,  # a graph from the cache would not be counted
    }
    with (
        functorch.patch(settings),
        inductor.patch(fx_graph_cache=False, post_grad_custom_pre_pass=_count),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        module(*sample).backward()
    return module


def flops_of_graphs() -> int:
    """Return the FLOPs of all graphs that `compile_within` made last: one step's."""
    return sum(_flops)


def counting_backend() -> Any:
    """Return a backend that runs the partitioned graphs as they are."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def compile_graph(module: fx.GraphModule, _inputs: Any) -> Callable[[list[Any]], Any]:
        _count(module.graph)
        # arguments in a list that the graph empties, so that what is saved can be freed early
        module.graph.set_codegen(fx.graph._BoxedCodeGen())
        module.recompile()

        def run(arguments: list[Any]) -> Any:
            return module.forward(arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return aot_autograd(
        fw_compiler=compile_graph,
        bw_compiler=compile_graph,
        # whole BatchNorms cannot be partitioned; decomposing all else costs this peer memory
        decompositions={
            op: made for op, made in select_decomp_table().items() if "batch_norm" in str(op)
        },
        partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"),
    )


def _count(graph: fx.Graph) -> None:
    total = 0
    for node in graph.nodes:
        packet = getattr(node.target, "overloadpacket", None)
        if node.op == "call_function" and packet is not None:
            args = fx.node.map_arg(node.args, lambda n: n.meta.get("val"))
            kwargs = fx.node.map_arg(node.kwargs, lambda n: n.meta.get("val"))
            total += flops_of(packet, args, kwargs, node.meta.get("val"))
    _flops.append(total)
