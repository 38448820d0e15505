"""What the command line promises before there is a model."""

from __future__ import annotations

import os
import runpy
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.commands.cli import GROUPS, MOST_USED, main
from app.config.settings import Settings
from app.config.sources import _OF_VLLM, env_name, flag_name, unknown_flag, unknown_setting

pytestmark = pytest.mark.seconds

HEADRACE = [sys.executable, "-m", "app.commands.cli"]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")} | environment
    return subprocess.run([*HEADRACE, *arguments], capture_output=True, text=True, env=env, check=False)


def test_help_lists_every_setting_with_its_range(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["serve", "--help"])
    assert left.value.code == 0
    page = " ".join(capsys.readouterr().out.split())
    for name in Settings.model_fields:
        assert flag_name(name) in page
    assert "(a whole number, 0 to 65535) Default: 8000." in page
    assert "Default: enable_thinking, thinking," in page


@pytest.mark.parametrize(
    ("command", "told"),
    [("chat", "--max-model-len"), ("pull", "--cache-dir"), ("list", "--cache-dir"), ("top", "--admin-keys")],
)
def test_help_of_other_commands_lists_the_settings_that_matter_there(
    command: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    page = " ".join(capsys.readouterr().out.split())
    assert told in page
    assert "--sse-keep-alive" not in page
    assert "All others work too: see headrace serve --help." in page


@pytest.mark.parametrize("words", [[], ["bench"]], ids=str)
def test_without_a_command_there_is_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    assert f"usage: {' '.join(['headrace', *words])} [-h]" in capsys.readouterr().out
    assert main([*words, "--prot"]) == 1
    assert "'--prot'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ["--model=A", "--model=A"],
        ["--log-requests", "--no-log-requests"],
        ["-tp", "2", "-tp", "2"],
    ],
    ids=str,
)
def test_a_flag_that_is_given_twice_is_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Without the check, one of two models would be ignored silently."""
    assert main(["serve", *flags]) == 1
    assert "given twice" in capsys.readouterr().err


def test_a_model_that_is_given_several_times_makes_a_server_of_several(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--given", "--model", "a", "--model", "org/b", "--model", "c"]) == 0
    models = '{"a" = {"model" = "a"}, "org/b" = {"model" = "org/b"}, "c" = {"model" = "c"}}'
    assert f"models = {models}" in capsys.readouterr().out
    assert main(["config", "a", "--model", "b"]) == 1
    assert main(["chat", "--model", "a", "--model", "b"]) == 1


def test_names_with_blanks_between_them_are_taken_after_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    """Users of vLLM write names like this. If the flag came before the model, the model would be taken for a name."""
    assert main(["config", "org/name", "--served-model-name", "a", "b", "--port", "1"]) == 0
    assert 'served_model_name = ["a", "b"]' in capsys.readouterr().out
    assert main(["config", "--served-model-name", "a", "org/name"]) == 1
    assert "--served-model-name: name the model before it, or write commas" in capsys.readouterr().err


def test_parsing_imports_neither_torch_nor_a_web_server() -> None:
    code = """
    import contextlib, sys
    from app.commands.cli import main
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(None):
        main(["serve", "--help"])
    print(sorted({m.split(".")[0] for m in sys.modules} & {"torch", "starlette", "hypercorn", "tokenizers", "numpy"}))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_wrong_value_is_one_line_without_a_traceback() -> None:
    done = run("serve", "--port", "eighty")
    assert done.returncode == 1
    assert done.stderr == "error: --port: got 'eighty'; allowed: a whole number, 0 to 65535. A value that works: 8000\n"


def test_a_key_is_not_echoed() -> None:
    done = run("serve", "--port", "eighty", HEADRACE_API_KEYS="sk-secret")
    assert done.returncode == 1
    assert "sk-secret" not in done.stdout + done.stderr


def test_a_prefix_of_a_flag_is_no_flag() -> None:
    done = run("serve", "--max-num", "3")
    assert done.returncode == 1
    assert "'--max-num'" in done.stderr


def test_a_mistyped_flag_is_told_with_the_one_that_was_meant() -> None:
    done = run("serve", "--prot=secret")
    assert done.returncode == 1
    assert done.stderr == "error: there is no setting '--prot'. Did you mean --port?\n"


def test_flags_of_vllm_are_told_by_what_they_mean() -> None:
    known = {env_name(name): name for name in Settings.model_fields}
    assert "Did you mean HEADRACE_DRAIN_TIMEOUT?" in unknown_setting("HEADRACE_SHUTDOWN_TIMEOUT", known)
    flags = [flag_name(name) for name in Settings.model_fields]
    assert "Did you mean --cache-dir?" in unknown_flag("--download-dir", flags, "headrace serve")
    for removed in ("TRACE_NAMES", "TRACE_SAMPLE_RATIO", "RESPONSE_STORE_AGE", "ROUTES_WITHOUT_V1"):
        message = unknown_setting(f"HEADRACE_{removed}", known)
        assert "Did you mean" not in message, f"a setting of version 0.1, for which {message} is no substitute"
    assert "Did you mean" not in unknown_flag("--enable-ssl-refresh", flags, "headrace serve"), (
        "nothing like it is here"
    )
    assert {meant for meant in _OF_VLLM.values() if meant and " " not in meant} <= Settings.model_fields.keys()


VLLM_FLAGS = """
    --enforce-eager --swap-space --enable-chunked-prefill --trust-remote-code --disable-log-requests
    --disable-log-stats --enable-auto-tool-choice --tool-call-parser --max-seq-len-to-capture --cpu-offload-gb
    --distributed-executor-backend --tokenizer --revision --hf-token --enable-lora --speculative-config --task
    --guided-decoding-backend --hf-overrides --compilation-config --download-dir --api-key --async-scheduling
    --kv-cache-memory-bytes --uvicorn-log-level --max-logprobs --scheduling-policy --root-path"""


@pytest.mark.parametrize("flag", VLLM_FLAGS.split())
def test_a_flag_of_vllm_is_answered_with_what_to_do(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", flag, "1"]) == 1
    said = capsys.readouterr().err
    assert flag in said
    assert any(
        words in said for words in ("Did you mean --", "Leave it out", "What works", "Write it", "not supported")
    )


def test_values_of_vllm_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--given", "--dtype", "half", "--kv-cache-dtype", "fp8_e4m3"]) == 0
    assert capsys.readouterr().out == 'dtype = "float16"  # --dtype\nkv_cache_dtype = "fp8"  # --kv-cache-dtype\n'


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serv"], "there is no command 'serv'. Did you mean `headrace serve`?"),
        (["bench", "latancy"], "Did you mean `headrace bench latency`?"),
        (["zzz"], "`headrace --help` lists the commands."),
        (["serve", "--enable-prefix-caching", "false"], "'false' is no model: flags such as"),
        (["serve", "--kv-cache-memory", "2", "GB"], "'GB' is no model: write a size without a blank, such as 2GiB"),
        (["serve", "--quantization", "awq"], "none, int8 or int4. A value that works: none. Quantized files need none"),
    ],
)
def test_a_slip_is_answered_with_what_was_meant(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 1
    assert said in capsys.readouterr().err


def test_the_page_of_commands_and_settings_is_as_the_program_has_them() -> None:
    docs = Path(__file__).parents[3] / "docs"
    page = (docs / "cli.md").read_text()
    assert runpy.run_path(str(docs / "cli_tables.py"))["written"](page) == page, "run python docs/cli_tables.py"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("simulate", "--request-rate", "x"), "error: --request-rate: got 'x'; allowed: a number\n"),
        (("bench", "serve", "--num-prompts", "many"), "error: --num-prompts: got 'many'; allowed: a whole number\n"),
    ],
    ids=lambda value: value[-2] if isinstance(value, tuple) else "",
)
def test_a_flag_that_wants_a_number_says_so(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert capsys.readouterr().err.endswith(words)


def test_the_help_begins_with_twelve_settings_and_groups_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    page = capsys.readouterr().out
    titles = ["the settings that matter most:", *(f"\n{title}:" for title in GROUPS.values())]
    places = [page.index(title) for title in titles]
    assert places == sorted(places)
    assert all(page.index(f"  {flag_name(name)} ") < places[1] for name in MOST_USED)
    assert len(MOST_USED) == 12
    assert "headrace serve Qwen/Qwen3-0.6B --port 9000" in " ".join(page.split())


@pytest.mark.slow
def test_the_model_needs_no_flag_and_a_second_word_is_refused() -> None:
    done = run("pull", "--cache-dir", "/nowhere", "org/model/file", "--load-format", "dummy")
    assert done.stderr.startswith("error: There is no model 'org/model/file'. A model is one of: ")
    done = run("serve", "org/model", "more", "--port", "9000")
    assert done.stderr == "error: 'more' is not a flag. Only the model is given without a flag: headrace serve MODEL\n"
    twice = "is given twice: '4' and 'org/model'. Is a flag misspelled? Give it once\n"
    assert run("serve", "--max-num-seq", "4", "--model", "org/model").stderr == f"error: --model {twice}"
    assert run("serve", "--model", "4", "org/model").stderr == f"error: the model {twice}"


SIGNALLED = """
import os, sys
import app.__main__

class SignalAtImport:
    def find_spec(self, name, *_):
        if name == "app.commands.cli":
            os.kill(os.getpid(), number)

number = int(sys.argv.pop(1))
sys.meta_path.insert(0, SignalAtImport())
sys.exit(app.__main__.main())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_during_the_first_imports_leaves_no_traceback_and_a_server(number: signal.Signals) -> None:
    """Ctrl-C ends it; SIGHUP means nothing yet to a server that has no terminal."""
    command = [sys.executable, "-c", SIGNALLED, str(int(number)), "serve", "--prot", "1"]  # ends when all is imported
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if number is signal.SIGHUP:
        assert (done.returncode, done.stderr) == (1, "error: there is no setting '--prot'. Did you mean --port?\n")
    else:
        assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_ctrl_c_just_before_the_server_takes_signals_ends_it() -> None:
    """The model's name ends a server that has lost the signal, with code 1."""
    program = """
import os, signal, sys
import app.application
from app.__main__ import main

def end_with_parent(original=app.application.end_with_parent):
    os.kill(os.getpid(), signal.SIGINT)  # in the lifespan's start, before its first task runs
    original()

app.application.end_with_parent = end_with_parent
sys.argv = ["headrace", "serve", "--port", "0", "--model", "/no/such-model"]
sys.exit(main())
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_port_in_use_is_known_before_the_model_is_loaded(taken_port: int) -> None:
    # A model that does not exist: whoever tried to load it first would complain about that instead.
    done = run("serve", "--port", str(taken_port), "--model", "no/such-model")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"error: Port {taken_port} on 127.0.0.1 is in use. Stop what listens there, or take another: "
        f"headrace serve --port {taken_port + 1}"
    )


def test_an_address_of_another_machine_is_refused() -> None:
    done = run("serve", "--host", "192.0.2.1")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: host: got '192.0.2.1'")


def test_chat_with_nobody_there_says_whom_it_asked(taken_port: int) -> None:
    done = run("chat", "--url", "ftp://127.0.0.1")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free_port = listener.getsockname()[1]
    done = run("chat", "--url", f"http://127.0.0.1:{free_port}", "Is this a question?")
    assert done.returncode == 1
    assert f"No answer from http://127.0.0.1:{free_port}" in done.stderr
