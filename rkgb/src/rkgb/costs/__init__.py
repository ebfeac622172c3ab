"""What operations and nodes cost: time, FLOPs, workspace, and from them the peaks of every part.

Read op_costs.py (one kind of operation), then measure.py (how it is measured), then node_facts.py
(sums and exact memory of every node).
"""
