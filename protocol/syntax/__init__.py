"""Readers and grammars for the reasoning and the tool calls that models write.

In reading order:

json_scanner    The end of one JSON value in text that arrives in pieces.
call_reader     Prose around blocks of calls, and the free text of custom tools.
json_calls      Calls written as JSON.
grammars        Grammars for response formats, tool choices and structural tags.
formats         The syntaxes by family, and the one that a chat template was made for.
reasoning       Reasoning between tags.
message_parts   A choice's text as reasoning, content and tool calls.
message_syntax  How the served model writes reasoning and calls, and tools for templates without them.
"""
