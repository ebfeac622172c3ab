"""What differs between devices: memory, time, random state.

Gets torch's private names from `torch_api`; gives one object per device (base.py, chosen.py), a
memory meter for named spans, and the state of the random generators. Read cuda.py for how peaks are
counted on CUDA and cpu.py for the CPU. `test_support/fake_cuda` applies the rules of CUDA on
a CPU.
"""

from rkgb.device.base import Span, no_collection
from rkgb.device.rng import KeptGenerators, RngState

__all__ = ["KeptGenerators", "RngState", "Span", "no_collection"]
