"""Install all wheels of a plan into an environment, or none of them.

Files to be replaced are moved aside first, and moved back if anything fails. A distribution counts
as installed by its RECORD, which is therefore removed first and written last.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import shutil
import signal
import sys
import sysconfig
import time

from .distributions import (
    STASH,
    files_of,
    installed,
    read_rows,
    read_text,
    remove_empty,
    remove_leftovers,
    title,
)
from .files import for_interpreter, in_parallel, row_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from .files import Work

INSTALLER = "wheelmount"

LINKS_NAME = "wheelmount-links.pth"
"""Warning of a Python whose packages are links into a mount that is gone."""

_LINKS = "LINKS"
"""A file beside RECORD with the path of the plan in the tree that a distribution is linked into.

The path of the tree would not do: in a container a directory may be there without this tree.
"""

# A line that the module site runs when Python starts; twice if lib64 is a link to lib.
_ON_START = (
    "import os, sys; said = vars(sys).setdefault('_wheelmount', []); os.path.exists({plan!r}) "
    "or {root!r} in said or said.append({root!r}) or sys.stderr.write({message!r})\n"
)
_GONE = (
    "warning: packages in {library} are links into {root}, which is not mounted\n"
    "hint: mount it again, or install with --link-mode copy; in a container, give the command the "
    "--packages that `wheelmount install` named ({file} says this)\n"
)


class Refusal(Exception):  # noqa: N818
    """The reason why nothing was installed, with a hint."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class Installation:
    """An installation of a plan's wheels into this environment.

    Args:
        wheels: the wheels of the plan, as in its JSON (see ``linktree``).
        plan: path of the plan in the tree of unpacked wheels.
        mode: ``copy`` or ``symlink``.
    """

    def __init__(self, wheels: list[dict[str, Any]], plan: str, mode: str) -> None:
        self._wheels = wheels
        self._plan = plan
        self._root = tree_of(plan)
        self._mode = mode
        self._paths = sysconfig.get_paths()
        self._stash = os.path.join(self._paths["purelib"], f"{STASH}{os.getpid()}")
        self._stashed: list[str] = []
        self._made: list[str] = []
        self._work: list[Work] = []
        self._placed: list[str] = []

    def run(self) -> None:
        """Install missing packages, and remove other versions of them."""
        started = time.monotonic()
        remove_leftovers(self._paths["purelib"])
        there = installed({self._paths["purelib"], self._paths["platlib"]})
        wanted = [wheel for wheel in self._wheels if not self._has(wheel, there)]
        changes = []
        try:
            for wheel in wanted:
                for info in there.get(wheel["name"], ()):
                    changes.append(f" - {title(info)}")
                    self._take_away(info)
                changes.append(f" + {wheel['name']}=={wheel['version']}")
            self._place(wanted)
        except BaseException:
            self._undo()
            raise
        shutil.rmtree(self._stash, ignore_errors=True)
        self._tell_of_links()
        verb = "linked" if self._mode == "symlink" else "copied"
        took = f"in {time.monotonic() - started:.2f} s"
        packages = "1 package" if len(wanted) == 1 else f"{len(wanted)} packages"
        print("\n".join([f"{verb} {packages} {took}", *changes]), file=sys.stderr)

    # --- installed wheels -------------------------------------------------------------------------

    def _has(self, wheel: dict[str, Any], there: dict[str, list[str]]) -> bool:
        """Return whether exactly this wheel is installed, in this mode."""
        library = self._paths[wheel["root"]]
        info = os.path.join(library, wheel["info"])
        if there.get(wheel["name"]) != [info]:
            return False
        source = os.path.join(self._root, wheel["directory"], wheel["root"])
        with contextlib.suppress(OSError):
            rows = {tuple(row[:2]) for row in read_rows(os.path.join(info, "RECORD")) if row[1:]}
            mine = os.path.join(source, wheel["info"], "RECORD")
            if rows.issuperset(tuple(row[:2]) for row in read_rows(mine) if row[1]):
                return all(
                    self._is_made(os.path.join(library, path), os.path.join(source, path))
                    for path in _first(wheel)
                )
        return False

    def _is_made(self, path: str, source: str) -> bool:
        if self._mode == "symlink":
            return os.path.islink(path) and os.readlink(path) == source
        return os.path.isfile(path) and not os.path.islink(path)

    # --- removal ----------------------------------------------------------------------------------

    def _take_away(self, info: str) -> None:
        """Move a distribution aside, its RECORD first."""
        record = os.path.join(info, "RECORD")
        if os.path.isdir(info) and info.endswith(".dist-info") and not os.path.exists(record):
            by = read_text(os.path.join(info, "INSTALLER")).strip()
            if by not in ("", INSTALLER):
                raise Refusal(
                    f"{info} has no RECORD, and was installed by {by}",
                    f"remove it with {by}",
                )
            paths = [os.path.join(info, name) for name in os.listdir(info)]  # cut off half-way
        elif os.path.exists(record):
            paths = [record, *files_of(info)]
        else:
            raise Refusal(
                f"{info} was not installed from a wheel, and cannot be replaced",
                "remove it with the program that installed it, or use another environment",
            )
        for path in paths:
            self._put_aside(path)
        keep = {os.path.normpath(path) for path in self._paths.values()}
        for folder in sorted({os.path.dirname(path) for path in paths}, reverse=True):
            remove_empty(folder, keep)

    def _put_aside(self, path: str) -> None:
        os.makedirs(self._stash, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            shutil.move(path, os.path.join(self._stash, str(len(self._stashed))))
            self._stashed.append(path)

    def _undo(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        placed = [
            os.path.join(target, name) for _, target, names, _ in self._work for name in names
        ]
        for path in (*placed, *self._placed):
            with contextlib.suppress(OSError):
                os.unlink(path)
        for folder in reversed(self._made):
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        for number, path in enumerate(self._stashed):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            shutil.move(os.path.join(self._stash, str(number)), path)
        shutil.rmtree(self._stash, ignore_errors=True)

    # --- installation -----------------------------------------------------------------------------

    def _place(self, wheels: list[dict[str, Any]]) -> None:
        work = []
        for wheel in wheels:
            source = os.path.join(self._root, wheel["directory"])
            for scheme, path in wheel["passed"]:
                folder, name = os.path.split(path)
                wheel["files"][scheme][folder].remove(name)
            for scheme, folders in wheel["files"].items():
                to = self._directory(scheme, wheel)
                for folder, names in folders.items():
                    target = os.path.normpath(os.path.join(to, folder))
                    self._make_room(target, names)
                    copied = scheme == "scripts" or folder.split("/")[0] == wheel["info"]
                    if scheme != "scripts":
                        way = "copy" if copied else self._mode
                        work.append((os.path.join(source, scheme, folder), target, names, way))
        self._work = work
        in_parallel(work)
        for wheel in wheels:
            rows = [*self._scripts(wheel), *self._metadata(wheel)]
            rows += [
                [self._row_path(scheme, path, wheel), *row] for scheme, path, *row in wheel["rows"]
            ]
            self._record(wheel, rows)

    def _directory(self, scheme: str, wheel: dict[str, Any]) -> str:
        if scheme != "headers":
            return self._paths[scheme]
        if sys.prefix == sys.base_prefix:
            return os.path.join(self._paths["include"], wheel["name"])
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        return os.path.join(sys.prefix, "include", "site", version, wheel["name"])

    def _make_room(self, folder: str, names: list[str]) -> None:
        """Make a directory; files in its place are put aside."""
        if not self._make(folder):
            for name in set(names).intersection(os.listdir(folder)):
                path = os.path.join(folder, name)
                if os.path.isdir(path) and not os.path.islink(path):
                    raise Refusal(
                        f"{path} is a directory, and a file must take its place", "remove it"
                    )
                self._put_aside(path)

    def _make(self, folder: str) -> bool:
        try:
            os.mkdir(folder)
        except FileExistsError:
            return False
        except FileNotFoundError:
            self._make(os.path.dirname(folder))
            os.mkdir(folder)
        self._made.append(folder)
        return True

    def _scripts(self, wheel: dict[str, Any]) -> Iterator[list[str]]:
        """Write the programs for this interpreter; return their rows of RECORD."""
        for folder, names in wheel["files"].get("scripts", {}).items():
            for name in names:
                path = os.path.join(folder, name)
                source = os.path.join(self._root, wheel["directory"], "scripts", path)
                with open(source, "rb") as stream:
                    data = for_interpreter(stream.read(), sys.executable)
                target = os.path.join(self._paths["scripts"], path)
                self._write(target, data, 0o777)
                yield [self._row_path("scripts", path, wheel), *row_of(data)]

    def _metadata(self, wheel: dict[str, Any]) -> Iterator[list[str]]:
        texts = {"INSTALLER": f"{INSTALLER}\n"}
        if self._mode == "symlink":
            texts[_LINKS] = self._plan
        if wheel["requested"]:
            texts["REQUESTED"] = ""
        if wheel["direct_url"]:
            texts["direct_url.json"] = json.dumps(wheel["direct_url"])
        for name, text in texts.items():
            path = os.path.join(wheel["info"], name)
            self._write(os.path.join(self._paths[wheel["root"]], path), text.encode(), 0o666)
            yield [path, *row_of(text.encode())]

    def _record(self, wheel: dict[str, Any], rows: list[list[str]]) -> None:
        path = os.path.join(wheel["directory"], wheel["root"], wheel["info"], "RECORD")
        with open(os.path.join(self._root, path), encoding="utf-8", newline="") as stream:
            text = io.StringIO(stream.read())
        text.seek(0, os.SEEK_END)
        csv.writer(text, lineterminator="\n").writerows(rows)
        target = os.path.join(self._paths[wheel["root"]], wheel["info"], "RECORD")
        fresh = f"{target}.part"
        self._write(fresh, text.getvalue().encode(), 0o666)
        os.replace(fresh, target)
        self._placed.append(target)

    def _row_path(self, scheme: str, path: str, wheel: dict[str, Any]) -> str:
        target = os.path.join(self._directory(scheme, wheel), path)
        return os.path.relpath(target, self._paths[wheel["root"]])

    def _write(self, path: str, data: bytes, mode: int) -> None:
        self._placed.append(path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(descriptor, "wb") as stream:
            stream.write(data)

    def _tell_of_links(self) -> None:
        """Make this Python warn at its start if the tree of its links is not mounted."""
        file = os.path.join(self._paths["purelib"], LINKS_NAME)
        libraries = {self._paths["purelib"], self._paths["platlib"]}
        infos = [info for found in installed(libraries).values() for info in found]
        plans = sorted({read_text(os.path.join(info, _LINKS)) for info in infos} - {""})
        if not plans:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file)
            return
        lines = []
        for plan in plans:
            root = tree_of(plan)
            message = _GONE.format(library=self._paths["purelib"], root=root, file=file)
            lines.append(_ON_START.format(plan=plan, root=root, message=message))
        with open(file, "w", encoding="utf-8") as stream:
            stream.writelines(lines)


def tree_of(plan: str) -> str:
    """Return the tree that contains a plan."""
    return os.path.dirname(os.path.dirname(plan))


def _first(wheel: dict[str, Any]) -> Iterator[str]:
    """Yield one file that is linked in mode ``symlink``."""
    passed = {path for scheme, path in wheel["passed"] if scheme == wheel["root"]}
    for folder, names in wheel["files"].get(wheel["root"], {}).items():
        if folder.split("/")[0] != wheel["info"]:
            for name in names:
                path = os.path.join(folder, name)
                if path not in passed:
                    yield path
                    return
