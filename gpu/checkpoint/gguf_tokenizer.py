"""A GGUF file's metadata as a tokenizer.

Four kinds are supported: byte-level BPE (`tokenizer.ggml.model` = "gpt2"), SentencePiece's BPE ("llama", "gemma4") and
Unigram ("t5"), and WordPiece ("bert"). GGUF files have vocabulary, merges and token types, but only a pre-tokenizer's
name; its steps are here.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from gpu.checkpoint import tokenizers as steps
from gpu.checkpoint.config import ModelError, shown
from gpu.checkpoint.gguf_file import GGUFFile
from gpu.checkpoint.tokenizers import MAX_ADDED_TOKENS, check_lengths, check_tokenizer, tokenizer_errors

# Kinds of tokens, as the file numbers them: undefined, normal, unknown, control, user-defined, unused, byte.
_KINDS = range(7)
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_NEVER_STRIP = ("<unk>", "<s>", "<|endoftext|>")

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
    if kind not in ("gpt2", "llama", "gemma4", "bert", "t5"):
        raise ModelError(
            f"{file.path.name} has a tokenizer of the kind {shown(kind)}; supported in GGUF files are 'gpt2' "
            f"(byte-level BPE), 'llama', 'gemma4' and 't5' (SentencePiece) and 'bert' (WordPiece). Serve the model's "
            f"Hugging Face directory, which has a tokenizer.json, instead."
        )
    tokens = _tokens(file)
    types = file.require_array("tokenizer.ggml.token_type", int)
    if len(types) != len(tokens):
        raise ModelError(
            f"{file.path.name}: {len(types)} token_type entries for {len(tokens)} tokens. Convert it anew."
        )
    if unknown := set(types).difference(_KINDS):
        number = types.index(min(unknown))
        raise ModelError(
            f"{file.path.name}: the token {shown(tokens[number])} has the type {types[number]}; known types are "
            f"{_KINDS[0]} to {_KINDS[-1]}. Convert the model anew."
        )
    adds_bos = True
    if kind == "bert":
        tokenizer = _word_piece(file, tokens, types)
    elif kind == "t5":
        tokenizer, adds_bos = _unigram(file, tokens, types), False
    elif kind == "gpt2":
        tokenizer, adds_bos = _byte_level(file, tokens)
    else:
        tokenizer = sentencepiece_from_gguf(file, tokens, types)
    tokenizer.add_tokens(_added_tokens(file, tokens, types))
    around = ["cls", "seperator"]  # the format's spelling
    if kind != "bert":
        adds_bos &= "tokenizer.ggml.bos_token_id" in file.metadata
        around = ["bos" if file.get("tokenizer.ggml.add_bos_token", bool, adds_bos) else ""]
        around += ["eos" if file.get("tokenizer.ggml.add_eos_token", bool, kind == "t5") else ""]
    if any(around):
        ids = {f"[{name}]": file.require(f"tokenizer.ggml.{name}_token_id", int) for name in around if name}
        first, last = ([f"[{name}]"] if name else [] for name in around)
        text = [*first, "$A", *last]
        architecture = file.get("general.architecture", str)
        has_one_start = kind == "bert" or architecture == "modern-bert"
        second = [f"{name}:1" for name in ([] if has_one_start else first) + ["$B", *last]]
        if kind != "bert" and architecture == "bert":
            second = [*last, "$B", *last]  # RoBERTa's
        tokenizer.post_processor = processors.TemplateProcessing(
            single=text,
            pair=[*text, *second],
            special_tokens=[
                {"id": name, "ids": [index], "tokens": [_token_text(file, tokens, index)]}
                for name, index in ids.items()
            ],
        )
    return tokenizer


def _byte_level(file: GGUFFile, tokens: list[str]) -> tuple[Tokenizer, bool]:
    """Return the tokenizer without added tokens, and True if its family begins texts with BOS by default."""
    name = file.get("tokenizer.ggml.pre", str, "default") or "default"
    if name not in _PRE_TOKENIZERS:
        raise ModelError(
            f"{file.path.name} has the pre-tokenizer {shown(name)}; supported are {', '.join(_PRE_TOKENIZERS)}. "
            f"Serve the model's Hugging Face directory, which has a tokenizer.json, instead."
        )
    pre = _PRE_TOKENIZERS[name]
    tokenizer = Tokenizer(_bpe(file, tokens, _merges_of(file), ignore_merges=pre.ignore_merges))
    if pre.composes:
        tokenizer.normalizer = normalizers.NFC()
    built = [
        pre_tokenizers.Split(Regex(step), behavior="isolated") if isinstance(step, str) else step()
        for step in pre.steps
    ]
    if _GPT2 not in pre.steps:
        built.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(built)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.add_bos


def _merges_of(file: GGUFFile) -> list[tuple[str, str]]:
    merges = file.require_array("tokenizer.ggml.merges", str)
    return [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]


def _bpe(file: GGUFFile, tokens: list[str], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges, **options)
    except Exception as error:  # the library raises bare Exceptions
        raise ModelError(f"{file.path.name}: the merges do not fit the vocabulary: {error}.") from error


def _unigram(file: GGUFFile, tokens: list[str], types: list[int]) -> Tokenizer:
    """Return the tokenizer of XLM-RoBERTa without added tokens. Raises `ModelError` for missing and for NaN scores, and
    for a map of letters that makes a text too long."""
    scores = file.require_array("tokenizer.ggml.scores", float)
    if len(scores) != len(tokens) or any(map(math.isnan, scores)) or _UNKNOWN not in types:
        raise ModelError(
            f"{file.path.name}: tokenizer.ggml.scores must hold a number for each of {len(tokens)} tokens, and "
            f"tokenizer.ggml.token_type one unknown token (2). Convert the model anew."
        )
    tokenizer = Tokenizer(models.Unigram([*zip(tokens, scores, strict=True)], types.index(_UNKNOWN), False))
    if (charsmap := file.metadata.get("tokenizer.ggml.precompiled_charsmap")) is not None:
        data = bytes(each % 256 for each in file.require_array("tokenizer.ggml.precompiled_charsmap", int))
        step = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}
        steps.check_steps({"normalizer": step}, file.path.name)
        tokenizer.normalizer = normalizers.Precompiled(data) if charsmap else None
    spaces = pre_tokenizers.Metaspace(_SPACE, "always")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), spaces])
    tokenizer.decoder = decoders.Metaspace(_SPACE, "always")
    return tokenizer


def _word_piece(file: GGUFFile, tokens: list[str], types: list[int]) -> Tokenizer:
    """Return the tokenizer without added tokens. GGUF marks the first piece of a word, WordPiece the others."""
    unknown = _token_text(file, tokens, file.require("tokenizer.ggml.unknown_token_id", int))
    plain = [
        token if kind != _NORMAL else token[1:] if token.startswith(_SPACE) else f"##{token}"
        for token, kind in zip(tokens, types, strict=True)
    ]
    vocabulary = {token: index for index, token in enumerate(plain)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=unknown, max_input_chars_per_word=100))
    lowercase = file.get("tokenizer.ggml.normalizer.lowercase", bool, True)
    strips = file.get("tokenizer.ggml.normalizer.strip_accents", bool, lowercase)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=bool(lowercase), strip_accents=strips)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


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
    """Return the control and user-defined tokens, which are matched before a text is split."""
    # Phi-3's own tokenizer.json drops blanks after control tokens, but its GGUF files do not record that.
    architecture, kind = (file.get(key, str) for key in ("general.architecture", "tokenizer.ggml.model"))
    strips = (architecture, kind) == ("phi3", "llama")
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False, rstrip=strips and token not in _NEVER_STRIP)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    if len(added) > MAX_ADDED_TOKENS:
        raise ModelError(
            f"{file.path.name}: tokenizer.ggml.token_type has {len(added):,} control and user-defined tokens; up to "
            f"{MAX_ADDED_TOKENS:,} are allowed."
        )
    return added


class _PreTokenizer(NamedTuple):
    """The steps that split a text before the merges, and other settings of a family's tokenizer.json."""

    steps: tuple[str | Callable[[], pre_tokenizers.PreTokenizer], ...]  # patterns, or steps of the library
    ignore_merges: bool = False  # a word in the vocabulary becomes one token without merges
    add_bos: bool = False  # the default if the metadata does not have it
    composes: bool = False  # normalizes text by Unicode's NFC


_GPT2 = partial(pre_tokenizers.ByteLevel, add_prefix_space=False, use_regex=True)
_EACH_DIGIT = partial(pre_tokenizers.Digits, individual_digits=True)
# Falcon splits digits after bytes became letters, some of which count as digits.
_FALCON = (
    partial(pre_tokenizers.Punctuation, behavior="contiguous"),
    _GPT2,
    partial(pre_tokenizers.Digits, individual_digits=False),
    steps.FALCON_DIGITS,
)
_LLAMA3 = _PreTokenizer((steps.LLAMA3_WORDS,), ignore_merges=True, add_bos=True)
_QWEN2 = _PreTokenizer((steps.QWEN2_WORDS,), composes=True)
_GPT4O = _PreTokenizer((steps.GPT4O_WORDS,), ignore_merges=True)

# By `tokenizer.ggml.pre`, the name of the first family that had the tokenizer: Phi-4-mini's files carry gpt-4o.
_PRE_TOKENIZERS = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "roberta-bpe"), _PreTokenizer((_GPT2,))),
    **dict.fromkeys(("olmo", "mpt", "modern-bert"), _PreTokenizer((_GPT2,), composes=True)),
    # Digits are split off first, so that two spaces before a digit stay one word; GPT-2's pattern would split them.
    **dict.fromkeys(("smollm", "refact", "starcoder"), _PreTokenizer((_EACH_DIGIT, _GPT2))),
    "command-r": _PreTokenizer((_EACH_DIGIT, _GPT2), composes=True),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("smaug-bpe", "glm4", "chatglm-bpe"), _LLAMA3._replace(add_bos=False)),
    "dbrx": _PreTokenizer((steps.LLAMA3_WORDS,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "qwen35": _PreTokenizer((steps.QWEN35_WORDS,), composes=True),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "minimax-m2": _PreTokenizer((steps.GPT4O_WORDS,)),
    "tekken": _PreTokenizer((steps.TEKKEN_WORDS,), ignore_merges=True, add_bos=True),
    "kimi-k2": _PreTokenizer((steps.KIMI_WORDS,), ignore_merges=True),
    "deepseek-llm": _PreTokenizer((*steps.DEEPSEEK_LLM_STEPS, _EACH_DIGIT)),
    "deepseek-coder": _PreTokenizer((*steps.DEEPSEEK_CODER_STEPS, _EACH_DIGIT)),
    "deepseek-v3": _PreTokenizer(steps.DEEPSEEK_V3_STEPS),
    "falcon": _PreTokenizer(_FALCON),
}


# --------------------------------------------------------------------------------------------------- gguf sentencepiece
# SentencePiece's byte-pair encoding ("llama": Gemma, and the first Llamas and Mistrals; and "gemma4").
#
# A GGUF file has the pieces, their scores and their kinds. SentencePiece merges the two neighbours that form the piece
# of the highest score, until none form a piece; the tokenizers library merges the pair that comes first in a list. So
# the list has every pair of pieces that form a piece, by falling score, as in these models' tokenizer.json files; a
# file of Gemma 4 has the list. Characters without a piece become their bytes.


_MOST_WORK = 2**26  # limit on the sum of squared lengths of all tokens, Gemma 3's is 11 million
_SPACE = "\u2581"  # stands for a space in pieces


def sentencepiece_from_gguf(file: GGUFFile, tokens: list[str], types: list[int]) -> Tokenizer:
    """Return the tokenizer without its added tokens. Raises `ModelError` for missing and for NaN scores."""
    is_gemma4 = file.get("tokenizer.ggml.model", str) == "gemma4"
    merges = _merges_of(file) if is_gemma4 else _merges(_scored(file, tokens, types))
    unknown = file.get("tokenizer.ggml.unknown_token_id", int) or 0
    unk_token = tokens[unknown] if 0 <= unknown < len(tokens) else None
    tokenizer = Tokenizer(_bpe(file, tokens, merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True))
    space = normalizers.Replace(" ", _SPACE)
    decode = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.get("tokenizer.ggml.add_space_prefix", bool, not is_gemma4):  # so that a text's first word is as later ones
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), space])
        decode.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = space
    tokenizer.decoder = decoders.Sequence(decode)
    return tokenizer


def _scored(file: GGUFFile, tokens: list[str], types: list[int]) -> list[tuple[str, float]]:
    """Return the pieces that are found by merging, with their scores."""
    scores = file.require_array("tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise ModelError(f"{file.path.name}: {len(scores)} scores for {len(tokens)} tokens. Convert it anew.")
    if any(map(math.isnan, scores)):
        raise ModelError(f"{file.path.name}: tokenizer.ggml.scores has NaN scores. Convert the model anew.")
    if (work := sum(len(token) ** 2 for token in tokens)) > _MOST_WORK:
        raise ModelError(
            f"{file.path.name}: tokens are too long: their squared lengths total {work:,}, limit {_MOST_WORK:,}."
        )
    kinds = zip(tokens, scores, types, strict=True)
    return [(token, score) for token, score, kind in kinds if kind == _NORMAL]


def _merges(scored: list[tuple[str, float]]) -> list[tuple[str, str]]:
    """Return all pairs of pieces that form a piece, by falling score, then by falling length of the left half."""
    pieces = {piece for piece, _ in scored}
    scored.sort(key=lambda pair: -pair[1])
    return [
        (left, right)
        for piece, _ in scored
        for cut in range(len(piece) - 1, 0, -1)
        if (left := piece[:cut]) in pieces and (right := piece[cut:]) in pieces
    ]
