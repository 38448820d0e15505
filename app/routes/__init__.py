"""The handlers of all paths.

In reading order:

generation  Generation, embeddings and tokens: handlers made from the dialects' records.
scoring     Reranking, scores, classes and pooled vectors.
responses   /v1/responses: create, retrieve, delete, cancel, list input items, count tokens.
ollama      Ollama's API: chat, models, vectors, pulls.
batches     /v1/files and /v1/batches.
operations  Probes, models, timelines and administration.
pages       The dashboard, /docs and /openapi.json.
"""
