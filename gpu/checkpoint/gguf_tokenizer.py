"""A GGUF file's metadata as a tokenizer.

Two kinds are supported: byte-level BPE (`tokenizer.ggml.model` = "gpt2") and SentencePiece's BPE ("llama"). GGUF has
vocabulary, merges and token types, but only the name of a pre-tokenizer; the patterns of the names are here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from gpu.checkpoint.config import ModelError, shown
from gpu.checkpoint.gguf_file import GGUFFile
from gpu.checkpoint.tokenizers import (
    LLAMA3_DIGITS,
    MAX_ADDED_TOKENS,
    QWEN2_DIGITS,
    check_lengths,
    check_tokenizer,
    tokenizer_errors,
    word_pattern,
)

# Kinds of tokens, as the file numbers them: undefined, normal, unknown, control, user-defined, unused, byte.
_KINDS = range(7)
_CONTROL, _USER_DEFINED = 3, 4

# The name of a special token in templates, and the key of its id in GGUF.
_SPECIAL_TOKEN_KEYS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


def tokenizer_from_gguf(file: GGUFFile, vocab_size: int) -> Tokenizer:
    """Return the tokenizer of the model in `file`. Raises `ModelError` if it is damaged or not supported."""
    with tokenizer_errors(f"{file.path.name} has a tokenizer that cannot be built"):
        tokenizer = _build(file)
    vocabulary = {token: index for index, token in enumerate(_tokens(file))}
    check_tokenizer(tokenizer, vocabulary, vocab_size, source=file.path.name)
    return tokenizer


def _build(file: GGUFFile) -> Tokenizer:
    kind = file.require("tokenizer.ggml.model", str)
    if kind not in ("gpt2", "llama"):
        raise ModelError(
            f"{file.path.name} has a tokenizer of the kind {shown(kind)}; supported in GGUF files are 'gpt2' "
            f"(byte-level BPE) and 'llama' (SentencePiece). Serve the model's Hugging Face directory, which has a "
            f"tokenizer.json, instead."
        )
    tokens = _tokens(file)
    types = file.require_array("tokenizer.ggml.token_type", int)
    if len(types) != len(tokens):
        raise ModelError(f"{file.path.name}: {len(tokens)} tokens have {len(types)} types. Convert the model anew.")
    if unknown := set(types).difference(_KINDS):
        number = types.index(min(unknown))
        raise ModelError(
            f"{file.path.name}: the token {shown(tokens[number])} is of the type {types[number]}; known are "
            f"{_KINDS[0]} to {_KINDS[-1]}. Convert the model anew."
        )
    if kind == "llama":
        tokenizer, add_bos = sentencepiece_from_gguf(file, tokens, types), True
    else:
        tokenizer, add_bos = _byte_level(file, tokens)
    tokenizer.add_tokens(_added_tokens(file, tokens, types))
    if file.get("tokenizer.ggml.add_bos_token", bool, add_bos):
        bos = file.require("tokenizer.ggml.bos_token_id", int)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=["[BOS]", "$A"],
            pair=["[BOS]", "$A", "[BOS]:1", "$B:1"],
            special_tokens=[{"id": "[BOS]", "ids": [bos], "tokens": [_token_text(file, tokens, bos)]}],
        )
    return tokenizer


def _byte_level(file: GGUFFile, tokens: list[str]) -> tuple[Tokenizer, bool]:
    """Return the tokenizer without its added tokens, and True if its family begins a text with BOS."""
    pre_name = file.get("tokenizer.ggml.pre", str, "default") or "default"
    if pre_name not in _PRE_TOKENIZERS:
        raise ModelError(
            f"{file.path.name} has the pre-tokenizer {shown(pre_name)}; supported are {', '.join(_PRE_TOKENIZERS)}. "
            f"Serve the model's Hugging Face directory, which has a tokenizer.json, instead."
        )
    pre = _PRE_TOKENIZERS[pre_name]
    merges = file.require_array("tokenizer.ggml.merges", str)
    try:
        model = models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[(left, right) for left, _, right in (merge.partition(" ") for merge in merges)],
            ignore_merges=pre.ignore_merges,
        )
    except Exception as error:  # the library raises bare Exceptions
        raise ModelError(f"{file.path.name}: the merges do not fit the vocabulary: {error}.") from error

    tokenizer = Tokenizer(model)
    if pre.normalizer is not None:
        tokenizer.normalizer = pre.normalizer()
    tokenizer.pre_tokenizer = pre.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.add_bos


def special_tokens_from_gguf(file: GGUFFile) -> dict[str, str]:
    """Return the texts of the special tokens in chat templates, such as {"eos_token": "<|im_end|>"}."""
    if "tokenizer.ggml.tokens" not in file.metadata:
        return {}
    tokens = file.require_array("tokenizer.ggml.tokens", str)
    ids = {name: file.get(key, int) for name, key in _SPECIAL_TOKEN_KEYS.items()}
    return {name: _token_text(file, tokens, index) for name, index in ids.items() if index is not None}


def _tokens(file: GGUFFile) -> list[str]:
    tokens = file.require_array("tokenizer.ggml.tokens", str)
    check_lengths(tokens, file.path.name)
    if len(set(tokens)) != len(tokens):
        raise ModelError(f"{file.path.name}: tokenizer.ggml.tokens holds a token twice. Convert the model anew.")
    return tokens


def _token_text(file: GGUFFile, tokens: list[str], index: int) -> str:
    if not 0 <= index < len(tokens):
        raise ModelError(
            f"{file.path.name}: a special token has the id {index}; the vocabulary has {len(tokens)} tokens."
        )
    return tokens[index]


def _added_tokens(file: GGUFFile, tokens: list[str], types: list[int]) -> list[AddedToken]:
    """Return the tokens that are found in a text before it is split: control and user-defined tokens."""
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    if len(added) > MAX_ADDED_TOKENS:
        raise ModelError(
            f"{file.path.name}: tokenizer.ggml.token_type names {len(added):,} tokens that are found as a whole; up to "
            f"{MAX_ADDED_TOKENS:,} are allowed."
        )
    return added


@dataclass(frozen=True, kw_only=True)
class _PreTokenizer:
    """The pattern by which a family of models cuts a text before the merges, with other parts of its tokenizer.json."""

    build: Callable[[], pre_tokenizers.PreTokenizer]
    ignore_merges: bool = False  # a word of the vocabulary is one token, whatever the merges
    add_bos: bool = False  # the default if the metadata does not have it
    normalizer: Callable[[], normalizers.Normalizer] | None = None


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    # Digits are cut first, so that two spaces before a digit are one word; GPT-2's pattern alone would split them.
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split_by(digits: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def build() -> pre_tokenizers.PreTokenizer:
        split = pre_tokenizers.Split(Regex(word_pattern(digits)), behavior="isolated", invert=False)
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


_GPT2 = _PreTokenizer(build=_gpt2)
_LLAMA3 = _PreTokenizer(build=_split_by(LLAMA3_DIGITS), ignore_merges=True, add_bos=True)
_QWEN2 = _PreTokenizer(build=_split_by(QWEN2_DIGITS), normalizer=normalizers.NFC)

# By `tokenizer.ggml.pre`.
_PRE_TOKENIZERS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _PreTokenizer(build=_smollm),
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
}


# --------------------------------------------------------------------------------------------------- gguf sentencepiece
# SentencePiece's byte-pair encoding (`tokenizer.ggml.model` = "llama": Gemma, and the first Llamas and Mistrals).
#
# A GGUF file has the pieces, their scores and their kinds. SentencePiece joins neighbours to the piece of the highest
# score until no two form a piece; the tokenizers library joins the pair that comes first in a list. So the list has
# every way to form a piece from two others, by falling score; tokenizer.json files of these models were made in the
# same way. Characters that are no piece become their bytes.


_NORMAL = 1  # the kind of a piece that is found by merging
_MOST_WORK = 2**26  # the sum of squared lengths of all pieces, which are cut everywhere. Gemma 3's is 11 million
_SPACE = "\u2581"  # stands for a space in pieces


def sentencepiece_from_gguf(file: GGUFFile, tokens: list[str], types: list[int]) -> Tokenizer:
    """Return the tokenizer without its added tokens. Raises `ModelError` for scores that give no order."""
    scores = file.require_array("tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise ModelError(f"{file.path.name}: {len(tokens)} tokens have {len(scores)} scores. Convert the model anew.")
    if any(map(math.isnan, scores)):
        raise ModelError(f"{file.path.name}: tokenizer.ggml.scores holds NaN. Convert the model anew.")
    if (work := sum(len(token) ** 2 for token in tokens)) > _MOST_WORK:
        raise ModelError(
            f"{file.path.name}: the squares of its tokens' lengths add up to {work:,}; allowed: up to {_MOST_WORK:,}."
        )
    unknown = file.get("tokenizer.ggml.unknown_token_id", int) or 0
    normal = {token for token, kind in zip(tokens, types, strict=True) if kind == _NORMAL}
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=_merges([pair for pair in zip(tokens, scores, strict=True) if pair[0] in normal], normal),
            unk_token=tokens[unknown] if 0 <= unknown < len(tokens) else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    space = normalizers.Replace(" ", _SPACE)
    decode = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.get("tokenizer.ggml.add_space_prefix", bool, True):  # a word at the beginning of a text is the same piece
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), space])
        decode.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = space
    tokenizer.decoder = decoders.Sequence(decode)
    return tokenizer


def _merges(scored: list[tuple[str, float]], pieces: set[str]) -> list[tuple[str, str]]:
    """Return all pairs of pieces that form a piece, by falling score, then by falling length of the left half."""
    scored.sort(key=lambda pair: -pair[1])
    return [
        (left, right)
        for piece, _ in scored
        for cut in range(len(piece) - 1, 0, -1)
        if (left := piece[:cut]) in pieces and (right := piece[cut:]) in pieces
    ]
