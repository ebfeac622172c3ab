"""Runs schedules on modules, and measures the stages of a chain.

Gets a Sequential and a schedule; gives outputs and gradients under autograd. Read `device`,
`memory` and `rng`, then `boundary`, `stages` and `joining`, then `program`, `gradients` and
`execute` (how a schedule runs), then `timing`, `twins` and `measure` (how a module becomes a
chain).
"""
