"""Plans for the blocks of a model: each block gets its own plan, all chosen within one budget.

Gets a model, a sample and a budget; gives blocks that run planned as separate modules. So hooks,
FSDP, pipeline stages and other code at the borders of modules work as before. Read team.py (the
processes that share a model), rehearsal.py (whole steps whose memory is marked at the borders),
kinds.py (equal blocks and their options), recorded.py (recording and test in a step), planning.py
(the choice), report.py and saved_blocks.py; the entry is `apply_to_blocks` in block_by_block.py.
"""
