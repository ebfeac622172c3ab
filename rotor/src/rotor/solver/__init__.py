"""From a chain and a budget to a schedule.

Gets a `Chain`; gives a `Schedule` or an InfeasibleBudgetError. Read `table` (the dynamic program in
C++, and one table for every budget in bytes), and `intervals` (a search by CP-SAT that may drop
stored tensors). The recurrence in readable Python is an oracle of the tests:
`test_support/oracles/recurrence.py`.
"""
