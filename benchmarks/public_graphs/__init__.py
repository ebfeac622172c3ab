"""Other people's instances: read as they are, planned as our problem, checked on the original.

Gets files that others publish; gives their graphs, problems for our planners, and a check of each
plan that knows no planner. Read graph.py (what a graph is), readers.py (the formats), files.py
(where they come from), then encoding.py (a graph as a `Problem`) and walk.py (a plan run on the
graph).
"""
