"""What a schedule is: the chain that it is for, its operations, and what it needs and takes.

Gets a chain of stages with sizes and times, gives schedules and their exact memory. Nothing here
knows tensors. Read `ops`, `chain`, `simulate`, `schedule`, then `report`.
"""
