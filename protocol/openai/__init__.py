"""OpenAI's wire formats, in reading order:

dialect       the record
chat          POST /v1/chat/completions
completions   POST /v1/completions
common        request fields that the two share, and their way to `SamplingParams`
structured    the fields that ask for structured output
tools         tools in OpenAI's words: definitions, choice, and the calls of earlier turns
output        what both do with `RequestOutput`: stream chunks, collect, count usage
message       the parts of a message in chat's spelling: a delta, or the whole
logprobs      the two logprobs objects
prompt_parts  what an answer repeats of its prompt: echo, ids, log-probabilities
long_lists    long lists of an answer as JSON, a piece at a time
embeddings    POST /v1/embeddings
models        GET /v1/models, and the 404 of an unknown name
answers       the shapes of answers, for /openapi.json
"""
