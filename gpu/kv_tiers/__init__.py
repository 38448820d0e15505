"""Keys and values kept beside the KV cache: on disk, where they survive a restart, and in the memory of the host.

What is kept is a piece: a run of blocks with all layers, about a megabyte, named by the hash of its last block, which
covers every token before it. In reading order:

worth   which pieces are given up first
piece   how a piece is sealed, so that nothing else is ever taken for it
disk    pieces as files of a directory that several engines share
ram     pieces in the memory of the host
memory  blocks copied out of the KV cache and into it
tier    threads that store and load beside the steps: what the engine is handed
opening  from settings and a loaded model to a tier, or to a line in the log that says why there is none
"""
