"""Commands of ours that end with a command of the user's, all of whose words are left to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

_ENVIRONMENT = {"named", "files", "project", "interpreter"}
"""Names of options with which a command needs no source."""


class Launcher(click.Command):
    """Reads options only up to the first word of the user's command, with or without ``--``.

    Args:
        after_source: an argument of ours comes before it; options may stand between the two.
    """

    allow_interspersed_args = False

    def __init__(self, *arguments: Any, after_source: bool = False, **values: Any) -> None:
        super().__init__(*arguments, **values)
        self._after_source = after_source

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See ``click.Command``; our argument is put behind our options."""
        if self._after_source:
            options = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
            reader = click.Command(self.name, params=list(options)).make_parser(ctx)
            given, rest, _ = reader.parse_args(list(args))
            head = args[: len(args) - len(rest)]
            ended = reader.parse_args([*head, "--"])[1]  # by a `--` among them
            if rest and not ended:
                between = rest[1:]
                # The user's command itself, without a source: unknown ones are its own.
                alone = rest[0] == "-" or Path(rest[0]).is_file() or _ENVIRONMENT & given.keys()
                if alone and not Path(rest[0]).is_dir():
                    between = _known(reader, between)
                _, command, _ = reader.parse_args(list(between))
                between = between[: len(between) - len(command)]
                args = [*head, *between, rest[0], *rest[1 + len(between) :]]
        return super().parse_args(ctx, args)


def _known(reader: click.parser._OptionParser, words: list[str]) -> list[str]:
    """The words before the first option that is not ours."""
    try:
        reader.parse_args(list(words))
    except click.NoSuchOption as error:
        first = next((n for n, word in enumerate(words) if word.startswith(error.option_name)), 0)
        return words[:first]
    return words
