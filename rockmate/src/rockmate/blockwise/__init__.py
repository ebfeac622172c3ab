"""A plan applied module by module: every block for itself, all options chosen within one budget.

Gets a model, a sample and a budget; gives blocks that run planned as modules of their own, so that
hooks, FSDP, pipeline stages and other things at the borders of modules work as they do without.
Read blocks.py (which modules are blocks), rehearsal.py (whole steps whose memory is marked at the
borders), kinds.py (equal blocks and their options), planning.py (choice, test), report.py;
`apply_to_blocks` in block_by_block.py is the door.
"""
