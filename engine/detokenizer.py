"""Incremental decoding of token ids to text, without broken characters, and the search for stop strings.

A byte-level tokenizer (GPT-2's family: Llama 3, Qwen, SmolLM) has a fixed byte string for every token, so decoding is a
table look-up and an incremental UTF-8 decoder. For other tokenizers, the tokenizers library decodes a short window.
(The library's own DecodeStream raises on token sequences that a model may produce, such as a letter after an
unfinished character: vllm#17448.)
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from engine.messages import SPECIAL_MARK

_WINDOW = 16  # tokens of the preceding text; one is enough unless it is empty or a byte
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class TokenDecoder(Protocol):
    """Decodes the tokens of one sequence in order."""

    def feed_token(self, token_id: int) -> str:
        """Return the text that this token completes; empty while a character is unfinished."""


class Vocabulary:
    """The bytes of every token. Built once per tokenizer, shared by all requests, read-only afterwards."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.is_byte_level = isinstance(tokenizer.decoder, ByteLevel)

    @cached_property
    def bytes_of(self) -> list[bytes]:
        """The bytes of every token by its id; b"" for ids without a token.

        A token of a sentencepiece vocabulary stands for its text with a space for U+2581, and `<0xHH>` for that byte.
        """
        table = [b""] * self.tokenizer.get_vocab_size(with_added_tokens=True)
        for token, token_id in self.tokenizer.get_vocab(with_added_tokens=True).items():
            if token_id >= len(table):
                table += [b""] * (token_id + 1 - len(table))
            table[token_id] = _byte_level_bytes(token) if self.is_byte_level else _sentencepiece_bytes(token)
        return table

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token; b"" for an id that the model can produce but the tokenizer does not have."""
        return self.bytes_of[token_id] if token_id < len(self.bytes_of) else b""

    def decoder(
        self, *, skip_special_tokens: bool, shown: Sequence[int] = (), after: Sequence[int] = ()
    ) -> TokenDecoder:
        """Return a decoder of one sequence. Its text continues that of the tokens in `after`, such as a prompt's.

        The special tokens in `shown` always become text, with `SPECIAL_MARK` before it.
        """
        skipped = frozenset[int]()
        if skip_special_tokens:
            skipped = self.special_ids.difference(shown) if shown else self.special_ids  # mostly the same set
        decoder: TokenDecoder
        decoder = _ByteLevelDecoder(self, skipped) if self.is_byte_level else _WindowDecoder(self, skipped, after)
        return _MarkingDecoder(decoder, {each: self.token_bytes(each).decode() for each in shown}) if shown else decoder


class _ByteLevelDecoder:
    __slots__ = ("_bytes_of", "_pending", "_skipped")

    def __init__(self, vocabulary: Vocabulary, skipped: frozenset[int]) -> None:
        self._bytes_of = vocabulary.bytes_of
        self._skipped = skipped
        self._pending = b""  # of a character that is unfinished

    def feed_token(self, token_id: int) -> str:
        if token_id in self._skipped or token_id >= len(self._bytes_of):
            return ""
        data = self._pending + self._bytes_of[token_id]
        # Replaces bytes that can never become valid, as the tokenizers library does, and leaves bytes that still may.
        text, num_used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[num_used:]
        return text


class _WindowDecoder:
    """Decodes the last shown tokens together with the pending ones, and takes the difference: the text of a token can
    depend on the token before it (the leading space of sentencepiece)."""

    __slots__ = ("_pending", "_shown", "_skipped", "_tokenizer")

    def __init__(self, vocabulary: Vocabulary, skipped: frozenset[int], after: Sequence[int]) -> None:
        self._tokenizer = vocabulary.tokenizer
        self._skipped = skipped
        self._shown = [token_id for token_id in after[-_WINDOW:] if token_id not in skipped]
        self._pending: list[int] = []

    def feed_token(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._pending.append(token_id)
        alone = self._decode(self._pending)
        # One replacement character for each byte of an unfinished character, which has three bytes at most.
        if alone.endswith("\ufffd") and not alone.endswith("\ufffd" * 4):
            return ""
        shown = self._decode(self._shown)
        text = self._decode(self._shown + self._pending)
        # A run of byte tokens may turn out to be broken; the part that was already shown stays.
        is_whole = text.startswith(shown) and text.count("\ufffd") <= shown.count("\ufffd") + alone.count("\ufffd")
        new = text[len(shown) :] if is_whole else alone
        if new:
            self._shown, self._pending = self._pending, []
        return new

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


class _MarkingDecoder:
    """A decoder that puts `SPECIAL_MARK` before the text of some tokens of another decoder."""

    __slots__ = ("_decoder", "_marked")

    def __init__(self, decoder: TokenDecoder, marked: Mapping[int, str]) -> None:
        self._decoder = decoder
        self._marked = marked

    def feed_token(self, token_id: int) -> str:
        text = self._decoder.feed_token(token_id)
        spelling = self._marked.get(token_id)
        if spelling is None or not text.endswith(spelling):
            return text
        return f"{text.removesuffix(spelling)}{SPECIAL_MARK}{spelling}"


class StopStrings:
    """Look for stop strings in a growing text and hold back text that may still become one.

    The stop string that is complete first wins, and of several that end together the one that begins first, so the
    result does not depend on how the text is cut into tokens.

    The longest end of the text that is a beginning of a stop string is held back, and no more, so text that cannot
    match is returned at once. For each stop string, the work is linear in the length of any text.

    Args:
        automata: one for each stop string; choices of one request may share them.
        include_in_output: whether the text ends after the stop string instead of before it.
    """

    __slots__ = ("_automata", "_held", "_include", "_states", "matched")

    def __init__(self, automata: Sequence[StopAutomaton], *, include_in_output: bool) -> None:
        self._automata = automata
        self._states = [0] * len(automata)
        self._include = include_in_output
        self._held = ""
        self.matched: str | None = None

    def feed_text(self, text: str) -> str:
        """Add text, and return the text that is decided. Once `matched` is set, there is no more."""
        num_held = len(self._held)
        matches = []
        for index, automaton in enumerate(self._automata):
            self._states[index], end = automaton.read(self._states[index], text)
            if end is not None:
                matches.append((num_held + end, num_held + end - len(automaton.stop)))
        text = self._held + text
        if matches:
            end, start = min(matches)
            self.matched, self._held = text[start:end], ""
            return text[:end] if self._include else text[:start]
        decided = len(text) - max(self._states, default=0)
        self._held = text[decided:]
        return text[:decided]

    def flush(self) -> str:
        """Return the text that was held back, when the text has ended without a match."""
        held, self._held = self._held, ""
        return held


class MarkedStopStrings(StopStrings):
    """`StopStrings` for a text with marks (`SPECIAL_MARK`), which do not count for matches."""

    __slots__ = ("_marks", "_num_fed", "_num_given")

    def __init__(self, automata: Sequence[StopAutomaton], *, include_in_output: bool) -> None:
        super().__init__(automata, include_in_output=include_in_output)
        self._marks: list[int] = []  # positions in the text without marks
        self._num_fed = self._num_given = 0  # characters, marks not counted

    def feed_text(self, text: str) -> str:
        plain, *others = text.split(SPECIAL_MARK)
        for other in others:
            self._marks.append(self._num_fed + len(plain))
            plain += other
        self._num_fed += len(plain)
        return self._marked(super().feed_text(plain))

    def flush(self) -> str:
        return self._marked(super().flush())

    def _marked(self, text: str) -> str:
        start, end = self._num_given, self._num_given + len(text)
        self._num_given = end
        while self._marks and self._marks[0] < end:
            place = self._marks.pop(0) - start
            text, start = f"{text[:place]}{SPECIAL_MARK}{text[place:]}", start - 1
        return text


class StopAutomaton:
    """The automaton of Knuth, Morris and Pratt for one stop string, which is not empty. Its table grows to the longest
    match so far."""

    __slots__ = ("_borders", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self._borders = [0, 0]  # by prefix length: the length of the longest proper prefix that is also a suffix

    def read(self, state: int, text: str) -> tuple[int, int | None]:
        """Continue after a text that ends with the first `state` characters of the stop string.

        Return the new state, and the end of the first complete stop string in `text`, None if there is none.
        """
        stop, position = self.stop, 0
        while position < len(text):
            if not state and (position := text.find(stop[0], position)) < 0:
                break
            state = self._next(state, text[position])
            position += 1
            if state == len(stop):
                return state, position
        return state, None

    def _next(self, state: int, character: str) -> int:
        """Return the state after one more character."""
        while state and self.stop[state] != character:
            state = self._borders[state]
        if self.stop[state] == character:
            state += 1
        if state == len(self._borders) < len(self.stop):  # the longest match so far
            self._borders.append(self._next(self._borders[-1], character))
        return state


def _byte_level_alphabet() -> dict[str, int]:
    """Return the bytes by GPT-2's printable characters for them: printable Latin-1 as is, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update((chr(0x100 + index), byte) for index, byte in enumerate(others))
    return alphabet


_ALPHABET = _byte_level_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    text = token if " " in token else token.replace("\u0120", " ")
    if text.isascii() and text.isprintable():  # most tokens; costs half as much as the table
        return text.encode()
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:  # an added token, spelled in plain text
        return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    if byte is not None:
        return bytes.fromhex(byte[1])
    return token.replace("\u2581", " ").encode()
