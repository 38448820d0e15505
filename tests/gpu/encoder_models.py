"""Small encoders of transformers in every variant that matters, with tokenizers, and vectors by a reference."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    CamembertConfig,
    DistilBertConfig,
    Gemma3TextConfig,
    ModernBertConfig,
    NomicBertConfig,
    PreTrainedConfig,
    RobertaConfig,
    XLMRobertaConfig,
)

from engine.messages import Pooling, SamplingParams
from engine.plan import NewRequestData, SchedulerOutput
from gpu.checkpoint import ModelFiles, open_model
from gpu.executor import UniProcExecutor, load_executor
from gpu.runner.runner import WorkerOptions

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = [*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS), "the", "cat", "sat", "on", "mat", ".", ",", "!"]
SHAPE: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 66,
    "initializer_range": 0.3,  # large, so that attention is far from uniform and mistakes show
    "pad_token_id": 0,
}
ROBERTA = SHAPE | {"pad_token_id": 1, "type_vocab_size": 1, "max_position_embeddings": 68}
FULL, LOCAL = "full_attention", "sliding_attention"
MODERN = SHAPE | {"eos_token_id": 3, "bos_token_id": 2, "cls_token_id": 2, "sep_token_id": 3, "local_attention": 10}
DISTIL: dict[str, Any] = {
    "vocab_size": 67,
    "dim": 32,
    "n_layers": 3,
    "n_heads": 4,
    "hidden_dim": 48,
    "max_position_embeddings": 66,
}

ENCODERS: dict[str, PreTrainedConfig] = {
    "bert": BertConfig(**SHAPE),
    "bert-tanh-gelu": BertConfig(**SHAPE, hidden_act="gelu_new", layer_norm_eps=1e-3, type_vocab_size=3),
    "roberta": RobertaConfig(**ROBERTA),
    "xlm-roberta": XLMRobertaConfig(**ROBERTA | {"hidden_act": "relu"}),
    "camembert": CamembertConfig(**ROBERTA),
    "nomic-bert": NomicBertConfig(**SHAPE),
    "modern-bert": ModernBertConfig(**MODERN),
    "modern-bert-with-biases": ModernBertConfig(
        **MODERN | {"hidden_activation": "silu", "layer_types": [FULL, LOCAL, LOCAL]},
        attention_bias=True,
        mlp_bias=True,
        norm_bias=True,
        classifier_bias=True,
        classifier_pooling="mean",
    ),
    "embedding-gemma": Gemma3TextConfig(
        **SHAPE,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=8,
        layer_types=[LOCAL, FULL, LOCAL],
        query_pre_attn_scalar=16,
        use_bidirectional_attention=True,
    ),
    "distilbert": DistilBertConfig(**DISTIL, initializer_range=0.3, pad_token_id=0),
}


def word_tokenizer() -> Tokenizer:
    """Return a WordPiece tokenizer as BERT's, of letters and a few words."""
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def make_checkpoint(directory: Path, config: PreTrainedConfig, *, labels: int = 0) -> Any:
    """Write a model with random weights and a tokenizer, and return the model of transformers."""
    torch.manual_seed(0)
    if labels:
        config = deepcopy(config)
        config.num_labels = labels
    model = (AutoModelForSequenceClassification if labels else AutoModel).from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name.lower():
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    word_tokenizer().save(str(directory / "tokenizer.json"))
    return model


def prompts(seed: int = 0, longest: int = 60, vocabulary: int = 67) -> list[list[int]]:
    """Return prompts of several lengths, two of them equal."""
    generator = np.random.default_rng(seed)
    lengths = [1, 7, longest, 19, 7, 33]
    return [[2, *generator.integers(5, vocabulary, length - 1).tolist()] for length in lengths]


def opened(files: ModelFiles | Path) -> UniProcExecutor:
    """Return the executor of a model's files or folder."""
    files = open_model(str(files)) if isinstance(files, Path) else files
    return load_executor(files, WorkerOptions(device="cpu", dtype="float32", num_threads=1, max_num_seqs=16))


def encoded(
    files: ModelFiles | Path | UniProcExecutor,
    token_ids: Sequence[list[int]],
    pooling: Pooling | None = Pooling.MEAN,
    **fields: Any,
) -> list[NDArray[np.float32]]:
    """Return the vectors of prompts in one step of the executor. `fields` are those of the requests."""
    executor = files if isinstance(files, UniProcExecutor) else opened(files)
    requests = [
        NewRequestData(
            request_id=str(index),
            token_ids=tokens,
            num_prompt_tokens=len(tokens),
            num_computed_tokens=0,
            block_ids=[index],
            sampling=SamplingParams(max_tokens=0),
            stop_token_ids=[],
            pooling=pooling,
            **{name: value[index] for name, value in fields.items()},
        )
        for index, tokens in enumerate(token_ids)
    ]
    names, lengths = [request.request_id for request in requests], list(map(len, token_ids))
    plan = SchedulerOutput.made_up([], requests, names, lengths, [1] * len(names))
    output = executor.submit(plan).result()
    return [np.frombuffer(output.embeddings[index], np.float32) for index in range(len(names))]


@torch.no_grad()
def hidden_states(model: Any, token_ids: list[int], **inputs: Any) -> NDArray[np.float32]:
    """Return the last hidden states of transformers for one prompt."""
    return model(torch.tensor([token_ids]), **inputs).last_hidden_state[0].float().numpy()


def cosine(one: NDArray[Any], other: NDArray[Any]) -> float:
    one, other = (each.astype(np.float64).ravel() for each in (one, other))
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))
