"""Keys and values kept outside the KV cache: on disk and in the host's memory.

In reading order:

chunks   A chunk of keys and values: its header, its signature, and its copies into and out of the KV cache.
stores   Chunks as files of a directory, and in memory.
tier     Threads that store and load chunks while steps run.
opening  Open a tier from settings and a loaded model, or log why there is none.
"""
