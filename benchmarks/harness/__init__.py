"""How anything is measured: point by point, each in a process of its own, each one row.

Gets an `Experiment` (points, and the name of the function that measures one); gives rows in a CSV
file. Read points.py, experiment.py and worker.py (the way of a point), meter.py (the
instruments), networks.py and data.py (on what), forecast.py (how long it takes).
"""
