"""The wire formats: requests, answers and errors. Pure data: no device, no web server.

From the engine, this package imports messages, errors and child processes.

In reading order:

errors          Every failure as an HTTP status and an error envelope.
body            Request bodies parsed into checked models, and the pages of lists.
jinja_sandbox   Chat templates compiled and rendered in a sandbox, in a child process if they are unknown.
chat_template   Messages rendered as the text that the model was trained on.
tools           Kinds of tools, and tools that are not supported.
request_fields  The fields that requests of every dialect have.
syntax          How models write reasoning and tool calls.
answers         Shapes of answers, writers, and frames of event streams.
operations      The parts of a dialect's record.
openai          OpenAI's chat, completions and embeddings, and the common chat request.
translation     Dialects that are translated into chat requests.
responses       OpenAI's Responses.
anthropic       Anthropic's Messages.
ollama          Ollama's chat, generate and embed.
scoring         Reranking, scores, classes and pooled vectors.
registry        Every dialect and route, tokenization and administration included.
openapi         The description of the API, made from the models.
"""
