"""What a request says about tools.

In reading order:

kinds        Functions and built-in tools of a request.
unsupported  Tools that are not supported, and the warning for them.
"""
