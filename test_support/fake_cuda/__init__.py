"""The rules of CUDA on a CPU: its blocks, its workspaces, its threads.

`device` stands in for rkgb's device, by the blocks of `allocator`; `of_rotor` for rotor's own.
"""
