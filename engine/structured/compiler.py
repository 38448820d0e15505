"""Grammars, compiled within limits and kept in a cache. Used by the front door and by the core, on worker threads.

What is compiled comes from clients, so everything is bounded: the size of the text, the work and the memory of the
compiler and of every mask (llguidance counts both), the stack, and the cache. The compiler works through chains of
references by recursion in native code, where running out of stack ends the process; so it gets a thread whose stack
holds the longest chain that fits into the largest text.
"""

from __future__ import annotations

import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from engine.detokenizer import Vocabulary
from engine.errors import InvalidRequest
from engine.messages import StructuredOutput
from engine.structured.grammar import refused, to_llguidance

STACK_BYTES = 256 * 2**20  # only what is used of it becomes memory
MAX_CACHED_GRAMMARS = 128
MAX_CACHED_CHARACTERS = 4 * 2**20  # of their texts: what a grammar compiles to grows with its text
TRIED_TOKENS = 32
MAX_MESSAGE = 400  # characters; the compiler cites the grammar

_LIMITS = LLParserLimits(
    max_items_in_row=5_000,  # alternatives that are open at the same time
    initial_lexer_fuel=200_000,
    step_lexer_fuel=50_000,  # keeps a mask below some tens of milliseconds
    step_max_items=20_000,
    max_lexer_states=20_000,  # about 2 KB each, per request
    max_grammar_size=200_000,
    verbose_errors=False,  # or messages would cite what has been generated
)


class CompiledGrammar:
    """A grammar at its start. Matchers are copies of it."""

    def __init__(self, prototype: LLMatcher) -> None:
        self._prototype = prototype

    def matcher(self) -> LLMatcher:
        """A matcher of its own for one request; microseconds."""
        return self._prototype.deep_copy()


class GrammarCompiler:
    """Compiles for one model. Thread-safe; blocks, but lets other threads run while it compiles.

    `vocab_size` is the model's, which may be padded beyond the tokenizer's: the padding is never allowed.
    """

    def __init__(self, vocabulary: Vocabulary, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.mask_words = -(-vocab_size // 32)
        self.vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._cache: OrderedDict[StructuredOutput, CompiledGrammar | InvalidRequest] = OrderedDict()
        self._cached_characters = 0
        self._lock = threading.Lock()  # of the cache
        self._tokenizer_lock = threading.Lock()
        self._built: LLTokenizer | None = None

    def find(self, structured: StructuredOutput) -> CompiledGrammar | None:
        """The grammar if it has been compiled before. Does not block. Raises InvalidRequest if it was refused."""
        with self._lock:
            found = self._cache.get(structured)
            if found is not None:
                self._cache.move_to_end(structured)
        if isinstance(found, InvalidRequest):
            raise InvalidRequest(str(found), param=found.param)
        return found

    def compile(self, structured: StructuredOutput) -> CompiledGrammar:
        """The grammar, compiled now unless it is in the cache. Raises InvalidRequest that says what is wrong."""
        found = self.find(structured)
        if found is not None:
            return found
        outcome = _with_deep_stack(lambda: self._compile(structured))
        self._keep(structured, outcome)
        if isinstance(outcome, InvalidRequest):
            raise outcome
        return outcome

    def build_tokenizer(self) -> LLTokenizer:
        """What the compiler knows of the vocabulary: 0.15 s for 50,000 tokens, once. The GIL is held meanwhile."""
        with self._tokenizer_lock:
            if self._built is None:
                eos = self._eos_token_ids
                tokens = TokenizerWrapper(_Tokens(self.vocabulary, self._vocab_size, eos))
                self._built = LLTokenizer(tokens, n_vocab=len(tokens.tokens), eos_token=eos)
            return self._built

    def _compile(self, structured: StructuredOutput) -> CompiledGrammar | InvalidRequest:
        try:
            structured.check()
            text = to_llguidance(structured, self._special_tokens())
        except InvalidRequest as error:
            return error
        prototype = LLMatcher(self.build_tokenizer(), text, log_level=0, limits=_LIMITS)
        if not prototype.is_error():
            self._try_out(prototype)
        if prototype.is_error():
            reason = prototype.get_error()
            return refused("no output fits it." if "NoExtension" in reason else _first_words(reason))
        return CompiledGrammar(prototype)

    def _try_out(self, prototype: LLMatcher) -> None:
        """Follow the grammar for a few tokens, whichever it allows, and go back to its start.

        What is too complex to be followed mostly shows now, while it can be refused; and the lexer, which learns as it
        goes, does its dearest work here and not for each of its copies.
        """
        mask = np.zeros(self.mask_words_of_tokenizer, dtype=np.uint32)
        chance = random.Random(0)
        for _ in range(TRIED_TOKENS):
            prototype.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            if prototype.is_stopped() or not prototype.consume_token(int(chance.choice(allowed))):
                break
        if not prototype.is_error():
            prototype.reset()

    @property
    def mask_words_of_tokenizer(self) -> int:
        """uint32 words of a mask as llguidance writes it; at least `mask_words`."""
        return -(-self.build_tokenizer().vocab_size // 32)

    def _special_tokens(self) -> dict[str, int]:
        text_of = self.vocabulary.tokenizer.id_to_token
        return {text: token_id for token_id in self.vocabulary.special_ids if (text := text_of(token_id))}

    def _keep(self, structured: StructuredOutput, outcome: CompiledGrammar | InvalidRequest) -> None:
        with self._lock:
            if structured not in self._cache:
                self._cache[structured] = outcome
                self._cached_characters += len(structured.value)
            while len(self._cache) > MAX_CACHED_GRAMMARS or self._cached_characters > MAX_CACHED_CHARACTERS:
                dropped, _ = self._cache.popitem(last=False)
                self._cached_characters -= len(dropped.value)


class _Tokens:
    """The vocabulary in the form that llguidance asks for, by attributes of these names."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        tokens = vocabulary.bytes_of
        self.tokens = tokens + [b""] * (vocab_size - len(tokens))
        self.special_token_ids = sorted(vocabulary.special_ids.union(eos_token_ids))
        self.eos_token_id = eos_token_ids[0] if eos_token_ids else None
        self._tokenizer = vocabulary.tokenizer
        self._special = frozenset(self.special_token_ids)
        self._id_of = {text: token_id for token_id, text in enumerate(tokens) if token_id not in self._special}
        self._longest = max(map(len, self._id_of))
        # Sentencepiece puts a space before a text, but not before what follows a control character.
        self._before = "" if vocabulary.is_byte_level else "\x02"
        self._num_before = len(self._encode(self._before))

    def __call__(self, text: bytes | str) -> list[int]:
        """The tokens in which the model would write a text: where only one text can follow, they are allowed alone.

        Where that is not exactly the text, because it is normalized or reads like a special token, the longest tokens.
        """
        as_bytes = text.encode() if isinstance(text, str) else text
        as_text = as_bytes.decode(errors="replace")
        token_ids = self._encode(self._before + as_text)[self._num_before :]
        exact = b"".join(self.tokens[token_id] for token_id in token_ids) == as_bytes
        return token_ids if exact and self._special.isdisjoint(token_ids) else self._longest_tokens(as_bytes)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _longest_tokens(self, text: bytes) -> list[int]:
        token_ids: list[int] = []
        start = 0
        while start < len(text):
            for length in range(min(self._longest, len(text) - start), 0, -1):
                token_id = self._id_of.get(text[start : start + length])
                if token_id is not None:
                    token_ids.append(token_id)
                    start += length
                    break
            else:
                break  # the vocabulary cannot say it
        return token_ids


_stack_size_lock = threading.Lock()


def _with_deep_stack(function: Callable[[], CompiledGrammar | InvalidRequest]) -> CompiledGrammar | InvalidRequest:
    """Run `function` on a thread with `STACK_BYTES` of stack, which it gives back at its end."""
    outcome: list[CompiledGrammar | InvalidRequest | BaseException] = []

    def run() -> None:
        try:
            outcome.append(function())
        except BaseException as error:  # a native library's panic is no Exception
            outcome.append(error)

    thread = threading.Thread(target=run, name="grammar-compiler", daemon=True)
    with _stack_size_lock:  # the size is the process's, for threads started meanwhile
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    match outcome[0]:
        case CompiledGrammar() | InvalidRequest() as result:
            return result
        case BaseException() as error:
            raise error
        case _:
            raise AssertionError


def _first_words(error: str) -> str:
    """What the compiler says, without what it says about itself."""
    text = " ".join(error.replace("<non-verbose/>", "").split())
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}..."
