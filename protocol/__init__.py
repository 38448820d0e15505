"""What clients say and hear. Pure data: no device, no web server, no I/O.

The app room parses bodies with this package and sends what it builds. Of the engine it knows `engine.messages` and
`engine.errors`.

    errors          every failure as a status and the error envelope
    body            bytes to a checked request model
    sse             frames of an event stream
    chat_template   messages to the text that the model was trained on
    structured      grammars that an answer has to follow, whoever asks for them
    openai          the wire formats of OpenAI: chat, completions, models
"""
