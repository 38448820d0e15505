"""Compile grammars within limits and keep them in a cache. Used by the front end and by the core.

Grammars come from clients, so everything is bounded: the size of the text, the work and the memory of the compiler and
of every mask (llguidance counts both), the stack, and the cache. The compiler follows chains of references by recursion
in native code, where a stack overflow ends the process. So the queue's threads have a stack for the longest chain that
fits into the largest text.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from msgspec import structs

from engine.detokenizer import Vocabulary
from engine.errors import InvalidRequest
from engine.fairness import TenantLRU
from engine.messages import GRAMMAR_TOO_COMPLEX, MAX_GRAMMAR_CHARACTERS, StructuredOutput
from engine.structured.compile_queue import CompileQueue, Owner
from engine.structured.grammar import refused, supported_part, to_llguidance

TRIED_TOKENS = 32
TRIED_SECONDS = 0.1  # CPU time during which other grammars wait
MAX_MESSAGE = 400  # characters; the compiler cites the grammar

_LIMITS = LLParserLimits(
    max_items_in_row=5_000,  # alternatives that are open at once
    initial_lexer_fuel=200_000,
    step_lexer_fuel=50_000,  # keeps a mask below some tens of milliseconds
    step_max_items=20_000,
    max_lexer_states=20_000,  # about 2 KB each, per request
    max_grammar_size=200_000,
    verbose_errors=False,  # verbose messages would cite generated text
)
# The compiler's messages when a limit is exceeded. Messages about faults in the text begin with a position.
_LIMIT_MET = re.compile(
    r"^(lexer|parser) |fuel exhausted|too big \(limit|size limit|recursion limit exceeded|too deeply nested|"
    r"maximum number of|unable to determine if regex is empty|too many (expressions|states|items|digits)",
    re.IGNORECASE,
)

# Does not match an unsatisfiable definition, because the reference to it may be optional.
_UNSATISFIABLE = re.compile("^(?!.*while processing).*(unsatisfiable|no output fits)", re.IGNORECASE)

# Estimates of the memory of a compiled grammar, which llguidance does not report. Measured: 13 MB per second of work.
BYTES_PER_SECOND = 20 * 2**20
BYTES_PER_CHARACTER = 64
# The cache of grammars and refusals. An entry belongs to one owner: a hit is faster, so with shared entries the
# response time would reveal what other owners have asked for.
MAX_CACHED_GRAMMARS = 128
MAX_CACHED_BYTES = 256 * 2**20

ANYBODY = Owner()


class CompiledGrammar:
    """A grammar at its start. Matchers are copies of it.

    It was compiled from `enforced`. `unenforced` lists the keywords of the request's JSON Schema that were removed.
    """

    def __init__(self, prototype: LLMatcher, enforced: StructuredOutput, unenforced: tuple[str, ...] = ()) -> None:
        self._prototype = prototype
        self.enforced = enforced
        self.unenforced = unenforced

    def leaving_out(self, unenforced: tuple[str, ...]) -> CompiledGrammar:
        """Return the same grammar for a schema that also has these unenforced keywords."""
        return CompiledGrammar(self._prototype, self.enforced, unenforced)

    def matcher(self) -> LLMatcher:
        return self._prototype.deep_copy()


class GrammarCompiler:
    """Compiles for one model, on threads of its own that release the interpreter lock. Thread-safe.

    `vocab_size` is the model's. If it exceeds the tokenizer's, masks never allow the surplus ids.
    """

    def __init__(self, vocabulary: Vocabulary, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.mask_words = -(-vocab_size // 32)
        self.vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self.num_compiled = 0  # without cache hits; for tests
        self._cache: TenantLRU[CompiledGrammar | InvalidRequest] = TenantLRU(MAX_CACHED_GRAMMARS, MAX_CACHED_BYTES)
        self._queue: CompileQueue[CompiledGrammar] = CompileQueue(self._compile)
        self._tokenizer_lock = threading.Lock()
        self._built: LLTokenizer | None = None

    def find(self, structured: StructuredOutput, owner: Owner = ANYBODY) -> CompiledGrammar | None:
        """Return the grammar if it is in the cache. Does not block. Raises InvalidRequest if it was refused."""
        found = self._cache.find(owner.tenant, (owner.salt, structured))
        return None if found is None else _unless_refused(found)

    def submit(self, structured: StructuredOutput, owner: Owner = ANYBODY) -> Future[CompiledGrammar]:
        """Return a future of the grammar. Does not block. The future raises InvalidRequest with the reason.

        If all its futures are cancelled, a grammar is not compiled.
        """
        try:
            found = self.find(structured, owner)
            if found is None:
                return self._queue.submit(owner, structured)
        except Exception as error:
            failed: Future[CompiledGrammar] = Future()
            failed.set_exception(error)
            return failed
        done: Future[CompiledGrammar] = Future()
        done.set_result(found)
        return done

    def compile(self, structured: StructuredOutput, owner: Owner = ANYBODY) -> CompiledGrammar:
        """Wait for the grammar and return it. Raises InvalidRequest with the reason."""
        return self.submit(structured, owner).result()

    def build_tokenizer(self) -> LLTokenizer:
        """Return the compiler's form of the vocabulary. Built once: 0.15 s for 50,000 tokens, with the GIL held."""
        with self._tokenizer_lock:
            if self._built is None:
                eos = self._eos_token_ids
                tokens = TokenizerWrapper(_Tokens(self.vocabulary, self._vocab_size, eos))
                self._built = LLTokenizer(tokens, n_vocab=len(tokens.tokens), eos_token=eos)
            return self._built

    def _compile(self, owner: Owner, structured: StructuredOutput) -> CompiledGrammar:
        """Do the work of the queue's threads."""
        found = self._cache.find(owner.tenant, (owner.salt, structured))
        if found is None:  # no other job has compiled it while this one was queued
            started = time.thread_time()
            found = self._outcome(structured)
            seconds = time.thread_time() - started
            num_bytes = int(seconds * BYTES_PER_SECOND) + structured.size * BYTES_PER_CHARACTER
            self._cache.keep(owner.tenant, (owner.salt, structured), found, num_bytes)
            if isinstance(found, CompiledGrammar) and found.enforced != structured:
                # The core will look up the enforced grammar.
                self._cache.keep(owner.tenant, (owner.salt, found.enforced), found, found.enforced.size)
        return _unless_refused(found)

    def _outcome(self, structured: StructuredOutput) -> CompiledGrammar | InvalidRequest:
        self.num_compiled += 1
        found = self._whole(structured)
        if isinstance(found, CompiledGrammar) or not structured.lenient or _UNSATISFIABLE.search(str(found)):
            return found
        try:
            structured.check()
            enforced, unenforced = supported_part(structured)
        except InvalidRequest as error:
            return error
        except RecursionError:
            return found  # the error "nested too deeply"
        if not unenforced and len(structured.value) <= MAX_GRAMMAR_CHARACTERS:
            return found
        found = self._whole(enforced)
        return found.leaving_out(unenforced) if isinstance(found, CompiledGrammar) else found

    def _whole(self, structured: StructuredOutput) -> CompiledGrammar | InvalidRequest:
        try:
            structs.replace(structured, lenient=False).check()
            text = to_llguidance(structured, self._special_tokens())
        except InvalidRequest as error:
            return error
        prototype = LLMatcher(self.build_tokenizer(), text, log_level=0, limits=_LIMITS)
        if not prototype.is_error():
            prototype = self._tried_out(prototype)
        if prototype.is_error():
            reason = prototype.get_error()
            if "NoExtension" in reason:
                return refused("no output fits it.")
            return refused(_first_words(reason), code=GRAMMAR_TOO_COMPLEX if _LIMIT_MET.search(reason) else None)
        return CompiledGrammar(prototype, structured)

    def _tried_out(self, prototype: LLMatcher) -> LLMatcher:
        """Follow the grammar for a few allowed tokens. Return it at its start, or with its error.

        Most grammars that are too complex to follow fail here, where they can still be refused. And the lexer, which
        builds its states lazily, does its most expensive work here once, not in each copy.
        """
        fresh = prototype.deep_copy()
        mask = np.zeros(self.mask_words_of_tokenizer, dtype=np.uint32)
        chance = random.Random(0)
        end = time.thread_time() + TRIED_SECONDS
        for _ in range(TRIED_TOKENS):
            if time.thread_time() > end:
                break
            prototype.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            if prototype.is_stopped() or not prototype.consume_token(int(chance.choice(allowed))):
                break
        if prototype.is_error() or prototype.reset():
            return prototype
        return fresh  # a lexeme with a token limit or a stop text cannot be reset

    @property
    def mask_words_of_tokenizer(self) -> int:
        """The number of uint32 words of a mask as llguidance writes it; at least `mask_words`."""
        return -(-self.build_tokenizer().vocab_size // 32)

    def _special_tokens(self) -> dict[str, int]:
        text_of = self.vocabulary.tokenizer.id_to_token
        return {text: token_id for token_id in self.vocabulary.special_ids if (text := text_of(token_id))}


class _Tokens:
    """The vocabulary with the attributes that llguidance reads."""

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
        # Sentencepiece adds a space at the start of a text, but not after a control character.
        self._before = "" if vocabulary.is_byte_level else "\x02"
        self._num_before = len(self._encode(self._before))

    def __call__(self, text: bytes | str) -> list[int]:
        """Return the tokens of a text as the model would write it. If only this text can follow, only they are allowed.

        If the tokenizer's tokens do not decode to exactly the text, because it is normalized or contains the text of a
        special token, return the longest tokens that spell it.
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
                break  # no token spells the rest
        return token_ids


def _unless_refused(found: CompiledGrammar | InvalidRequest) -> CompiledGrammar:
    if isinstance(found, InvalidRequest):
        raise InvalidRequest(str(found), param=found.param, code=found.code)  # a new error, for a new traceback
    return found


def _first_words(error: str) -> str:
    """Return the first line of the compiler's message as a sentence."""
    text = " ".join(error.replace("<non-verbose/>", "").split())
    if text.startswith("Invalid type: "):
        text += "; a type is string, number, integer, boolean, null, array or object"
    return f"{text.removesuffix('.')}." if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}..."
