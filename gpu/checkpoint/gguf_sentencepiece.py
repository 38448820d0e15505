"""SentencePiece's byte-pair encoding (`tokenizer.ggml.model` = "llama": Gemma, and the first Llamas and Mistrals).

A GGUF file keeps of it the pieces, their scores and their kinds. SentencePiece joins the neighbours that make the piece
of the highest score, until no two make one; the tokenizers library joins the pair that comes first in a list. So the
list has every way to make every piece of two others, best pieces first, which is also how tokenizer.json files of these
models were made. Characters that are no piece become their bytes.
"""

from __future__ import annotations

import math

from tokenizers import Tokenizer, decoders, models, normalizers

from gpu.checkpoint.errors import ModelError
from gpu.checkpoint.gguf_file import GGUFFile

_NORMAL = 1  # a piece that is found by merging; what was defined by users is found as a whole before
_MOST_WORK = 2**26  # characters times length, of all pieces: each is cut everywhere. Gemma 3's have 11 million
_SPACE = "\u2581"  # what pieces have for a space


def sentencepiece_from_gguf(file: GGUFFile, tokens: list[str], types: list[int]) -> Tokenizer:
    """The tokenizer without its added tokens. Raises `ModelError` for scores that give no order."""
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
    if file.get("tokenizer.ggml.add_space_prefix", bool, True):  # so that a word is the same piece wherever it stands
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), space])
        decode.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = space
    tokenizer.decoder = decoders.Sequence(decode)
    return tokenizer


def _merges(scored: list[tuple[str, float]], pieces: set[str]) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece: by falling score, and of the same piece the longest left half first."""
    scored.sort(key=lambda pair: -pair[1])
    return [
        (left, right)
        for piece, _ in scored
        for cut in range(len(piece) - 1, 0, -1)
        if (left := piece[:cut]) in pieces and (right := piece[cut:]) in pieces
    ]
