"""Sequences of forwards F(k) and backwards B(k), and what follows from them.

Gets a problem and steps; gives peaks, times and a checked `Plan`. Read steps.py (the vocabulary),
liveness.py (what is alive), simulate.py (the one judge of every plan), plan.py, then what makes or
changes steps without a solver: baselines.py and prune.py. report.py prints, with folding.py.
"""
