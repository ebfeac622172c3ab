"""Options of a block or a module, and the choice of one for each within one budget.

Gets problems of single blocks; gives options, and keeps known ones. Read options.py (the Pareto
front of bytes and time, and what is kept of it between plans), module_choice.py (one option for
every module of a step, chosen together).
"""
