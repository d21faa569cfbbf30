from __future__ import annotations

import errno
import html.parser
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import uv

from wheelmount.wheels.archive import read_metadata
from wheelmount.wheels.install import clean_environment
from wheelmount.wheels.manifest import Entry
from wheelmount.wheels.simple import write_index

from .support import make_wheel, sha256, spoil

TOOLS = {
    "pip": [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"],
    "uv": [uv.find_uv_bin(), "pip", "install", "--quiet", "--no-cache", "--offline"],
}


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A directory whose name needs quoting in a URL, with ``own``, ``Other.Name`` and more."""
    packages = tmp_path / "some packages"
    make_wheel(packages, "own", requires=["other-name>=1"])
    make_wheel(packages, "own", "0.5")
    make_wheel(packages, "Other.Name", "1.0+local", headers="Requires-Python: >=3.8,<4\n")
    make_wheel(packages, "future", headers="Requires-Python: >=4\n")
    write_index(packages, {})
    return packages


def install(
    tool: str, packages: Path, into: Path, *requirements: str
) -> subprocess.CompletedProcess[str]:
    url = f"{packages.as_uri()}/simple/"
    return subprocess.run(
        [*TOOLS[tool], "--target", str(into), "--index-url", url, *requirements],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def everything(root: Path) -> dict[str, tuple[int, int]]:
    found = {str(path.relative_to(root)): path.lstat() for path in root.rglob("*")}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in found.items()}


class Links(html.parser.HTMLParser):
    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: list[dict[str, str | None]] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found.append(dict(attrs))


def record(packages: Path, project: str, number: int = 0) -> dict[str, Any]:
    page = json.loads((packages / "simple" / project / "index.json").read_text())
    return page["files"][number]  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS)
def test_installs_by_the_index(packages: Path, tmp_path: Path, tool: str) -> None:
    done = install(tool, packages, tmp_path / "into", "own")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "into" / "own.py").read_text() == "VALUE = '1.0'\n"
    assert (tmp_path / "into" / "Other.Name.py").exists()
    assert install(tool, packages, tmp_path / "none", "future").returncode != 0
    assert install(tool, packages, tmp_path / "none", "nosuch").returncode != 0


@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS)
def test_hashes_are_checked_without_being_asked(packages: Path, tmp_path: Path, tool: str) -> None:
    make_wheel(packages, "own", module=b"VALUE = 'other'\n")
    done = install(tool, packages, tmp_path / "into", "own")
    assert done.returncode != 0
    assert "hash" in done.stderr.lower()
    write_index(packages, {})
    assert install(tool, packages, tmp_path / "into", "own").returncode == 0


def test_the_pages(packages: Path) -> None:
    root = packages / "simple"
    assert [link["href"] for link in Links(root / "index.html").found] == [
        "future/", "other-name/", "own/"
    ]  # fmt: skip
    projects = json.loads((root / "index.json").read_text())
    assert projects["projects"] == [{"name": n} for n in ("future", "other-name", "own")]
    assert projects["meta"] == {"api-version": "1.1"}
    wheel = packages / "Other.Name-1.0+local-py3-none-any.whl"
    metadata = root / "other-name" / f"{wheel.name}.metadata"
    assert metadata.read_bytes() == read_metadata(wheel)
    (link,) = Links(root / "other-name" / "index.html").found
    assert link == {
        "href": f"{wheel.name.replace('+', '%2B')}#sha256={sha256(wheel)}",
        "data-requires-python": ">=3.8,<4",
        "data-core-metadata": f"sha256={sha256(metadata)}",
        "data-dist-info-metadata": f"sha256={sha256(metadata)}",
    }
    assert record(packages, "other-name") == {
        "filename": wheel.name,
        "url": wheel.name.replace("+", "%2B"),
        "hashes": {"sha256": sha256(wheel)},
        "size": wheel.stat().st_size,
        "core-metadata": {"sha256": sha256(metadata)},
        "requires-python": ">=3.8,<4",
    }
    page = json.loads((root / "own" / "index.json").read_text())
    assert (page["name"], page["versions"]) == ("own", ["0.5", "1.0"])
    assert (root / "own" / "own-1.0-py3-none-any.whl").samefile(
        packages / "own-1.0-py3-none-any.whl"
    )


def test_nothing_is_touched_where_nothing_changed(packages: Path) -> None:
    before = everything(packages)
    write_index(packages, {})
    assert everything(packages) == before
    make_wheel(packages, "more")
    write_index(packages, {})
    after = everything(packages)
    assert {name for name in before if after[name] != before[name]} == {
        "simple", "simple/index.html", "simple/index.json"
    }  # fmt: skip


def test_what_is_gone_is_not_listed(packages: Path) -> None:
    (packages / "own-0.5-py3-none-any.whl").unlink()
    (packages / "future-1.0-py3-none-any.whl").unlink()
    (packages / "simple" / "own" / "stray.part").mkdir()
    write_index(packages, {})
    left = {name for name in everything(packages / "simple") if "0.5" in name or "future" in name}
    assert left == set()
    assert record(packages, "own")["filename"] == "own-1.0-py3-none-any.whl"
    assert not (packages / "simple" / "own" / "stray.part").exists()


@pytest.mark.parametrize("what", ["copy", "another", "directory", "broken"])
def test_a_copied_wheelhouse_can_be_extended(packages: Path, tmp_path: Path, what: str) -> None:
    """As ``scp -r`` or ``cp -rL`` copies one: with files in place of links."""
    copied = tmp_path / "copied"
    shutil.copytree(packages, copied, copy_function=shutil.copyfile)
    link = copied / "simple" / "own" / "own-1.0-py3-none-any.whl"
    assert not link.is_symlink()
    if what == "another":
        link.write_bytes(b"other bytes")
    elif what != "copy":
        link.unlink()
        link.mkdir() if what == "directory" else link.symlink_to("nowhere")
    make_wheel(copied, "more")
    write_index(copied, {})
    assert record(copied, "more")["filename"] == "more-1.0-py3-none-any.whl"
    for folder in (copied / "simple").glob("*/"):
        for wheel in folder.glob("*.whl"):
            assert wheel.read_bytes() == (copied / wheel.name).read_bytes()


def test_a_file_system_without_links_has_copies(
    packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Path, "symlink_to", refuse)
    other = tmp_path / "other"
    make_wheel(other, "own")
    write_index(other, {})
    copy = other / "simple" / "own" / "own-1.0-py3-none-any.whl"
    assert not copy.is_symlink()
    assert copy.read_bytes() == (other / copy.name).read_bytes()
    before = everything(other)
    write_index(other, {})
    assert everything(other) == before
    assert sorted(path.name for path in copy.parent.iterdir()) == sorted(
        path.name for path in (packages / "simple" / "own").iterdir() if "0.5" not in path.name
    )


def test_known_hashes_are_believed_while_the_file_is_the_same(packages: Path) -> None:
    wheel = packages / "own-1.0-py3-none-any.whl"
    known = {wheel.name: Entry.of(wheel, "ab" * 32)}
    write_index(packages, known)
    assert record(packages, "own", 1)["hashes"] == {"sha256": "ab" * 32}
    os.utime(wheel)
    write_index(packages, known)
    assert record(packages, "own", 1)["hashes"] == {"sha256": sha256(wheel)}


def test_metadata_follow_a_wheel_that_was_built_anew(packages: Path) -> None:
    wheel = packages / "own-1.0-py3-none-any.whl"
    times = wheel.stat()
    make_wheel(packages, "own", requires=["six"])
    os.utime(wheel, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    write_index(packages, {})
    metadata = packages / "simple" / "own" / f"{wheel.name}.metadata"
    assert b"Requires-Dist: six" in metadata.read_bytes()
    assert record(packages, "own", 1)["core-metadata"] == {"sha256": sha256(metadata)}


def test_wheels_that_cannot_be_read_are_left_out(packages: Path) -> None:
    (packages / "own-0.5-py3-none-any.whl").write_bytes(b"")
    (packages / "odd.whl").write_bytes(b"")
    spoil(packages / "future-1.0-py3-none-any.whl", {"future-1.0.dist-info/METADATA": None})
    write_index(packages, {})
    projects = json.loads((packages / "simple" / "index.json").read_text())["projects"]
    assert [project["name"] for project in projects] == ["other-name", "own"]
    assert record(packages, "own")["filename"] == "own-1.0-py3-none-any.whl"


def test_markup_in_metadata(packages: Path) -> None:
    make_wheel(packages, "evil", headers='Requires-Python: "><script>\n')
    write_index(packages, {})
    assert "<script>" not in (packages / "simple" / "evil" / "index.html").read_text()


def test_an_empty_directory(tmp_path: Path) -> None:
    write_index(tmp_path, {})
    assert Links(tmp_path / "simple" / "index.html").found == []
