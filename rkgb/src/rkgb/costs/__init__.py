"""What operations and nodes cost: time, FLOPs, workspace, and from them the peaks of every part.

Gets a simplified graph and the module's tensors; gives the facts of each node, and K. Read
op_costs.py (one kind of operation), measure.py (how it is measured), node_facts.py (sums and exact
memory of every node), inspection.py (all of it for a module), forward_backward.py (K), then
recorded_costs.py (costs in a file).
"""
