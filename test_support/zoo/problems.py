"""Problems for tests and benchmarks: networks by hand, and small random ones.

The networks have hand-made sizes and times in proportion to their operations: good enough to
compare planners on, without capturing or running anything.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rockmate.problems.link import Link
from rockmate.problems.problem import Node, Problem, Storage

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

_FLOPS_PER_MS = 50e6  # a laptop core: 50 GFLOP/s
_BYTES_PER_MS = 10e6  # 10 GB/s
FAST = Link(1e12, 1e12)  # it carries all in no time


@dataclass
class NetworkBuilder:
    """Builds a problem op by op, and works out the gradients that are alive before each backward.

    The gradient of a storage is alive from the backward of its last reader to the backward of its
    producer. Sizes are in bytes; a size of 0 in `add` means that the op returns nothing new.
    """

    module_path: str = ""
    _nodes: list[dict[str, float | str]] = field(default_factory=list)
    _storages: list[tuple[int, int, bool]] = field(default_factory=list)  # producer, size, phantom
    _reads: list[tuple[list[int], list[int]]] = field(default_factory=list)  # per node: fwd, bwd

    def add(
        self,
        op: str,
        inputs: Sequence[int],
        size_bytes: int,
        *,
        flops: float = 0.0,
        saves: str = "i",
        phantom_bytes: int = 0,
        workspace_bytes: int = 0,
        weight_bytes: int = 0,
        state_bytes: int = 0,
    ) -> int:
        """Add a node and return its output storage.

        `saves` says what its backward reads: "i" its inputs, "o" its output, "io" both, "" none.
        """
        node = len(self._nodes)
        moved = size_bytes + sum(self._storages[i][1] for i in inputs)
        time_ms = flops / _FLOPS_PER_MS + moved / _BYTES_PER_MS + 0.002
        output = len(self._storages)
        self._storages.append((node, size_bytes, False))
        reads = list(inputs) if "i" in saves else []
        reads += [output] if "o" in saves else []
        if phantom_bytes:
            reads.append(len(self._storages))
            self._storages.append((node, phantom_bytes, True))
        self._reads.append((list(inputs), reads))
        self._nodes.append(
            {
                "op": op,
                "module_path": self.module_path,
                "time": time_ms,
                "bwd_time": 2 * time_ms if flops else 1.5 * time_ms,
                "fwd_peak": size_bytes + phantom_bytes + workspace_bytes,
                "fwd_peak_nograd": size_bytes + workspace_bytes,
                "bwd_extra": workspace_bytes + weight_bytes,
                "state": state_bytes,
            }
        )
        return output

    def build(self, outputs: Iterable[int]) -> Problem:
        """Return the finished problem."""
        chosen = set(outputs)
        last_reader = {
            index: max(
                (node for node, (fwd, _) in enumerate(self._reads) if index in fwd), default=-1
            )
            for index in range(len(self._storages))
        }
        nodes = []
        for k, row in enumerate(self._nodes):
            grads = made = 0
            for index, (producer, size, phantom) in enumerate(self._storages):
                if phantom:
                    continue
                if producer <= k and (last_reader[index] > k or index in chosen):
                    grads += size
                if producer < k and last_reader[index] == k and index not in chosen:
                    made += size
            nodes.append(
                Node(
                    name=f"n{k}_{row['op']}",
                    fwd_time_ms=float(row["time"]),
                    bwd_time_ms=float(row["bwd_time"]),
                    fwd_peak_bytes=int(row["fwd_peak"]),
                    fwd_peak_nograd_bytes=int(row["fwd_peak_nograd"]),
                    bwd_peak_bytes=made + int(row["bwd_extra"]),
                    grads_before_bytes=grads,
                    rerun_state_bytes=int(row["state"]),
                    module_path=str(row["module_path"]),
                    op=str(row["op"]),
                )
            )
        storages = []
        for index, (producer, size, phantom) in enumerate(self._storages):
            storages.append(
                Storage(
                    name=f"{'p' if phantom else 's'}{producer}",
                    size_bytes=size,
                    producer=producer,
                    fwd_users=tuple(k for k, (fwd, _) in enumerate(self._reads) if index in fwd),
                    bwd_users=tuple(k for k, (_, bwd) in enumerate(self._reads) if index in bwd),
                    is_phantom=phantom,
                    is_output=index in chosen,
                )
            )
        return Problem(tuple(nodes), tuple(storages))


def _fused_attention(net: NetworkBuilder, qkv: int, hidden: int, flops: float, sums: int) -> int:
    return net.add("sdpa", [qkv], hidden, flops=2 * flops, saves="io", phantom_bytes=sums)


def _naive_attention(net: NetworkBuilder, qkv: int, hidden: int, flops: float, scores: int) -> int:
    q = net.add("q_contiguous", [qkv], hidden, saves="")
    k = net.add("k_contiguous", [qkv], hidden, saves="")
    v = net.add("v_contiguous", [qkv], hidden, saves="")
    y = net.add("scores", [q, k], scores, flops=flops)
    y = net.add("scale", [y], scores, saves="")
    y = net.add("masked_fill", [y], scores, saves="")
    y = net.add("softmax", [y], scores, saves="o")
    y = net.add("matmul", [y, v], hidden, flops=flops)
    return net.add("contiguous", [y], hidden, saves="")


def movable(problem: Problem, link: Link = FAST) -> Problem:
    """Return the problem in which all that may be moved is movable."""
    storages = tuple(
        replace(s, is_movable=bool(s.bwd_users) and not (s.is_phantom or s.is_output))
        for s in problem.storages
    )
    return replace(problem, storages=storages, link=link)


def gpt_problem(
    blocks: int,
    *,
    batch: int = 4,
    sequence: int = 128,
    width: int = 256,
    heads: int = 8,
    vocabulary: int = 4096,
    dropout: bool = True,
    attention: str = "fused",
) -> Problem:
    """Return a GPT with its loss; `attention="naive"` keeps the score matrices, op by op."""
    net = NetworkBuilder()
    tokens = batch * sequence
    hidden = 4 * tokens * width
    state = 5056 if dropout else 0  # the CPU generator's state

    def linear(source: int, inner: int, outer: int) -> int:
        size, flops = 4 * tokens * outer, 2.0 * tokens * inner * outer
        return net.add("linear", [source], size, flops=flops, weight_bytes=4 * inner * outer)

    def drop(source: int) -> int:
        if not dropout:
            return source
        return net.add(
            "dropout", [source], hidden, saves="", phantom_bytes=hidden // 4, state_bytes=state
        )

    def norm(source: int) -> int:
        return net.add("layer_norm", [source], hidden, phantom_bytes=8 * tokens)

    net.module_path = "embedding"
    x = drop(net.add("embedding", [], hidden, saves="", weight_bytes=4 * vocabulary * width))
    for block in range(blocks):
        net.module_path = f"blocks.{block}.ln1"
        y = norm(x)
        net.module_path = f"blocks.{block}.attn"
        qkv = linear(y, width, 3 * width)
        flops = 2.0 * batch * sequence * sequence * width
        if attention == "fused":
            y = _fused_attention(net, qkv, hidden, flops, 4 * tokens * heads)
        else:
            y = _naive_attention(net, qkv, hidden, flops, 4 * batch * heads * sequence * sequence)
        y = drop(linear(y, width, width))
        x = net.add("add", [x, y], hidden, saves="")
        net.module_path = f"blocks.{block}.ln2"
        y = norm(x)
        net.module_path = f"blocks.{block}.mlp"
        y = linear(y, width, 4 * width)
        y = net.add("gelu", [y], 4 * hidden)
        y = drop(linear(y, 4 * width, width))
        x = net.add("add", [x, y], hidden, saves="")
    net.module_path = "head"
    x = norm(x)
    logits = linear(x, width, vocabulary)
    net.module_path = "loss"
    x = net.add("log_softmax", [logits], 4 * tokens * vocabulary, saves="o")
    return net.build([net.add("nll_loss", [x], 4, saves="", phantom_bytes=4)])


def resnet_problem(
    stages: Sequence[int] = (2, 2, 2), *, batch: int = 8, width: int = 16
) -> Problem:
    """Return a ResNet of bottlenecks with BatchNorm and in-place ReLU, loss included."""
    net = NetworkBuilder()

    def conv(source: int, side: int, inner: int, outer: int, kernel: int = 1) -> int:
        size = 4 * batch * side * side * outer
        flops = size / 2 * inner * kernel * kernel
        weight = 4 * inner * outer * kernel * kernel
        space = size // 2 if kernel > 1 else 0
        return net.add(
            "conv", [source], size, flops=flops, weight_bytes=weight, workspace_bytes=space
        )

    def norm(source: int, side: int, channels: int, *, relu: bool = True) -> int:
        size = 4 * batch * side * side * channels
        op = "batch_norm_relu" if relu else "batch_norm"
        saves = "io" if relu else "i"
        return net.add(op, [source], size, saves=saves, phantom_bytes=8 * channels, state_bytes=64)

    side, channels = 64, width
    net.module_path = "stem"
    x = net.add("conv", [], 4 * batch * side * side * width, flops=27.0 * batch * side**2 * width)
    x = norm(x, side, width)
    for stage, count in enumerate(stages):
        for index in range(count):
            net.module_path = f"layers.{stage}.{index}"
            inner = width << stage
            down = stage > 0 and index == 0
            y = norm(conv(x, side, channels, inner), side, inner)
            new_side = side // 2 if down else side
            y = norm(conv(y, new_side, inner, inner, 3), new_side, inner)
            y = norm(conv(y, new_side, inner, 4 * inner), new_side, 4 * inner, relu=False)
            skip = x
            if channels != 4 * inner or down:
                skip = conv(x, new_side, channels, 4 * inner)
                skip = norm(skip, new_side, 4 * inner, relu=False)
            side, channels = new_side, 4 * inner
            x = net.add("add_relu", [y, skip], 4 * batch * side * side * channels, saves="o")
    net.module_path = "head"
    x = net.add("mean", [x], 4 * batch * channels, saves="")
    x = net.add("linear", [x], 40 * batch, flops=20.0 * batch * channels)
    return net.build([net.add("cross_entropy", [x], 4, saves="", phantom_bytes=40 * batch)])


def unet_problem(depth: int = 4, *, batch: int = 4, width: int = 16, side: int = 64) -> Problem:
    """Return a U-Net: the skip connections make it no chain."""
    net = NetworkBuilder()

    def double_conv(source: int, inner: int, outer: int, edge: int) -> int:
        for channels in (inner, outer):
            size = 4 * batch * edge * edge * outer
            flops = size / 2 * channels * 9
            source = net.add(
                "conv",
                [source],
                size,
                flops=flops,
                weight_bytes=36 * channels * outer,
                workspace_bytes=size // 2,
            )
            source = net.add("batch_norm_relu", [source], size, saves="io", phantom_bytes=8 * outer)
        return source

    net.module_path = "input"
    x = net.add("scale", [], 12 * batch * side * side, saves="")
    skips = []
    channels = 3
    for level in range(depth):
        net.module_path = f"down.{level}"
        edge = side >> level
        x = double_conv(x, channels, width << level, edge)
        channels = width << level
        if level < depth - 1:
            skips.append(x)
            size = batch * edge * edge * channels
            x = net.add("max_pool", [x], size, phantom_bytes=2 * size)
    for level in reversed(range(depth - 1)):
        net.module_path = f"up.{level}"
        edge = side >> level
        skip = skips.pop()
        x = net.add("upsample", [x], 4 * batch * edge * edge * channels, saves="")
        both = channels + (width << level)
        x = net.add("cat", [x, skip], 4 * batch * edge * edge * both, saves="")
        channels = width << level
        x = double_conv(x, both, channels, edge)
    net.module_path = "head"
    pixels = 16 * batch * side * side
    x = net.add("conv", [x], pixels, flops=pixels / 2.0 * channels)
    return net.build([net.add("cross_entropy", [x], 4, saves="", phantom_bytes=pixels)])


def random_problem(seed: int, nodes: int = 5, *, states: bool = True) -> Problem:
    """Return a small random problem: skips, two-product nodes, phantoms, outputs, no-grad nodes."""
    draw = random.Random(seed)
    has_backward = [draw.random() < 0.85 for _ in range(nodes)]
    has_backward[-1] = True
    storages = []
    for k in range(nodes):
        for product in range(1 if draw.random() < 0.8 else 2):
            later = range(k + 1, nodes)
            fwd = {u for u in later if draw.random() < 0.25}
            if product == 0 and k + 1 < nodes:
                fwd.add(k + 1)
            readers = sorted(fwd | {k})
            bwd = {u for u in readers if has_backward[u] and draw.random() < 0.6}
            is_output = k == nodes - 1 or draw.random() < 0.1
            storages.append(
                Storage(
                    f"s{k}_{product}",
                    draw.randint(1, 6),
                    k,
                    tuple(sorted(fwd)),
                    tuple(sorted(bwd)),
                    is_output=is_output,
                )
            )
        if has_backward[k] and draw.random() < 0.4:
            storages.append(Storage(f"p{k}", draw.randint(1, 4), k, (), (k,), is_phantom=True))
    table = []
    for k in range(nodes):
        phantom = sum(s.size_bytes for s in storages if s.producer == k and s.is_phantom)
        products = sum(s.size_bytes for s in storages if s.producer == k and not s.is_phantom)
        nograd = products + draw.choice([0, 0, 1, 3])
        table.append(
            Node(
                f"n{k}",
                float(draw.randint(1, 5)),
                float(draw.randint(1, 5)),
                has_backward[k],
                max(nograd, products + phantom + draw.choice([0, 0, 1, 3])),
                nograd,
                draw.randint(0, 6),
                draw.randint(0, 4),
                draw.choice([0, 0, 0, 1]) if states else 0,
            )
        )
    return Problem(tuple(table), tuple(storages))


def small_problems(max_nodes: int = 5) -> SearchStrategy[Problem]:
    """Hypothesis strategy over `random_problem`."""
    from hypothesis import strategies

    return strategies.builds(
        random_problem,
        strategies.integers(0, 10**6),
        strategies.integers(2, max_nodes),
        states=strategies.booleans(),
    )
