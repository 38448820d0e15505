"""The runners, which execute plans.

In reading order:

runner          The `Runner` interface, and the options that a worker is made with.
rows            The row table: each request's values between steps.
prompt_outputs  Log-probabilities and pooled hidden states of prompts.
encoder_runner  The runner of an encoder: prompts are computed whole, pooled, and given to heads.
host_runner     The runner that keeps its batch on the host and waits for its tokens.
"""
