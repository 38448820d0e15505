"""The two front ends to an engine, for servers and for programs.

In reading order:

input_processor   The last validation before the engine; a request with `n` choices becomes `n` requests.
request_stream    The outbox of one request, and the observer that metrics use.
output_processor  Engine outputs to text, usage and figures for each caller's stream.
async_llm         `AsyncLLM`, the front end of servers: a request is a scope.
shared_engine     One engine core that several threads use at once.
llm               `LLM`, the front end of programs.
"""
