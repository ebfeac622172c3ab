"""What graphs consist of: operations, facts about tensors, effects, and the arguments of a call.

Gets the arguments and results of calls; gives frozen facts. Read op.py (one operation), then
tensor_info.py (one tensor), trees.py and sample.py (arguments and results taken apart), effects.py
(what a forward leaves behind besides its result), compiled_call.py (a compiled target).
"""
