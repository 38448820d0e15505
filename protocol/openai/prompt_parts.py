"""What an answer may repeat of its prompt: echoed text, token ids, log-probabilities.

Echo is done to the first output of each choice, before anything else sees it: the prompt's text and log-probabilities
come first in it, as if they had been generated. So streams and whole answers cannot differ in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.messages import ALL_LOGPROBS, RequestOutput, TokenLogprobs
from protocol.message_parts import TokenBytes
from protocol.openai.logprobs import FIRST_HIDDEN, FIRST_SHOWN, finite, most_likely, spelled


@dataclass(frozen=True, kw_only=True)
class PromptParts:
    """What a client wants to see of its prompts again.

    `echo` is the text that goes before the answer to each prompt, `echo_logprobs` how many likely tokens to show with
    each echoed one (None: no log-probabilities). `prompt_logprobs` is the request's field of that name.
    """

    token_ids: Sequence[list[int]]
    echo: Sequence[str] | None = None
    echo_logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool = False

    def begin(self, output: RequestOutput, prompt: int, token_bytes: TokenBytes) -> RequestOutput:
        """The first output of a choice of this prompt, with the prompt before it."""
        if self.echo is None:
            return output
        text, logprobs = self.echo[prompt], output.logprobs
        if self.echo_logprobs is not None:
            first = self.token_ids[prompt][0]
            shown = token_bytes(first) and text.encode().startswith(token_bytes(first))
            entries = [_with_top(entry, self.echo_logprobs) for entry in output.prompt_logprobs or ()]
            unknown = TokenLogprobs(first, 0.0, FIRST_SHOWN if shown else FIRST_HIDDEN, [])
            logprobs = [unknown, *entries, *(logprobs or ())]
        return msgspec.structs.replace(output, text=text + output.text, logprobs=logprobs)

    def logprobs_of(self, entries: Sequence[TokenLogprobs], token_bytes: TokenBytes) -> list[dict[str, Any]]:
        """Some of the `prompt_logprobs` of an answer, which begin with null for the first token: objects
        `{token id: {logprob, rank, decoded_token}}` with the prompt's own token and the most likely ones."""
        assert self.prompt_logprobs is not None
        parts: list[dict[str, Any]] = []
        for entry in entries:
            likely = enumerate(_first(most_likely(entry), self.prompt_logprobs), start=1)
            ranked = [
                (entry.token_id, entry.logprob, entry.rank),
                *((token, value, rank) for rank, (token, value) in likely),
            ]
            part: dict[str, Any] = {}
            for token, value, rank in ranked:
                shown = {"logprob": finite(value), "rank": rank, "decoded_token": spelled(token_bytes(token))}
                part.setdefault(str(token), shown)
            parts.append(part)
        return parts


def _with_top(entry: TokenLogprobs, count: int) -> TokenLogprobs:
    if count == ALL_LOGPROBS or (entry.every is None and len(entry.top) == count):
        return entry
    return TokenLogprobs(entry.token_id, entry.logprob, entry.rank, most_likely(entry)[:count])


def _first(likely: list[tuple[int, float]], count: int) -> list[tuple[int, float]]:
    return likely if count == ALL_LOGPROBS else likely[:count]
