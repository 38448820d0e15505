"""Makes `RequestOutput`s as the engine would, and reads event streams as a client would."""

from __future__ import annotations

from typing import Any

import orjson
from hypothesis import strategies as st

from engine.messages import FinishReason, RequestOutput, TokenLogprobs
from protocol.answers import AnswerContext, Head
from protocol.syntax.message_parts import MessageFormat

HEAD = Head(id="chatcmpl-1", created=1_700_000_000, model="smol")

# Whole words, a character cut in three, a byte that is never UTF-8, and a control token.
VOCABULARY = [
    b"The",
    b" cat",
    b"\n",
    b'"',
    "水".encode(),
    b"\xf0\x9f",
    b"\x90",
    b"\x88",
    b"\xff",
    b"<|e|>",
]

PROMPT = [0, 1, 2, 3, 4]

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def token_bytes(token_id: int) -> bytes:
    return VOCABULARY[token_id]


def answer(num_prompts: int = 1, **fields: Any) -> AnswerContext:
    """The context of an answer to so many prompts, all of them `PROMPT`."""
    values: dict[str, Any] = {
        "head": HEAD,
        "request_id": "r",
        "prompts": [PROMPT] * num_prompts,
        "token_bytes": token_bytes,
        "decode": lambda ids: b"".join(map(token_bytes, ids)).decode("utf-8", "replace"),
        "message_format": MessageFormat(),
        "fingerprint": "fp_1",
    }
    return AnswerContext(**(values | fields))


def output(text: str = "", *, index: int = 0, finish: FinishReason | None = None, **fields: Any) -> RequestOutput:
    values: dict[str, Any] = {
        "request_id": "r",
        "token_ids": [],
        "logprobs": None,
        "stop_reason": None,
        "num_prompt_tokens": 5,
        "num_cached_tokens": 0,
        "num_output_tokens": 0,
    }
    return RequestOutput(text=text, index=index, finish_reason=finish, **(values | fields))


def lp(token_id: int, logprob: float = -0.5, top: list[tuple[int, float]] | None = None) -> TokenLogprobs:
    return TokenLogprobs(token_id=token_id, logprob=logprob, rank=1, top=top or [])


ids = st.integers(0, len(VOCABULARY) - 1)
logprob_values = st.floats(max_value=0.0, allow_nan=False, allow_infinity=True)
positions = st.builds(
    TokenLogprobs,
    token_id=ids,
    logprob=logprob_values,
    rank=st.just(1),
    top=st.lists(st.tuples(ids, logprob_values), max_size=3, unique_by=lambda pair: pair[0]),
)


@st.composite
def generations(draw: st.DrawFn, choices: int) -> list[RequestOutput]:
    """Every output of a request, interleaved: each choice's deltas in order, the last with its finish."""
    logprobs = draw(st.booleans())
    per_choice = []
    for index in range(choices):
        deltas, count = [], 0
        for text in draw(st.lists(texts, min_size=1, max_size=6)):
            fresh = draw(st.lists(positions, max_size=3))
            count += len(fresh)
            deltas.append(
                output(
                    text,
                    index=index,
                    token_ids=[position.token_id for position in fresh],
                    logprobs=fresh if logprobs else None,
                    num_output_tokens=count,
                    num_cached_tokens=draw(st.integers(0, 5)) if index else 2,
                )
            )
        deltas[-1].finish_reason = draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
        deltas[-1].stop_reason = draw(st.sampled_from([None, 2, "END"]))
        per_choice.append(deltas)
    order = draw(st.permutations([choice.index for deltas in per_choice for choice in deltas]))
    return [per_choice[index].pop(0) for index in order]


def events(stream: bytes) -> list[dict[str, Any]]:
    """The chunks of a whole stream; asserts the framing and the `[DONE]`."""
    frames = stream.split(b"\n\n")
    assert frames.pop() == b""
    assert frames.pop() == b"data: [DONE]"
    assert all(frame.startswith(b"data: {") and b"\n" not in frame for frame in frames)
    return [orjson.loads(frame.removeprefix(b"data: ")) for frame in frames]


@st.composite
def pieces_of(draw: st.DrawFn, text: str) -> list[str]:
    """`text`, cut anywhere."""
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
