"""Ways to run a block or a module, and the choice of one for each within one budget.

Gets problems of single blocks; gives options and what is known of blocks already. Read options.py
(the front of bytes and time), known_blocks.py (kept between plans), module_choice.py (one option
for every module of a step, chosen together).
"""
