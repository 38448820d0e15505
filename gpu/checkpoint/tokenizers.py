"""Bounds on tokenizers of unknown origin.

A tokenizer is a chain of steps around a model, and the library accepts any steps: three that each replace a letter by
65,536 letters exhaust the memory, which kills the process. So the JSON is checked before it is built.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from gpu.checkpoint.config import FIELDS, ModelError, shown

logger = logging.getLogger(__name__)

MAX_ADDED_TOKENS = 2**16
MAX_TOKEN = 4096  # characters; the longest known token has fewer than 1,000
_MAX_STEPS = 64
_MAX_LIST = 64
_MAX_TEXT = 64  # characters that a step inserts or searches
_MAX_PATTERN = 4096
_MAX_GROWTH = 64  # times, by all steps together
_MAX_WORD = 1000  # characters of a word for WordPiece: its time grows with their square
_MAX_SAMPLE_TOKENS = 4096  # the most tokens of `_SAMPLE`, which has 50 characters
# Letters with and without accents, digits, blanks, a word in another script, an emoji, a broken special token.
_SAMPLE = "Hello, wörld! 12 345\n\t  中文 Привет 🙂 <|im_start|> a"

# The sections of a tokenizer.json, and the key under which a sequence of each holds its steps.
_SECTIONS = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}
# The growth of a text by steps without parameters: bytes become letters, blanks go around a letter.
_GROWTH = {"ByteLevel": 4, "BertNormalizer": 3, "BPEDecoder": 2, "CTC": 2, "WordPiece": 2}

# The time of these steps is proportional to the length of a text.
_HARMLESS = {
    "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "Prepend",
    "ByteLevel", "Metaspace", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit", "BertPreTokenizer",
    "UnicodeScripts", "BertNormalizer",
}  # fmt: skip
_HARMLESS_GROWTH = 4


# The patterns by which families cut a text into words, as their tokenizer.json files have them. GPT-2's is ByteLevel's.
_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(digits: str, letters: str = r"\p{L}", signs: str = r"\p{L}\p{N}") -> str:
    return rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}| ?[^\s{signs}]+[\r\n]*|{_BLANKS}"


def _cased_words(ends: str, digits: str, sign_ends: str, but: str = "") -> str:
    """Return a pattern that ends a word before a capital letter that follows a small one, without letters `but`."""
    upper, lower = (rf"[{kind}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]" for kind in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
    begin = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{begin}{upper}*{lower}+{ends}|{begin}{upper}+{lower}*{ends}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{sign_ends}*|{_BLANKS}"


LLAMA3_WORDS = _words(r"\p{N}{1,3}")
QWEN2_WORDS = _words(r"\p{N}")
QWEN35_WORDS = _words(r"\p{N}", r"[\p{L}\p{M}]", r"\p{L}\p{M}\p{N}")
TEKKEN_WORDS = _cased_words("", r"\p{N}", r"[\r\n/]")
GPT4O_WORDS = _cased_words(f"{_CONTRACTION}?", r"\p{N}{1,3}", r"[\r\n/]")
KIMI_WORDS = r"[\p{Han}]+|" + _cased_words(f"{_CONTRACTION}?", r"\p{N}{1,3}", r"[\r\n]", r"&&[^\p{Han}]")
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Letters with capitals, in the Unicode of DeepSeek's first tokenizer.
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕ"
    "ἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-"
    "ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
DEEPSEEK_LLM_STEPS = (
    "[\r\n]",
    rf"\s?[{_CASED}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"(?<!\s)\s+$",  # theirs has no look-behind, finds the same, and tries every space of a long row
    _EAST_ASIAN,
)
DEEPSEEK_CODER_STEPS = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN)
DEEPSEEK_V3_STEPS = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    rf"|{_BLANKS}",
)
FALCON_DIGITS = "[0-9][0-9][0-9]"
_KNOWN_PATTERNS = {LLAMA3_WORDS, QWEN2_WORDS, QWEN35_WORDS, TEKKEN_WORDS, GPT4O_WORDS, KIMI_WORDS, _GPT2_PATTERN}
_KNOWN_PATTERNS |= {*DEEPSEEK_LLM_STEPS, *DEEPSEEK_CODER_STEPS, *DEEPSEEK_V3_STEPS, FALCON_DIGITS, r"\p{N}"}


def is_known(tokenizer: Tokenizer) -> bool:
    """Return True if the time to encode a text is proportional to its length: WordPiece, or byte-pair encoding with
    known regexes.

    Unknown regexes may take seconds for a few thousand characters, and a matching thread cannot be stopped.
    """
    steps = [
        step
        for section in ("normalizer", "pre_tokenizer")
        if (part := getattr(tokenizer, section)) is not None
        for step in _steps(json.loads(part.__getstate__()), section, "the tokenizer")
    ]
    growth = 1.0
    for step in steps:
        growth *= 1 if step["type"] == "ByteLevel" else _growth(step, "the tokenizer")
    is_linear = getattr(tokenizer.model, "max_input_chars_per_word", 0) <= 100  # of WordPiece
    is_linear &= type(tokenizer.model).__name__ in ("BPE", "WordPiece")
    return is_linear and growth <= _HARMLESS_GROWTH and all(map(_is_harmless, steps))


def _is_harmless(step: dict[str, Any]) -> bool:
    if step["type"] not in ("Split", "Replace"):
        return step["type"] in _HARMLESS
    pattern = step["pattern"]
    return "String" in pattern or pattern.get("Regex") in _KNOWN_PATTERNS


def wordpiece(tokens: Sequence[str], config: Mapping[str, Any], *, source: str) -> Tokenizer:
    """Return BERT's tokenizer of the `tokens` of a vocab.txt, with the settings of a tokenizer_config.json. Raises
    `ModelError` for a vocabulary without its special tokens."""
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    named = {name: str(_content(config.get(name)) or usual) for name, usual in names.items()}
    ids = {token: index for index, token in enumerate(tokens)}
    missing = [named[name] for name in ("unk_token", "cls_token", "sep_token") if named[name] not in ids]
    if missing:
        raise ModelError(f"{source} lacks {shown(missing[0])}, which every text of this model needs.")
    check_lengths(tokens, source)
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token=named["unk_token"]))
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=config.get("do_lower_case", True) is not False,
        strip_accents=config.get("strip_accents"),
        handle_chinese_chars=config.get("tokenize_chinese_chars", True) is not False,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    first, last = named["cls_token"], named["sep_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[first, "$A", last],
        pair=[first, "$A", last, "$B:1", f"{last}:1"],
        special_tokens=[(token, ids[token]) for token in (first, last)],
    )
    tokenizer.add_special_tokens([token for token in named.values() if token in ids])
    return tokenizer


def _content(token: object) -> object:
    return token.get("content") if isinstance(token, dict) else token


def check_steps(tokenizer: dict[str, Any], source: str) -> None:
    """Raise `ModelError` for a parsed tokenizer.json with steps or tokens out of bounds."""
    for sections in (("normalizer", "pre_tokenizer"), ("post_processor",), ("decoder",)):
        growth = 1.0
        for section in sections:
            for step in _steps(tokenizer.get(section), section, source):
                _check_values(step, f"{section} {step['type']}", source)
                if section == "decoder" and "Regex" in (step.get("pattern") or ()):
                    raise ModelError(f"{source}: decoder {step['type']} has a regex; only a string is allowed.")
                growth *= _growth(step, source)
                if growth > _MAX_GROWTH:
                    raise ModelError(
                        f"{source}: the tokenizer's steps up to {section} step {step['type']} can make a text "
                        f"{growth:,.0f} times as long; the limit is {_MAX_GROWTH} times."
                    )
    _check_model(tokenizer.get("model"), source)
    added = tokenizer.get("added_tokens") or []
    if not isinstance(added, list) or len(added) > MAX_ADDED_TOKENS:
        raise ModelError(
            f"{source}: added_tokens must be an array of up to {MAX_ADDED_TOKENS:,} tokens, got {shown(added)}."
        )
    check_lengths((entry.get("content") for entry in added if isinstance(entry, dict)), source)


def check_lengths(tokens: Any, source: str) -> None:
    """Raise `ModelError` for the first token of more than `MAX_TOKEN` characters."""
    for token in tokens:
        if isinstance(token, str) and len(token) > MAX_TOKEN:
            raise ModelError(
                f"{source}: token {shown(token)} has {len(token):,} characters; up to {MAX_TOKEN:,} are allowed."
            )


def _steps(section: Any, name: str, source: str) -> Iterator[dict[str, Any]]:
    """Yield the steps of a section in order, without the sequences that hold them."""
    left, seen = [section] if section is not None else [], 0
    while left:
        step = left.pop()
        seen += 1
        if seen > _MAX_STEPS:
            raise ModelError(f"{source}: the {name} has more than {_MAX_STEPS} steps.")
        # A type is required, because the library guesses the type of a step without one.
        if not isinstance(step, dict) or not isinstance(step.get("type"), str):
            raise ModelError(f"{source}: each step of the {name} must be an object with a type, got {shown(step)}.")
        if step["type"] != "Sequence":
            yield step
            continue
        inner = step.get(_SECTIONS[name])
        if not isinstance(inner, list) or len(inner) > _MAX_STEPS:
            raise ModelError(
                f"{source}: a sequence in the {name} must have up to {_MAX_STEPS} steps, got {shown(inner)}."
            )
        left.extend(reversed(inner))


def _check_values(value: Any, what: str, source: str, longest: int = _MAX_TEXT) -> None:
    """Raise `ModelError` for a long string or list in a step."""
    match value:
        case str() if len(value) > longest:
            raise ModelError(f"{source}: {what} has a string of {len(value):,} characters; limit {longest}.")
        case dict() | list() if len(value) > _MAX_LIST:
            raise ModelError(f"{source}: {what} holds {len(value):,} values; up to {_MAX_LIST} are allowed.")
        case dict():
            for key, inner in value.items():
                if key != "precompiled_charsmap":  # see _growth
                    _check_values(inner, what, source, _MAX_PATTERN if key in ("Regex", "String") else longest)
        case list():
            for inner in value:
                _check_values(inner, what, source, longest)


def _growth(step: dict[str, Any], source: str) -> float:
    """Return the largest factor by which this step can lengthen a text."""
    kind = step["type"]
    if kind == "Replace":
        content, pattern = step.get("content"), step.get("pattern")
        text = pattern.get("String") if isinstance(pattern, dict) else None
        if not isinstance(content, str):
            return 1.0  # the library refuses it
        if isinstance(text, str) and text:
            return max(1.0, len(content) / len(text))
        return 1.0 + len(content)  # the pattern may match before every letter
    if kind == "Precompiled":
        return _longest_mapped(step.get("precompiled_charsmap"), source)
    if kind == "TemplateProcessing":
        single = step.get("single")
        return float(max(1, len(single))) if isinstance(single, list) else 1.0
    return float(_GROWTH.get(kind, 1))


def _longest_mapped(charsmap: Any, source: str) -> float:
    """Return the length of the longest replacement of a letter in SentencePiece's map. The map is the size of a trie,
    the trie, and strings that end in a null byte."""
    if not isinstance(charsmap, str):
        return 1.0
    try:
        data = base64.b64decode(charsmap)
    except (binascii.Error, ValueError) as error:
        raise ModelError(f"{source}: precompiled_charsmap is not in base64: {error}.") from error
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    longest = max(len(text.decode(errors="replace")) for text in texts.split(b"\0"))
    return float(max(1, longest))


def _check_model(model: Any, source: str) -> None:
    if not isinstance(model, dict):
        return  # the library refuses it
    for key, value in model.items():
        if isinstance(value, str):
            _check_values(value, f"the model's {key}", source)
    longest = model.get("max_input_chars_per_word")
    if type(longest) is int and longest > _MAX_WORD:
        raise ModelError(f"{source}: max_input_chars_per_word must be an integer from 0 to {_MAX_WORD}, got {longest}.")


@contextmanager
def tokenizer_errors(what: str) -> Iterator[None]:
    """Turn every error of the tokenizers library into a `ModelError` that begins with `what`.

    The library raises bare Exceptions, and a panic of Rust is a BaseException that no `except Exception` catches.
    """
    try:
        yield
    except ModelError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelError(f"{what}: {str(error)[:200] or type(error).__name__}.") from error


def check_tokenizer(tokenizer: Tokenizer, vocabulary: Mapping[str, int], vocab_size: int, *, source: str) -> None:
    """Raise `ModelError` for a tokenizer with a vocabulary out of bounds, or one that fails on a sample text.

    `vocabulary` has the id of each token; reading it from the tokenizer is slow. Some working models have more tokens
    than rows in their embedding, as padding: they are served, but requests with such tokens are refused.
    """
    most = FIELDS["vocab_size"].high
    with tokenizer_errors(f"{source} has a tokenizer that cannot be used"):
        special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
        if not any(token and token not in special for token in vocabulary):
            raise ModelError(f"{source}: the tokenizer's vocabulary is empty, apart from special tokens.")
        check_lengths(vocabulary, source)
        highest = max(vocabulary.values())
        if highest >= most:
            token = next(token for token, token_id in vocabulary.items() if token_id == highest)
            raise ModelError(f"{source}: token {shown(token)} has the id {highest:,}; ids below {most:,} are allowed.")
        if highest >= vocab_size:
            logger.warning(
                "%s has token ids up to %d, but the model has %d embedding rows: requests with higher ids are refused",
                source, highest, vocab_size,
            )  # fmt: skip
        for add_special_tokens in (True, False):
            token_ids = tokenizer.encode(_SAMPLE, add_special_tokens=add_special_tokens).ids
            if len(token_ids) > _MAX_SAMPLE_TOKENS or max(token_ids, default=0) > highest:
                raise ModelError(
                    f"{source}: the tokenizer makes {len(token_ids):,} tokens of {len(_SAMPLE)} characters, with ids "
                    f"up to {max(token_ids):,}; up to {_MAX_SAMPLE_TOKENS:,} are allowed, with ids up to {highest:,}."
                )
            tokenizer.decode(token_ids, skip_special_tokens=not add_special_tokens)
