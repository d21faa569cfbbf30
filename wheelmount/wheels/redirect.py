"""Configure plain pip and uv for a directory of wheels: two files, and at most two variables.

Bound at ``/etc/pip.conf`` and ``/etc/uv/uv.toml``, the files suffice. The configuration of a user
or a project overrides them; the variables of ``environment`` prevent that. Other variables
(``PIP_*``, ``UV_*``) and options still override the files: start from ``clean_environment``, and
without a network to be sure.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath

import wheelmount
from wheelmount.errors import InputError

PACKAGES = "/packages"
PIP_CONF = "/etc/pip.conf"
UV_TOML = "/etc/uv/uv.toml"


def pip_conf(packages: str = PACKAGES) -> str:
    """Return a ``pip.conf`` with which pip installs from one directory only.

    Args:
        packages: absolute path of the directory, as pip will see it.

    Raises:
        InputError: the path is not absolute or can't be written in a file.
    """
    path = checked_path(packages)
    # A URL, because pip splits the value at white space.
    links = PurePosixPath(path).as_uri() if any(c.isspace() for c in path) else path
    return _file("pip.conf").replace(f"find-links = {PACKAGES}\n", f"find-links = {links}\n")


def uv_toml(packages: str = PACKAGES, *, system: bool = True) -> str:
    """Return a ``uv.toml`` with which uv installs from one directory only.

    Args:
        packages: absolute path of the directory, as uv will see it.
        system: whether ``uv pip install`` installs into the system's Python, as containers need it.
            uv then ignores a virtual environment, even an active one, without ``--no-system`` or
            ``-p``: give False for users with virtual environments.

    Raises:
        InputError: the path is not absolute or can't be written in a file.
    """
    # JSON strings with no other escapes are TOML strings, too.
    links = json.dumps(checked_path(packages), ensure_ascii=False)
    text = _file("images/uv.toml").replace(f'["{PACKAGES}"]', f"[{links}]")
    return text if system else text.partition("\n[pip]\n")[0]


def _file(name: str) -> str:
    """Return the text of a file that comes with the package, or lies beside it in a checkout."""
    package = Path(wheelmount.__file__).parent
    places = package / name, package.parent / name
    return next(path for path in places if path.is_file()).read_text(encoding="utf-8")


def environment(pip_conf: str = PIP_CONF, uv_toml: str = UV_TOML) -> dict[str, str]:
    """Return variables with which the two files override those of users and projects.

    pip reads the file of ``PIP_CONFIG_FILE`` last and a user's own not at all; uv reads the file of
    ``UV_CONFIG_FILE`` only. They also serve where the files can't be bound under ``/etc``.

    Args:
        pip_conf: path of the file with the text of ``pip_conf``.
        uv_toml: path of the file with the text of ``uv_toml``.
    """
    return {"PIP_CONFIG_FILE": pip_conf, "UV_CONFIG_FILE": uv_toml}


def checked_path(packages: str) -> str:
    """Return the path of a directory of wheels, checked for use in files and command lines.

    Raises:
        InputError: it is not absolute, or has control characters.
    """
    if not packages.startswith("/") or not packages.isprintable():
        raise InputError(f"{packages!r} is not an absolute path", hint="give one such as /packages")
    return packages
