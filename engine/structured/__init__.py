"""Grammars that an output has to follow.

In reading order:

json_schema    Preparation of a client's JSON Schema for llguidance.
grammar        A `StructuredOutput` as the text that llguidance compiles.
compile_queue  The queue of grammars to compile.
compiler       Compilation within limits, on threads.
matchers       A request's position in its grammar, token rules and the thinking budget.
manager        The grammars of running requests, and their token masks.
"""
