"""Suites of projects of PyPI, offline and plainly: ``python -m benchmarks.suites --image ci.sif``.

From the checkout, with the index in reach and an image of images/ci.def. Each project's source
distribution is tested twice, by its own suite:

plain     a new environment, ``pip install`` of the project and its requirements, ``pytest``
offline   examples/ci: ``prepare.sh`` with the network, then ``wheelmount run`` of ``test.sh`` in a
          container without one; and that once more, as by the next push
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

CI = Path(__file__).resolve().parent.parent / "examples" / "ci"


@dataclass(frozen=True, slots=True)
class Project:
    """A project with tests in its source distribution.

    Attributes:
        name: on the index.
        version: of it.
        requirements: what it and its tests import, and what builds it.
        options: of pytest.
    """

    name: str
    version: str
    requirements: Sequence[str]
    options: Sequence[str] = field(default=())


PIP = "-m", "pip", "--quiet", "--disable-pip-version-check"

PROJECTS = (
    Project("packaging", "25.0", ["pytest", "pretend", "flit_core<4"]),
    Project(
        "attrs", "25.3.0",
        ["pytest", "hypothesis", "cloudpickle", "pympler",
         "hatchling", "hatch-vcs", "hatch-fancy-pypi-readme"],
        # It fails anywhere.
        ["--deselect", "tests/test_converters.py::TestPipe::test_wrapped_annotation"],
    ),
    Project(
        "httpx", "0.28.1",
        # Of the versions of its time: with later ones some of its tests fail anywhere.
        ["pytest==8.3.4", "trio==0.27.0", "uvicorn==0.32.1", "trustme==1.2.0", "chardet==5.2.0",
         "click<8.2", "anyio==4.7.0", "httpcore==1.0.7", "h11==0.14.0", "certifi", "idna", "h2",
         "socksio", "brotli", "zstandard", "pygments", "rich",
         "hatchling", "hatch-fancy-pypi-readme"],
        ["-m", "not network", "-W", "ignore::pytest.PytestUnraisableExceptionWarning"],
    ),
)  # fmt: skip


def fetch(project: Project, work: Path) -> Path:
    """Download a project's source distribution into a directory."""
    sources = ["--no-deps", "--no-binary", project.name, "--dest", str(work)]
    _run([sys.executable, *PIP, "download", *sources, f"{project.name}=={project.version}"])
    (archive,) = work.glob("*.tar.gz")
    return archive


def plain(project: Project, archive: Path, work: Path) -> tuple[float, str]:
    """Seconds, and what pytest said at its end."""
    started = time.perf_counter()
    _run(["tar", "-xf", archive, "-C", work])
    source = work / archive.name.removesuffix(".tar.gz")
    python = work / "venv" / "bin" / "python"
    _run([sys.executable, "-m", "venv", work / "venv"])
    _run([python, *PIP, "install", source, *project.requirements])
    said = _run([python, "-m", "pytest", "-q", *project.options], source, codes=(0, 1))
    return time.perf_counter() - started, _end(said)


def offline(project: Project, image: Path, work: Path) -> tuple[float, float, str]:
    """Seconds to prepare and to test, and what pytest said at its end."""
    job, wheelmount = work / "job", [sys.executable, "-m", "wheelmount.cli.main"]
    environment = {**os.environ, "IMAGE": str(image)}
    started = time.perf_counter()
    which = f"{project.name}=={project.version}"
    _run([CI / "prepare.sh", job, which, *project.requirements], environment=environment)
    prepared = time.perf_counter()
    options = ["--image", job / "img.sif", "--overlay-kind", "memory", "--overlay", "suites"]
    test = [*wheelmount, "run", "-q", "--hosts", "local:1", *options]
    said = _run([*test, job, CI / "test.sh", *project.options], codes=(0, 1))
    ended = time.perf_counter()
    _run([*wheelmount, "overlay", "rm", "suites"])
    return prepared - started, ended - prepared, _end(said)


def _run(
    command: Sequence[str | Path],
    cwd: Path | None = None,
    *,
    codes: Sequence[int] = (0,),
    environment: dict[str, str] | None = None,
) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode not in codes:
        raise SystemExit(f"{command}: ended with {done.returncode}: {done.stdout[-2000:]}")
    return done.stdout


def _end(said: str) -> str:
    """The line that counts, without its seconds."""
    lines = [line for line in said.splitlines() if re.search(r"\d+ (passed|failed)", line)]
    if not lines:
        raise SystemExit(f"pytest counted nothing: {said[-2000:]}")
    return re.sub(r" in [\d.]+s.*", "", lines[-1].strip("= "))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser("python -m benchmarks.suites")
    parser.add_argument("projects", nargs="*", help="default: packaging, attrs, httpx")
    parser.add_argument("--image", type=Path, default=Path("build/images/ci.sif"))
    parser.add_argument("--json", type=Path, help="file for all that was found")
    given = parser.parse_args()
    found = {}
    for project in PROJECTS:
        if given.projects and project.name not in given.projects:
            continue
        with tempfile.TemporaryDirectory(prefix="wm-", dir="/var/tmp") as work:
            for part in ("plain", "offline"):
                Path(work, part).mkdir()
            archive = fetch(project, Path(work, "plain"))
            seconds, said = plain(project, archive, Path(work, "plain"))
            image = given.image.absolute()
            prepared, tested, counted = offline(project, image, Path(work, "offline"))
            again = offline(project, image, Path(work, "offline"))
        found[project.name] = {
            "plain": {"seconds": seconds, "said": said},
            "offline": {"prepare": prepared, "test": tested, "said": counted},
            "again": {"prepare": again[0], "test": again[1], "said": again[2]},
        }
        print(f"{project.name} {project.version}", flush=True)
        print(f"  plain: {seconds:.1f} s: {said}")
        print(f"  offline: {prepared:.1f} s to prepare, {tested:.1f} s to test: {counted}")
        print(f"  again: {again[0]:.1f} s, {again[1]:.1f} s: {again[2]}", flush=True)
    if given.json:
        given.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
