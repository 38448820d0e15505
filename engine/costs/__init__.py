"""The costs of engine steps, in seconds.

In reading order:

table      The table of step costs, and the work and budgets that follow from it.
measuring  Measurement of step costs while the engine is idle, and their update by real steps.
"""
