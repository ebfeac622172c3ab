"""From a module and a sample to one recorded step, or to a refusal that says where and why.

Gets a module and a `Sample`; gives a `BasicGraph`. Read record.py (which submodules run whole),
then step.py (one step from start to end) with twin.py (the copy that runs), saved.py, backward.py,
pieces.py, functions.py and hooks.py; sizes.py records without memory.
"""
