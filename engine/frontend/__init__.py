"""From a caller's request to what the caller reads: the two front doors, and what they share.

Used on the front end's thread. Reading order:

fair_threads      a few threads that tenants take turns at
input_processor   the last check before the engine; `n` choices become requests of their own
detokenizer       token ids to text, as they come; stop strings
observer          who counts: metrics listen here
request_stream    one request's outbox, and who reads it
output_processor  an engine's outputs to each caller's stream
async_llm         `AsyncLLM`, the server's front door: a request is a scope
shared_engine     a core that several threads use at once; it steps on its own threads
llm               `LLM`, the offline front door
"""
