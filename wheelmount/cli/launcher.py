"""Commands of wheelmount that end with a command of the user, whose words are not parsed."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

_ENVIRONMENT = {"named", "files", "project", "interpreter"}
"""Names of options with which a command needs no source."""


class Module(click.Option):
    """An option that is the user's command: no option of ours follows its value."""

    def add_to_parser(self, parser: click.parser._OptionParser, ctx: click.Context) -> None:
        """Register the option so that all words behind its value are arguments."""
        super().add_to_parser(parser, ctx)
        option = parser._short_opt[self.opts[0]]
        process = option.process

        def last(value: Any, state: click.parser._ParsingState) -> None:
            process(value, state)
            state.rargs.insert(0, "--")

        option.process = last  # type: ignore[method-assign]


class Launcher(click.Command):
    """Reads options only up to the first word of the user's command, with or without ``--``.

    Where one of ours stands right behind that word, without a ``--`` before it, a line says whose
    it is.

    Args:
        after_source: an argument of ours comes before it; options may stand between the two.
    """

    allow_interspersed_args = False

    def __init__(self, *arguments: Any, after_source: bool = False, **values: Any) -> None:
        super().__init__(*arguments, **values)
        self._after_source = after_source

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse options up to the user's command, and put wheelmount's argument behind them."""
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        reader = click.Command(self.name, params=list(options)).make_parser(ctx)
        given, command, _ = reader.parse_args(list(args))
        head = args[: len(args) - len(command)]
        quiet = "quiet" in given
        if self._after_source and "module" in given:
            return super().parse_args(ctx, [*head, "", *command])
        if not command or _ended(reader, head):
            return super().parse_args(ctx, args)
        if self._after_source:
            source, rest = command[0], command[1:]
            script = source == "-" or Path(source).is_file()
            if (script or _ENVIRONMENT & given.keys()) and not Path(source).is_dir():
                # The user's command itself, without a source.
                between = _ours(options, rest) if script else []
                if between:
                    _say(f"{shlex.join(between)} is read as wheelmount's own", source, quiet)
                command = [source, *rest[len(between) :]]
            else:
                more, command, _ = reader.parse_args(list(rest))
                between = rest[: len(rest) - len(command)]
                quiet = quiet or "quiet" in more
                if "module" in more or _ended(reader, between):
                    command = []
            args = [*head, *between, source, *rest[len(between) :]]
        if command and _ours(options, command[1:]):
            _say(f"{command[1]} is passed on to {command[0]}", command[0], quiet)
        return super().parse_args(ctx, args)


def _ended(reader: click.parser._OptionParser, words: Sequence[str]) -> bool:
    """Whether a ``--`` is among options, or what ends them as well."""
    return bool(reader.parse_args([*words, "--"])[1])


def _ours(options: Sequence[click.Option], words: Sequence[str]) -> list[str]:
    """The words at the beginning that are long options of ours, with their values."""
    known = {name: option for option in options for name in option.opts + option.secondary_opts}
    known.pop("--help", None)  # of the user's command
    count = 0
    while count < len(words) and words[count].startswith("--"):
        name, equals, _ = words[count].partition("=")
        if name not in known:
            break
        count += 1 if equals or known[name].is_flag else 1 + known[name].nargs
    return list(words[:count])


def _say(text: str, command: str, quiet: bool) -> None:
    if not quiet:
        own = (
            f"wheelmount's options stand before {command}, and all behind `-- {command}` is its own"
        )
        click.echo(f"note: {text}: {own}", err=True)
