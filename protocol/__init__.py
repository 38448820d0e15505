"""What clients say and hear. Pure data: no device, no web server, no I/O but with the process that renders templates.

The app room parses bodies with this package and sends what it builds. Of the engine it knows `engine.messages` and
`engine.errors`. In reading order:

operations        every route with its request and answer models
dialects          the list of dialects, and which one a path speaks
dialect           a dialect as one record: paths, request models, writers, errors
errors            every failure as a status and the error envelope
body              bytes to a checked request model
request_fields    the fields that requests of every dialect have
translation       dialects that are translated into chat requests
writers           what writes an answer, as a stream or in one piece
openai            the dialect of OpenAI: chat, completions, embeddings, models
anthropic         Anthropic's messages
responses         OpenAI's Responses
tokens            text to token ids and back
administration    what administrators send
sse               frames of an event stream
paging            the pages of lists
message_syntax    how the served model writes reasoning and tool calls, and how it is told of tools
message_parts     a choice's text as reasoning, content and tool calls: what every dialect streams from
reasoning         finding the reasoning in a text that comes in pieces
tools             functions, the families' syntaxes for calls, and finding calls in text
tags              looking for tags in text that comes in pieces
structured        grammars that an answer has to follow, whoever asks for them
chat_template     messages to the text that the model was trained on
jinja_sandbox     compiles and renders a template: here if it is known, else in a process apart
template_process  as many of those as are needed, replaced when they end
template_child    the main of that process
answer_check      what no grammar could enforce, checked when the answer is there
check_child       the main of the process in which that is done
child_process     such processes, seen from the server: their bounds and their deadlines
bounded_child     what their mains have in common
openapi           the description of the API, made from the models
answers           the shapes of answers that dialects share, for that description
"""
