"""Inductor, which is loaded when it is first used."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from rkgb.errors import CompilerMissingError
from rkgb.torch_api.private.flags import kernel_flags
from rkgb.torch_api.private_names import TO_COMPILE, refuse_missing


def fake_tensors() -> AbstractContextManager[Any]:
    """Return a mode in which tensors have no memory.

    Without a shape environment, inductor would not use its cache on disk.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv())


def refuse_missing_compiler(device: torch.device) -> None:
    """Refuse to compile for a device for which inductor has no compiler.

    Raises:
        CompilerMissingError: it says what to install.
    """
    refuse_missing(TO_COMPILE, "for compile=True")
    if device.type == "cpu":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except RuntimeError as error:
            raise CompilerMissingError(
                "compile=True needs a C++ compiler on a CPU, and none was found: install g++ or "
                "clang++, or name one in the environment variable CXX. Without compile=True none "
                "is needed."
            ) from error
        return
    from torch.utils._triton import has_triton

    if not has_triton():
        raise CompilerMissingError(
            f"compile=True needs Triton on '{device}', and it does not work here: pip install "
            "triton. Without compile=True it is not needed."
        )


class AnySize:
    """A symbolic size of a traced function, and the sizes for which its code is valid."""

    def __init__(self, mode: Any, hint: int) -> None:
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        self._shapes = mode.shape_env
        source = ConstantSource("any_size")
        self._symbol = self._shapes.create_symbol(
            hint, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None
        )
        self.symint = self._shapes.create_symintnode(self._symbol, hint=hint, source=source)

    def is_valid(self, size: int) -> bool:
        """Return whether the guards from tracing and compiling hold for a size."""
        if self._symbol in self._shapes.replacements:  # it was specialised to a number
            return False
        if size not in self._shapes.var_to_range[self._symbol]:
            return False
        given = {self._symbol: size}
        return all(guard.expr.xreplace(given) == True for guard in self._shapes.guards)  # noqa: E712  (of sympy)

    def of(self, number: Any, size: int) -> int:
        """Return the value of a number, which may depend on the symbol, at a size."""
        if not isinstance(number, torch.SymInt):
            return int(number)
        return int(number.node.expr.xreplace({self._symbol: size}))


def traced_for_inductor(mode: Any, function: Callable[..., Any], *inputs: Sequence[Tensor]) -> Any:
    """Return the functional graph of `function(*inputs)` in inductor's operations.

    `inputs` are two lists of fake tensors of `mode`, primals and tangents. The partitioner uses
    these names to find the inputs of the forward. The first primal may be a symbol, `AnySize`.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
    from torch.fx.experimental.proxy_tensor import make_fx

    functional = dispatch_functionalize(function, FunctionalTensorMode())
    table = dict(select_decomp_table())
    # It scatters, so overlapping windows would be added in any order; without it inductor gathers.
    table.pop(torch.ops.aten.max_pool2d_with_indices_backward.default, None)

    def primals_and_tangents(primals: Any, tangents: Any) -> Any:
        return functional(primals, tangents)

    with torch.no_grad(), mode, enable_python_dispatcher():
        graph: Any = make_fx(primals_and_tangents, decomposition_table=table)(*inputs)
    aten = torch.ops.aten
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and node.target in (aten.detach.default, aten.alias.default):
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


@contextlib.contextmanager
def under_inductor(mode: Any, options: Any) -> Iterator[None]:
    """While active, graphs with fake tensors of this mode can be partitioned and compiled."""
    from torch._dynamo.convert_frame import compile_lock
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.virtualized import V

    with compile_lock, config.patch(options), V.set_fake_mode(mode), tracing(TracingContext(mode)):
        yield


def partitioned(
    joint: Any,
    inputs: Sequence[Any],
    results: int,
    static: Sequence[int],
    is_heavy: Callable[[Any], bool],
    *,
    rebuilds: bool,
) -> tuple[Any, Any]:
    """Return the graphs of the forward, whose first outputs are `results`, and of the backward.

    With `rebuilds`, the backward recomputes everything except heavy operations and large sums;
    otherwise torch decides what to save. Heavy operations never run twice. A joint that makes
    nothing but results has an empty backward.
    """
    from torch._functorch import config
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.compile_fx import _recursive_joint_graph_passes

    device = inputs[-1].device
    joint = _recursive_joint_graph_passes(joint, skip_invoke_subgraph=True, input_device=device)
    (output,) = joint.graph.find_nodes(op="output")
    if len(output.args[0]) == results:
        empty = torch.fx.Graph()
        empty.output(())
        joint.graph.set_codegen(torch.fx.graph.CodeGen())  # it takes and gives flat lists
        return joint, torch.fx.GraphModule({}, empty)
    for node in joint.graph.nodes:
        if node.op == "call_function" and is_heavy(node.target):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    with config.patch(activation_memory_budget=1.0, aggressive_recomputation=rebuilds):
        forward, backward = min_cut_rematerialization_partition(
            joint,
            inputs,
            compiler="inductor",
            num_fwd_outputs=results,
            static_lifetime_input_indices=list(static),
        )
    return forward, backward


def compiled_by_inductor(
    graph: Any, inputs: Sequence[Any], static: Sequence[int], kept: int, kind: str
) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    """Return the compiled function of a graph, which takes a list and empties it.

    The first `kept` results have the graph's layouts; inductor may choose those of the others.
    `kind` is "forward", "backward" or "inference".
    """
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    (output,) = graph.graph.find_nodes(op="output")
    output.meta["user_visible_output_idxs"] = list(range(kept))
    # Makes vector widths part of the key of inductor's cache. Otherwise its loops for wide vectors
    # could be used on a CPU with narrow ones, and leave out elements.
    threads, vectors = torch.get_num_threads(), str(pick_vec_isa())
    graph.meta["rkgb"] = (kept, threads, vectors, repr(kernel_flags()))
    code: Any = compile_fx_inner(
        graph,
        list(inputs),
        static_input_idxs=list(static),
        is_backward=kind == "backward",
        is_inference=kind == "inference",
    )
    run: Callable[[list[Tensor]], Sequence[Tensor]] = code.current_callable or code
    return run
