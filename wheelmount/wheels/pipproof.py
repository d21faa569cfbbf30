"""Prove that pip, by its own rules, can install requirements from one directory.

uv accepts a prerelease if there is no other version, and ignores upper bounds of
``Requires-Python``. pip does neither, so a directory can be complete for uv and not for pip.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from wheelmount import child
from wheelmount.errors import InputError, UnavailableError, WaitError
from wheelmount.wheels.findings import Gap
from wheelmount.wheels.install import clean_environment, pinned
from wheelmount.wheels.manifest import REQUESTS_NAME
from wheelmount.wheels.missing import absent
from wheelmount.wheels.proof import Question
from wheelmount.wheels.target import Target

TIMEOUT = 600.0
"""Seconds that pip may take to resolve."""


def prove_with_pip(question: Question, directory: Path) -> Gap | None:
    """Make pip resolve a question from a directory alone; nothing is installed.

    Returns:
        The requirements that pip does not find, with its message; None if pip finds all.

    Raises:
        InputError: the target is not this Python; pip resolves for this Python only.
        UnavailableError: pip is not installed.
        WaitError: pip did not end within ``TIMEOUT``.
    """
    if question.target != Target.here():
        raise InputError(
            f"pip resolves for {Target.here()} only, and not for {question.target}",
            hint="run the check with that Python, or without --tool pip",
        )
    wanted = question.wanted
    lines = [*wanted.requirements, *question.pins, *wanted.overrides]
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write("".join(f"{one}\n" for one in lines))
        file.flush()
        command = [sys.executable, "-m", "pip", "--isolated", "install", "--dry-run", "--quiet"]
        command += ["--ignore-installed", "--no-input", "--no-index", "--only-binary", ":all:"]
        command += ["--disable-pip-version-check", "--find-links", str(directory.absolute())]
        command += [*(f"-c{one}" for one in wanted.constraints), "-r", file.name]
        for one in wanted.plain_files:
            command += [] if one in wanted.constraints else ["-r", str(one)]
        try:
            done = child.run(command, timeout=TIMEOUT, environ=clean_environment())
        except subprocess.TimeoutExpired:
            raise WaitError(
                f"pip did not end within {TIMEOUT:.0f} s", hint="check fewer requirements at a time"
            ) from None
    if not done.code:
        return None
    if "No module named pip" in done.stderr:
        raise UnavailableError("pip is not installed here", hint="python -m ensurepip")
    said = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
    reason = " ".join(line.removeprefix("ERROR:").strip() for line in said) or "pip gave no reason"
    lacking = ", ".join(absent(done.stderr))
    options = " ".join(pinned("pip"))
    hint = f"let pip install the resolved versions: {options} -r {directory}/{REQUESTS_NAME}/…"
    return Gap(question.target, (), f"pip refuses {lacking or 'them'}: {reason}", hint)
