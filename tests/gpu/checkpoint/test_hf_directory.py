"""A Hugging Face directory: written by transformers, old spellings and new, read back; and what is refused."""

import json
import os
import re
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gpu.checkpoint import Embedder, ModelError, RopeScaling, model_digest, open_model
from gpu.checkpoint.gguf_file import GGUFFile
from gpu.checkpoint.hf_config import config_from_hf
from gpu.checkpoint.hf_files import read_header
from gpu.weights.tensors import weights_of
from tests.gpu.checkpoint_files import TINY, TinyGGUF, random_weights
from tests.support.embedded_model import embedded_gguf

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "torch_dtype": "float32",
}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture
def directory(tmp_path):
    """A small Llama with the embedded model's tokenizer."""
    path = tmp_path / "tiny-llama"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    open_model(str(embedded_gguf())).tokenizer.save(str(path / "tokenizer.json"))
    save_file({name: torch.from_numpy(w) for name, w in random_weights(TINY).items()}, path / "model.safetensors")
    return path


def change(directory, file="config.json", **values):
    path = directory / file
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({key: value for key, value in (old | values).items() if value is not ...}))
    return directory


def test_configuration_and_weights_are_read(directory):
    model = open_model(str(directory))

    assert model.name == "tiny-llama"
    assert model.config == TINY
    assert model.tokenizer.encode("Hi 12").tokens == ["Hi", "Ġ", "1", "2"]
    read = dict(weights_of(model))
    expected = random_weights(TINY)
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], torch.from_numpy(expected[name])) for name in expected)


def test_weights_are_mapped_and_not_copied(directory):
    tensor = next(tensor for name, tensor in weights_of(open_model(str(directory))) if name == "lm_head.weight")
    address = tensor.data_ptr()
    with open("/proc/self/maps") as maps:
        areas = [line.split() for line in maps if line.endswith("model.safetensors\n")]
    assert any(int(area[0].split("-")[0], 16) <= address < int(area[0].split("-")[1], 16) for area in areas)


def tiny_transformers_model(kind):
    import transformers

    shape: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "eos_token_id": [5, 6],
    }
    special: dict[str, dict[str, Any]] = {
        "Llama": {"rope_parameters": {"rope_theta": 5e5, **LLAMA3_ROPE}, "tie_word_embeddings": True},
        "Mistral": {"sliding_window": 16, "head_dim": 16},
        "Qwen2": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        "Qwen3": {"head_dim": 16},
    }
    config = getattr(transformers, f"{kind}Config")(**shape, **special[kind])
    return getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16)


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_what_transformers_saves_in_shards_is_read_back(tmp_path, directory, kind):
    original = tiny_transformers_model(kind)
    path = tmp_path / "saved"
    original.save_pretrained(path, max_shard_size="10KB")
    (directory / "tokenizer.json").rename(path / "tokenizer.json")
    assert len(list(path.glob("*.safetensors"))) > 1

    model = open_model(str(path))
    read = dict(weights_of(model))

    expected = original.state_dict()
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], expected[name]) for name in expected)
    theirs, ours = original.config, model.config
    assert ours.architecture == f"{kind}ForCausalLM"
    assert ours.torch_dtype == "bfloat16"
    assert ours.eos_token_ids == (5, 6)
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.tie_word_embeddings is theirs.tie_word_embeddings
    assert ours.sliding_window == (16 if kind == "Mistral" else None)
    assert (ours.attention_bias, ours.qk_norm) == (kind == "Qwen2", kind == "Qwen3")
    assert ours.rope_scaling == (RopeScaling(**LLAMA3_ROPE) if kind == "Llama" else None)


def test_both_spellings_of_rope_scaling_are_read(directory):
    llama3 = RopeScaling(**LLAMA3_ROPE)
    assert open_model(str(change(directory, rope_scaling=LLAMA3_ROPE))).config.rope_scaling == llama3
    linear = {"type": "linear", "factor": 2}
    assert open_model(str(change(directory, rope_scaling=linear))).config.rope_scaling == RopeScaling(
        rope_type="linear", factor=2.0
    )
    new = {"rope_theta": 7.0, "rope_type": "default"}
    config = open_model(str(change(directory, rope_scaling=..., rope_theta=..., rope_parameters=new))).config
    assert (config.rope_theta, config.rope_scaling) == (7.0, None)


def test_eos_tokens_of_all_files_end_generation(directory):
    change(directory, "generation_config.json", eos_token_id=[9, 2])
    change(directory, "tokenizer_config.json", eos_token="<|endoftext|>")
    assert open_model(str(directory)).config.eos_token_ids == (9, 2, 0)
    change(directory, "generation_config.json", eos_token_id=9)
    change(directory, "tokenizer_config.json", eos_token={"content": "<jupyter>"})
    change(directory, "tokenizer_config.json", added_tokens_decoder={"7": {"content": "<jupyter>"}})
    assert open_model(str(directory)).config.eos_token_ids == (9, 7, 2)


def test_special_tokens_are_read_as_texts(directory):
    change(directory, "special_tokens_map.json", unk_token="<unk>", bos_token="<old>", additional_special_tokens=["x"])
    change(directory, "tokenizer_config.json", bos_token={"content": "<s>"}, eos_token="<|im_end|>", pad_token=None)
    assert open_model(str(directory)).special_tokens == {
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
    }


def test_the_chat_template_is_found_in_each_of_its_places(directory):
    assert open_model(str(directory)).chat_template is None
    change(directory, "tokenizer_config.json", chat_template="in tokenizer_config")
    assert open_model(str(directory)).chat_template == "in tokenizer_config"
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "the default"}]
    change(directory, "tokenizer_config.json", chat_template=several)
    assert open_model(str(directory)).chat_template == "the default"
    change(directory, "chat_template.json", chat_template="in chat_template.json")
    assert open_model(str(directory)).chat_template == "in chat_template.json"
    (directory / "chat_template.jinja").write_text("in chat_template.jinja")
    assert open_model(str(directory)).chat_template == "in chat_template.jinja"


def test_a_tokenizer_saved_with_truncation_does_not_cut_prompts(directory):
    tokenizer = open_model(str(directory)).tokenizer
    tokenizer.enable_truncation(max_length=2)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(directory / "tokenizer.json"))
    assert len(open_model(str(directory)).tokenizer.encode("one two three four").ids) == 4


def test_weights_that_transformers_would_ignore_are_ignored(directory):
    weights = {name: torch.from_numpy(w) for name, w in random_weights(TINY).items()}
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(32)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, directory / "model.safetensors")
    change(directory, tie_word_embeddings=True)
    read = dict(weights_of(open_model(str(directory))))
    expected = {name for name in weights if not name.endswith("inv_freq") and name != "lm_head.weight"}
    assert read.keys() == expected


def test_a_head_of_its_own_is_used_though_the_configuration_ties_it(directory, caplog):
    change(directory, tie_word_embeddings=True)
    model = open_model(str(directory))
    assert not model.config.tie_word_embeddings
    assert torch.equal(
        dict(weights_of(model))["lm_head.weight"], torch.from_numpy(random_weights(TINY)["lm_head.weight"])
    )
    assert "tie_word_embeddings is true in config.json, but lm_head.weight is not the embedding" in caplog.text


def test_a_model_that_was_saved_without_its_head_is_read(directory):
    weights = {name: torch.from_numpy(w) for name, w in random_weights(TINY).items()}
    del weights["lm_head.weight"]
    save_file({name.removeprefix("model."): w for name, w in weights.items()}, directory / "model.safetensors")
    with pytest.raises(ModelError, match=r"1 missing: lm_head\.weight"):
        open_model(str(directory))
    read = dict(weights_of(open_model(str(change(directory, tie_word_embeddings=True)))))
    assert read.keys() == weights.keys()
    assert all(torch.equal(read[name], weights[name]) for name in weights)


MODULES = [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}]
POOLING = {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}


def make_embedder(directory, pooling, *modules, **prompts):
    (directory / "modules.json").write_text(json.dumps([*MODULES, POOLING, *modules]))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (directory / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return directory


def test_how_vectors_are_made_is_read(directory):
    assert open_model(str(directory)).embedder == Embedder()
    last = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True, "include_prompt": True}
    prompts = {"prompts": {"query": "Query: ", "document": ""}, "default_prompt_name": None}
    normalize = {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
    read = open_model(str(make_embedder(directory, last, normalize, **prompts))).embedder
    assert read == Embedder(pooling="last", prompts={"query": "Query: ", "document": ""})
    assert open_model(str(make_embedder(directory, {"pooling_mode": "mean"}))).embedder == Embedder(pooling="mean")


def test_an_embedder_that_was_saved_without_its_head_is_read(directory, caplog):
    weights = {name: torch.from_numpy(w) for name, w in random_weights(TINY).items() if name != "lm_head.weight"}
    make_embedder(directory, {"pooling_mode": "lasttoken"})
    assert not open_model(str(directory)).config.tie_word_embeddings, "a head that is there is used"
    assert "lm_head" not in caplog.text
    save_file({name.removeprefix("model."): w for name, w in weights.items()}, directory / "model.safetensors")
    read = dict(weights_of(open_model(str(directory))))
    assert read.keys() == weights.keys()
    assert all(torch.equal(read[name], weights[name]) for name in weights)
    assert "this embedding model have no lm_head.weight" in caplog.text
    save_file({name: w for name, w in weights.items() if "embed" not in name}, directory / "model.safetensors")
    with pytest.raises(ModelError, match=r"2 missing: model\.embed_tokens\.weight, lm_head\.weight"):
        open_model(str(directory))


@pytest.mark.parametrize(
    ("pooling", "modules", "prompts", "message"),
    [
        ({"pooling_mode_cls_token": True}, [], {}, "pooling by 'cls'.*mean and lasttoken"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}, [], {}, "pooling by 'mean', 'lasttoken'"),
        ({}, [], {}, "pooling by nothing"),
        ({"pooling_mode": 3}, [], {}, "pooling by 3"),
        (
            {"pooling_mode": "mean"},
            [{"idx": 2, "path": "2_Dense", "type": "sentence_transformers.models.Dense"}],
            {},
            "the module 'sentence_transformers.models.Dense' of modules.json is not supported",
        ),
        ({"pooling_mode": "mean"}, [POOLING | {"path": "../x"}], {}, "path of a module in modules.json"),
        ({"pooling_mode": "mean"}, [POOLING | {"path": "3_Pooling"}], {}, "lacks 3_Pooling/config.json"),
        ({"pooling_mode": "mean"}, [7], {}, "modules.json must hold a list of objects"),
        ({"pooling_mode": "mean"}, [], {"prompts": {"a": 1}}, "prompts in config_sentence_transformers.json"),
        ({"pooling_mode": "mean"}, [], {"default_prompt_name": "query"}, "default_prompt_name='query'.*is not one of"),
        ({"pooling_mode": "mean", "include_prompt": False}, [], {"prompts": {"a": "b"}}, "include_prompt=false"),
    ],
)
def test_vectors_that_cannot_be_made_are_refused(directory, pooling, modules, prompts, message):
    with pytest.raises(ModelError, match=message):
        open_model(str(make_embedder(directory, pooling, *modules, **prompts)))


def test_bytes_are_no_weights(directory):
    weights = {name: torch.from_numpy(w) for name, w in random_weights(TINY).items()}
    name = "model.layers.1.mlp.down_proj.weight"
    save_file(weights | {name: torch.ones(weights[name].shape, dtype=torch.uint8)}, directory / "model.safetensors")
    with pytest.raises(ModelError, match=rf"tensor {re.escape(name)} has the dtype U8, .* Serve a checkpoint in BF16"):
        dict(weights_of(open_model(str(directory))))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"\['GPT2LMHeadModel'\].*Supported are LlamaForCausalLM, Mistral"),
        ({"architectures": ...}, "None, which is not supported"),
        ({"hidden_size": ...}, "hidden_size in config.json must be an integer from 1 to 131,072 elements, got None"),
        ({"hidden_size": "big"}, "hidden_size in config.json must be an integer .*, got 'big'"),
        ({"hidden_size": 0}, "hidden_size in config.json must be an integer .*, got 0"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "'dynamic' is not supported; supported are llama3"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}},
            "long_factor in config.json must be a list of numbers, got None",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "original_max_position_embeddings"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quantized checkpoint .*aqlm.*GGUF"),
        ({"attention_bias": True}, "attention_bias=true"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'.*must be 'silu'"),
        ({"torch_dtype": "float8_e4m3fn"}, "supported are float32, float16, bfloat16"),
        ({"eos_token_id": 256}, "must be below vocab_size"),
    ],
)
def test_a_configuration_that_cannot_be_run_says_why(directory, values, message):
    with pytest.raises(ModelError, match=message):
        open_model(str(change(directory, **values)))


def test_a_window_is_read_only_where_the_family_has_one():
    def windows(architecture, **values):
        named = {"architectures": [f"{architecture}ForCausalLM"], "sliding_window": 64}
        config = config_from_hf(CONFIG | named | values, source="m")
        return [config.window(layer) for layer in range(2)]

    on = {"use_sliding_window": True}
    assert windows("Llama", **on) == [None, None]
    assert windows("Qwen2") == [None, None]
    assert windows("Qwen2", **on, max_window_layers=2) == [None, None]
    assert windows("Qwen2", **on, max_window_layers=0) == [64, 64]
    assert windows("Qwen2", **on, max_window_layers=1) == [None, 64]
    named = {"layer_types": ["sliding_attention", "full_attention"]}
    assert windows("Qwen2", **on, **named) == [64, None]
    assert windows("Mistral") == windows("Mistral", use_sliding_window=False) == [64, 64]
    assert windows("Mistral", sliding_window=None) == [None, None]


def test_missing_files_are_named(directory):
    (directory / "tokenizer.json").rename(directory / "tokenizer.model")
    with pytest.raises(ModelError, match="has no tokenizer.json, the only tokenizer format"):
        open_model(str(directory))
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"no \*.safetensors. pytorch_model.bin is a pickle"):
        open_model(str(directory))
    (directory / "config.json").rename(directory / "m.gguf")
    with pytest.raises(ModelError, match=r"has no config.json.*name it: .*m\.gguf"):
        open_model(str(directory))


def test_damaged_files_are_named(directory):
    weights = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(weights[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        list(weights_of(open_model(str(directory))))
    (directory / "model.safetensors").write_bytes(weights)
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        open_model(str(directory)).tokenizer  # noqa: B018
    (directory / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        open_model(str(directory))


def test_an_index_cannot_point_outside_its_directory_or_at_nothing(directory):
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "../model.safetensors"}}))
    with pytest.raises(ModelError, match="to a file of the same folder"):
        open_model(str(directory))
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}))
    with pytest.raises(ModelError, match="lacks model-00002-of-00002"):
        open_model(str(directory))


def test_the_digest_follows_the_weights_and_not_their_place(tmp_path, directory):
    same, other = (shutil.copytree(directory, tmp_path / name) / "." for name in ("same", "other"))
    weights = other / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    digests = [model_digest(open_model(str(each))) for each in (directory, same, other)]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_the_digest_follows_every_tensor_in_a_file_of_the_same_size_and_date(tmp_path, directory, kind, monkeypatch):
    monkeypatch.setattr("gpu.checkpoint.model_files.SAMPLES", 2)  # as many for their size as a large file has
    path = directory / "model.safetensors"
    if kind == "gguf":
        path = tmp_path / "tiny.gguf"
        TinyGGUF(path).add_tokenizer().add_weights(random_weights(TINY)).save()
    opened = directory if kind == "safetensors" else path
    if kind == "gguf":
        middles = [tensor.offset + tensor.nbytes // 2 for tensor in GGUFFile(path).tensors.values()]
    else:
        middles = [tensor.offset + tensor.num_bytes // 2 for tensor in read_header(path).values()]
    content, status, digests = path.read_bytes(), path.stat(), {model_digest(open_model(str(opened)))}
    for middle in middles:
        changed = bytearray(content)
        changed[middle] ^= 1
        path.write_bytes(changed)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        digests.add(model_digest(open_model(str(opened))))
    assert len(digests) == 1 + len(middles)
