"""What results are held against, sharing no code with what they check; each file needs one package.

Gets a graph, a program or a plan, and what it came from; gives an AssertionError, or nothing.
rkgb: `gradients`, `k_walk` (a walk through K alone), `check_program` (a checker that shares no code
with what writes programs), `check_pieces` (of calls that run piece by piece). rockmate: `training`
beside plain PyTorch; `best_plan`, an exhaustive search for tiny problems. rotor: `checkpointables`,
`best_schedule` of a small chain, and `recurrence`, the dynamic program in readable Python.
"""
