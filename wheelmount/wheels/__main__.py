"""Installs into a virtual environment of this host, from what is mounted and nothing else.

Run as ``python -m wheelmount.wheels uv|pip WHEELHOUSE VENV REQUIREMENT…``, or for a tree of
unpacked wheels ``python -m wheelmount.wheels wheelmount TREE VENV PLAN copy|symlink``. The
environment is made where there is none, with the Python that runs this.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, cast

import uv

from wheelmount.errors import WheelmountError
from wheelmount.wheels.install import clean_environment, install_command
from wheelmount.wheels.shipment import Shipment


def main() -> int:
    """Do it; gives the exit code."""
    tool, packages, directory, *arguments = sys.argv[1:]
    venv = Path(directory)
    python = venv / "bin" / "python"
    program = uv.find_uv_bin()
    # Its own cache, inside: what uv keeps elsewhere may be of another wheel with the same name,
    # and can only be linked from where it lies on the same file system.
    cache = venv / ".wheelmount-cache"
    environment = {
        **clean_environment(),
        "PATH": os.pathsep.join([str(Path(program).parent), os.environ.get("PATH", "")]),
        "UV_CACHE_DIR": str(cache),
    }
    try:
        command: Sequence[str]
        if tool == "wheelmount":
            plan, mode = arguments
            command = Shipment(Path(packages), plan).command(str(python), packages, mode)
        else:
            command = install_command(
                cast(Literal["uv", "pip"], tool), arguments, packages=packages, python=str(python)
            )
        if not python.exists():
            making = (
                [program, "venv", "--quiet", "--no-cache", "--offline", "--python", sys.executable]
                if tool != "pip"
                else [sys.executable, "-m", "venv"]  # with pip, which Python brings along
            )
            made = subprocess.run([*making, directory], env=environment, check=False)
            if made.returncode:
                return made.returncode
        return subprocess.run(command, env=environment, check=False).returncode
    except WheelmountError as error:
        hint = f"\nhint: {error.hint}" if error.hint else ""
        print(f"error: {error.message}{hint}", file=sys.stderr)
        return error.exit_code
    finally:
        shutil.rmtree(cache, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
