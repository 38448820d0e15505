"""Anthropic's Messages API.

In reading order:

blocks    Content blocks, and their translation into chat messages.
messages  Requests, tools and errors of /v1/messages.
output    Answers of /v1/messages: one message, or its events.
dialect   The dialect's record, models list and answer shapes.
"""
