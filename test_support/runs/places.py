"""Places for storages that move, as a test wants them in place of those of the process."""

from __future__ import annotations

import pytest
import torch

from rkgb.copies import Copies
from rockmate.networks import offload
from rockmate.problems.link import Link

_CPU = torch.device("cpu")


def let_host_be(
    copies: Copies, link: Link, patch: pytest.MonkeyPatch, device: torch.device = _CPU
) -> None:
    """Let "host" be these copies, over a link of given rates in place of measured ones."""
    patch.setattr(offload, "_copies", {("host", device): copies})
    patch.setattr(offload, "_measured", {("host", device): link})
