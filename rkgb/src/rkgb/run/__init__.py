"""From the order of a plan to Python code that runs one step of a recorded module.

Gets a simplified graph and the steps of a plan; gives a forward function and a backward generator.
Read views.py (which graph is run), node_storages.py (what a node makes), statements.py (what a
program consists of), program.py (what is run, and when it is dropped), source.py (how it is written
down), then bindings.py (what is called).
"""
