"""Compare the C++ library with transformers on torch: embeddings and reranking by an encoder of MiniLM's shape.

    python -m loadtest.encoders                          2 threads, 5 rounds
    python -m loadtest.encoders --threads 1 --rounds 9

Both compute the same random weights in one process, in turn, with as many threads each; sleeping threads of the other
take no time. transformers computes in float32 and gets what sentence-transformers gives it: texts sorted by length, 32
at a time, padded to the longest of them. The library gets the same texts in their order. Tokenizers are left out on
both sides. Printed are texts per second, the best round and the median, their ratios, the ratio of the CPU time of best
rounds, and how far results agree: the least cosine of an embedding, or the pairs of texts that a ranking
has in another order.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import BertConfig, BertForSequenceClassification

from gpu.checkpoint.families.encoders import encoder_config, encoder_family
from gpu.cpu.encoder import CPUEncoder
from gpu.cpu.library import load_library
from gpu.runner.encoder_runner import EncoderInputs

SHAPE: dict[str, Any] = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "num_labels": 1,
}
NEAR = 1e-3  # scores that differ by less are near ties, whose order is not compared
BATCH = 32  # texts that sentence-transformers computes together
Texts = list[NDArray[np.int64]]
Floats = NDArray[np.float32]


def texts(lengths: NDArray[np.float64], least: int, most: int) -> Texts:
    generator = np.random.default_rng(1)
    return [generator.integers(1000, 30000, length) for length in np.clip(lengths, least, most).astype(int)]


def make_sets() -> dict[str, tuple[Texts, bool]]:
    """Return texts by the names of their lengths, and whether they are ranked."""
    generator = np.random.default_rng(0)
    return {
        "32 sentences, about 20 tokens": (texts(generator.lognormal(3.0, 0.5, 32), 5, 128), False),
        "32 sentences, 24 tokens each": (texts(np.full(32, 24.0), 24, 24), False),
        "100 passages, 200 ± 40 tokens": (texts(generator.normal(200, 40, 100), 20, 400), True),
        "100 passages, 200 tokens each": (texts(np.full(100, 200.0), 200, 200), True),
    }


class Pair:
    """A model of transformers and the library's of the same weights."""

    def __init__(self, num_threads: int) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(num_threads)
        config = BertConfig(**SHAPE)
        self.torch = BertForSequenceClassification(config).eval()
        values = {**config.to_dict(), "architectures": ["BertModel"]}
        family, library = encoder_family(values), load_library()
        assert family is not None
        assert library is not None
        self.build = library.name
        self._heads = {name: array.numpy() for name, array in self.torch.state_dict().items()}
        own = ((name.removeprefix("bert."), array) for name, array in self._heads.items())
        self._library = CPUEncoder(
            library,
            encoder_config(*family, values, where="config"),
            [(name, array) for name, array in own if not name.startswith(("pooler", "classifier"))],
            num_threads=num_threads,
            quantized=True,
            max_model_len=512,
            max_num_batched_tokens=2**20,
        )

    def by_library(self, texts: Texts, ranked: bool) -> Floats:
        lengths = [len(text) for text in texts]
        starts = np.cumsum([0, *lengths], dtype=np.int32)
        ids, positions = np.concatenate(texts), np.concatenate([np.arange(length) for length in lengths])
        hidden = self._library.encode(EncoderInputs(ids, positions, np.zeros(len(ids), np.int64), starts))
        if ranked:
            table = self._heads
            pooled = np.tanh(
                hidden[starts[:-1]] @ table["bert.pooler.dense.weight"].T + table["bert.pooler.dense.bias"]
            )
            return np.asarray(pooled @ table["classifier.weight"].T + table["classifier.bias"])
        means = np.add.reduceat(hidden, starts[:-1], axis=0) / np.array(lengths, np.float32)[:, None]
        return np.asarray(means / np.linalg.norm(means, axis=1, keepdims=True))

    @torch.inference_mode()
    def by_torch(self, texts: Texts, ranked: bool) -> Floats:
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        results = np.empty((len(texts), 1 if ranked else SHAPE["hidden_size"]), np.float32)
        for start in range(0, len(order), BATCH):
            chosen = order[start : start + BATCH]
            longest = len(texts[chosen[0]])
            ids = torch.zeros((len(chosen), longest), dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, index in enumerate(chosen):
                ids[row, : len(texts[index])] = torch.from_numpy(texts[index])
                mask[row, : len(texts[index])] = 1
            if ranked:
                results[chosen] = self.torch(input_ids=ids, attention_mask=mask).logits.numpy()
                continue
            hidden = self.torch.bert(input_ids=ids, attention_mask=mask).last_hidden_state
            means = (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
            results[chosen] = torch.nn.functional.normalize(means).numpy()
        return results


def timed(function: Callable[..., Floats], *arguments: object) -> tuple[float, float]:
    """Return the seconds and the CPU seconds of a call."""
    wall, cpu = time.perf_counter(), time.process_time()
    function(*arguments)
    return time.perf_counter() - wall, time.process_time() - cpu


def agreement(found: Floats, expected: Floats, ranked: bool) -> str:
    if not ranked:
        return f"cosine {(found * expected).sum(1).min():.7f}"
    here, there = found - found.T, expected - expected.T
    far = np.abs(there) > NEAR
    wrong = int((far & (here * there <= 0)).sum() // 2)
    return (
        f"{wrong} of {int(far.sum() // 2)} pairs in another order, scores within {np.abs(found - expected).max():.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    pair = Pair(options.threads)
    print(f"{pair.build}, torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()}\n")
    print("| texts | library/s | torch/s | ratio | CPU time | agreement |\n| --- | ---: | ---: | ---: | ---: | --- |")
    for name, (some, ranked) in make_sets().items():
        agree = agreement(pair.by_library(some, ranked), pair.by_torch(some, ranked), ranked)
        rounds = [
            [timed(each, some, ranked) for each in (pair.by_library, pair.by_torch)] for _ in range(options.rounds)
        ]
        (best, other), (middle, other_middle) = (
            [choose(each[side][0] for each in rounds) for side in range(2)] for choose in (min, statistics.median)
        )
        cpu, other_cpu = (min(each[side][1] for each in rounds) for side in range(2))
        print(
            f"| {name} | {len(some) / best:.0f} ({len(some) / middle:.0f}) | {len(some) / other:.0f} "
            f"({len(some) / other_middle:.0f}) | {other / best:.2f} ({other_middle / middle:.2f}) | "
            f"{other_cpu / cpu:.2f} | {agree} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
