"""The rules of CUDA on a CPU: its blocks, its workspaces, its threads.

`device` stands in for rkgb's device, by the blocks of `allocator` and the streams of `queues`;
`of_rotor` for rotor's own.
"""
