"""The command line: `headrace serve`, `headrace chat`, `headrace pull`.

The flags are the fields of `app.settings.Settings`. Parsing imports neither torch nor a web server, so `--help` and
typing errors answer at once. What goes wrong on purpose ends in one last line on standard error and exit code 1
(2 for what argparse refuses); a traceback is a bug.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from app.progress import loading
from app.setting_sources import (
    CONFIG_VARIABLE,
    allowed_values,
    env_name,
    flag_name,
    load_settings,
    shown,
    unknown_setting,
)
from app.settings import Settings, SettingsError
from engine.errors import HeadraceError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    parsed, rest = _parser().parse_known_args(arguments)
    options = vars(parsed)
    command = options.pop("command")
    config_file = options.pop("config")
    flags = {name: options.pop(name) for name in Settings.model_fields if name in options}
    try:
        if rest:
            raise SettingsError(unknown_setting(rest[0].partition("=")[0], map(flag_name, Settings.model_fields)))
        return command(load_settings(flags, config_file), **options)
    except HeadraceError as error:
        sys.stdout.flush()
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130  # the shell's number for Ctrl-C


def serve(settings: Settings) -> int:
    """Answer HTTP until SIGTERM or Ctrl-C."""
    from app.frozen_imports import frozen_imports

    with frozen_imports("app.application"):
        from app.runner import bind, run

        listener = bind(settings)  # before anything is loaded: a port in use is known at once

        from app.application import create_app

    run(create_app(settings), settings, listener)
    return 0


def pull(settings: Settings) -> int:
    """Fetch the model and check it, so that the server starts without a network."""
    from gpu.checkpoint import open_model

    with loading() as progress:
        files = open_model(
            settings.model, cache_dir=settings.cache_dir, load_format=settings.load_format, progress=progress
        )
    print(f"{files.name} is here.")
    return 0


def chat(settings: Settings, *, url: str | None, system: str | None, temperature: float | None) -> int:
    """Talk to a model in the terminal."""
    from app.chat import chat_here, chat_with

    if url is not None:
        return chat_with(url, settings, system=system, temperature=temperature)
    return chat_here(settings, system=system, temperature=temperature)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headrace",
        description="A server of the OpenAI and Anthropic APIs for large language models.",
    )
    parser.add_argument("--version", action="version", version=f"headrace {_version()}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="{serve,chat,pull}")
    for function in (serve, chat, pull):
        summary = (function.__doc__ or "").strip()
        command = commands.add_parser(
            function.__name__,
            help=summary,
            description=summary,
            epilog=f"Each flag is also an environment variable ({flag_name('max_num_seqs')} is "
            f"{env_name('max_num_seqs')}) and a key of the TOML file (max_num_seqs). A flag wins over the environment, "
            "the environment over the file.",
            usage=f"headrace {function.__name__} [--config FILE] [--SETTING VALUE ...]",
            allow_abbrev=False,  # a prefix that is unique today is ambiguous after the next release
        )
        command.set_defaults(command=function)
        if function is chat:
            _add_chat_flags(command)
        _add_settings(command)
    return parser


def _version() -> str:
    try:
        return version("headrace")
    except PackageNotFoundError:
        return "(run from its sources, not installed)"


def _add_chat_flags(parser: argparse.ArgumentParser) -> None:
    talk = parser.add_argument_group("the conversation")
    talk.add_argument("--url", help="Talk to a server that runs, such as http://127.0.0.1:8000. Default: run one here.")
    talk.add_argument("--system", help="The system prompt.")
    talk.add_argument("--temperature", type=float, help="0 is greedy. Default: the server's.")


def _add_settings(parser: argparse.ArgumentParser) -> None:
    settings = parser.add_argument_group("settings")
    settings.add_argument("--config", type=Path, metavar="FILE", help=f"TOML file of settings. Or {CONFIG_VARIABLE}.")
    for name, field in Settings.model_fields.items():
        # Values stay text here: pydantic checks them, with the same words as in the environment and the file.
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": name}
        default = "" if field.default in (None, ()) else f" Default: {shown(field.default)}."
        if field.annotation is bool:
            options |= {"action": argparse.BooleanOptionalAction, "help": f"{field.description}{default}"}
        else:
            limits = allowed_values(field)
            options |= {"metavar": "VALUE", "help": f"{field.description} ({limits}){default}".replace("%", "%%")}
        settings.add_argument(flag_name(name), **options)


if __name__ == "__main__":
    sys.exit(main())
