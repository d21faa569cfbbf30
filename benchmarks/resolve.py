"""Whether a wheelhouse is what uv resolves to: ``python -m benchmarks.resolve DIRECTORY``.

The directory is ``scenarios`` of a checkout of https://github.com/astral-sh/packse: small made-up
indexes, each with a hard question for resolvers. Each is served here. Of wheels alone, it is
resolved by ``uv pip compile``, downloaded by wheelmount, which has to come to the same versions or
refuse where uv refuses, and proven from the directory alone by ``check``. Then pip resolves what
was asked for from that directory.

Left out: whether a source is to be built, since a download builds only what it is told to. pip
knows of a scenario's Python only its version, and takes markers for the Python that runs it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uv
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from tests.wheels.support import Index, make_wheel
from wheelmount.errors import WheelmountError
from wheelmount.wheels.target import Target
from wheelmount.wheels.wanted import PRE, Wanted
from wheelmount.wheels.wheelhouse import Wheelhouse

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TIMEOUT = 300
"""Seconds that one command may take."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a scenario.

    Attributes:
        name: of the scenario.
        uv: versions by name; None where uv finds none.
        wheelmount: the same of the download.
        complete: whether ``check`` finds it complete.
        pip: the same of pip, from the directory; None where it was not asked too.
        said: why the download was refused.
    """

    name: str
    uv: dict[str, str] | None
    wheelmount: dict[str, str] | None
    complete: bool = False
    pip: dict[str, str] | None = None
    said: str = ""


def main() -> None:
    """Try all scenarios and print what came of them."""
    parser = argparse.ArgumentParser("python -m benchmarks.resolve")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--only", default="", help="scenarios with this in their names")
    parser.add_argument("--jobs", type=int, default=4)
    given = parser.parse_args()
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        del os.environ[name]
    os.environ |= {"UV_NO_CACHE": "1", "UV_NO_CONFIG": "1", "PIP_CONFIG_FILE": os.devnull}
    files = [file for file in sorted(given.directory.rglob("*.toml")) if given.only in file.stem]
    files = [file for file in files if file.parent.name != "examples"]
    with ThreadPoolExecutor(given.jobs) as pool:
        outcomes = list(pool.map(_try, files))
    counts: Counter[str] = Counter()
    for one in outcomes:
        same = one.uv == one.wheelmount
        counts["as uv"] += same
        counts["refused by both"] += same and one.uv is None
        if not same:
            print(f"{one.name}: uv {one.uv}, wheelmount {one.wheelmount} {one.said}")
        if one.wheelmount is None:
            continue
        counts["downloaded"] += 1
        counts["complete for uv"] += one.complete
        counts["refused by pip"] += one.pip is None
        counts["other versions with pip"] += one.pip not in (None, one.wheelmount)
        if not one.complete or one.pip != one.wheelmount:
            said = "complete" if one.complete else "NOT complete"
            print(f"{one.name}: {one.wheelmount}, {said} for uv; pip {one.pip}")
    print(f"{len(outcomes)} scenarios")
    for what, count in counts.items():
        print(f"{count} {what}")


def _try(file: Path) -> Outcome:
    scenario: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
    options = scenario.get("resolver_options", {})
    python = options.get("python") or scenario.get("environment", {}).get("python", "3.12")
    target = Target.parse(python, options.get("python_platform"))
    flags = [PRE] if options.get("prereleases") else []
    with tempfile.TemporaryDirectory(prefix="wm-") as temporary:
        place = Path(temporary)
        with Index(place / "index") as index:
            _publish(scenario["packages"], index)
            needs = place / "needs.txt"
            lines = [f"--index-url {index.url}", *scenario["root"].get("requires", [])]
            needs.write_text("".join(f"{line}\n" for line in lines))
            reference = _compiled(needs, target, flags)
            house = Wheelhouse(place / "house")
            try:
                report = house.add(Wanted.of(files=[needs], flags=flags), targets=[target])
            except WheelmountError as error:
                return Outcome(file.stem, reference, None, said=error.message)
        found = dict(map(_version, report.wheels))
        findings = house.check()  # the index is gone
        complete = not findings.gaps and not findings.unsound
        needs.write_text("".join(f"{line}\n" for line in lines[1:]))
        pip = _by_pip(needs, house.directory, target, flags, place)
        return Outcome(file.stem, reference, found, complete, pip)


def _publish(packages: dict[str, Any], index: Index) -> None:
    """Make the distributions of a scenario."""
    index.directory.mkdir(exist_ok=True)
    for name, package in packages.items():
        plain = name.replace("-", "_")
        for version, about in package.get("versions", {}).items():
            python = about.get("requires_python", ">=3.12")
            headers = f"Requires-Python: {python}\n" if python else ""
            requires = list(about.get("requires", []))
            for extra, more in about.get("extras", {}).items():
                headers += f"Provides-Extra: {extra}\n"
                requires += [_of_extra(one, extra) for one in more]
            made = []
            if about.get("wheel", True):
                for tag in about.get("wheel_tags", []) or ["py3-none-any"]:
                    made.append(
                        make_wheel(
                            index.directory,
                            plain,
                            version,
                            requires=requires,
                            tag=tag,
                            headers=headers,
                        )
                    )
            if about.get("sdist", True):
                made.append(index.directory / f"{plain}-{version}.tar.gz")
                made[-1].touch()
            if about.get("yanked"):
                index.yanked |= {file.name: "" for file in made}


def _of_extra(text: str, extra: str) -> str:
    one = Requirement(text)
    marker = f"({one.marker}) and " if one.marker else ""
    one.marker = None
    return f"{one} ; {marker}extra == '{extra}'"


def _compiled(needs: Path, target: Target, flags: Sequence[str]) -> dict[str, str] | None:
    command = [uv.find_uv_bin(), "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
    command += ["--only-binary", ":all:", "--python", sys.executable, *flags]
    command += ["--python-version", target.release, "--python-platform", target.platform]
    done = subprocess.run(
        [*command, str(needs)], capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    if done.returncode:
        return None
    lines = [line for line in done.stdout.splitlines() if line and not line.startswith("-")]
    found = [Requirement(line) for line in lines]
    return {canonicalize_name(one.name): str(one.specifier)[2:] for one in found}


def _version(wheel: str) -> tuple[str, str]:
    name, version, _, _ = parse_wheel_filename(wheel)
    return name, str(version)


def _by_pip(
    needs: Path, house: Path, target: Target, flags: Sequence[str], place: Path
) -> dict[str, str] | None:
    # Of an installation pip would compare Requires-Python with the Python that runs it.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-index"]
    command += ["--only-binary", ":all:", "--find-links", str(house), "-r", str(needs)]
    command += ["--python-version", target.release, *(["--pre"] if flags else [])]
    command += ["--dest", str(place / "pip")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    if done.returncode:
        return None
    return dict(_version(wheel.name) for wheel in (place / "pip").glob("*.whl"))


if __name__ == "__main__":
    main()
