"""Prepare wheels of a wheelhouse for installation on hosts without unpacking."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name, parse_wheel_filename

from wheelmount.owned import FILE, make_folders
from wheelmount.progress import SILENT, Progress
from wheelmount.wheels.bytecode import Compiler
from wheelmount.wheels.linktree import PROGRAM, Item, Plan, grow
from wheelmount.wheels.manifest import Request
from wheelmount.wheels.requirements import parse_requirements, split_url
from wheelmount.wheels.target import Target
from wheelmount.wheels.unpacked import Unpacked


@dataclass(frozen=True, slots=True)
class Shipment:
    """A tree of wheels to mount on hosts, and the plan to install.

    Attributes:
        tree: the directory to mount.
        plan: relative path in it of the file that says what to install.
    """

    tree: Path
    plan: str

    def command(self, python: str, mounted: str, mode: str) -> tuple[str, ...]:
        """Return the command that installs on a host.

        Args:
            python: interpreter of the environment to install into.
            mounted: path of the mounted tree on the host.
            mode: ``copy`` or ``symlink``; or ``uv``, which needs a directory as one more argument,
                to fill a cache there with which uv installs by links.
        """
        return python, "-I", f"{mounted}/{PROGRAM}", f"{mounted}/{self.plan}", mode


def prepare(
    house: Path,
    request: Request,
    target: Target,
    cache: Path,
    progress: Progress = SILENT,
    *,
    bytecode: bool = True,
    tree: str | None = None,
) -> Shipment:
    """Unpack missing wheels, and make the tree to mount.

    Args:
        house: directory of a wheelhouse, whose wheels have been checked.
        request: a recorded request, whose wheels are installed together.
        target: the target that they were chosen for.
        cache: directory for unpacked wheels; it may be deleted while no command runs.
        progress: informed of the steps ``unpack`` and ``compile``, if they are needed.
        bytecode: whether to compile bytecode, if this machine has the target's Python.
        tree: name of a tree to add to; default a new one for these wheels.

    Raises:
        WheelError: wheels cannot be unpacked, exclude each other, or were replaced meanwhile.
        SourceError: the cache cannot be written.
        StoreError: no space is left.
        UnavailableError: the Python that compiles bytecode failed.
    """
    chosen = items_of(request)
    unpacked = Unpacked(cache)
    recipes = unpacked.add(
        [(house / one.filename, one.sha256) for one in chosen],
        Compiler.find(target) if bytecode else None,
        progress,
    )
    items = [
        Item(one.filename, recipe, one.requested, one.direct_url)
        for one, recipe in zip(chosen, recipes, strict=True)
    ]
    plan = Plan.make(items, target, progress)
    folder = cache / "trees" / (tree or plan.digest)
    grow(folder, plan, unpacked)
    mark = cache / "used" / folder.name  # outside of the mounted directory
    make_folders(mark.parent)
    mark.touch(FILE)
    return Shipment(folder, plan.file)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A wheel of a wheelhouse to install.

    Attributes:
        filename: its file name.
        sha256: hash of its bytes.
        requested: see ``Item``.
        direct_url: likewise.
    """

    filename: str
    sha256: str
    requested: bool
    direct_url: dict[str, Any] | None


def items_of(request: Request) -> list[Chosen]:
    """Return the wheels of a request, with the hashes that they had when it was recorded.

    Another request may replace a wheel in the wheelhouse at any time.
    """
    asked = _asked(request)
    found = []
    for filename, digest in zip(request.wheels, request.hashes, strict=True):
        name = parse_wheel_filename(filename)[0]
        url = asked.get(name)
        origin = _direct_url(url, digest) if url else None
        found.append(Chosen(filename, digest, name in asked, origin))
    return found


def _asked(request: Request) -> dict[str, str | None]:
    """Return the requested URL of each package, by normalized name; None without a URL."""
    found = parse_requirements((*request.requirements, *request.builds))
    return {canonicalize_name(one.name): one.url for one in found}


def _direct_url(url: str, sha256: str) -> dict[str, Any]:
    """Return the content of ``direct_url.json`` (PEP 610) for a requested URL."""
    if url.startswith("git+"):
        address, _, commit = url.removeprefix("git+").rpartition("@")
        return {"url": address, "vcs_info": {"vcs": "git", "commit_id": commit}}
    path = split_url(url).path
    if url.startswith("file:") and not path.endswith((".whl", ".gz", ".zip")):
        return {"url": url, "dir_info": {}}
    hashes = {"hashes": {"sha256": sha256}} if path.endswith(".whl") else {}
    return {"url": url, "archive_info": hashes}
