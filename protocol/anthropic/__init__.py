"""Anthropic's wire format: POST /v1/messages, translated to a chat request and back.

dialect         the record
messages        the request bodies, and the chat requests that they mean
tools           tools, those of a form that Anthropic has fixed among them
blocks          turns and content blocks, and their way into chat messages
output          the message or its events
models          what is served, as GET /v1/models tells it
errors          the envelope of errors, on every route below /v1/messages
answers         the shapes of answers, for /openapi.json
"""
