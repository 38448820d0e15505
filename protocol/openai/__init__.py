"""OpenAI's wire formats.

structured      the fields that ask for structured output
common          request fields that chat and completions share, and their way to `SamplingParams`
output          what both do with `RequestOutput`: stream chunks, collect, count usage
logprobs        the two logprobs objects
chat            POST /v1/chat/completions
completions     POST /v1/completions
models          GET /v1/models, and the 404 of an unknown name
"""
