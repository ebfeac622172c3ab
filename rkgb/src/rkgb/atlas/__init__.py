"""What is known of graphs beside plans: A (equal blocks), K (with costs), and graphs as JSON.

Gets a simplified graph, and costs; gives graphs to look at, compare and save. No plan needs them:
this folder, pictures, api.py and published hang on the road from a module to its step, and nothing
on that road knows them. Read anonymize.py (A), inspection.py (costs of all nodes),
forward_backward.py (K) and serialize.py (files).
"""
