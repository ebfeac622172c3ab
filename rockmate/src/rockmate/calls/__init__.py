"""Which plan runs a call of a module, and what happens where there is none.

Gets a module, settings and calls; gives their results. Read planned_module.py (the gate: plain, or
which plan), plan_store.py (plans by what they take for granted), plans_of_module.py (a call that no
plan is for) with any_number.py, requester.py (how a plan is asked for) with first_call.py, then
second_look.py (a call that is recorded once more), loss_outside.py (plans anew for what a loss
took) and class_attributes.py (how torch gets here).
"""
