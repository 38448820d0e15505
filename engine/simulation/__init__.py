"""An engine without a device: steps that compute nothing but take their time, on a clock that may be virtual.

It fits the seams that are there, `Executor` and `Clock`. The tests' executor, which checks every plan, stands on it.
Reading order:

clock       time that passes only when somebody says so
tokens      what a request says: a function of its sequence alone
executor    takes plans, gives tokens, and has what a step costs pass
counting    the same without reading or saying anything: for hours
engines     one engine or several behind their router, on virtual time
simulation  clients, requests and engines, from event to event
"""
