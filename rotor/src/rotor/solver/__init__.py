"""From a chain and a budget to a schedule.

Gets a `Chain`; gives a `Schedule` or an InfeasibleBudgetError. Read `recurrence` (in readable
Python), then `table` (the same in C++, and one table for every budget in bytes), and `intervals` (a
search by CP-SAT that may drop stored tensors).
"""
