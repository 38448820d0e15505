"""What an operator may rely on when writing settings."""

from __future__ import annotations

import ast
import os
from dataclasses import fields
from pathlib import Path

import pytest
from pydantic import SecretStr

import app
from app.config.setting_types import is_secret
from app.config.settings import Settings, SettingsError
from app.config.sources import env_name, flag_name, load_settings, working_value
from gpu.runner.runner import WorkerOptions

MIB = 2**20


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("HEADRACE_"):
            monkeypatch.delenv(name)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return tmp_path / "headrace.toml"


def test_flag_beats_environment_beats_file_beats_default(monkeypatch: pytest.MonkeyPatch, config_file: Path) -> None:
    config_file.write_text("port = 1001\nblock_size = 32\nseed = 7\n")
    monkeypatch.setenv("HEADRACE_PORT", "1002")
    monkeypatch.setenv("HEADRACE_BLOCK_SIZE", "64")
    settings = load_settings({"port": "1003"}, config_file)
    assert (settings.port, settings.block_size, settings.seed, settings.host) == (1003, 64, 7, "127.0.0.1")


def test_headrace_config_names_the_file_and_a_flag_names_another(
    monkeypatch: pytest.MonkeyPatch, config_file: Path, tmp_path: Path
) -> None:
    config_file.write_text("port = 1001\n")
    other = tmp_path / "other.toml"
    other.write_text("port = 1002\n")
    monkeypatch.setenv("HEADRACE_CONFIG", str(config_file))
    assert load_settings().port == 1001
    assert load_settings(config_file=other).port == 1002


def test_lists_and_sizes_read_the_same_from_file_and_environment(
    monkeypatch: pytest.MonkeyPatch, config_file: Path
) -> None:
    config_file.write_text('served_model_name = ["a", "b"]\nkv_cache_memory = "2GiB"\n')
    from_file = load_settings(config_file=config_file)
    monkeypatch.setenv("HEADRACE_SERVED_MODEL_NAME", "a, b,")
    monkeypatch.setenv("HEADRACE_KV_CACHE_MEMORY", "2GiB")
    assert load_settings() == from_file
    assert (from_file.served_model_name, from_file.kv_cache_memory) == (("a", "b"), 2048 * MIB)


def test_an_empty_variable_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_PORT", "")
    assert load_settings().port == 8000


def test_a_kubernetes_service_named_headrace_does_not_break_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_PORT", "tcp://10.0.0.7:80")
    monkeypatch.setenv("HEADRACE_SERVICE_HOST", "10.0.0.7")
    monkeypatch.setenv("HEADRACE_PORT_80_TCP_ADDR", "10.0.0.7")
    monkeypatch.setenv("HEADRACE_METRICS_PORT", "tcp://10.0.0.8:80")
    assert load_settings().port == 8000


def test_an_unknown_key_in_the_file_is_named_with_its_nearest(config_file: Path) -> None:
    config_file.write_text("max_num_seq = 3\n")
    with pytest.raises(SettingsError, match=r"headrace\.toml.*'max_num_seq'.*Did you mean max_num_seqs\?"):
        load_settings(config_file=config_file)


def test_an_unknown_variable_is_named_with_its_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_MODLE", "x")
    with pytest.raises(SettingsError, match="'HEADRACE_MODLE'.*Did you mean HEADRACE_MODEL?"):
        load_settings()


def test_every_wrong_value_gets_one_line_that_says_where_what_and_what_works(
    monkeypatch: pytest.MonkeyPatch, config_file: Path
) -> None:
    config_file.write_text('dtype = "int3"\n')
    monkeypatch.setenv("HEADRACE_KV_CACHE_MEMORY", "two gigs")
    with pytest.raises(SettingsError) as refused:
        load_settings({"port": "70000"}, config_file)
    lines = sorted(str(refused.value).splitlines())
    assert lines == [
        "--port: got '70000'; allowed: a whole number, 0 to 65535. A value that works: 8000",
        "HEADRACE_KV_CACHE_MEMORY: got 'two gigs'; allowed: a size such as 2GiB, at least 1.0MiB. "
        "A value that works: 2GiB",
        f"dtype in {config_file}: got 'int3'; allowed: auto, float32, bfloat16 or float16. A value that works: auto",
    ]


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "soon", ""])
def test_seconds_are_finite_and_not_negative(value: str) -> None:
    with pytest.raises(SettingsError, match="--sse-keep-alive"):
        load_settings({"sse_keep_alive": value})


def test_a_step_must_have_room_for_every_running_request() -> None:
    with pytest.raises(SettingsError, match=r"max_num_batched_tokens \(512\) must be at least max_num_seqs \(600\)"):
        load_settings({"max_num_seqs": "600"})


@pytest.mark.parametrize("name", ["default_timeout", "default_ttft_timeout"])
def test_a_default_is_not_longer_than_what_may_be_asked_for(name: str) -> None:
    with pytest.raises(SettingsError, match=rf"{name} \(60\) must be at most max_timeout \(30\)"):
        load_settings({name: "60", "max_timeout": "30"})
    load_settings({name: "30", "max_timeout": "30"})


def test_what_is_kept_needs_the_prefix_cache() -> None:
    with pytest.raises(SettingsError, match="enable_prefix_caching is false"):
        load_settings({"kv_cache_dir": "/tmp/kv", "enable_prefix_caching": "false"})
    assert load_settings({"kv_cache_dir": "~/kv", "kv_cache_dir_size": "1GiB"}).kv_cache_dir == Path.home() / "kv"


def test_a_size_needs_a_directory_and_a_directory_a_name() -> None:
    with pytest.raises(SettingsError, match=r"kv_cache_dir_size \(1\.0GiB\) .* not set\. What works: kv_cache_dir = /"):
        load_settings({"kv_cache_dir_size": "1GiB"})
    for name in ("kv_cache_dir", "cache_dir", "api_keys_file"):
        with pytest.raises(SettingsError, match=f"{flag_name(name)}: got ''; allowed: text that is not empty"):
            load_settings({name: ""})


def test_what_must_be_above_a_number_says_so() -> None:
    with pytest.raises(SettingsError, match="allowed: a number above 0, at most 1. A value that works: 0.9"):
        load_settings({"gpu_memory_utilization": "0"})


@pytest.mark.parametrize("given", [{"executor": "ray", "data_parallel_size": "3"}, {"engine": "process"}])
def test_more_engines_than_at_first_need_a_cluster(given: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match=r"max_data_parallel_size \(2\) must be .* max_data_parallel_size = [13]$"):
        load_settings({**given, "max_data_parallel_size": "2"})
    assert load_settings({"executor": "ray", "max_data_parallel_size": "2"}).max_data_parallel_size == 2


def test_a_file_that_is_missing_or_broken_says_so(config_file: Path) -> None:
    with pytest.raises(SettingsError, match="Cannot read the settings file .*No such file"):
        load_settings(config_file=config_file)
    config_file.write_text("port = \n")
    with pytest.raises(SettingsError, match="is not TOML.*line 1"):
        load_settings(config_file=config_file)


def test_what_an_error_recommends_does_work() -> None:
    for name, field in Settings.model_fields.items():
        if field.default is None and not field.examples:
            pytest.fail(f"{name} has no default and no example: its error message has nothing to recommend")
        value = working_value(field)
        if value != "()":
            load_settings({name: value})


def test_keys_are_never_shown(monkeypatch: pytest.MonkeyPatch, config_file: Path) -> None:
    monkeypatch.setenv("HEADRACE_API_KEYS", "sk-one,sk-two")
    settings = load_settings()
    assert settings.api_keys == (SecretStr("sk-one"), SecretStr("sk-two"))
    for shown in (repr(settings), str(settings), settings.model_dump_json(), f"{settings.api_keys}"):
        assert "sk-" not in shown

    monkeypatch.delenv("HEADRACE_API_KEYS")
    config_file.write_text('api_keys = { first = "sk-three" }\n')
    with pytest.raises(SettingsError) as refused:
        load_settings(config_file=config_file)
    assert "api_keys" in str(refused.value)
    assert "sk-three" not in str(refused.value)
    assert refused.value.__cause__ is None, "a traceback would show pydantic's error, and that the key"
    assert is_secret(Settings.model_fields["api_keys"])
    assert not is_secret(Settings.model_fields["model"])


@pytest.mark.parametrize("name", ["api_keys", "admin_keys"])
@pytest.mark.parametrize("value", [" ", ",", " , ", "[]", '[""]', '["a", ""]', '[" a"]', '["a ", "b"]', '["a\\nb"]'])
def test_a_list_of_keys_without_a_key_that_can_be_sent_is_refused_wherever_it_comes_from(
    monkeypatch: pytest.MonkeyPatch, config_file: Path, name: str, value: str
) -> None:
    """An empty key would be everybody's, and an empty list would open the server."""
    allowed = f"{name}.*got a value that is not shown; allowed: one or more keys, .* none of them empty"
    with pytest.raises(SettingsError, match=allowed.replace(name, flag_name(name), 1)):
        load_settings({name: value})
    as_toml = value if value.startswith("[") else f'"{value}"'
    for line in (f"{name} = {as_toml}", f"{name} = '{value}'"):
        config_file.write_text(line)
        with pytest.raises(SettingsError, match=allowed):
            load_settings(config_file=config_file)
    monkeypatch.setenv(env_name(name), value)
    with pytest.raises(SettingsError, match=allowed.replace(name, env_name(name), 1)):
        load_settings()


@pytest.mark.parametrize("value", ["", "tcp://10.0.0.7:80"])
def test_what_stands_for_keys_is_never_passed_over(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """An empty flag does not undo a variable, and only a variable that ends in _PORT may be a link of Kubernetes."""
    monkeypatch.setenv("HEADRACE_API_KEYS", value or "a-key")
    if value:
        assert load_settings().api_keys == (SecretStr(value),)
    else:
        with pytest.raises(SettingsError, match="--api-keys"):
            load_settings({"api_keys": value})


def test_keys_and_names_read_the_same_with_commas_and_as_json(
    monkeypatch: pytest.MonkeyPatch, config_file: Path
) -> None:
    expected = load_settings({"api_keys": "a, b", "served_model_name": "x,y"})
    config_file.write_text("""api_keys = '["a", "b"]'\nserved_model_name = ["x", "y"]\n""")
    assert load_settings(config_file=config_file) == expected
    monkeypatch.setenv("HEADRACE_API_KEYS", '["a", "b"]')
    assert load_settings({"served_model_name": ' ["x", "y"]'}) == expected
    for wrong in ('["x"', "[1]", '[["x"]]'):
        with pytest.raises(SettingsError, match="--served-model-name: .* a comma-separated list or a JSON array"):
            load_settings({"served_model_name": wrong})


def test_settings_do_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().port = 1  # type: ignore[misc]  # mypy, too, says so


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, (256, 2048, "process")),
        ({"device": "cpu"}, (64, 512, "thread")),
        ({"max_num_batched_tokens": "100"}, (100, 100, "process")),
        ({"max_num_seqs": "1000", "engine": "thread"}, (1000, 2048, "thread")),
    ],
)
def test_a_cuda_device_changes_defaults_and_nothing_that_is_given(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], wanted: tuple[int, int, str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    settings = load_settings(given)
    assert (settings.max_num_seqs, settings.max_num_batched_tokens, settings.engine) == wanted
    assert settings.model_fields_set == set(given)
    assert Settings(**settings.without_secrets()).max_num_seqs == wanted[0]


def test_building_settings_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_PORT", "1234")
    assert Settings().port == 8000


def test_a_local_model_is_called_by_its_last_part_only(tmp_path: Path) -> None:
    directory = tmp_path / "secret-project" / "my-llama"
    directory.mkdir(parents=True)
    assert Settings(model=str(directory)).model_names == ("my-llama",)
    for name in ("tiny.gguf", "tiny.GGUF"):
        assert Settings(model=str(directory / name)).model_names == ("tiny",)
    assert Settings(model="org/name").model_names == ("org/name",)
    assert Settings(model="org/name", served_model_name=("x", "y", "x")).model_names == ("x", "y")


def test_every_setting_says_what_it_does() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description, name
        assert field.description.endswith("."), name
        assert env_name(name) == "HEADRACE_" + name.upper()


def test_no_setting_is_a_dead_knob() -> None:
    """A setting that nothing reads is a bug. Read means: `settings.<name>` somewhere in the application, or a field of
    `WorkerOptions`, which are filled by name: all but two, so a field with another name than its setting is found."""
    package = Path(app.__file__).parent
    read: set[str] = set()
    for source in package.rglob("*.py"):
        read |= {
            node.attr
            for node in ast.walk(ast.parse(source.read_text()))
            if isinstance(node, ast.Attribute) and _is_settings(node.value)
        }
    if "model_names" in read:
        read |= {"model", "served_model_name"}
    if "has_engine_processes" in read:
        read.add("engine")
    options = {field.name for field in fields(WorkerOptions)}
    assert options - Settings.model_fields.keys() == {"kv_cache_share", "runner"}
    dead = set(Settings.model_fields) - read - options
    assert not dead, f"nothing in app/ reads {sorted(dead)}"


def _is_settings(node: ast.expr) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name.lstrip("_") == "settings"


@pytest.mark.parametrize(
    "name", ["https://llm.example.com", "llm.example.com:8000", "*.example.com", "a.example/", "a.", ""]
)
def test_a_host_that_no_header_would_match_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match="allowed_hosts: got .* without scheme, port, path or pattern"):
        load_settings({"allowed_hosts": [name]})
    assert load_settings({"allowed_hosts": "LLM.example.com, *"}).allowed_hosts == ("LLM.example.com", "*")


def test_a_gguf_file_is_one_of_the_repository_or_of_the_directory(tmp_path: Path) -> None:
    def source(model: str) -> str:
        return load_settings({"model": model, "gguf_file": "Q6_K/a.gguf"}).model_source

    assert source("org/name") == "org/name:Q6_K/a.gguf"
    assert source("org/name@v2") == "org/name:Q6_K/a.gguf@v2"
    assert source(str(tmp_path)) == str(tmp_path / "Q6_K/a.gguf")
    assert load_settings({"model": "org/name:Q4_K_M@v2"}).model_source == "org/name:Q4_K_M@v2"
    with pytest.raises(
        SettingsError, match=r"gguf_file \(Q6_K/a.gguf\) names a file of model, which names a quantization"
    ):
        source("org/name:Q4_K_M")
