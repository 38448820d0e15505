"""Readers and grammars for the reasoning and the tool calls that models write.

In reading order:

record           What one family's syntax consists of.
registry         The families' records, and the one that a chat template was made for.
model_syntax     The served model's record, applied to requests.
history          Conversations in the form that a chat template can show.
message_parts    A choice's text as reasoning, content and tool calls.
reasoning        Reasoning between tags.
call_reader      Prose around blocks of calls, and the free text of custom tools.
json_calls       Calls written as JSON.
parameter_calls  Calls written parameter by parameter, and in Gemma's and Python's notation.
json_scanner     The end of one JSON value in text that arrives in pieces.
harmony          The channels of gpt-oss.
grammars         Grammars for response formats, tool choices and structural tags.
"""
