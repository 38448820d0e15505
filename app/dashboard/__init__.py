"""The page at /dashboard, in reading order:

frames     one frame: what the page shows of one engine at one moment
feed       the live feed: the engine's snapshots as frames, for all pages that are open
simulator  the page's simulator, a short piece with each request
files      the files of a page, as a browser gets them
"""
