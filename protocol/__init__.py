"""What clients say and hear. Pure data: no device, no web server, and no I/O but with that process.

The app room parses bodies with this package and sends what it builds. Of the engine it knows `engine.messages` and
`engine.errors`.

    errors          every failure as a status and the error envelope
    body            bytes to a checked request model
    sse             frames of an event stream
    chat_template   messages to the text that the model was trained on
    jinja_sandbox   compiles and renders a template: here, or, if nobody has read it, in a process apart, which is
                    `template_process` on this side and `template_child` on the other
    structured      grammars that an answer has to follow, whoever asks for them
    message_parts   a choice's text as reasoning, content and tool calls: what every dialect streams from
    message_syntax  how the served model writes those, and how it is told of tools
    tools           functions, the families' syntaxes for calls, and finding calls in text
    reasoning       finding the reasoning in a text that comes in pieces
    openai          the wire formats of OpenAI: chat, completions, models
    dialect         wire formats that are translated into chat requests
    anthropic       one of them: Anthropic's messages
    responses       the other: OpenAI's Responses
    tokens          text to token ids and back
    administration  what administrators send
    answers         the shapes of answers, for the description of the API
    operations      every route with its request and answer models
    openapi         the description that is made from them
"""
