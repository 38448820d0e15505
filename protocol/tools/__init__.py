"""Tool calls: what a request says about tools, and calls in the text that a model writes.

In reading order:

functions     the functions that a request offers, and which of them must be called
left_out      tools that nobody serves here, and the warning that they are left out
formats       the families' syntaxes with their grammars, and which one a chat template was made for
hermes        Hermes' syntax, which Qwen and many others share
llama3        Llama 3's syntax: bare JSON objects
mistral       Mistral's syntax, in both its forms
fallback      tools for templates that know nothing of them
custom        free text of custom tools, out of the calls' JSON
reader        prose around blocks of calls, for every family
call_object   one call as a JSON object
json_scanner  one JSON value in text that comes in pieces
"""
