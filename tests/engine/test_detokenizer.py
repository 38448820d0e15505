"""Text from tokens: what decoding all at once gives, never a broken character, never a part of a stop string."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from random import Random
from types import FrameType
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from engine import detokenizer
from engine.detokenizer import StopAutomaton, StopStrings, Vocabulary
from engine.errors import InvalidRequest
from engine.frontend.output_processor import OutputProcessor
from engine.messages import (
    MAX_STOP_CHARACTERS,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    RequestOutput,
    SamplingParams,
    SchedulerStats,
)
from tests.engine.helpers import byte_level_tokenizer, id_of, make_request, sentencepiece_tokenizer

BYTE_LEVEL = byte_level_tokenizer()
SENTENCEPIECE = sentencepiece_tokenizer()
BYTE_LEVEL_VOCABULARY = Vocabulary(BYTE_LEVEL)
SENTENCEPIECE_VOCABULARY = Vocabulary(SENTENCEPIECE)

STATS = SchedulerStats(
    step=1,
    num_running=1,
    num_waiting=0,
    kv_cache_usage=0.0,
    num_preemptions=0,
    prompt_tokens=0,
    prefix_cache_queries=0,
    prefix_cache_hits=0,
)

# Family with joiners, skin tone, flag, CJK, kana, combining accent, right-to-left, astral, white space.
TEXTS = ["hello a world", "👨‍👩‍👧‍👦 ok", "👍🏽", "🇫🇷", "北京欢迎你", "ひらがな", "e\u0301a", "שלום", "𝕏 𐍈", "a  \n\tb"]
any_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=30)


def feed_all(vocabulary: Vocabulary, token_ids: list[int], *, skip_special_tokens: bool = True) -> list[str]:
    decoder = vocabulary.decoder(skip_special_tokens=skip_special_tokens)
    return [decoder.feed_token(token_id) for token_id in token_ids]


def assert_all_but_an_unfinished_character(text: str, whole: str) -> None:
    assert whole.startswith(text)
    assert set(whole[len(text) :]) <= {"\ufffd"}


# --- decoders


@given(text=any_text)
@example(text="".join(TEXTS))
def test_byte_level_pieces_add_up_to_the_text(text: str) -> None:
    pieces = feed_all(BYTE_LEVEL_VOCABULARY, BYTE_LEVEL.encode(text).ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@given(
    token_ids=st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 5), max_size=40), skip_special_tokens=st.booleans()
)
def test_byte_level_pieces_of_any_tokens_are_what_the_tokenizer_decodes(
    token_ids: list[int], skip_special_tokens: bool
) -> None:
    text = "".join(feed_all(BYTE_LEVEL_VOCABULARY, token_ids, skip_special_tokens=skip_special_tokens))
    whole = BYTE_LEVEL.decode(token_ids, skip_special_tokens=skip_special_tokens)
    assert_all_but_an_unfinished_character(text, whole)


@given(text=any_text)
@example(text="".join(TEXTS))
def test_sentencepiece_pieces_add_up_to_the_text(text: str) -> None:
    token_ids = SENTENCEPIECE.encode(text).ids
    pieces = feed_all(SENTENCEPIECE_VOCABULARY, token_ids)
    assert "".join(pieces) == SENTENCEPIECE.decode(token_ids)
    assert not any("\ufffd" in piece for piece in pieces)


@given(token_ids=st.lists(st.integers(0, SENTENCEPIECE.get_vocab_size() + 5), max_size=40))
@example(token_ids=[0x48 + 3, 0x9B + 3, SENTENCEPIECE.token_to_id("a")])  # raises "Invalid prefix" in DecodeStream
def test_sentencepiece_decodes_any_tokens_and_holds_no_more_than_one_character(token_ids: list[int]) -> None:
    text = "".join(feed_all(SENTENCEPIECE_VOCABULARY, [*token_ids, *SENTENCEPIECE.encode("a.").ids]))
    assert text.endswith("a.")


@pytest.mark.parametrize("vocabulary", [BYTE_LEVEL_VOCABULARY, SENTENCEPIECE_VOCABULARY], ids=["bytes", "pieces"])
def test_a_character_comes_with_its_last_byte(vocabulary: Vocabulary) -> None:
    token_ids = vocabulary.tokenizer.encode("京").ids[-3:]
    assert b"".join(map(vocabulary.token_bytes, token_ids)) == "京".encode()
    assert feed_all(vocabulary, token_ids) == ["", "", "京"]


def test_spaces_between_words_survive_sentencepiece() -> None:
    token_ids = SENTENCEPIECE.encode("ab a  ab").ids
    assert "".join(feed_all(SENTENCEPIECE_VOCABULARY, token_ids)) == "ab a  ab"


def test_special_tokens_are_skipped_or_shown() -> None:
    end = id_of(BYTE_LEVEL, "<|im_end|>")
    token_ids = [*BYTE_LEVEL.encode("a").ids, end, *BYTE_LEVEL.encode("b").ids]
    assert "".join(feed_all(BYTE_LEVEL_VOCABULARY, token_ids)) == "ab"
    assert "".join(feed_all(BYTE_LEVEL_VOCABULARY, token_ids, skip_special_tokens=False)) == "a<|im_end|>b"


def test_bytes_of_tokens_add_up_to_the_bytes_of_the_text() -> None:
    for text in TEXTS:
        token_ids = BYTE_LEVEL.encode(text).ids
        assert b"".join(map(BYTE_LEVEL_VOCABULARY.token_bytes, token_ids)) == text.encode()
        token_ids = SENTENCEPIECE.encode(text).ids
        assert b"".join(map(SENTENCEPIECE_VOCABULARY.token_bytes, token_ids)).strip() == text.encode().strip()
    assert BYTE_LEVEL_VOCABULARY.token_bytes(10**6) == b""


def test_a_token_of_letters_for_bytes_is_these_bytes_and_an_added_one_its_text() -> None:
    tokenizer = byte_level_tokenizer()
    spelled = {
        "Ġaz~": b" az~",
        "é": b"\xe9",
        "Ċ": b"\n",
        "Ġ a": "Ġ a".encode(),
        "a b": b"a b",
        "a\x7f": b"a\x7f",
        "中": "中".encode(),
    }
    tokenizer.add_tokens(list(spelled))
    vocabulary = Vocabulary(tokenizer)
    assert {token: vocabulary.token_bytes(id_of(tokenizer, token)) for token in spelled} == spelled


def test_only_a_byte_level_decoder_counts_as_byte_level() -> None:
    other = Tokenizer.from_str(BYTE_LEVEL.to_str())
    other.decoder = decoders.Sequence([decoders.ByteLevel()])
    assert BYTE_LEVEL_VOCABULARY.is_byte_level
    assert not Vocabulary(other).is_byte_level
    token_ids = BYTE_LEVEL.encode("".join(TEXTS)).ids
    assert "".join(feed_all(Vocabulary(other), token_ids)) == "".join(TEXTS)


def wordpiece_tokenizer() -> Tokenizer:
    """BERT's kind: `##` for what goes on with a word."""
    pieces = ["[UNK]", "[SEP]", "hello", "##s", "##ing", "world", ".", "##京", "'", "a", "##b"]
    tokenizer = Tokenizer(models.WordPiece({piece: number for number, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]", "[SEP]"])
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    tokenizer = sentencepiece_tokenizer()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [BYTE_LEVEL, SENTENCEPIECE, metaspace_tokenizer(), wordpiece_tokenizer()],
    ids=["bytes", "pieces", "metaspace", "words"],
)
@given(data=st.data(), skip_special_tokens=st.booleans())
def test_an_answer_goes_on_with_the_text_of_its_prompt(
    tokenizer: Tokenizer, data: st.DataObject, skip_special_tokens: bool
) -> None:
    """Any tokens: what the prompt's text and the answer's come to is the tokenizer's own text of all of them."""
    token_ids = st.lists(st.integers(0, tokenizer.get_vocab_size() + 5), max_size=12)
    prompt, answer = data.draw(token_ids), data.draw(token_ids)
    before = tokenizer.decode(prompt, skip_special_tokens=skip_special_tokens)
    whole = tokenizer.decode(prompt + answer, skip_special_tokens=skip_special_tokens)
    if "\ufffd" in whole or not whole.startswith(before):
        return  # of what is no text, nothing is promised here
    decoder = Vocabulary(tokenizer).decoder(skip_special_tokens=skip_special_tokens, after=prompt)
    assert before + "".join(map(decoder.feed_token, answer)) == whole


def test_a_blank_between_prompt_and_answer_is_kept_and_one_before_a_message_is_not() -> None:
    prompt, answer = [id_of(SENTENCEPIECE, "g")], [id_of(SENTENCEPIECE, "▁"), id_of(SENTENCEPIECE, "d")]
    for begins_message, text in ((False, " d"), (True, "d")):
        processor = OutputProcessor(SENTENCEPIECE_VOCABULARY)
        request = make_request(prompt, "r")
        stream = processor.open([request], [request], begins_message=begins_message)
        output = EngineCoreOutput(request_id="r", new_token_ids=answer, finish_reason=FinishReason.LENGTH)
        processor.process(EngineCoreOutputs(outputs=[output], stats=STATS, timestamp=0.0))
        assert [output.text for output in stream.drain()] == [text]


# --- stop strings

narrow_text = st.text("ab", max_size=12)  # so that matches and near matches are common
stop_lists = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


def stop_finder(stops: list[str], *, include_in_output: bool) -> StopStrings:
    return StopStrings([StopAutomaton(stop) for stop in stops], include_in_output=include_in_output)


def cut(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(min(c, len(text)) for c in cuts)})
    return [text[start:end] for start, end in itertools.pairwise(edges)]


def first_match(text: str, stops: list[str]) -> tuple[int, int] | None:
    """Start and end of the match that a reader of one character at a time would see first."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts), end
    return None


@pytest.mark.seconds
@given(text=narrow_text, stops=stop_lists, cuts=st.lists(st.integers(0, 12), max_size=6), include=st.booleans())
@example(text="abcd", stops=["abcd", "bc"], cuts=[1, 2, 3], include=False)
@settings(max_examples=300)
def test_the_earliest_stop_string_ends_the_text_however_it_is_cut(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    finder = stop_finder(stops, include_in_output=include)
    shown = ""
    for piece in cut(text, cuts):
        shown += finder.feed_text(piece)
        if finder.matched is not None:
            break
    match = first_match(text, stops)
    if match is None:
        assert finder.matched is None
        assert shown + finder.flush() == text
    else:
        start, end = match
        assert finder.matched == text[start:end]
        assert shown == (text[:end] if include else text[:start])


@pytest.mark.seconds
@given(text=narrow_text, stops=stop_lists)
@settings(max_examples=300)
def test_what_is_held_back_is_exactly_what_may_still_become_a_stop_string(text: str, stops: list[str]) -> None:
    finder = stop_finder(stops, include_in_output=False)
    shown = ""
    for end, character in enumerate(text, 1):
        shown += finder.feed_text(character)
        if finder.matched is not None:
            return
        could_become = [
            length for length in range(1, end + 1) for stop in stops if stop.startswith(text[end - length : end])
        ]
        assert end - len(shown) == max(could_become, default=0)


def test_text_that_cannot_match_flows_on_at_once() -> None:
    finder = stop_finder(["</answer>"], include_in_output=False)
    assert [finder.feed_text(piece) for piece in ("a <", "b", " </ans", "x</answer> more")] == [
        "a ",
        "<b",
        " ",
        "</ansx",
    ]
    assert finder.matched == "</answer>"


class Counted(str):
    """A string that counts the characters taken out of it."""

    num_taken = 0

    def __getitem__(self, key: Any) -> str:
        taken = super().__getitem__(key)
        self.num_taken += len(taken)
        return taken


def lines_run(work: Callable[[], object]) -> int:
    """Return the number of lines of the detokenizer that `work` runs."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        nonlocal count
        if frame.f_code.co_filename != detokenizer.__file__:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_work_is_linear_in_the_text_whatever_the_stop_strings_say(seed: int) -> None:
    """Stop strings that are nearly there all the time, and the same text four times as long."""
    random = Random(seed)
    length = random.choice([60, 200, 1000])
    stop = "".join(random.choices("ab", [random.choice([1, 20]), 1], k=length - 1)) + "c"
    text = "".join(stop[: random.choice([length - 1, length // 2, 3])] + random.choice("ab") for _ in range(8))

    def work(text: str, piece_length: int) -> int:
        counted = Counted(stop)
        finder = stop_finder([counted], include_in_output=False)
        pieces = cut(text, list(range(0, len(text), piece_length)))
        num_lines = lines_run(lambda: list(map(finder.feed_text, pieces)))
        assert finder.matched is None
        return num_lines + counted.num_taken

    assert work(text, 1) < 50 * (len(text) + length)
    assert work(text * 4, 1) < 5 * work(text, 1)
    assert work(text, 50) < 30 * (len(text) + length)


def test_stop_strings_have_a_limit_that_errors_name() -> None:
    SamplingParams(stop=("s" * MAX_STOP_CHARACTERS,)).check(100)
    with pytest.raises(InvalidRequest, match=r"stop takes at most 1024 characters in each string, got 1025\.") as error:
        SamplingParams(stop=("a", "s" * (MAX_STOP_CHARACTERS + 1))).check(100)
    assert error.value.param == "stop"


# --- through the output processor


def generate(text: str, *, per_step: int = 1, finish: FinishReason | None = None, **sampling: Any) -> RequestOutput:
    """What one request shows when the engine generates this text and, after it, maybe an end."""
    processor = OutputProcessor(BYTE_LEVEL_VOCABULARY)
    request = make_request([1], "r", **sampling)
    stream = processor.open([request], [request])
    token_ids = BYTE_LEVEL.encode(text).ids
    chunks = [token_ids[start : start + per_step] for start in range(0, len(token_ids), per_step)]
    for number, chunk in enumerate(chunks, 1):
        last = number == len(chunks)
        output = EngineCoreOutput(request_id="r", new_token_ids=chunk, finish_reason=finish if last else None)
        if processor.process(EngineCoreOutputs(outputs=[output], stats=STATS, timestamp=0.0)):
            break
    (merged,) = stream.drain()
    return merged


@pytest.mark.parametrize("per_step", [1, 2, 5, 100])
def test_a_stop_string_that_spans_tokens_and_steps_is_found_and_not_shown(per_step: int) -> None:
    output = generate("one two STOP three", per_step=per_step, stop=("o S", "STOP"))
    assert (output.text, output.finish_reason, output.stop_reason) == ("one tw", FinishReason.STOP, "o S")
    # Tokens after the match are not billed.
    assert BYTE_LEVEL.decode(output.token_ids) == "one two S"
    assert output.num_output_tokens == len(output.token_ids)


def test_a_stop_string_is_shown_when_asked_for() -> None:
    output = generate("one STOP", stop=("STOP",), include_stop_str_in_output=True)
    assert (output.text, output.finish_reason) == ("one STOP", FinishReason.STOP)


def test_what_was_held_back_is_shown_when_the_text_ends() -> None:
    output = generate("one ST", stop=("STOP",), finish=FinishReason.LENGTH)
    assert (output.text, output.finish_reason, output.stop_reason) == ("one ST", FinishReason.LENGTH, None)


def test_a_stop_string_before_min_tokens_does_not_count() -> None:
    text = "x.y.z.w"
    assert len(BYTE_LEVEL.encode(text).ids) == len(text)
    output = generate(text, stop=(".",), min_tokens=3)
    assert (output.text, output.stop_reason) == ("x.y", ".")


def test_a_stop_string_wins_over_the_length_that_ends_in_the_same_step() -> None:
    output = generate("one.", stop=(".",), finish=FinishReason.LENGTH)
    assert (output.text, output.finish_reason, output.stop_reason) == ("one", FinishReason.STOP, ".")


def test_the_stop_token_is_counted_and_not_shown() -> None:
    shown = generate("one!", finish=FinishReason.STOP)
    assert (shown.text, shown.num_output_tokens) == ("one", 4)
    assert generate("one!", finish=FinishReason.STOP, include_stop_str_in_output=True).text == "one!"


def test_a_character_left_unfinished_is_dropped() -> None:
    token_ids = BYTE_LEVEL.encode("a京").ids[:-1]
    assert "".join(feed_all(BYTE_LEVEL_VOCABULARY, token_ids)) == "a"


def test_a_piece_that_only_looks_like_a_byte_is_text() -> None:
    tokenizer = sentencepiece_tokenizer()
    tokenizer.add_tokens(["<0xGG>", "<0x+1>"])
    vocabulary = Vocabulary(tokenizer)
    assert [vocabulary.token_bytes(id_of(tokenizer, piece)) for piece in ("<0x0A>", "<0xGG>", "<0x+1>")] == [
        b"\n",
        b"<0xGG>",
        b"<0x+1>",
    ]
