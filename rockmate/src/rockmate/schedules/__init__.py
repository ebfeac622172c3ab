"""Sequences of forwards F(k) and backwards B(k), and what follows from them.

Gets a problem and steps; gives peaks, times and a checked `Plan`. Read steps.py (the vocabulary),
liveness.py (live ranges), simulate.py (the checker of every plan), plan.py; then baselines.py and
prune.py, which make or change steps without a solver. report.py prints.
"""
