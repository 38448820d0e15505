"""Engines without a device, for tests, benchmarks and the simulator.

In reading order:

counting    An executor that counts tokens instead of computing them, and a virtual clock.
engines     One engine, or several behind their router, on virtual time.
simulation  Clients, requests and engines, simulated event by event. Deterministic.
"""
