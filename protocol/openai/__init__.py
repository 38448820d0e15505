"""OpenAI's wire formats.

In reading order:

structured   The fields that ask for structured output.
tools        Tool definitions, tool choice, and calls of earlier turns.
answers      Shapes of whole answers.
generation   The fields that chat and completions share, and `SamplingParams` made of them.
logprobs     Log-probabilities of chat and completions, and long lists in slices.
output       Answers of chat and completions: chunks, messages and usage.
chat         POST /v1/chat/completions.
completions  POST /v1/completions.
embeddings   POST /v1/embeddings.
batches      Files and batches, and the lines of their files.
dialect      The dialect's record.
"""
