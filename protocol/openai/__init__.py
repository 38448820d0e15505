"""OpenAI's wire formats.

structured      the fields that ask for structured output
common          request fields that chat and completions share, and their way to `SamplingParams`
output          what both do with `RequestOutput`: stream chunks, collect, count usage
logprobs        the two logprobs objects
prompt_parts    what an answer repeats of its prompt: echo, ids, log-probabilities
chat            POST /v1/chat/completions
completions     POST /v1/completions
embeddings      POST /v1/embeddings
models          GET /v1/models, and the 404 of an unknown name
"""
