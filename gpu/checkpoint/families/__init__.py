"""The families of models that are served.

In reading order:

gemma  Gemma 2 and 3.
table  All families by their names in files, with their specifications.
"""
