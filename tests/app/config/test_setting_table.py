"""Every setting, given by flag, environment and file: the same value is in force, and no other is taken for it."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import ByteSize
from pydantic.fields import FieldInfo

from app.commands.cli import main
from app.config.setting_types import is_secret, without_none
from app.config.settings import Settings, SettingsError
from app.config.sources import env_name, flag_name, load_settings

BESIDE: dict[str, dict[str, Any]] = {  # what a setting is refused without
    "kv_cache_dir_size": {"kv_cache_dir": "/tmp/kv"},
    "enable_expert_parallel": {"tensor_parallel_size": 2},
    "max_data_parallel_size": {"executor": "ray"},
}
CHOSEN: dict[str, Any] = {  # where a rule across settings, or a pattern, leaves fewer values
    "max_num_seqs": 65,
    "max_num_batched_tokens": 100,
    "metrics_prefix": "vllm_",
    "otlp_endpoint": "http://127.0.0.1:4318",
    "allowed_hosts": ["llm.example.com", "llm"],
    "allowed_origins": ["https://llm.example.com", "*"],
    "uds_mode": "0600",
}


def another(name: str, field: FieldInfo) -> Any:
    """A value that is allowed and not the default, as TOML has it."""
    if name in CHOSEN:
        return CHOSEN[name]
    annotation = without_none(field.annotation)
    if annotation is bool:
        return not field.default
    if get_origin(annotation) is Literal:
        return next(value for value in get_args(annotation) if value != field.default)
    if get_origin(annotation) in (tuple, dict):
        return ["one", "two"]
    if annotation is ByteSize:
        return 2**30
    if annotation is int:
        return 2 if field.default != 2 else 3
    if annotation is float:
        return 0.5
    return "/srv/another"


def as_text(value: Any) -> str:
    return ",".join(value) if isinstance(value, list) else json.dumps(value).strip('"')


SETTINGS = Settings.model_fields


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("HEADRACE_"):
            monkeypatch.delenv(name)


def in_force(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the output of `headrace config`, without the sources of settings."""
    assert main(["config", "--given", *arguments]) == 0
    return "\n".join(line.rpartition("  # ")[0] for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_the_same_by_flag_by_environment_and_by_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    field = SETTINGS[name]
    value = another(name, field)
    more = BESIDE.get(name, {})
    file = tmp_path / "headrace.toml"
    file.write_text("".join(f"{key} = {json.dumps(each)}\n" for key, each in {name: value, **more}.items()))
    from_file = in_force(capsys, "--config", str(file))
    if is_secret(field):
        assert from_file == f"# {name} is set and not shown"
        assert [key.get_secret_value() for key in getattr(load_settings(config_file=file), name)] == value
    else:
        is_table = get_origin(field.annotation) is dict
        assert tomllib.loads(from_file)[name] == ({each: {"model": each} for each in value} if is_table else value)
        assert getattr(load_settings(config_file=file), name) != field.default

    rest = [text for key, each in more.items() for text in (flag_name(key), as_text(each))]
    if without_none(field.annotation) is bool:
        flags = [flag_name(name) if value else flag_name(name).replace("--", "--no-", 1)]
    else:
        flags = [flag_name(name), as_text(value)]
    assert in_force(capsys, *flags, *rest) == from_file
    for key, each in {name: value, **more}.items():
        monkeypatch.setenv(env_name(key), as_text(each))
    assert in_force(capsys) == from_file
    if isinstance(value, list):
        monkeypatch.setenv(env_name(name), json.dumps(value))
        assert in_force(capsys) == from_file

    assert main(["config", *flags, *flags]) == 1
    assert f"{flags[0]} is given twice" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_a_value_of_another_kind_is_refused_by_name(name: str, tmp_path: Path) -> None:
    """Try all kinds of TOML values, also those that pydantic would convert, such as true to 1."""
    annotation = without_none(SETTINGS[name].annotation)
    wrong: list[str] = ["{ a = 1 }", "1979-05-27", "[[1]]"]
    wrong += ["[1]", "7"] if annotation is bool else ["true", "false"]
    if annotation in (int, float, ByteSize):
        wrong += ['"many"', "nan", '""', '"1 2"']
    for value in wrong:
        file = tmp_path / "headrace.toml"
        file.write_text(f"{name} = {value}\n")
        with pytest.raises(SettingsError, match=f"^{name} in .*headrace.toml: got .*; allowed: "):
            load_settings(config_file=file)
