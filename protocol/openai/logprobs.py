"""The two logprobs objects: chat's list of entries, and the parallel arrays of completions.

A writer turns what one `RequestOutput` brought into one JSON-ready object. Writers are per choice and fed in order,
because text offsets run on from chunk to chunk.

JSON has no infinity, and orjson would write null, so log-probabilities end at -9999.0 as in vLLM.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Container, Sequence
from typing import Any

from engine.messages import TokenLogprobs
from protocol.message_parts import TokenBytes

LogprobsWriter = Callable[[Sequence[TokenLogprobs]], dict[str, Any]]

LOWEST_LOGPROB = -9999.0

# Instead of a rank: the first token of an echoed prompt, of which nothing is known. A hidden one, such as the BOS token
# before a text, has no characters in the echoed text.
FIRST_SHOWN = 0
FIRST_HIDDEN = -1


class ChatLogprobs:
    """Writes `{"content": [{token, logprob, bytes, top_logprobs}], "refusal": null}`."""

    def __init__(self, token_bytes: TokenBytes, as_token_ids: bool = False) -> None:
        self._token_bytes = token_bytes
        self._as_token_ids = as_token_ids

    def __call__(self, positions: Sequence[TokenLogprobs]) -> dict[str, Any]:
        content = []
        for position in positions:
            entry = self._entry(position.token_id, position.logprob)
            entry["top_logprobs"] = [self._entry(token_id, logprob) for token_id, logprob in most_likely(position)]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._token_bytes(token_id)
        token = token_name(token_id) if self._as_token_ids else raw.decode("utf-8", "replace")
        return {"token": token, "logprob": finite(logprob), "bytes": list(raw)}


class CompletionLogprobs:
    """Writes `{"text_offset", "token_logprobs", "tokens", "top_logprobs"}`, four arrays with an entry per token.

    `text_offset` counts characters of the answer's text before the token: a character belongs to the token that holds
    its first byte, and bytes that are no UTF-8 are the replacement characters that the text has for them. Tokens of
    `hidden_ids` have no text, unless they are among the `num_echoed` tokens of an echoed prompt. A token that is not
    whole UTF-8 is written as ``bytes:\\xe2\\x80``, OpenAI's spelling, because the replacement character would make
    different tokens the same key of `top_logprobs`. The first token of an echoed prompt has nulls.
    """

    def __init__(
        self,
        token_bytes: TokenBytes,
        as_token_ids: bool = False,
        hidden_ids: Container[int] = (),
        num_echoed: int = 0,
    ) -> None:
        self._token_bytes = token_bytes
        self._as_token_ids = as_token_ids
        self._hidden_ids = hidden_ids
        self._num_echoed = num_echoed
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = 0  # without the one that is unfinished

    def __call__(self, positions: Sequence[TokenLogprobs]) -> dict[str, Any]:
        offsets: list[int] = []
        logprobs: list[float | None] = []
        tokens: list[str] = []
        tops: list[dict[str, float] | None] = []
        for position in positions:
            token = self._name(position.token_id)
            unfinished, _ = self._decoder.getstate()
            offsets.append(self._num_characters + (len(unfinished) > 0))
            tokens.append(token)
            if position.rank > 0:
                top = {self._name(token_id): finite(value) for token_id, value in most_likely(position)}
                logprobs.append(finite(position.logprob))
                # The token itself is always there: up to one entry more than asked for.
                tops.append(top | {token: finite(position.logprob)})
            else:
                logprobs.append(None)
                tops.append(None)
            is_hidden = self._num_echoed <= 0 and position.token_id in self._hidden_ids
            if position.rank != FIRST_HIDDEN and not is_hidden:
                self._num_characters += len(self._decoder.decode(self._token_bytes(position.token_id)))
            self._num_echoed -= 1
        return {"text_offset": offsets, "token_logprobs": logprobs, "tokens": tokens, "top_logprobs": tops}

    def _name(self, token_id: int) -> str:
        return token_name(token_id) if self._as_token_ids else spelled(self._token_bytes(token_id))


def token_name(token_id: int) -> str:
    """A token by its id, for clients that ask for it so: no two are spelled alike."""
    return f"token_id:{token_id}"


def finite(logprob: float) -> float:
    """What JSON can hold of it."""
    return max(LOWEST_LOGPROB, logprob)  # in this order NaN gives the lowest too


def spelled(raw: bytes) -> str:
    """A token as text; where it is not whole characters, its bytes."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def most_likely(position: TokenLogprobs) -> list[tuple[int, float]]:
    """All that was asked for: `top`, or it made of `every`, which takes milliseconds and megabytes."""
    if position.every is None:
        return position.top
    import numpy as np  # here, because the server answers before it needs them

    values = np.frombuffer(position.every, np.float32)
    order = np.argsort(-values, kind="stable")
    return list(zip(order.tolist(), values[order].tolist(), strict=True))
