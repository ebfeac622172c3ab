"""The program over retention intervals, for CP-SAT.

Gets a problem, a budget and a window to free; gives steps. Read solve.py (the overview), then
runs.py (when nodes may run), demands.py (what occupies memory, and when) and memory.py (the budget
as one cumulative resource). cp_sat.py loads the solver.
"""
