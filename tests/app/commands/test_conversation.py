"""Tests of the commands of a conversation and of its saved files."""

from __future__ import annotations

import base64
import json
import os
import re
import resource
from typing import Any

import pytest

from app.commands.conversation import HELP, SETTABLE, Commands, Conversation, is_open_block
from app.config.settings import SettingsError

CARDS: list[dict[str, Any]] = [
    {"id": "smol", "status": "loaded"},
    {"id": "org/large", "default_parameters": {"temperature": 0.7}},
]
DEFAULTS = {"temperature": 0.2, "top_p": 0.9, "max_tokens": None}


@pytest.fixture
def conversation() -> Conversation:
    return Conversation("smol", DEFAULTS, system="Be brief.")


def typed(conversation: Conversation, line: str) -> str:
    said, question = Commands(conversation, lambda: CARDS).take(line)
    assert not question
    return said


@pytest.mark.parametrize("line", ["Hello", "/etc/passwd is what?", " /help", "1/2", "//", "/path-like thing"])
def test_messages_are_no_commands(conversation, line):
    assert Commands(conversation, lambda: CARDS).take(line) == ("", line.strip())


def test_help_names_every_command_and_an_unknown_one_gets_a_hint(conversation):
    assert typed(conversation, "/help") == HELP
    for word in set(Commands(conversation, lambda: CARDS).names) - {"/quit", "/exit", "/help"}:
        assert f"\n{word}" in f"\n{HELP}"
    for name in SETTABLE:
        assert re.search(rf"\b{name}\b", HELP), name
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


def test_the_system_prompt_is_shown_changed_and_removed(conversation):
    assert typed(conversation, "/system") == "Be brief."
    typed(conversation, "/system You are a pirate.")
    assert conversation.body()["messages"] == [{"role": "system", "content": "You are a pirate."}]
    assert "no system prompt" in typed(conversation, "/system off")
    assert conversation.body()["messages"] == []
    assert "no system prompt" in typed(conversation, "/system")


def test_another_model_goes_on_with_its_own_defaults(conversation):
    conversation.messages.append({"role": "user", "content": "Hello"})
    assert typed(conversation, "/model").splitlines() == ["smol loaded", "org/large "]
    assert typed(conversation, "/model org/larg") == "There is no model org/larg. Did you mean org/large?"
    typed(conversation, "/model org/large")
    assert conversation.body()["model"] == "org/large"
    assert conversation.body()["messages"][-1]["content"] == "Hello"
    assert typed(conversation, "/set temperature") == "temperature 0.7 (default)"


TALK = [
    {"role": "user", "content": "Grüße"},
    {"role": "assistant", "content": "# Hi\n\n## user\n\\## assistant\n\nwhat of it?", "reasoning": "They greet."},
]


@pytest.mark.parametrize("name", ["talk.json", "talk.md"])
def test_a_saved_conversation_is_read_again(conversation, tmp_path, name):
    conversation.messages += TALK
    path = tmp_path / name
    commands = Commands(conversation, lambda: CARDS)
    assert commands.take(f"/save {path}") == (f"2 messages are in {path}.", "")
    other = Conversation("org/large", {})
    assert typed(other, f"/load {path}").startswith("2 messages were read.")
    assert other.system == "Be brief."
    assert [each["content"] for each in other.messages] == [each["content"] for each in TALK]
    assert other.title == "Grüße"
    if name.endswith(".json"):
        assert other.messages == TALK
        assert other.created == conversation.created
        assert other.model == "smol", "the file names it, and the server has it"
        content = json.loads(path.read_text())
        assert content.pop("created")
        fields = {"title": "Grüße", "model": "smol", "system": "Be brief.", "messages": TALK}
        assert content == {"headrace_conversation": 1, **fields}
        assert "reasoning" not in other.body()["messages"][-1]
    else:
        assert path.read_text().startswith(
            "# Grüße\n\n## system\n\nBe brief.\n\n## user\n\nGrüße\n\n## assistant\n\n# Hi"
        )
    assert "File exists" in typed(conversation, f"/save {path}"), "no file of somebody else is written over"
    conversation.messages.clear()
    assert commands.take("/save")[0] == f"0 messages are in {path}."
    assert "cannot be written" in typed(conversation, f"/save {tmp_path}/no/such/folder")
    assert "/save conversation.json" in typed(conversation, "/save")


def test_calls_and_requests_are_read_too(conversation, tmp_path):
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = [
        *TALK[:1],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": "a"},
    ]
    path = tmp_path / "talk.json"
    path.write_text(json.dumps({"messages": [{"role": "system", "content": "As a pirate."}, *said], "top_k": 5}))
    assert typed(conversation, f"/load {path}").startswith("3 messages were read.")
    assert conversation.body()["messages"] == [{"role": "system", "content": "As a pirate."}, *said]
    assert b"## tool" not in conversation.as_file(is_markdown=True)
    silent = {"role": "assistant", "content": None, "tool_calls": [call]}
    path.write_text(json.dumps({"messages": [said[0], silent, said[2]]}))
    assert typed(conversation, f"/load {path}").startswith("3 messages were read.")
    assert conversation.body()["messages"] == said, "calls without text are an empty text"


def test_a_conversation_of_another_server_is_read(conversation, tmp_path):
    path = tmp_path / "talk.json"
    path.write_text(json.dumps({"headrace_conversation": 1, "model": "gone", "messages": TALK[:1], "more": 1}))
    assert typed(conversation, f"/load {path}") == "1 messages were read. smol answers, not gone. /show shows them."
    assert conversation.body()["messages"] == TALK[:1]


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.json", b"{", "Expecting"),
        ("a.json", b"[" * 100_000, "recursion"),
        ("a.json", b'[{"role": "user", "content": "Hi"}]', "headrace_conversation"),
        ("a.json", b'{"x": 1}', "an array"),
        ("a.json", b'{"headrace_conversation": 2, "messages": []}', "headrace_conversation"),
        ("a.json", b'{"headrace_conversation": 1, "messages": {}}', "an array"),
        ("a.json", b'{"headrace_conversation": 1, "messages": [], "system": 3}', "system a string"),
        ("a.json", b'{"headrace_conversation": 1, "messages": [{"role": "other", "content": ""}]}', "messages.0"),
        ("a.json", b'{"headrace_conversation": 1, "messages": [{"role": "user", "content": []}]}', "messages.0"),
        ("a.json", b"\xff", "decode"),
        ("a.md", b"# Notes\n\nNothing else.", "## user"),
    ],
)
def test_a_file_that_is_no_conversation_changes_nothing(conversation, tmp_path, name, content, why):
    conversation.messages += TALK
    (tmp_path / name).write_bytes(content)
    said = typed(conversation, f"/load {tmp_path / name}")
    assert "is no conversation that can be read" in said
    assert why in said
    assert conversation.messages == TALK
    assert conversation.system == "Be brief."
    assert "No such file" in typed(conversation, f"/load {tmp_path / 'missing.json'}")


def test_what_has_no_end_is_not_read(conversation, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in (tmp_path / "pipe", "/dev/zero", tmp_path):
        assert "it is no file" in typed(conversation, f"/load {name}")


def test_an_interrupt_ends_a_command_and_not_the_conversation(conversation):
    def models() -> list[dict[str, Any]]:
        raise KeyboardInterrupt

    commands = Commands(conversation, models)
    assert commands.take("/model") == ("", "")
    assert not commands.wants_to_leave


def test_a_question_is_asked_again_and_taken_back(conversation):
    commands = Commands(conversation, lambda: CARDS)
    assert commands.take("/retry") == ("There is no question to ask again.", "")
    conversation.messages += [*TALK, {"role": "user", "content": "And?"}, {"role": "assistant", "content": "So."}]
    assert commands.take("/retry") == ("", "And?")
    assert conversation.messages == TALK
    conversation.unanswered = "lost"
    assert commands.take("/retry") == ("", "lost"), "the last question had no answer"
    assert conversation.messages == TALK
    assert commands.take("/undo") == ("", "")
    assert commands.draft == "Grüße"
    assert conversation.messages == []
    assert commands.take("/undo")[0] == "There is no question to take back."


def test_everything_is_shown(conversation):
    conversation.messages += TALK
    conversation.set("top_k", "5")
    shown = typed(conversation, "/show")
    assert shown.startswith(
        "model smol\ntemperature 0.2 (default)\ntop_p 0.9 (default)\ntop_k 5\nsystem Be brief.\n\n> Grüße"
    )


def test_an_answer_goes_to_the_terminals_clipboard(conversation, capsys):
    assert typed(conversation, "/copy") == "There is no answer to copy."
    conversation.messages += TALK
    assert "OSC 52" in typed(conversation, "/copy")
    sent = capsys.readouterr().out
    assert sent.startswith("\x1b]52;c;")
    assert base64.b64decode(sent[7:-1]).decode() == TALK[1]["content"]
    conversation.messages.append({"role": "assistant", "content": "a" * 100_000})
    assert "/save FILE" in typed(conversation, "/copy")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("word", ["/bye", "/exit", "/quit", "exit", "quit", "bye", "Exit "])
def test_many_words_leave(conversation, word):
    commands = Commands(conversation, lambda: CARDS)
    commands.take(word)
    assert commands.wants_to_leave
    commands = Commands(conversation, lambda: CARDS)
    assert commands.take(f"{word.strip()} strategies for startups?")[1] or word.startswith("/")


def test_a_block_is_one_question(conversation):
    commands = Commands(conversation, lambda: CARDS)
    assert [is_open_block(text) for text in ('"""', '"""a', '"""a\n', '"""\na"""', "a", "")] == [True] * 3 + [False] * 3
    assert commands.take('"""\none\n\ntwo\n"""') == ("", "one\n\ntwo")
    assert commands.take('"""x""" is quoted') == ("", '"""x""" is quoted')
    assert commands.take("   ") == ("", "")


@pytest.mark.parametrize("name", ["~nobody-of-this-name/a", "a\0b", "/no/folder/\x1b]0;title\x07", "x" * 5000])
def test_a_name_that_is_none_is_told_and_obeyed_by_no_terminal(conversation, name):
    said = typed(conversation, f"/save {name}")
    assert "cannot be written" in said
    assert "\x1b" not in said


def test_a_full_disk_leaves_what_was_saved_before(conversation, tmp_path):
    conversation.messages += TALK
    commands = Commands(conversation, lambda: CARDS)
    assert "messages are in" in commands.take(f"/save {tmp_path / 'talk.json'}")[0]
    before = (tmp_path / "talk.json").read_bytes()
    conversation.messages.append({"role": "user", "content": "x" * 100_000})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        said = [commands.take(f"/save {name}")[0] for name in ("", tmp_path / "other.md")]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert all("cannot be written: File too large" in each for each in said)
    assert [path.name for path in tmp_path.iterdir()] == ["talk.json"]
    assert (tmp_path / "talk.json").read_bytes() == before


def test_half_a_character_is_saved_as_a_question_mark(conversation, tmp_path):
    conversation.messages.append({"role": "user", "content": "caf\udcc3"})
    assert "1 messages" in typed(conversation, f"/save {tmp_path / 'talk.json'}")
    assert json.loads((tmp_path / "talk.json").read_text())["messages"][0]["content"] == "caf?"
