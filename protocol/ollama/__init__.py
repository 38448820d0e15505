"""Ollama's API.

In reading order:

requests  Requests, and their translation into chat requests and completions.
output    Answers: lines of JSON, or one object.
dialect   The dialect's record, and the shapes of its answers.
"""
