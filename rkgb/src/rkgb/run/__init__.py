"""From the order of a plan to Python code that runs one step of a recorded module.

Gets a simplified graph and the steps of a plan, and gives a forward function and a backward
generator. Read program.py first (what is run, and when it is dropped), then check_program.py (what
must hold), then source.py (how it is written down).
"""
