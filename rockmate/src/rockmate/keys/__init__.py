"""What a plan takes for granted about a call and its module, as one hashable key.

Gets a module and the arguments of a call; gives keys, quickly: what was found out once is looked at
again. Read input_signature.py (the call and torch's global state), module_state.py (what a module
is, as a part of a key), snapshot.py (how that is found), tables.py (what was written to since),
module_watch.py (whether it still holds), and sharded.py (what torch's sharding does to a module).
"""
