"""Benchmarks and evaluations: token ids as prompts, log-probabilities of the prompt, no end of the text."""

from __future__ import annotations

from tests.integration.agents.shapes import ASK, USAGE, chat, completion

_IDS = [504, 3575, 282, 4649, 314]
_ASKED = [{"role": "user", "content": [{"type": "text", "text": ASK}]}]

RECORDED = [
    completion(
        "vllm bench",
        "a stream of a given length",
        prompt=ASK,
        repetition_penalty=1.0,
        max_tokens=4,
        logprobs=None,
        ignore_eos=True,
        **USAGE,
    ),
    chat(
        "vllm bench",
        "a chat of a given length",
        messages=_ASKED,
        max_completion_tokens=4,
        ignore_eos=True,
        **USAGE,
    ),
    completion(
        "lm-eval",
        "how likely texts are",
        prompt=[_IDS, _IDS[:3]],
        max_tokens=1,
        logprobs=1,
        seed=1234,
        echo=True,
    ),
    completion(
        "lm-eval", "until a text", prompt=[_IDS], max_tokens=256, stop=["\n\n", "Question:"], seed=1234, temperature=0
    ),
    chat(
        "lm-eval",
        "chat until a text",
        messages=[{"role": "user", "content": ASK, "type": "text"}],
        max_tokens=256,
        stop=["\n\n"],
        seed=1234,
        temperature=0,
    ),
    chat(
        "guidellm",
        "every chunk tells the usage",
        messages=_ASKED,
        max_tokens=4,
        max_completion_tokens=4,
        ignore_eos=True,
        stop=None,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    ),
    chat("aiperf", "at least so many tokens", messages=_ASKED, min_tokens=4, max_completion_tokens=4, **USAGE),
    chat(
        "inspect",
        "likely tokens",
        messages=_ASKED,
        max_tokens=4,
        logprobs=True,
        top_logprobs=5,
        num_choices=1,
        without_effect="num_choices",
        n=2,
        seed=42,
    ),
]
