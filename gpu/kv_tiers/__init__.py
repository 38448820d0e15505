"""Keys and values kept outside the KV cache: on disk and in the host's memory.

In reading order:

chunks   A chunk of keys and values: its seal, its bytes and its memory.
worth    Which chunks are evicted first.
stores   Chunks as files of a directory, and in memory.
tier     Threads that store and load chunks beside the steps.
opening  Settings and a model to a tier, or to the reason why there is none.
"""
