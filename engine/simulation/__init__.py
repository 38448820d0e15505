"""An engine without a device: steps that compute nothing but take their time, on a clock that may be virtual.

It fits the seams that are there, `Executor` and `Clock`.
Reading order:

clock       time that passes only when somebody says so
counting    an executor that takes plans, gives numbers, and has what a step costs pass
engines     one engine or several behind their router, on virtual time
simulation  clients, requests and engines, from event to event
"""
