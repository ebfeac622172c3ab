"""What differs between devices and between versions of torch: memory, random state, private names.

Gets nothing from the rest of the package; gives one object per device (base.py, chosen.py), a
memory meter for named spans, the state of the random generators, and torch's private functions
under names of ours. Read cuda.py for how peaks are counted there, profiled.py for the CPU, and
testing.fake_cuda for the rules of CUDA on a CPU. When torch changes, read torch_private.py.
"""
