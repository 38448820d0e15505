"""OpenAI's Responses API.

In reading order:

items    Items of a conversation, and their translation into chat messages.
tools    Tools of a request, their calls and outputs.
request  The requests, and the truncation of long conversations.
output   The response object and its events.
dialect  The dialect's record and answer shapes.
"""
