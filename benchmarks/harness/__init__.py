"""How anything is measured: point by point, each in a process of its own, each one row.

Gets an `Experiment` (points, and the name of the function that measures one); gives rows in a CSV
file. Read points.py, experiment.py and worker.py (the way of a point), measures.py and
planning_measures.py (what is measured), meter.py (the instruments), strategies.py and networks.py
(what is compared, and on what), compiled.py, forecast.py, data.py.
"""
