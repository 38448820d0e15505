"""The cost of decoding a body is estimated before it is decoded, by counting the structure in its bytes."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import body
from protocol.body import MAX_JSON_WEIGHT, ClientModel, decode_json, parse_body, weight_above
from protocol.errors import ApiError
from protocol.registry import parse_tokenize

texts = st.text(st.sampled_from('ab[]{},:"\\\n\u00e9\U0001f600'), max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(texts, inner, max_size=6),
    max_leaves=40,
)


def weigh(value: Any) -> int:
    """The weight of a value, but for the comma before it."""
    if isinstance(value, str):
        return 2
    if isinstance(value, list):
        return 8 + max(0, len(value) - 1) + sum(map(weigh, value))
    if isinstance(value, dict):
        return 8 + max(0, len(value) - 1) + sum(2 + 8 + weigh(each) for each in value.values())
    return 0


@pytest.mark.slow
@pytest.mark.parametrize("piece", [1, 2, 3, 7, 65536])
@given(value=values, escapes=st.booleans())
def test_weight_is_that_of_the_values_whatever_their_texts_look_like(piece: int, value: Any, escapes: bool) -> None:
    data = json.dumps(value, ensure_ascii=escapes).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body, "_PIECE", piece)
        weight = weigh(value)
        assert not weight_above(data, weight)
        assert not weight or weight_above(data, weight - 1)


@pytest.mark.parametrize(
    "data",
    [
        b"[" + b"1," * 2_000_000 + b"1]",
        b'{"x":[' + b"[]," * 200_000,
        b"[" * 200_000,
        b'["",' * 300_000,
        b'{"a":' * 70_000,
    ],
    ids=["numbers", "arrays", "depth", "strings", "objects"],
)
def test_too_many_values_are_refused_before_any_is_made(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(_: bytes) -> None:
        raise AssertionError("it was decoded")

    monkeypatch.setattr(orjson, "loads", never)
    for parse in (decode_json, parse_tokenize, lambda data: parse_body(ClientModel, data)):
        with pytest.raises(ApiError, match="too many JSON values") as error:
            parse(data)
        assert (error.value.status, error.value.code) == (413, "too_many_values")


def test_long_texts_and_a_million_token_ids_are_not_too_many_values() -> None:
    ids = list(range(1_000_000))
    assert decode_json(json.dumps({"prompt": ids}).encode()) == {"prompt": ids}
    code = 'call(a, b, [c, {d: "e"}])\n' * 200_000
    assert decode_json(json.dumps({"prompt": code}).encode()) == {"prompt": code}
    assert MAX_JSON_WEIGHT >= 2**20  # what /detokenize takes


def test_threads_that_need_a_model_first_and_at_once_all_get_what_it_checks() -> None:
    class Inner(ClientModel):
        number: int

    switch_interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20):

            class Outer(ClientModel):
                inner: list[Inner]

            together = Barrier(4)

            def outcome(data: bytes, model: type[Outer] = Outer, together: Barrier = together) -> str:
                together.wait()
                try:
                    return str(parse_body(model, data).inner[0].number)
                except ApiError as error:
                    return str(error.param)

            given = [b'{"inner": [{"number": 1}]}', b'{"inner": [{"number": "1"}]}'] * 2
            with ThreadPoolExecutor(4) as threads:
                assert list(threads.map(outcome, given)) == ["1", "inner.0.number"] * 2
    finally:
        sys.setswitchinterval(switch_interval)
        body._MODELS[:] = [model for model in body._MODELS if model.__module__ != __name__]
