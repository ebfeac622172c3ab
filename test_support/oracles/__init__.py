"""What results are held against, sharing no code with what they check; each file needs one package.

Gets a graph, a program or a plan, and what it came from; gives an AssertionError, or nothing.
rkgb: `gradients`, `k_walk` (a walk through K alone), `check_program` (a checker that shares no code
with what writes programs). rockmate: `best_plan` finds the best schedule of a tiny problem by
exhaustive search. rotor: `chains`.
"""
