"""A digest of a model as it lies on disk, from little enough of it that it costs milliseconds."""

from __future__ import annotations

import hashlib
from pathlib import Path

from gpu.checkpoint.gguf_file import GGUFFile
from gpu.checkpoint.model_files import ModelFiles
from gpu.checkpoint.safetensors_header import read_header

SAMPLES = 64  # of each file, evenly spread, its beginning and its end among them
SAMPLE_BYTES = 4096


def model_digest(files: ModelFiles) -> bytes:
    """32 bytes, the same wherever the same files lie; random weights have that of their configuration and seed.

    Each tensor is sampled, so a file in which one tensor was changed has another digest. Files of equal sizes that
    differ only between the samples have the same digest. Fine-tuning and quantizing change nearly every byte of a
    tensor, so only a deliberate change goes unseen; and only values that clients are shown rely on the digest.
    """
    found = hashlib.blake2b(digest_size=32)
    found.update(repr((files.config, files.chat_template, sorted(files.special_tokens.items()))).encode())
    if files.tensors is None:
        found.update(f"random, seed {files.seed}".encode())
    for path in weight_paths(files):
        size = path.stat().st_size
        found.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            for number in range(SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * number // (SAMPLES - 1))
                found.update(file.read(SAMPLE_BYTES))
            for middle in _middles(files, path):
                file.seek(max(0, middle - SAMPLE_BYTES // 2))
                found.update(file.read(SAMPLE_BYTES))
    return found.digest()


def _middles(files: ModelFiles, path: Path) -> list[int]:
    """Return the offset of each tensor's middle byte in a file."""
    if isinstance(files.tensors, GGUFFile):
        return [tensor.offset + tensor.nbytes // 2 for tensor in files.tensors.tensors.values()]
    return [tensor.offset + tensor.num_bytes // 2 for tensor in read_header(path).values()]


def weight_paths(files: ModelFiles) -> tuple[Path, ...]:
    """The files that the weights lie in, none for random ones."""
    if files.tensors is None:
        return ()
    return files.tensors if isinstance(files.tensors, tuple) else (files.tensors.path,)
