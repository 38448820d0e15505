"""Tags that are special tokens: only the token counts, and its spelling in other tokens is text."""

from __future__ import annotations

from random import Random

import pytest
from tokenizers import Tokenizer

from engine.detokenizer import MarkedStopStrings, StopAutomaton, Vocabulary
from engine.messages import FinishReason
from protocol.chat_template import ChatTemplate
from protocol.syntax.message_parts import ContentDelta, MessagePart, ReasoningDelta, join
from protocol.syntax.model_syntax import ModelSyntax
from protocol.tools.kinds import Function, ToolUse
from tests.engine.helpers import byte_level_tokenizer, id_of, sentencepiece_tokenizer
from tests.protocol.wire_helpers import output

TEMPLATES = {
    "llama3": "{{ tools }}<|python_tag|>",
    "mistral": "{{ tools }}[TOOL_CALLS] [THINK] [/THINK]",
    "hermes": "{{ tools }}<tool_call></tool_call><think></think>",
}
TAGS = [
    *("<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
    *("<tool_call>", "</tool_call>", "<think>", "</think>"),
]
TOOLS = ToolUse(functions=(Function(name="f"),))


def with_tags(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens(TAGS)
    return tokenizer


TOKENIZERS = {"bytes": with_tags(byte_level_tokenizer()), "pieces": with_tags(sentencepiece_tokenizer())}
VOCABULARIES = {name: Vocabulary(tokenizer) for name, tokenizer in TOKENIZERS.items()}


def in_pieces(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text that spell every tag in ordinary pieces."""
    plain = Tokenizer.from_str(tokenizer.to_str())
    plain.encode_special_tokens = True
    token_ids: list[int] = plain.encode(text, add_special_tokens=False).ids
    assert not {id_of(tokenizer, tag) for tag in TAGS} & set(token_ids)
    return token_ids


def answered(
    name: str,
    family: str,
    token_ids: list[int],
    *,
    tools: ToolUse | None = TOOLS,
    stops: tuple[str, ...] = (),
    skip_special_tokens: bool = True,
    random: Random | None = None,
) -> tuple[list[MessagePart], int | None]:
    """The parts of the answer and the number of its tokens that are reasoning, through everything between the two."""
    vocabulary, tokenizer = VOCABULARIES[name], TOKENIZERS[name]
    syntax = ModelSyntax(ChatTemplate(TEMPLATES[family], {}), {tag: id_of(tokenizer, tag) for tag in TAGS})
    decoder = vocabulary.decoder(skip_special_tokens=skip_special_tokens, shown=syntax.shown_special_tokens(tools))
    message_format = syntax.message_format(tools, prompt_end=b"", hide_special_tokens=skip_special_tokens)
    parser = message_format.parser(vocabulary.token_bytes)
    stop_strings = MarkedStopStrings([StopAutomaton(stop) for stop in stops], include_in_output=False)
    parts: list[MessagePart] = []
    text, waiting = "", []
    for token_id in token_ids:
        text += stop_strings.feed_text(decoder.feed_token(token_id))
        waiting.append(token_id)
        if random is None or random.random() < 0.5 or stop_strings.matched:
            parts += parser.read(output(text, token_ids=waiting))
            text, waiting = "", []
        if stop_strings.matched:
            break
    text += "" if stop_strings.matched else stop_strings.flush()
    parts += parser.read(output(text, token_ids=waiting, finish=FinishReason.STOP))
    return join(parts), parser.num_reasoning_tokens


def check_random_texts(count: int) -> int:
    """Assert that nothing is lost of so many texts. Returns how many characters they have."""
    random, characters = Random(35), 0
    fragments = [
        *TAGS,
        *(tag[: len(tag) // 2] for tag in TAGS),
        *(tag[1:] for tag in TAGS),
        *" \n[<]>/a水",
        "begins with",
        "🏴",
    ]
    plain = {name: in_pieces(tokenizer, "") for name, tokenizer in TOKENIZERS.items()}
    assert plain == {"bytes": [], "pieces": []}
    for number in range(count):
        text = "".join(random.choices(fragments, k=random.randint(1, 9)))
        name, family = random.choice(list(TOKENIZERS)), random.choice(list(TEMPLATES))
        token_ids = in_pieces(TOKENIZERS[name], text)
        stops = random.choice([(), ("never said", "[ARGS] never", "<tool_call>never")])
        tools = random.choice([None, TOOLS])
        parts, num_thought = answered(name, family, token_ids, stops=stops, tools=tools, random=random)
        assert parts == [ContentDelta(TOKENIZERS[name].decode(token_ids))], (number, text)
        assert not num_thought
        characters += len(text)
    return characters


@pytest.mark.slow
def test_no_character_is_lost_of_texts_that_spell_tags() -> None:
    assert check_random_texts(200) > 2000


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(
    ("family", "pieces", "parts"),
    [
        ("llama3", ["Use <|python_tag|> so: "], [ContentDelta("Use <|python_tag|> so: ")]),
        ("llama3", ["Hm. ", "<|python_tag|>", '{"name": "f", "parameters": {}}'], [ContentDelta("Hm."), "f", "{}"]),
        ("llama3", ["a", "<|python_tag|>", "b"], [ContentDelta("ab")]),
        ("mistral", ["[TOOL_CALLS]f[ARGS]{}"], [ContentDelta("[TOOL_CALLS]f[ARGS]{}")]),
        ("mistral", ["[TOOL_CALLS]", "f", "[ARGS]", '{"a": "[ARGS]"}'], ["f", '{"a": "[ARGS]"}']),
        ("mistral", ["[TOOL_CALLS]", "f", "[ARGS]", '{"a": "', "[ARGS]", '"}'], ["f", '{"a": ""}']),
        ("mistral", ["[THINK]Hm.[/THINK]a"], [ContentDelta("[THINK]Hm.[/THINK]a")]),
        (
            "mistral",
            ["[THINK]", "H[/THINK]m.", "[/THINK]", "a", "[THINK]", "b"],
            [ReasoningDelta("H[/THINK]m."), ContentDelta("ab")],
        ),
        (
            "hermes",
            ["<tool_call>", '{"name": "f", "arguments": {"a": "</tool_call>"}}', "</tool_call>", "</tool_call>"],
            ["f", '{"a": "</tool_call>"}'],
        ),
    ],
)
def test_only_the_token_is_a_tag(name: str, family: str, pieces: list[str], parts: list[object]) -> None:
    tokenizer = TOKENIZERS[name]
    token_ids: list[int] = []
    for piece in pieces:
        token_ids += [id_of(tokenizer, piece)] if piece in TAGS else in_pieces(tokenizer, piece)
    found, num_thought = answered(name, family, token_ids)
    said = [getattr(part, "fragment", getattr(part, "name", part)) for part in found]
    # Where a piece begins, a sentencepiece tokenizer puts a blank.
    assert str(said).replace(" ", "") == str(parts).replace(" ", "")
    if (tag := "[/THINK]") in pieces:
        ids = token_ids.index(id_of(tokenizer, tag))
        assert num_thought == ids + 1
    shown, _ = answered(name, family, token_ids, skip_special_tokens=False)
    assert all("\ud800" not in str(part) and "\udc00" not in str(part) for part in [*found, *shown])


def test_special_tokens_that_the_client_wants_to_see_are_text_where_they_are_no_syntax() -> None:
    tokenizer = TOKENIZERS["bytes"]
    token_ids = [*in_pieces(tokenizer, "a"), id_of(tokenizer, "[ARGS]"), *in_pieces(tokenizer, "b")]
    assert answered("bytes", "mistral", token_ids, skip_special_tokens=False)[0] == [ContentDelta("a[ARGS]b")]
    assert answered("bytes", "mistral", token_ids)[0] == [ContentDelta("ab")]


@pytest.mark.parametrize("stop", ["a[ARGS]", "[ARGS]b", "a[ARGS]b", "RGS", "[ARGS]"])
def test_stop_strings_do_not_see_the_marks(stop: str) -> None:
    tokenizer = TOKENIZERS["bytes"]
    token_ids = [*in_pieces(tokenizer, "xa"), id_of(tokenizer, "[ARGS]"), *in_pieces(tokenizer, "by")]
    text = "xa[ARGS]by".partition(stop)[0]
    for random in (None, Random(1)):
        parts, _ = answered("bytes", "mistral", token_ids, stops=(stop,), skip_special_tokens=False, random=random)
        assert parts == [ContentDelta(text)]
