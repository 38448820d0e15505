"""Engines without a device, for tests, benchmarks and the simulator.

In reading order:

counting    An executor that only counts, and virtual clocks.
engines     One engine, or several behind their router, on virtual time.
simulation  Clients, requests and engines, from event to event. Deterministic.
"""
