"""The live feed and the simulator of the page at /dashboard.

In reading order:

feed       The live feed: engine snapshots as frames for all open pages.
simulator  The page's simulator, one slice of work per request.
"""
