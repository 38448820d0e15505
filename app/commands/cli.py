"""The `headrace` command: its subcommands, flags and `headrace config`.

1. Parsing imports neither torch nor a web server, so `--help` and wrong flags answer at once.
2. An expected error is one line on standard error and exit code 1 (2 if argparse refuses a flag). A traceback is a bug.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, get_origin

from app.config import sources
from app.config.setting_types import has_password, is_secret
from app.config.settings import Settings, SettingsError
from engine.errors import HeadraceError


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        parsed, rest = _parser().parse_known_args(arguments)
        code = _run(vars(parsed), rest)
        sys.stdout.flush()
        return code
    except HeadraceError as error:
        sys.stdout.flush()
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for output that is not flushed yet
        return 141  # the shell's number for SIGPIPE
    except KeyboardInterrupt:
        return 130  # the shell's number for Ctrl-C


def _run(options: dict[str, Any], rest: Sequence[str]) -> int:
    command: Command | None = options.pop("command", None)
    parser: _CommandParser = options.pop("parser")
    if rest:
        raise SettingsError(sources.unknown_flag(rest[0].partition("=")[0], parser.flags, parser.prog))
    if command is None:
        parser.print_help()
        return 0
    if not command.takes_settings:
        return command.run(**options)
    config_file = options.pop("config")
    flags = {name: options.pop(name) for name in Settings.model_fields if name in options}
    given = sources.given_settings(flags, config_file)
    if command.wants_sources:
        options["given"] = given
    return command.run(sources.check_settings(given), **options)


def serve(settings: Settings) -> int:
    """Answer HTTP until SIGTERM or Ctrl-C."""
    import anyio

    from app.http.listening import Certificate, inherited_listener
    from app.runtime import frozen_imports
    from app.serving.process import ignore_hangup

    ignore_hangup(settings)
    certificate = Certificate.of(settings)
    inherited = inherited_listener()
    with frozen_imports("app.application"):
        from app.serving.process import bind, run

        listener = inherited or bind(settings)  # before the model is loaded, so that a port in use fails at once

        from app.application import create_app

    # The application handles signals itself. A second receiver would take the first signal, and on asyncio restore the
    # default action for the next one.
    application = create_app(settings, inherited=inherited is not None, certificate=certificate)
    run(application, settings, listener, anyio.sleep_forever, certificate)
    return 0


def pull(settings: Settings) -> int:
    """Download the model and check it, so that the server starts without a network."""
    from app.library import loading  # imports numpy and the engine, which `--help` does not need
    from gpu.checkpoint import open_model

    with loading() as progress:
        files = open_model(
            settings.model_source,
            cache_dir=settings.cache_dir,
            load_format=settings.load_format,
            model_impl=settings.model_impl,
            progress=progress,
        )
    print(f"{files.name} is complete.")
    return 0


def list_models(settings: Settings) -> int:
    """List the models that were fetched, by the names under which they can be served."""
    from gpu.checkpoint import models_here

    models = list(models_here(settings.cache_dir))
    width = max((len(name) for name, _, _ in models), default=0)
    for name, size, state in models:
        print(f"{name:{width}}  {size / 1e9:7.2f} GB  {state}")
    if not models:
        print("No model was fetched yet. `headrace pull MODEL` fetches one.")
    return 0


class Command(NamedTuple):
    """A subcommand: it calls `run(settings, **own)`, or `run(**own)` if it takes no settings."""

    run: Callable[..., int]
    summary: str
    add_flags: Callable[[ArgumentParser], None] = lambda _: None  # adds its own flags
    takes_settings: bool = True
    wants_sources: bool = False  # `run(settings, given=...)`: the value and source of each setting
    in_help: Collection[str] = tuple(Settings.model_fields)  # settings that `--help` lists

    @classmethod
    def of(cls, run: Callable[..., int], **more: Any) -> Command:
        """Return the command of a function of this module, with its docstring as help."""
        return cls(run, (run.__doc__ or "").strip(), **more)

    @classmethod
    def at(cls, module: str, summary: str, **more: Any) -> Command:
        """Return the command that calls a module's `run` with the flags of `add_flags`; for "module:name", its `name`
        with those of `add_name_flags`. The module is imported when the command runs."""
        module, _, name = module.partition(":")

        def run(*settings: Settings, **own: Any) -> int:
            return int(getattr(import_module(module), name or "run")(*settings, **own))

        def add_flags(parser: ArgumentParser) -> None:
            getattr(import_module(module), f"add_{name}_flags" if name else "add_flags")(parser)

        return cls(run, summary, add_flags, **more)


class CommandGroup(NamedTuple):
    """Subcommands behind a common first word."""

    summary: str
    commands: Mapping[str, Command]


SHORT_FLAGS = {  # as vLLM has them
    "tensor_parallel_size": ("-tp",),
    "pipeline_parallel_size": ("-pp",),
    "data_parallel_size": ("-dp",),
    "enable_expert_parallel": ("-ep",),
}
MOST_USED = (
    *("model", "host", "port", "api_keys", "max_model_len", "dtype", "quantization", "device"),
    *("kv_cache_memory", "max_num_seqs", "tensor_parallel_size", "max_queue_time"),
)
GROUPS = {  # the title of each group in `--help`, by its first setting in the order of `Settings`
    "model": "the model",
    "engine": "the engine",
    "models": "several models",
    "host": "the server",
    "log_level": "logs, metrics and traces",
}
OF_THE_ENGINE = tuple(takewhile(lambda name: name != "models", Settings.model_fields))
COMMANDS: dict[str, Command | CommandGroup] = {
    "serve": Command.of(serve),
    "chat": Command.at(
        "app.commands.chat",
        "Talk to a model in the terminal. A question after the model, or standard input, is answered once.",
        in_help=OF_THE_ENGINE,
    ),
    "run-batch": Command.at(
        "app.commands.run_batch", "Answer a file of requests, without a server.", in_help=OF_THE_ENGINE
    ),
    "pull": Command.of(pull, in_help=("model", "gguf_file", "load_format", "cache_dir")),
    "list": Command.of(list_models, in_help=("cache_dir",)),
    "config": Command.at(
        "app.commands.cli", "Show the settings in force, and where each comes from.", wants_sources=True
    ),
    "doctor": Command.at("app.commands.doctor", "Check this machine for what prevents or slows down serving."),
    "top": Command.at(
        "app.commands.top", "Watch a running server in the terminal.", in_help=("port", "api_keys", "admin_keys")
    ),
    "simulate": Command.at(
        "app.simulate.command",
        "Predict a server's figures under a load, without running it.",
        in_help=(
            *(*OF_THE_ENGINE, "max_queued_requests", "max_queued_tokens", "max_queue_time", "default_timeout"),
            *("models", "memory"),
        ),
    ),
    "bench": CommandGroup(
        "Measure a server, or the model without a server.",
        {
            "serve": Command.at("app.bench.serve", "Measure a server over HTTP.", takes_settings=False),
            "latency": Command.at(
                "app.bench.offline:latency", "Time one batch, without a server.", in_help=OF_THE_ENGINE
            ),
            "throughput": Command.at(
                "app.bench.offline:throughput",
                "Generate for many prompts at once, without a server.",
                in_help=OF_THE_ENGINE,
            ),
            "startup": Command.at("app.bench.offline:startup", "Start servers, cold and warm.", in_help=OF_THE_ENGINE),
        },
    ),
}


class _CommandParser(ArgumentParser):
    """Adds the flags of its command when it first parses, so that only the flags of one command are built."""

    def __init__(self, *, command: Command | None = None, **options: Any) -> None:
        # No abbreviations: a prefix that is unique today may be ambiguous after the next release.
        super().__init__(allow_abbrev=False, **options)
        self._command = command

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if (command := self._command) is not None:
            self._command = None
            self.set_defaults(command=command, parser=self)
            command.add_flags(self)
            if command.takes_settings:
                _add_settings(self, command.in_help)
        return super().parse_known_args(args, namespace)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            near = difflib.get_close_matches(value, action.choices, n=1)
            meant = f"Did you mean `{self.prog} {near[0]}`?" if near else f"`{self.prog} --help` lists the commands."
            raise SettingsError(f"there is no command {value!r}. {meant}")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        if found := re.fullmatch(r"argument (\S+): invalid (int|float) value: (.*)", message):
            message = f"{found[1]}: got {found[3]}; allowed: a {'whole ' if found[2] == 'int' else ''}number"
        super().error(message)

    @property
    def flags(self) -> list[str]:
        return list(self._option_string_actions)


class _Once(argparse.Action):
    """Accept a setting's flag once. Without this, argparse silently keeps the last of two values."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if not option_string:
            _refuse_value(values)
        if hasattr(namespace, self.dest):
            # A misspelled flag leaves its value to be taken for the model.
            both = f": {namespace.model!r} and {values!r}. Is a flag misspelled?" if self.dest == "model" else "."
            raise SettingsError(f"{option_string or 'the model'} is given twice{both} Give it once{self.const}")
        if isinstance(values, list):  # with blanks between them, as users of vLLM write names
            if len(values) > 1 and not hasattr(namespace, "model"):
                raise SettingsError(f"{option_string}: name the model before it, or write commas between the values")
            values = ",".join(values)
        setattr(namespace, self.dest, values)


def _refuse_value(text: str) -> None:
    """Refuse what is the value of a flag, and no model."""
    if text.lower() in ("true", "false"):
        raise SettingsError(f"{text!r} is no model: flags such as --log-requests and --no-log-requests take no value")
    if re.fullmatch("[kmgt]i?b", text, re.IGNORECASE):
        raise SettingsError(f"{text!r} is no model: write a size without a blank, such as 2GiB")


class _ModelAndQuestion(_Once):
    """Accept a model, a question, or both. A single argument is a question if it has a blank or a question mark, or is
    a word that names no file; with `--url` the word may be one of the server's models."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        _refuse_value(values[0])
        is_word = values[0].rstrip(".!").isalpha() and not Path(values[0]).exists()
        if len(values) > 1 or is_word or re.search(r"[\s?]", values[0]):
            *values, namespace.question = values
        for model in values:
            super().__call__(parser, namespace, model)


class _Several(_Once):
    """Accept `--model` several times, for a server of several models."""

    given: tuple[str, ...] = ()

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        is_next = values not in self.given and (len(self.given) > 1 or not hasattr(namespace, "models"))
        if self.given and is_next:
            namespace.models = json.dumps([*self.given, values])
        else:
            super().__call__(parser, namespace, values, option_string)
        self.given = (*self.given, values)


class _OnceOrNot(argparse.BooleanOptionalAction):
    """Accept one of ``--flag`` and ``--no-flag``, once."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if hasattr(namespace, self.dest):
            raise SettingsError(
                f"{option_string} is given twice, or together with its opposite. Give one of them, once"
            )
        super().__call__(parser, namespace, values, option_string)


def _parser() -> ArgumentParser:
    parser = _CommandParser(
        prog="headrace", description="A server of the OpenAI and Anthropic APIs for large language models."
    )
    parser.add_argument("--version", action="version", version=f"headrace {_version()}")
    _add_commands(parser, COMMANDS)
    return parser


def _add_commands(parser: ArgumentParser, commands: Mapping[str, Command | CommandGroup]) -> None:
    parser.set_defaults(parser=parser)
    children = parser.add_subparsers(title="commands", metavar=f"{{{','.join(commands)}}}", parser_class=_CommandParser)
    for name, entry in commands.items():
        about: dict[str, Any] = {"help": entry.summary, "description": entry.summary}
        if isinstance(entry, CommandGroup):
            _add_commands(children.add_parser(name, **about), entry.commands)
            continue
        about["usage"] = f"{parser.prog} {name} [--FLAG VALUE ...]"
        if entry.takes_settings:
            model = "[MODEL] " if "model" in entry.in_help else ""
            about["usage"] = f"{parser.prog} {name} {model}[--config FILE] [--SETTING VALUE ...]"
            examples = f"For example: {parser.prog} serve Qwen/Qwen3-0.6B --port 9000. " * (name == "serve")
            about["epilog"] = (
                f"{examples}Each setting is also an environment variable ({sources.flag_name('max_num_seqs')} is "
                f"{sources.env_name('max_num_seqs')}) and a key of the TOML file (max_num_seqs). A flag wins over the "
                "environment, the environment over the file."
            )
        children.add_parser(name, command=entry, **about)


def _version() -> str:
    try:
        return version("headrace")
    except PackageNotFoundError:
        return "(run from its sources, not installed)"


def _add_settings(parser: ArgumentParser, in_help: Collection[str]) -> None:
    every = len(in_help) == len(Settings.model_fields)
    others = None if every else "All others work too: see headrace serve --help."
    settings = parser.add_argument_group("the settings that matter most" if every else "settings", others)
    if "model" in in_help:
        takes_question = parser.get_default("question") is not None
        settings.add_argument(
            "model",
            nargs="*" if takes_question else "?",
            default=argparse.SUPPRESS,
            action=_ModelAndQuestion if takes_question else _Once,
            const="",
            help="--model's value.",
        )
    settings.add_argument(
        "--config", type=Path, metavar="FILE", help=f"TOML file of settings. Or {sources.CONFIG_VARIABLE}."
    )
    groups, group = dict.fromkeys(MOST_USED, settings), settings
    for name in Settings.model_fields:
        group = parser.add_argument_group(GROUPS[name]) if name in GROUPS and every else group
        groups.setdefault(name, group)
    for name, group in groups.items():
        field = Settings.model_fields[name]
        # Values stay text here: pydantic checks them, with the same errors as for the environment and the file.
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": name, "action": _Once}
        default = "" if field.default in (None, ()) else f" Default: {sources.shown(field.default)}."
        if field.annotation is bool:
            options |= {"action": _OnceOrNot, "help": f"{field.description}{default}"}
        else:
            limits = sources.allowed_values(field)
            options["const"] = ", with commas between the values" if get_origin(field.annotation) is tuple else ""
            options |= {"metavar": "VALUE", "help": f"{field.description} ({limits}){default}".replace("%", "%%")}
        if name == "served_model_name":
            options["nargs"] = "+"
        if name == "model" and "models" in in_help:
            options["action"] = _Several
        if name not in in_help:
            options["help"] = argparse.SUPPRESS
        group.add_argument(sources.flag_name(name), *SHORT_FLAGS.get(name, ()), **options)


if __name__ == "__main__":
    sys.exit(main())


# ------------------------------------------------------------------------------------------------------- config command
# `headrace config`: the settings in force as a settings file, with the source of each.


def add_flags(parser: ArgumentParser) -> None:
    shown = parser.add_argument_group("what is shown")
    shown.add_argument("--given", dest="only_given", action="store_true", help="Leave the defaults out.")


def run(settings: Settings, *, given: Mapping[str, sources.Given], only_given: bool) -> int:
    """Print TOML that `--config` accepts, without the values of secrets."""
    for name, field in Settings.model_fields.items():
        if name not in given and only_given:
            continue
        value, source = getattr(settings, name), given[name].where if name in given else "default"
        if value is None or (is_secret(field) and not value):
            line = f"# {name} is not set"
        elif is_secret(field) or has_password(value):
            line = f"# {name} is set and not shown"
        else:
            line = f"{name} = {_toml(value)}"
        print(f"{line}  # {source}")
    return 0


def _toml(value: Any) -> str:
    """Return a TOML value. JSON's form is TOML's, except for objects."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(each)}" for key, each in value.items()) + "}"
    plain = list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value
    return json.dumps(plain, ensure_ascii=False)
