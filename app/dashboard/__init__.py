"""What the page at /dashboard shows: the live feed and the simulator.

In reading order:

feed       The live feed: engine snapshots as frames for all open pages.
simulator  The page's simulator, one slice of work per request.
"""
