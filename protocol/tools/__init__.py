"""Tool calls: what a request says about tools, and calls in the text that a model writes.

functions       the functions that a request offers, which of them must be called, and the grammar for that
formats         the families' syntaxes, and which one a chat template was made for
hermes, llama3, mistral     one family each
fallback        tools for templates that know nothing of them
reader          prose around blocks of calls, for every family
call_object     one call as a JSON object
json_scanner    one JSON value in text that comes in pieces
"""
