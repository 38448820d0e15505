"""Tests of the figures after an answer, and of the report of a broken stream."""

from __future__ import annotations

import json

import pytest

from app.client import ServerClient, ServerError
from app.commands.chat import Figures, _show
from app.commands.conversation import Conversation
from app.config.settings import SettingsError
from tests.app.bench.scripted_server import SSE_HEAD, scripted


@pytest.fixture
def conversation() -> Conversation:
    return Conversation("smol", {})


@pytest.mark.parametrize(
    "event",
    [
        "{nope",
        "5",
        '{"x": 1}',
        '{"error": "down"}',
        '{"choices": [{"delta": {"content": ["a"]}}]}',
        '{"choices": [], "usage": {"completion_tokens": "many"}}',
    ],
)
def test_what_is_not_understood_is_said_and_the_conversation_goes_on(conversation, event, capsys):
    async def script(_body):
        yield SSE_HEAD + b"%x\r\ndata: %b\n\n\r\n0\r\n\r\n" % (len(event) + 8, event.encode())

    with scripted(script) as server:
        assert _show(ServerClient(server.url), conversation) == ("", "", False)
    assert f"The answer of {server.url} has an unknown form" in capsys.readouterr().err


@pytest.mark.parametrize("ends", [b"0\r\n\r\n", b""], ids=["well formed", "cut"])
def test_half_an_answer_is_not_shown_as_whole(conversation, ends, capsys):
    event = b'data: {"choices": [{"delta": {"content": "The sea"}}]}\n\n'

    async def script(_body):
        yield SSE_HEAD + b"%x\r\n%b\r\n" % (len(event), event) + ends
        yield b""

    with scripted(script) as server:
        assert _show(ServerClient(server.url), conversation) == ("The sea", "", False)
    shown = capsys.readouterr()
    assert "The sea" in shown.out
    assert "before the answer did" in shown.err or "No answer" in shown.err


def test_figures_are_the_servers_and_say_why_it_ended():
    figures = Figures()
    usage = {"completion_tokens": 21, "prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": 32}}
    assert figures.read({"choices": [{"delta": {"role": "assistant", "content": ""}}]}) == ("", "")
    assert figures.read({"choices": [{"delta": {"reasoning": "hm"}}]}) == ("hm", "")
    assert figures.read({"choices": [{"delta": {"content": "yes"}, "finish_reason": "length"}]}) == ("", "yes")
    assert figures.read({"choices": [], "usage": usage}) == ("", "")
    ended = "cut off: no more tokens were allowed"
    assert str(figures) == f"21 tokens; 32 of 40 prompt tokens cached; {ended}"
    seconds = {"receive": 0.1, "tokenize": 0.1, "queue": 0.1, "prefill": 0.2, "decode": 2.0, "deliver": 9.0}
    figures.timeline = {"segments": [{"name": name, "seconds": value} for name, value in seconds.items()]}
    assert str(figures) == (f"21 tokens, 10.0 tok/s; first token after 0.50 s; 32 of 40 prompt tokens cached; {ended}")


def test_a_short_answer_has_no_figures():
    figures = Figures()
    assert str(figures) == ""
    usage = {"completion_tokens": 19, "prompt_tokens": 40}
    figures.read({"choices": [{"delta": {"content": "yes"}, "finish_reason": "stop"}], "usage": usage})
    figures.timeline = {"segments": [{"name": "decode", "seconds": 0.5}], "output_tokens": 19}
    assert str(figures) == ""


async def silent(_body):
    return
    yield b""


@pytest.mark.parametrize(
    "models",
    [
        *({}, {"data": []}, "no", {"data": [{"name": "m"}]}, {"data": [{"id": "m"}, {}]}, {"data": [{"id": ["m"]}]}),
        {"data": [{"id": "m", "chat_parameters": [1]}]},
    ],
)
def test_a_server_that_names_no_models_is_told_of(models):
    with (
        scripted(silent, pages={"/v1/models": models}) as server,
        pytest.raises(ServerError, match="unknown form"),
    ):
        ServerClient(server.url).models()


@pytest.mark.parametrize("url", ["http://here:port", "http://[::1", "ftp://here", "http://"])
def test_what_is_no_address_is_named(url):
    with pytest.raises(SettingsError, match="--url: got"):
        ServerClient(url)


def test_an_answer_that_is_not_http_gives_no_command_to_the_terminal():
    async def script(_body):
        yield b"\x1b]52;c;aGk=\x07\x1b[2J evil\r\n\r\n"

    with scripted(script) as server, pytest.raises(ServerError, match="No answer from") as raised:
        next(ServerClient(server.url).stream({}))
    assert str(raised.value).replace("\n", "").isprintable()


@pytest.mark.parametrize("timeline", [[], {"output_tokens": "x"}, {"segments": [{}], "output_tokens": 50}, None])
def test_an_answer_stands_whatever_becomes_of_its_figures(conversation, timeline, monkeypatch):
    """None: Ctrl-C while the figures are waited for, which the client does by sleeping."""
    event = json.dumps({"choices": [{"delta": {"content": "The sea"}, "finish_reason": "stop"}]})

    async def script(_body):
        head = SSE_HEAD.replace(b"transfer-encoding: chunked", b"connection: close\r\nx-request-id: one")
        yield head + f"data: {event}\n\ndata: [DONE]\n\n".encode()
        yield b""

    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a terminal
    monkeypatch.setattr("app.commands.chat.time.sleep", interrupt)
    with scripted(script, pages={"/v1/requests/one/timeline": timeline}) as server:
        assert _show(ServerClient(server.url), conversation) == ("The sea", "", True)
