"""The error envelope, and what each exception becomes in it."""

import orjson
import pytest

from engine.errors import EngineDead, InvalidRequest, RequestFailed
from protocol.answers import DONE, KEEP_ALIVE, data_frame, encode
from protocol.errors import ApiError, deadline_exceeded, to_api_error
from protocol.openai.answers import ModelCard, ModelList
from protocol.openai.dialect import unknown_model


def test_the_envelope_has_all_four_keys():
    assert orjson.loads(ApiError(500, "m", type="t").body()) == {
        "error": {"message": "m", "type": "t", "param": None, "code": None}
    }
    error = ApiError(429, "slow down", code="queue_full", headers={"Retry-After": "1"})
    assert orjson.loads(error.body())["error"] == {
        "message": "slow down",
        "type": "rate_limit_error",
        "param": None,
        "code": "queue_full",
    }
    assert error.headers == {"Retry-After": "1"}


@pytest.mark.parametrize(
    ("status", "type_"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
        (503, "server_error"),
    ],
)
def test_the_type_follows_from_the_status(status, type_):
    assert ApiError(status, "x").type == type_
    assert ApiError(status, "x", type="mine").type == "mine"


def test_an_invalid_request_keeps_its_param_and_code():
    error = to_api_error(InvalidRequest("too long", param="messages", code="context_length_exceeded"))
    assert (error.status, error.message, error.param, error.code) == (
        400,
        "too long",
        "messages",
        "context_length_exceeded",
    )


@pytest.mark.parametrize(
    ("exc", "status"),
    [(RequestFailed("at 0x7f /root"), 500), (EngineDead("at 0x7f /root"), 503), (KeyError("/root/key 0x7f"), 500)],
)
def test_what_went_wrong_inside_stays_inside(exc, status):
    error = to_api_error(exc)
    assert (error.status, error.type) == (status, "server_error")
    assert "/root" not in error.message
    assert "0x7f" not in error.message


def test_an_api_error_is_already_what_the_client_sees():
    error = ApiError(418, "teapot")
    assert to_api_error(error) is error


def test_stream_frames_end_with_a_blank_line():
    assert data_frame(ApiError(500, "a\nb").body()) == b"data: " + ApiError(500, "a\nb").body() + b"\n\n"
    assert data_frame(ApiError(500, "a\nb").body()).count(b"\n") == 2
    assert DONE == b"data: [DONE]\n\n"
    assert KEEP_ALIVE.startswith(b":")
    assert KEEP_ALIVE.endswith(b"\n\n")


def test_the_model_list_tells_the_context_length():
    from openai.types import Model

    card = ModelCard(
        id="smol",
        root="SmolLM2",
        created=7,
        max_model_len=2048,
        status="loaded",
        memory=None,
        default_parameters={"top_p": 0.9},
        chat_parameters={"min_p": 0.1},
    )
    body = orjson.loads(encode(ModelList(data=[card])))
    assert body["object"] == "list"
    (shown,) = body["data"]
    Model.model_validate(shown, strict=True)
    assert shown["default_parameters"] == {"top_p": 0.9}
    assert (shown["max_model_len"], shown["root"], shown["parent"], shown["permission"]) == (2048, "SmolLM2", None, [])


def test_an_unknown_model_is_a_404_that_lists_the_served_ones():
    error = unknown_model("gpt-4o", ["smol", "small"])
    assert (error.status, error.type, error.param, error.code) == (404, "not_found_error", "model", "model_not_found")
    assert error.message == "The model `gpt-4o` does not exist. Served here: smol, small."
    assert len(unknown_model("x" * 10_000, ["smol"]).message) < 200


def test_a_missed_deadline_asks_sdks_not_to_retry():
    error = deadline_exceeded("Too late.")
    assert (error.status, error.code, error.headers["x-should-retry"]) == (504, "deadline_exceeded", "false")
