"""The rules of CUDA on a CPU: its blocks, its workspaces, its threads.

`device` stands in for rkgb's device, by the blocks of `allocator` and the streams of `queues`;
`of_rotor` for rotor's own. What runs here is torch's part, and no code of the user's.
"""

from rkgb.guards import owners

owners._LIBRARIES |= {__name__}
