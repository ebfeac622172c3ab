"""What a schedule is: its chain, its operations, its memory and its time.

Gets a chain of stages with sizes and times; gives schedules and their exact memory. Nothing here
knows tensors. Read `ops`, `chain`, `simulate`, then `report`.
"""
