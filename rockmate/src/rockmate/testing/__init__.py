"""What tests and benchmarks plan and train: problems, networks, and an oracle.

Gets a size or a seed; gives problems made by hand (problems.py), small networks that are hard to
run exactly (nets.py, operators.py) and the assertion that holds them to eager's bits. oracle.py
finds the best schedule of a tiny problem by exhaustive search, sharing nothing with the solvers.
"""
