"""Which dialect a path speaks, and that what is common to all is told once."""

from __future__ import annotations

import re
from inspect import get_annotations
from pathlib import Path

import pytest

import app
from engine.messages import RANGES, SamplingParams
from protocol.anthropic.dialect import ANTHROPIC
from protocol.openai.dialect import OPENAI
from protocol.operations import Dialect
from protocol.registry import DIALECTS, OPERATIONS, dialect_of
from protocol.request_fields import RequestFields
from protocol.responses.dialect import RESPONSES


@pytest.mark.parametrize(
    ("path", "dialect"),
    [
        ("/v1/messages", ANTHROPIC),
        ("/v1/messages/", ANTHROPIC),
        ("/v1/messages/there/is/nothing", ANTHROPIC),
        ("/v1/messagesandmore", OPENAI),
        ("/v1/complete", ANTHROPIC),
        ("/v1/completions", OPENAI),
        ("/v1/responses/resp_1/cancel", RESPONSES),
        ("/v1/chat/completions", OPENAI),
        ("/nothing", OPENAI),
        ("*", OPENAI),
        ("", OPENAI),
    ],
)
def test_a_path_speaks_the_dialect_of_the_longest_root_above_it(path: str, dialect: Dialect) -> None:
    assert dialect_of(path) is dialect


def test_of_a_path_that_is_shared_the_headers_tell() -> None:
    for path in ("/v1/models", "/v1/models/a/b"):
        assert dialect_of(path, {"anthropic-version": "1"}) is ANTHROPIC
        assert dialect_of(path, {"x-api-key": "a"}) is OPENAI
    assert dialect_of("/v1/chat/completions", {"anthropic-version": "1"}) is OPENAI


def test_a_dialect_has_no_path_outside_of_its_root_and_all_are_described() -> None:
    for dialect in DIALECTS:
        assert all(dialect_of(operation.path) is dialect for operation in dialect.operations)
        assert all(operation in OPERATIONS for operation in dialect.operations)


def test_every_dialect_takes_the_parameters_of_sampling_from_one_place() -> None:
    shared = RequestFields.model_fields.keys() & set(SamplingParams.__struct_fields__)
    assert {"temperature", "top_p", "top_k", "seed"} <= shared
    requests: list[type] = [route.request for dialect in DIALECTS for route in dialect.generation]
    requests += [model for dialect in DIALECTS for model in dialect.counting.values()]
    for request in requests:
        assert issubclass(request, RequestFields)
        others = [get_annotations(each) for each in request.__mro__ if each is not RequestFields]
        assert not any(shared & annotations.keys() for annotations in others)


def test_every_range_is_of_a_parameter() -> None:
    assert RANGES.keys() <= set(SamplingParams.__struct_fields__)


def test_what_makes_handlers_knows_no_dialect_by_name() -> None:
    source = (Path(app.__file__).parent / "routes" / "generation.py").read_text()
    assert not re.findall(r"anthropic|responses\b|ANTHROPIC|OPENAI|RESPONSES|/v1", source)
