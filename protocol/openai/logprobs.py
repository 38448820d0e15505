"""The two logprobs objects: chat's list of entries, and the parallel arrays of completions.

A writer turns what one `RequestOutput` brought into one JSON-ready object. Writers are per choice and fed in order,
because text offsets run on from chunk to chunk.

JSON has no infinity, and orjson would write null, so log-probabilities end at -9999.0 as in vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine.messages import TokenLogprobs

TokenBytes = Callable[[int], bytes]
"""The bytes that a token id stands for: not always whole characters."""

LogprobsWriter = Callable[[Sequence[TokenLogprobs]], dict[str, Any]]

LOWEST_LOGPROB = -9999.0


class ChatLogprobs:
    """Writes `{"content": [{token, logprob, bytes, top_logprobs}], "refusal": null}`."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes

    def __call__(self, positions: Sequence[TokenLogprobs]) -> dict[str, Any]:
        content = []
        for position in positions:
            entry = self._entry(position.token_id, position.logprob)
            entry["top_logprobs"] = [self._entry(token_id, logprob) for token_id, logprob in position.top]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._token_bytes(token_id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(raw)}


class CompletionLogprobs:
    """Writes `{"text_offset", "token_logprobs", "tokens", "top_logprobs"}`, four arrays with an entry per token.

    `text_offset` counts characters of the generated text before the token: a character belongs to the token that
    holds its first byte. A token that is not whole UTF-8 is written as ``bytes:\\xe2\\x80``, OpenAI's spelling, because
    the replacement character would make different tokens the same key of `top_logprobs`.
    """

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._offset = 0

    def __call__(self, positions: Sequence[TokenLogprobs]) -> dict[str, Any]:
        offsets, logprobs, tokens, tops = [], [], [], []
        for position in positions:
            raw = self._token_bytes(position.token_id)
            logprob = _finite(position.logprob)
            token = _spelled(raw)
            top = {_spelled(self._token_bytes(token_id)): _finite(value) for token_id, value in position.top}
            top.setdefault(token, logprob)  # the sampled token is always there: up to one entry more than asked for
            offsets.append(self._offset)
            logprobs.append(logprob)
            tokens.append(token)
            tops.append(top)
            self._offset += sum(byte & 0xC0 != 0x80 for byte in raw)
        return {"text_offset": offsets, "token_logprobs": logprobs, "tokens": tokens, "top_logprobs": tops}


def _finite(logprob: float) -> float:
    return max(LOWEST_LOGPROB, logprob)  # in this order NaN gives the lowest too


def _spelled(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
