"""The choice of an engine for a request. A separate library: it imports neither the engine core nor the transport.

In reading order:

prefix_index  Which engines hold which prompt prefixes in their caches.
tenants       Fair shares and limits of tenants over several engines.
router        The expected work of each engine, the choice, and the size of the fleet.
"""
