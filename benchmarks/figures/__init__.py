"""From committed rows to pictures: one figure a file.

Gets the rows of one CSV file; gives a matplotlib figure. Read style.py (what all share), then any
of overhead, planning, timeline, throughput, options, peers. `visualize.py` draws them all; the
figure of the steps is in steps/.
"""
