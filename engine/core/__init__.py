"""The engine's loop: schedule, submit, update, and isolation of requests that make steps fail.

In reading order:

heartbeat     The heartbeat that a watchdog reads from another thread or process.
participants  Step costs, expert load and profiles: what acts around each step.
core          `EngineCore.step`.
"""
