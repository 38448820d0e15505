"""Structured output: grammars that a request's output has to follow, enforced token by token.

A `StructuredOutput` (`engine.messages`) is text. `grammar` translates it for llguidance, `compiler` compiles it, within
limits, when `compile_queue` says that it is its turn, and `grammar_cache` keeps it for its owner. `matcher` is one
request's place in its grammar, and `manager` is what the engine's core owns: it has grammars compiled beside the steps
and computes the masks of allowed tokens while the device computes the logits.
`token_rules` takes the same way for `allowed_token_ids` and `bad_words`.

The front door compiles first (`AsyncLLM.stream`), so that a grammar that cannot be enforced is refused before it is
queued; the core compiles again, mostly from the cache, because it may live in another process.
"""

from engine.structured.compile_queue import Owner
from engine.structured.compiler import CompiledGrammar, GrammarCompiler
from engine.structured.manager import StructuredOutputManager
from engine.structured.matcher import GrammarMatcher, TokenMatcher

__all__ = ["CompiledGrammar", "GrammarCompiler", "GrammarMatcher", "Owner", "StructuredOutputManager", "TokenMatcher"]
