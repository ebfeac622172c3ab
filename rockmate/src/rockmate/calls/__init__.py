"""The choice of a plan for a call of a module, and planning if there is none yet.

Gets a module, settings and calls; gives their results. Read planned_module.py (planned or plain,
and with which plan), plan_store.py (the plans by key), plans_of_module.py (plans for new calls)
with requester.py (requests for plans) with first_call.py, second_look.py (a call
that is recorded again), loss_outside.py (new plans for the memory that a loss took) and
class_attributes.py (the way from torch to here).
"""
