"""What points vanilla pip and uv at a directory of wheels: two files, and two variables at most.

Bound at ``/etc/pip.conf`` and ``/etc/uv/uv.toml`` the files alone do it. Both tools let a user's or
a project's configuration speak over those; ``environment`` takes that away. What remains are
variables (``PIP_*``, ``UV_*``) and options that say otherwise: start with ``clean_environment``,
and without a network where it must be sure.
"""

from __future__ import annotations

import json
from pathlib import PurePosixPath

from wheelmount.errors import InputError

PACKAGES = "/packages"
PIP_CONF = "/etc/pip.conf"
UV_TOML = "/etc/uv/uv.toml"


def pip_conf(packages: str = PACKAGES) -> str:
    """The text of a ``pip.conf`` with which pip installs from ``packages`` and nowhere else.

    Args:
        packages: absolute path of the directory, as pip will see it.

    Raises:
        InputError: the path is not absolute or can't be written in a file.
    """
    path = checked_path(packages)
    # pip splits the value at white space, which a URL has none of.
    links = PurePosixPath(path).as_uri() if any(c.isspace() for c in path) else path
    return (
        "# Install from the mounted directory of wheels, and from nowhere else.\n"
        "[global]\n"
        "no-index = true\n"
        f"find-links = {links}\n"
        # A requirement that is a URL still goes out; where there is no network, fail at once.
        "retries = 0\n"
        "disable-pip-version-check = true\n"
        # The system's Python of a container is there to be installed into (PEP 668).
        "break-system-packages = true\n"
        "root-user-action = ignore\n"
    )


def uv_toml(packages: str = PACKAGES, *, system: bool = True) -> str:
    """The text of a ``uv.toml`` with which uv installs from ``packages`` and nowhere else.

    Args:
        packages: absolute path of the directory, as uv will see it.
        system: whether ``uv pip install`` goes to the system's Python, as a container wants it.
            uv then passes over a virtual environment, even an active one, unless told
            ``--no-system`` or ``-p``: give False where people work in one.

    Raises:
        InputError: the path is not absolute or can't be written in a file.
    """
    # Strings of JSON without escapes beyond these are strings of TOML too.
    links = json.dumps(checked_path(packages), ensure_ascii=False)
    text = (
        "# Install from the mounted directory of wheels, and from nowhere else.\n"
        # Both: without no-index a missing package is reported as missing from uv's cache, and
        # without offline a requirement that is a URL goes out. At the top and not under [pip],
        # so that they hold for uv run, sync, add and tool too.
        "offline = true\n"
        "no-index = true\n"
        f"find-links = [{links}]\n"
        'python-downloads = "never"\n'
        # uv's cache knows a wheel by its name alone: one that was built anew would come out of it
        # as it was. It would also take the room of every package in an overlay a second time.
        "no-cache = true\n"
        # What it keeps for the moment may lie on another file system.
        'link-mode = "copy"\n'
    )
    if system:
        text += "\n[pip]\nsystem = true\nbreak-system-packages = true\n"
    return text


def environment(pip_conf: str = PIP_CONF, uv_toml: str = UV_TOML) -> dict[str, str]:
    """Variables with which the two files outrank those of users and projects.

    pip reads the file of ``PIP_CONFIG_FILE`` last and a user's own not at all; uv reads the file of
    ``UV_CONFIG_FILE`` only. They also serve where the files can't be bound under ``/etc``.

    Args:
        pip_conf: where the text of ``pip_conf`` stands.
        uv_toml: where the text of ``uv_toml`` stands.
    """
    return {"PIP_CONFIG_FILE": pip_conf, "UV_CONFIG_FILE": uv_toml}


def checked_path(packages: str) -> str:
    """The path of a directory of wheels, if it can stand in a file and on a command line.

    Raises:
        InputError: it is not absolute, or has control characters.
    """
    if not packages.startswith("/") or not packages.isprintable():
        raise InputError(f"{packages!r} is not an absolute path", hint="give one such as /packages")
    return packages
