"""Grammars of a model that may reason first: free text between two tags, and then what the grammar says."""

from __future__ import annotations

import msgspec
import pytest

from engine.detokenizer import Vocabulary
from engine.messages import StructuredOutput, StructuredOutputKind
from engine.structured.compiler import GrammarCompiler
from protocol.syntax.grammars import Tag, choice, json_schema, tagged_json
from tests.engine.helpers import byte_level_tokenizer, id_of

TOKENIZER = byte_level_tokenizer()
COMPILER = GrammarCompiler(Vocabulary(TOKENIZER), vocab_size=TOKENIZER.get_vocab_size(), eos_token_ids=(258,))
CALL = "<call>{}</call>"
CLOSED = {"type": "object", "additionalProperties": False}
GRAMMARS = {
    "{}": json_schema(CLOSED),
    "<thanks>": StructuredOutput(kind=StructuredOutputKind.REGEX, value="<th[a-z]+>"),
    "yes": choice(["yes", "no"]),
    "axc": StructuredOutput(kind=StructuredOutputKind.GRAMMAR, value='start: "a" b\nb: "c" | "x" b'),
    f"{CALL}{CALL}": tagged_json([Tag("<call>", CLOSED, "</call>")], text=False, required=True),
}


def accepts(structured: StructuredOutput, text: str | list[int]) -> bool:
    matcher = COMPILER.compile(structured).matcher()
    tokens = TOKENIZER.encode(text).ids if isinstance(text, str) else text
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(("answer", "structured"), GRAMMARS.items())
def test_the_grammar_begins_after_the_closing_tag(answer: str, structured: StructuredOutput) -> None:
    may = msgspec.structs.replace(structured, reasoning=("<think>", "</think>"))
    must = msgspec.structs.replace(structured, reasoning=("", "</think>"))
    thought = "What {} <call> é\n < </ do I say?"
    for gap in ("", "\n\n"):
        assert accepts(may, f"<think>{thought}</think>{gap}{answer}")
        assert accepts(must, f"{thought}</think>{gap}{answer}")
    assert accepts(may, answer)
    assert not accepts(must, answer), "it has begun to reason, and has to end that first"
    assert not accepts(may, f"<think>{thought}</think>{thought}")
    assert not accepts(may, f"<think>{answer}")
    assert not accepts(structured, f"<think></think>{answer}")


def test_tags_that_are_special_tokens_are_meant_as_such() -> None:
    opening, closing = (id_of(TOKENIZER, token) for token in ("<|im_start|>", "<|endoftext|>"))
    structured = msgspec.structs.replace(choice(["yes"]), reasoning=("<|im_start|>", "<|endoftext|>"))
    thought, answer = (TOKENIZER.encode(text).ids for text in ("<hm>", "yes"))
    assert accepts(structured, [opening, *thought, closing, *answer])
    assert not accepts(structured, [opening, *thought, *answer])
