"""The guards of a plan on its call and its module, as one hashable value: the key of a plan.

Gets a module and the arguments of a call; gives keys. It is fast, because what was found once is
only checked afterwards. Read input_signature.py (the call and torch's global state),
module_state.py (the module's part of a key), snapshot.py (how that is found), tables.py (which
dicts were written to since), module_watch.py (whether a snapshot still holds), read_in_backward.py
(what a plain backward would read again), and sharded.py (what torch's sharding does to a module).
"""
