"""The tools of a request.

In reading order:

kinds        Kinds of tools, and the functions of a request.
unsupported  Tools that are not supported, and the warning for them.
"""
