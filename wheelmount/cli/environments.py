"""``wheelmount env``, and the options of commands that run in an environment."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wheelmount import config
from wheelmount.cli import completion, options
from wheelmount.errors import InputError
from wheelmount.progress import number_of
from wheelmount.wheels.inline import Inline

if TYPE_CHECKING:  # imported where an environment is wanted: loading takes longer than a command
    from wheelmount.operations.environments import Needed


def environment(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for an environment; passes ``needed``, a function of the script's metadata.

    The function returns None if neither an option nor the script asks for an environment.
    """

    @click.option(
        "--with",
        "named",
        multiple=True,
        metavar="PACKAGE",
        help="Run in an environment with this package, made here and mounted on the hosts. "
        "Several: with commas between, or repeated.",
    )
    @options.requirement_files(
        "Add the packages of a requirements file, pyproject.toml, uv.lock or pylock.toml."
    )
    @click.option(
        "--project",
        type=options.GivenPath(path_type=Path, file_okay=False, exists=True),
        help="Add the dependencies of the project in this directory: of its uv.lock, or else of "
        "its pyproject.toml.",
    )
    @click.option(
        "--python",
        "interpreter",
        default="",
        metavar="VERSION",
        help="Bring this version of Python along, one that uv manages; hosts need no Python then.",
    )
    @click.option("--extra", "extras", multiple=True, help="Extra of the project.")
    @click.option("--group", "groups", multiple=True, help="Dependency group of the project.")
    @options.indexes()
    @click.option(
        "-U",
        "--upgrade",
        is_flag=True,
        help="Take the newest versions instead of those of last time.",
    )
    @wraps(command)
    def wrapped(
        *arguments: Any,
        named: tuple[str, ...],
        files: tuple[str, ...],
        project: Path | None,
        extras: tuple[str, ...],
        groups: tuple[str, ...],
        upgrade: bool,
        interpreter: str,
        **values: Any,
    ) -> Any:
        def needed(inline: Inline | None = None) -> Needed | None:
            asked = named or files or project is not None or interpreter
            if inline is None and not asked:
                if extras or groups:
                    raise InputError("extras and groups of which project?", hint="give --project")
                return None
            from wheelmount.operations.environments import Needed
            from wheelmount.wheels.given import file_of
            from wheelmount.wheels.uvsettings import PROJECT_NAME
            from wheelmount.wheels.wanted import UV_LOCK_NAME

            packages = [one for text in named for one in _split(text)]
            place = config.load().private_runtime() / "given"
            paths = [file_of(one, place) for one in files]
            if project is not None:
                locked = (project / UV_LOCK_NAME).is_file()
                paths.append(project / (UV_LOCK_NAME if locked else PROJECT_NAME))
            return Needed.of(
                packages,
                paths,
                inline,
                extras=extras,
                groups=groups,
                upgrade=upgrade,
                interpreter=interpreter,
            )

        return command(*arguments, needed=needed, **values)

    return wrapped


def _split(text: str) -> list[str]:
    """Split packages at commas, except commas inside extras and version ranges."""
    parts: list[str] = []
    for part in text.split(","):
        inside = parts and parts[-1].count("[") > parts[-1].count("]")
        if inside or (parts and part.strip()[:1] in ("<", ">", "=", "!", "~")):
            parts[-1] += f",{part}"
        else:
            parts.append(part)
    return [part.strip() for part in parts]


@click.group()
def env() -> None:
    """List and remove the environments made by `run --with`, `-r` and `--project`."""


@env.command("ls")
@options.as_json
def env_ls(as_json: bool) -> None:
    """List environments, least recently used first: name, Python and packages."""
    from wheelmount.operations import cache
    from wheelmount.wheels import venv

    settings = config.load()
    known = {one.folder: one for one in venv.every(Path(settings.cache_dir))}
    found = [one for one in cache.items(settings, "environment") if one.path in known]
    if as_json:
        records = [
            {
                "name": item.path.name,
                "path": str(item.path),
                "python": known[item.path].python,
                "packages": known[item.path].packages,
                "bytes": item.size,
                "used": item.used,
            }
            for item in found
        ]
        print(json.dumps(records))
        return
    for item in found:
        one = known[item.path]
        first = " ".join(one.packages[:6]) + (" …" if one.packages[6:] else "")
        packages = number_of(len(one.packages), "package")
        print(f"{item.path.name}  Python {one.python}  {packages}: {first}")


@env.command("rm")
@click.argument("names", nargs=-1, required=True, shell_complete=completion.environments)
@options.as_json
def env_rm(names: tuple[str, ...], as_json: bool) -> None:
    """Remove environments from the cache; the wheels they were made of stay there."""
    from wheelmount.operations import environments

    removed = [one.folder.name for one in environments.remove(names, config.load())]
    if as_json:
        print(json.dumps(removed))
        return
    for name in removed:
        print(f"{name} removed")
