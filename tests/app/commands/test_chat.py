"""What can be typed in a conversation, and what an answer's figures say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.client import ServerClient, ServerError
from app.commands.chat import HELP, SETTABLE, Commands, Conversation, Figures, _show
from app.config.settings import SettingsError
from tests.app.bench.scripted_server import SSE_HEAD, scripted

CARDS: list[dict[str, Any]] = [
    {"id": "smol", "status": "loaded"},
    {"id": "org/large", "default_parameters": {"temperature": 0.7}},
]
DEFAULTS = {"temperature": 0.2, "top_p": 0.9, "max_tokens": None}


@pytest.fixture
def conversation() -> Conversation:
    return Conversation("smol", DEFAULTS, system="Be brief.")


def typed(conversation: Conversation, line: str) -> str:
    said = Commands(conversation, lambda: CARDS).take(line)
    assert said is not None
    return said


@pytest.mark.parametrize("line", ["Hello", "/etc/passwd is what?", " /help", "1/2", "//", "/path-like thing"])
def test_messages_are_no_commands(conversation, line):
    assert Commands(conversation, lambda: CARDS).take(line) is None


def test_help_names_every_command_and_an_unknown_one_gets_a_hint(conversation):
    assert typed(conversation, "/help") == HELP
    for word in Commands(conversation, lambda: CARDS)._commands.keys() - {"/quit", "/help"}:
        assert word in HELP
    assert typed(conversation, "/hepl me") == "There is no /hepl. Did you mean /help?"
    assert typed(conversation, "/") == "There is no /. /help lists the commands."


def test_any_sampling_field_is_set_checked_and_left_open_again(conversation):
    assert typed(conversation, "/set temperature 0.5") == "temperature 0.5"
    typed(conversation, "/set stop the END")
    typed(conversation, "/set seed 7")
    assert conversation.body() == {
        "model": "smol",
        "messages": [{"role": "system", "content": "Be brief."}],
        "temperature": 0.5,
        "stop": "the END",
        "seed": 7,
    }
    assert typed(conversation, "/set").splitlines() == [
        "temperature 0.5",
        "top_p 0.9 (default)",
        "seed 7",
        "stop the END",
    ]
    assert typed(conversation, "/set temperature") == "temperature 0.2 (default)"
    assert "temperature" not in conversation.body()


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("temperature 5", "temperature must be in [0.0, 2.0], got 5.0."),
        ("temperature hot", "temperature: got 'hot'; allowed: a number"),
        ("top_k 1.5", "top_k must be an integer, got 1.5."),
        ("max_tokens -7", "max_tokens must be at least 1"),
        ("reasoning_effort enormous", "reasoning_effort"),
        ("temprature 1", "There is no field 'temprature'. Did you mean temperature?"),
        ("n 4", "There is no field 'n'."),
    ],
)
def test_a_wrong_value_is_told_and_changes_nothing(conversation, line, complaint):
    assert complaint in typed(conversation, f"/set {line}")
    assert conversation.fields == {}


def test_every_field_that_can_be_set_is_one_of_a_request(conversation):
    from protocol.openai.chat import ChatCompletionRequest

    assert set(SETTABLE) <= ChatCompletionRequest.model_fields.keys()
    with pytest.raises(SettingsError):
        conversation.set("model", "other")


def test_the_system_prompt_changes_and_goes(conversation):
    typed(conversation, "/system You are a pirate.")
    assert conversation.body()["messages"] == [{"role": "system", "content": "You are a pirate."}]
    typed(conversation, "/system")
    assert conversation.body()["messages"] == []


def test_another_model_goes_on_with_its_own_defaults(conversation):
    conversation.messages.append({"role": "user", "content": "Hello"})
    assert typed(conversation, "/model").splitlines() == ["smol loaded", "org/large "]
    assert typed(conversation, "/model org/larg") == "There is no model org/larg. Did you mean org/large?"
    typed(conversation, "/model org/large")
    assert conversation.body()["model"] == "org/large"
    assert conversation.body()["messages"][-1]["content"] == "Hello"
    assert typed(conversation, "/set temperature") == "temperature 0.7 (default)"


def test_a_conversation_is_saved_as_a_request_and_over_nothing(conversation, tmp_path):
    conversation.messages += [{"role": "user", "content": "Grüße"}, {"role": "assistant", "content": "Hi"}]
    conversation.set("top_k", "5")
    path = tmp_path / "talk.json"
    assert typed(conversation, f"/save {path}") == f"2 messages are in {path}."
    assert json.loads(path.read_text()) == conversation.body()
    assert "File exists" in typed(conversation, f"/save {path}")
    assert "cannot be written" in typed(conversation, f"/save {tmp_path}/no/such/folder")
    assert "/save conversation.json" in typed(conversation, "/save")


@pytest.mark.parametrize("name", ["~nobody-of-this-name/a", "a\0b", "/no/folder/\x1b]0;title\x07", "x" * 5000])
def test_a_name_that_is_none_is_told_and_obeyed_by_no_terminal(conversation, name):
    said = typed(conversation, f"/save {name}")
    assert "cannot be written" in said
    assert "\x1b" not in said


def test_half_a_character_is_saved_as_a_question_mark(conversation, tmp_path):
    conversation.messages.append({"role": "user", "content": "caf\udcc3"})
    assert "1 messages" in typed(conversation, f"/save {tmp_path / 'talk.json'}")
    assert json.loads((tmp_path / "talk.json").read_text())["messages"][1]["content"] == "caf?"


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
        assert _show(ServerClient(server.url), conversation) == ""
    assert f"The answer of {server.url} has an unknown form" in capsys.readouterr().err


@pytest.mark.parametrize("ends", [b"0\r\n\r\n", b""], ids=["well formed", "cut"])
def test_half_an_answer_is_not_shown_as_whole(conversation, ends, capsys):
    event = b'data: {"choices": [{"delta": {"content": "The sea"}}]}\n\n'

    async def script(_body):
        yield SSE_HEAD + b"%x\r\n%b\r\n" % (len(event), event) + ends
        yield b""

    with scripted(script) as server:
        assert _show(ServerClient(server.url), conversation) == "The sea"
    shown = capsys.readouterr()
    assert "The sea" in shown.out
    assert "before the answer did" in shown.err or "No answer" in shown.err


def test_figures_tell_speed_cache_and_why_it_ended(monkeypatch):
    now = iter([10.0, 10.5, 12.5])
    monkeypatch.setattr("app.commands.chat.time.monotonic", lambda: next(now))
    figures = Figures()
    usage = {"completion_tokens": 21, "prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": 32}}
    assert figures.read({"choices": [{"delta": {"role": "assistant", "content": ""}}]}) == ("", "")
    assert figures.read({"choices": [{"delta": {"reasoning": "hm"}}]}) == ("hm", "")
    assert figures.read({"choices": [{"delta": {"content": "yes"}, "finish_reason": "length"}]}) == ("", "yes")
    assert figures.read({"choices": [], "usage": usage}) == ("", "")
    assert str(figures) == (
        "21 tokens, 10.0 tok/s; first token after 0.50 s; 32 of 40 prompt tokens cached; "
        "cut off: no more tokens were allowed"
    )


def test_figures_of_a_server_that_tells_nothing():
    figures = Figures()
    assert str(figures) == ""
    figures.read({"choices": [{"delta": {"content": "yes"}, "finish_reason": "stop"}], "usage": None})
    assert str(figures).startswith("first token after ")


async def silent(_body):
    return
    yield b""


@pytest.mark.parametrize("models", [{}, {"data": []}, "no", {"data": [{"name": "m"}]}])
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
