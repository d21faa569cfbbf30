"""Commands of ours that end with a command of the user's, all of whose words are left to it."""

from __future__ import annotations

from typing import Any

import click


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
            _, rest, _ = reader.parse_args(list(args))
            head = args[: len(args) - len(rest)]
            ended = reader.parse_args([*head, "--"])[1]  # by a `--` among them
            if rest and not ended:
                _, command, _ = reader.parse_args(rest[1:])
                between = rest[1 : len(rest) - len(command)]
                args = [*head, *between, rest[0], *command]
        return super().parse_args(ctx, args)
