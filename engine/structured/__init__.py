"""Structured output: grammars that a request's output has to follow, enforced token by token.

A `StructuredOutput` (`engine.messages`) is text; what becomes of it, in reading order:

manager        what the engine's core owns: grammars compiled beside the steps, masks computed beside the device's work
matcher        one request's place in its grammar
compiler       compiles grammars, within limits
compile_queue  whose turn it is to compile
grammar_cache  compiled grammars, and refusals, kept for their owner
grammar        from a `StructuredOutput` to the text that llguidance compiles
quoted_lark    a grammar for the text of a JSON string
json_schema    what is done to a client's JSON Schema before it is compiled
one_of         which alternatives exclude each other
lenient        what is enforced where not all of a `StructuredOutput` can be
relaxation     what of a JSON Schema is left out then
pointers       JSON pointers and references within one document
thinking_budget  what closes the reasoning when it has taken its tokens
token_rules    the same way for `allowed_token_ids` and `bad_words`

The front door compiles first (`AsyncLLM.stream`), so that a grammar that cannot be enforced is refused before it is
queued; the core compiles again, mostly from the cache, because it may live in another process.
"""

from engine.structured.compile_queue import Owner
from engine.structured.compiler import CompiledGrammar, GrammarCompiler
from engine.structured.manager import StructuredOutputManager
from engine.structured.matcher import GrammarMatcher, TokenMatcher

__all__ = ["CompiledGrammar", "GrammarCompiler", "GrammarMatcher", "Owner", "StructuredOutputManager", "TokenMatcher"]
