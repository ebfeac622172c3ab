"""How tests run things: planned the same on every machine, with other kernels, in processes.

`planned` wraps a module, `kernels` takes other ones, `processes` calls a function of a test file in
each process of a group. `little_search` and `frozen` save time.
"""
