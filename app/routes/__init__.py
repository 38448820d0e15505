"""Handlers that no record of a dialect describes (`app.dialects` has the others), in reading order:

responses       /v1/responses: create, retrieve, delete, cancel, list the input, count its tokens
embeddings      POST /v1/embeddings
tokens          POST /tokenize and /detokenize
catalogue       GET /v1/models: what is served here
requests        GET /v1/requests/{id}/timeline: what happened to one of the last requests
documents       /openapi.json and /docs: what can be asked, for programs and for people
dashboard       /dashboard and what it shows, and / for whoever opens the server's address in a browser
probes          health, readiness, load, version and /metrics
administration  the state of server and engine, the prefix cache and aborts, for those who hold an admin key
"""
