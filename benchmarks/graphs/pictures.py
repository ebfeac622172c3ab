"""Draw the pictures of rkgb's README: of a GPT-2, a ResNet-50 and a U-Net.

$ python -m graphs.pictures    # needs the program dot (Graphviz)
"""

from __future__ import annotations

import shutil
import sys

import torch

import rkgb
from models.GPT import GPT2
from models.resnet import resnet50
from models.unet import UNet
from reports.readme import README

FOLDER = README.parent / "pictures"


def main() -> int:
    """Rewrite all pictures."""
    if shutil.which("dot") is None:
        print("the program dot (Graphviz) is not installed", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = GPT2(nlayers=12, d_model=256, n_heads=8, vocab=1000, max_length=128).train()
    result = rkgb.make_all_graphs(model, torch.randint(1000, (4, 128)))
    largest = max(result.equivalent_classes, key=len)
    perceptron = next(
        members[0]
        for members in result.equivalent_classes
        if len(members) == len(largest)
        and any(node.op == "gelu" for node in result.K_graph_list[members[0]].compute)
    )
    rkgb.print_graph(result, "gpt2_blocks", folder=FOLDER, title="GPT-2, 12 layers")
    rkgb.print_graph(
        result.K_graph_list[perceptron], "gpt2_perceptron", folder=FOLDER, title="one perceptron"
    )
    images = torch.randn(4, 3, 64, 64)
    for name, net in (("resnet50", resnet50(width=16, num_classes=10)), ("unet", UNet(width=8))):
        graph = rkgb.make_all_graphs(net.train(), images, cost="flops").S_graph
        rkgb.print_graph(graph, name, folder=FOLDER)
    return 0


if __name__ == "__main__":
    sys.exit(main())
