"""The command that installs from a directory of wheels on a host, and the environment it needs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Literal

from wheelmount import variables
from wheelmount.errors import InputError
from wheelmount.wheels.redirect import PACKAGES, checked_path
from wheelmount.wheels.requirements import parse_requirements


def install_command(
    tool: Literal["uv", "pip"],
    requirements: Sequence[str],
    *,
    packages: str = PACKAGES,
    python: str | None = None,
    file: str | None = None,
) -> list[str]:
    """Return the command that installs requirements from a directory, offline.

    Its flags override every file and variable. Files can still add settings, so on a host run the
    command in ``clean_environment``.

    Args:
        tool: ``"uv"`` (found on ``PATH``) or ``"pip"`` (of the Python).
        requirements: PEP 508 requirements without URLs.
        packages: absolute path of the directory of wheels on the host.
        python: path of the interpreter to install for; None leaves it to the tool: ``python3`` on
            ``PATH`` for pip; for uv the active virtual environment, or what its configuration says.
        file: path of a file in it that pins all there is to install, instead of requirements; see
            ``Request.text``. Nothing is resolved then.

    Raises:
        InputError: an unknown tool, no requirement, one that is an option or a URL, or a path that
            is not absolute.
    """
    wanted = parse_requirements(requirements)
    if not wanted and file is None:
        raise InputError("nothing is required", hint="name a package")
    for requirement in wanted:
        if requirement.url is not None:
            raise InputError(
                f"{str(requirement)!r} would not come from {packages}",
                hint=f"download it beforehand and install {requirement.name!r}",
            )
    source = ["--no-index", "--find-links", checked_path(packages)]
    if tool == "uv":
        command = ["uv", "pip", "install", "--offline", "--no-python-downloads", *source]
        command += ["--python", python] if python else []
    elif tool == "pip":
        command = [python or "python3", "-m", "pip", "--isolated", "install"]
        command += ["--no-input", "--disable-pip-version-check", *source]
    else:
        raise InputError(f"{tool!r} is not an installer", hint="give uv or pip")
    if file is not None:
        return [*command, *pinned(tool), "-r", checked_path(file)]
    # Parsed requirements cannot be options; "--" shows this to readers of the command.
    return [*command, "--", *(str(requirement) for requirement in wanted)]


def pinned(tool: Literal["uv", "pip"]) -> list[str]:
    """Return options to install exactly the versions in a file that pins everything.

    uv counts a lower bound of ``Requires-Python`` only, and has chosen so.
    """
    options = ["--no-deps", "--require-hashes"]
    return [*options, "--ignore-requires-python"] if tool == "pip" else options


def clean_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return an environment without settings of pip and uv, in which they read no files of theirs.

    A host's ``/etc/pip.conf`` or ``uv.toml`` may name an index or more directories, which flags
    don't take away.

    Args:
        environ: what to start from; not changed.
    """
    kept = {
        name: value
        for name, value in variables.for_programs(environ).items()
        if not name.startswith(("PIP_", "UV_"))
    }
    return {**kept, "PIP_CONFIG_FILE": os.devnull, "UV_NO_CONFIG": "1"}
