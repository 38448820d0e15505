"""Log-probabilities of chat and completions, and long lists in slices.

A writer turns the tokens of one `RequestOutput` into one object for JSON. It serves one choice and is called in order,
because text offsets continue from chunk to chunk. Log-probabilities end at -9999.0, as in vLLM: JSON has no infinity.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from engine.messages import ALL_LOGPROBS, RequestOutput, TokenLogprobs
from protocol.syntax.message_parts import TokenBytes

LogprobsWriter = Callable[[Sequence[TokenLogprobs]], dict[str, Any]]

LOWEST_LOGPROB = -9999.0

# Ranks of the first token of an echoed prompt, which has no log-probability. A hidden one, such as the BOS token, has
# no characters in the echoed text.
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

    `text_offset` counts characters of the answer before the token: a character belongs to the token with its first
    byte, and bytes that are no UTF-8 count as the text's replacement characters. Tokens of `hidden_ids` have no text,
    except in the `num_echoed` tokens of an echoed prompt. The first echoed token has nulls. A token that is not whole
    UTF-8 is written as ``bytes:\\xe2\\x80``, as by OpenAI, because keys of `top_logprobs` must differ.
    """

    def __init__(
        self, token_bytes: TokenBytes, as_token_ids: bool = False, hidden_ids: Container[int] = (), num_echoed: int = 0
    ) -> None:
        self._token_bytes = token_bytes
        self._as_token_ids = as_token_ids
        self._hidden_ids = hidden_ids
        self._num_echoed = num_echoed
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = 0  # without an unfinished character

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
    """Return the text by which a token's id replaces its spelling, for clients that ask for unique tokens."""
    return f"token_id:{token_id}"


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can hold."""
    return max(LOWEST_LOGPROB, logprob)  # in this order NaN gives the lowest too


def spelled(raw: bytes) -> str:
    """Return a token as text, or as its bytes if they are not whole characters."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def most_likely(position: TokenLogprobs) -> list[tuple[int, float]]:
    """Return the requested tokens, most likely first: `top`, or all of `every` (takes milliseconds and megabytes)."""
    if position.every is None:
        return position.top
    import numpy as np  # here, because the server answers before it needs them

    values = np.frombuffer(position.every, np.float32)
    order = np.argsort(-values, kind="stable")
    return list(zip(order.tolist(), values[order].tolist(), strict=True))


# --------------------------------------------------------------------------------------------------------- prompt parts
# The parts of a prompt that its answer repeats: echoed text, token ids, log-probabilities.
#
# Echo changes the first output of each choice before it is read: the prompt's text and log-probabilities come first, as
# if they had been generated. So streams and whole answers agree.


@dataclass(frozen=True, kw_only=True)
class PromptParts:
    """The parts of the prompts that the answer repeats.

    `echo` is the text before the answer to each prompt, `echo_logprobs` the number of likely tokens with each echoed
    one (None: no log-probabilities). `prompt_logprobs` is the request's field of that name.
    """

    token_ids: Sequence[list[int]]
    echo: Sequence[str] | None = None
    echo_logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool = False

    def begin(self, output: RequestOutput, prompt: int, token_bytes: TokenBytes) -> RequestOutput:
        """Return the first output of a choice of this prompt, with the prompt before it."""
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
        """Return entries of `prompt_logprobs` in the answer's form, without the null of the first token.

        An entry is `{token id: {logprob, rank, decoded_token}}` with the prompt's own token and the most likely ones.
        """
        assert self.prompt_logprobs is not None
        parts: list[dict[str, Any]] = []
        for entry in entries:
            count = None if self.prompt_logprobs == ALL_LOGPROBS else self.prompt_logprobs
            likely = enumerate(most_likely(entry)[:count], start=1)
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


# ----------------------------------------------------------------------------------------------------------- long lists
# Long lists of an answer as JSON, a piece at a time.
#
# The objects of a hundred thousand log-probabilities are a hundred megabytes; writing them in one call keeps the GIL,
# and the garbage collector visits them again and again. So only a few hundred positions are objects at a time.


PIECE = 256  # positions


def pieces(entries: Sequence[TokenLogprobs]) -> Iterator[Sequence[TokenLogprobs]]:
    """Yield `entries` in pieces; one entry at a time if each has the whole vocabulary."""
    piece = PIECE if not entries or entries[-1].every is None else 1
    for begin in range(0, len(entries), piece):
        yield entries[begin : begin + piece]


def joined(lists: Iterable[Sequence[Any]]) -> msgspec.Raw:
    """Return one list of the entries of all of these lists."""
    return msgspec.Raw(array_of(map(entries_of, lists)))


def written(write: LogprobsWriter, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Write the entries with `write`, a piece at a time, and return one object with the pieces' lists joined."""
    if len(entries) <= PIECE and not (entries and entries[-1].every is not None):
        return write(entries)
    whole: dict[str, Any] = {}
    for piece in pieces(entries):
        for key, value in write(piece).items():
            if isinstance(value, list):
                whole.setdefault(key, []).append(entries_of(value))
            else:
                whole[key] = value
    return {key: msgspec.Raw(array_of(value)) if isinstance(value, list) else value for key, value in whole.items()}


def entries_of(values: Sequence[Any]) -> bytes:
    """Return the JSON of a list, without its brackets."""
    return orjson.dumps(values)[1:-1]


def array_of(written_entries: Iterable[bytes]) -> bytes:
    """Join encoded entries into one JSON array. Empty byte strings are skipped."""
    return b"[" + b",".join(filter(None, written_entries)) + b"]"
