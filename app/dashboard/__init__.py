"""The live feed, the history and the simulator of the page at /dashboard.

In reading order:

feed       The live feed: engine snapshots as frames for all open pages.
history    Figures of the last 15 minutes and 24 hours, kept for pages that are opened later.
simulator  The page's simulator, one slice of work per request.
"""
