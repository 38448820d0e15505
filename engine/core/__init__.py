"""The engine's loop: schedule, submit, update, and what keeps it alive when a step fails.

Runs on the engine's thread, in the server or in a process of its own. Reading order:

config      the numbers that an engine is made with
executor    the seam: who computes a plan
heartbeat   what tells from outside whether steps are made
quarantine  finds the request that makes steps fail
lost_time   finds steps that other work on the machine delayed
calibration  measures what steps cost, while nobody wants one
step_costs  keeps that up to date, and paces prefill by it
expert_load  how evenly a model's experts are used
profile     what steps do with their time, while somebody wants to know
core        `EngineCore.step`
"""
