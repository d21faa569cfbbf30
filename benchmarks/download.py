"""How fast wheels come in: ``python -m benchmarks.download``, from the checkout.

One set of packages, every version given, into an empty directory: with ``wheelmount download`` and
with ``pip download``, both without any cache and from the same index, in turn in every round; and
``wheelmount download`` once more where all is there. What pip fetched has to be what wheelmount
fetched. Beside the time on the wall the processor time of all their processes: on a slow index the
one says more, on a busy machine the other.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

PACKAGES = (
    "numpy", "scipy", "pandas", "scikit-learn", "pyarrow", "matplotlib", "transformers", "datasets",
    "jupyterlab", "fastapi", "sqlalchemy", "boto3", "requests", "pytest", "black",
)  # fmt: skip
"""A data scientist's environment: some 170 wheels, 250 MB."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one run took.

    Attributes:
        seconds: on the wall.
        cpu: seconds of all processors.
    """

    seconds: float
    cpu: float


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser("python -m benchmarks.download")
    parser.add_argument("packages", nargs="*", default=PACKAGES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--index", default="https://pypi.org/simple")
    parser.add_argument(
        "--pip", default=sys.executable, help="a Python that has the pip to measure"
    )
    parser.add_argument("--json", type=Path, help="file for all samples")
    given = parser.parse_args()
    samples: dict[str, list[Cost]] = {"wheelmount": [], "pip": [], "wheelmount again": []}
    with tempfile.TemporaryDirectory(prefix="wm-") as place:
        pins = _pins(Path(place, "first"), given.packages, given.index)
        for number in range(given.rounds):
            ours, theirs = Path(place, f"ours{number}"), Path(place, f"theirs{number}")
            with tempfile.TemporaryDirectory(dir=place) as cache:
                environ = _environment(given.index, Path(cache))
                again = [*_wheelmount(ours), *pins]
                samples["wheelmount"].append(_run(again, environ))
                samples["pip"].append(_run([*_pip(given.pip, theirs), *pins], environ))
                samples["wheelmount again"].append(_run(again, environ))
            _compare(ours, theirs)
        wheels = list(ours.glob("*.whl"))
        size = sum(wheel.stat().st_size for wheel in wheels)
    subprocess.run([given.pip, "-m", "pip", "--version"], check=True)
    print(f"{len(wheels)} wheels, {size / 1e6:.0f} MB; medians of {given.rounds} rounds")
    for name, costs in samples.items():
        seconds, cpu = median(c.seconds for c in costs), median(c.cpu for c in costs)
        every = " ".join(f"{c.seconds:.1f}" for c in costs)
        print(f"{name}: {seconds:.2f} s ({every}), {cpu:.2f} s of processors")
    ratios = [
        theirs.seconds / ours.seconds
        for ours, theirs in zip(samples["wheelmount"], samples["pip"], strict=True)
    ]
    print(f"pip / wheelmount, round by round: {' '.join(f'{ratio:.1f}' for ratio in ratios)}")
    if given.json:
        plain = {name: [[c.seconds, c.cpu] for c in costs] for name, costs in samples.items()}
        given.json.write_text(json.dumps({"wheels": len(wheels), "size": size, **plain}))


def _wheelmount(directory: Path) -> list[str]:
    return [sys.executable, "-m", "wheelmount.cli.main", "download", "-q", "-d", str(directory)]


def _pip(python: str, directory: Path) -> list[str]:
    options = ["--quiet", "--no-cache-dir", "--only-binary", ":all:", "--dest", str(directory)]
    return [python, "-m", "pip", "download", *options]


def _pins(directory: Path, packages: Sequence[str], index: str) -> list[str]:
    """The versions of all that the packages need: pip and uv do not always choose the same."""
    _run([*_wheelmount(directory), *packages], _environment(index, directory / "cache"))
    names = [wheel.name.split("-") for wheel in directory.glob("*.whl")]
    return [f"{name}=={version}" for name, version, *_ in names]


def _environment(index: str, cache: Path) -> dict[str, str]:
    """No settings of the user's own, but for certificates; caches that are empty."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_"))}
    certificates = {k: v for k, v in os.environ.items() if k == "PIP_CERT"}
    own = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": index, "UV_NO_CONFIG": "1"}
    return {**kept, **certificates, **own, "UV_DEFAULT_INDEX": index, "UV_CACHE_DIR": str(cache)}


def _run(command: Sequence[str], environ: Mapping[str, str]) -> Cost:
    used, started = _used(), time.perf_counter()
    subprocess.run(command, env=environ, stdout=subprocess.DEVNULL, check=True)
    return Cost(time.perf_counter() - started, _used() - used)


def _used() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime


def _compare(ours: Path, theirs: Path) -> None:
    """Both have to have fetched the same versions."""
    found = [{tuple(w.name.split("-")[:2]) for w in d.glob("*.whl")} for d in (ours, theirs)]
    if found[0] != found[1]:
        raise SystemExit(f"not the same was fetched: {sorted(found[0] ^ found[1])}")


if __name__ == "__main__":
    main()
