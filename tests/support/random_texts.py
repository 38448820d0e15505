"""Random texts that hit the edges of tokenizers: scripts, marks, digits, blanks, contractions, emoji, code."""

import random
import unicodedata
from functools import cache

_WORDS = """
 it's I'VE they'LL d'oh 's 'T ' '' "quoted" don't DON'T word Word WORD camelCase XMLHttpRequest aB Ab ABc aBC ǅungla ǅ
 1 12 123 1234 1234567 3.14 1,000 ½ ² Ⅷ ٣٤ १२३ １２ x1 1x a1b2 007
 你好 世界 こんにちは カタカナ ー 안녕하세요 ㄱㄴ สวัสดี مرحبا שלום हिन्दी ᏣᎳᎩ ԱՐՄ արմ ʰʷ ﬁ ß İ ı Σς
 é e\u0301 a\u0308\u0323 Z\u0351\u036b \u0301 ் \u200b \u00a0 \u2028 \u3000 \ufeff \x00 \x7f \ufffd \U0010ffff
 👩‍👩‍👧‍👦 👍🏽 🇫🇷 ❤️ ✅ → € ₿ § ¶ … — – „ “ ” ‘ ’ ！ ？ 、 。 《 》 ％
 !!! ??? ... --- === ``` ** __ ~~ // /* */ <!-- --> == != <= => && || :: ;; $x @y #z %d \\n {} [] () (a) .py /usr/bin
 http://a.b/c?d=e&f=1 user@host.org #include<stdio.h> if(x){y();} <|im_end <tag> </tag>
"""
_PIECES = _WORDS.split()
_BLANKS = [
    " ",
    "  ",
    "   ",
    "    ",
    "\n",
    "\n\n",
    "\r\n",
    "\r",
    "\t",
    "\t\t",
    " \n",
    "\n ",
    " \n\n  ",
    "\n\t",
    "\x0b",
    "\x85",
]
_LAST = 0x1F000  # of the characters that are drawn one by one; the newest scripts differ between versions of Unicode


@cache
def _assigned() -> list[str]:
    return [chr(code) for code in range(_LAST) if unicodedata.category(chr(code)) not in ("Cn", "Cs", "Co")]


def random_texts(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return ["".join(_part(draw) for _ in range(draw.randint(1, 16))) for _ in range(count)]


def _part(draw: random.Random) -> str:
    kind = draw.random()
    if kind < 0.35:
        return draw.choice(_PIECES)
    if kind < 0.65:
        return draw.choice(_BLANKS)
    if kind < 0.8:
        return "".join(draw.choice("etaoinshrdlu ETAOIN") for _ in range(draw.randint(1, 8)))
    if kind < 0.9:
        return draw.choice(_assigned())
    if kind < 0.97:
        return "".join(draw.choice("0123456789") for _ in range(draw.randint(1, 9)))
    return draw.choice(" \n\ta1") * draw.randint(2, 40)
