"""What hosts do that are to start a Python which they may not have: the program of ``sh``."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import xxhash

from wheelmount.config import Settings
from wheelmount.hosts import bundle
from wheelmount.hosts.bundle import Bundle

TOKEN = "0123abcd"  # noqa: S105 - none

STARTED = "started\n"

PYTHON = sys.executable


@pytest.fixture
def archive(tmp_path: Path) -> Bundle:
    """Has a program of ``sh`` in place of Python, which says that it was started."""
    root = tmp_path / "content"
    for folder in ("python/bin", "venv/bin"):
        (root / folder).mkdir(parents=True)
    program = root / "venv/bin/python"
    program.write_text(
        f'#!/bin/sh\ncase "$2" in started) printf {STARTED!r};; umask) umask;; esac\n'
    )
    program.chmod(0o700)
    (root / "python/bin/large").write_bytes(os.urandom(1 << 17))
    path = tmp_path / "archive.tar.gz"
    with tarfile.open(path, "w:gz") as made:
        for name in ("python", "venv"):
            made.add(root / name, name)
    return Bundle(path, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest(), 17)


@pytest.fixture(autouse=True)
def nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A host that does not have the client's Python."""
    monkeypatch.setattr(sys, "executable", "/no/python")
    monkeypatch.setenv("HOME", str(tmp_path / "home dir"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)


def _place(tmp_path: Path) -> Path:
    return tmp_path / "home dir/.cache/wheelmount/bundles"


def _start(given: bytes, shell: tuple[str, ...] = ()) -> tuple[list[dict[str, str]], str]:
    """What a host says, and what its Python does."""
    command = bundle.command(TOKEN, ["-c", "started"], Settings())
    if shell:
        command = [*shell, shlex.join(command)]
    done = subprocess.run(command, input=given, capture_output=True, timeout=60, check=False)
    said, printed = [], ""
    for line in done.stdout.decode().splitlines(keepends=True):
        if line.startswith(f"{TOKEN} "):
            said.append(json.loads(line.partition(" ")[2]))
        else:
            printed += line
    assert done.stderr == b""
    return said, printed


def _given(archive: Bundle) -> bytes:
    return b"".join(archive.pieces())


def test_it_is_asked_for_once(tmp_path: Path, archive: Bundle) -> None:
    said, printed = _start(_given(archive))
    assert (said, printed) == ([{"lacks": os.uname().nodename}], STARTED)
    assert _start(b"") == ([], STARTED)
    place = _place(tmp_path)
    assert [path.name for path in place.iterdir()] == [bundle.key()]
    assert place.stat().st_mode & 0o777 == 0o700
    made = (place / bundle.key() / "venv/pyvenv.cfg").read_text()
    assert made == f"home = {place}/{bundle.key()}/python/bin\n"


def test_it_makes_files_with_the_permissions_that_the_user_wants(archive: Bundle) -> None:
    command = bundle.command(TOKEN, ["-c", "umask"], Settings())
    command = ["sh", "-c", 'umask 027; exec "$@"', "sh", *command]
    for given in (_given(archive), b""):  # it is brought, and is there
        done = subprocess.run(command, input=given, capture_output=True, timeout=60, check=True)
        assert done.stdout.splitlines()[-1] == b"0027"


@pytest.mark.parametrize("shell", ["sh", "bash", "tcsh", "fish"])
def test_it_is_the_same_in_the_quotes_of_all_login_shells(archive: Bundle, shell: str) -> None:
    said, printed = _start(_given(archive), (shell, "-c"))
    assert (len(said), printed) == (1, STARTED)


def test_it_lies_there_already_where_it_was_copied_to(archive: Bundle) -> None:
    assert _start(archive.order(str(archive.path)))[1] == STARTED
    assert archive.path.exists()


def test_what_came_in_part_or_changed_is_not_used(tmp_path: Path, archive: Bundle) -> None:
    whole = _given(archive)
    for given in (b"", whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
        said, printed = _start(given)
        assert printed == ""
        assert [each.get("error", "lacks") for each in said] == ["lacks"] + [
            "not all came, or not what was sent"
        ] * bool(given)
        assert list(_place(tmp_path).iterdir()) == []
    assert _start(whole)[1] == STARTED


def test_two_at_once(tmp_path: Path, archive: Bundle) -> None:
    command = bundle.command(TOKEN, ["-c", "started"], Settings())
    both = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)
    ]
    for process in both:
        assert process.stdout is not None
        assert b"lacks" in process.stdout.readline()  # each found none
    for process in both:
        assert process.communicate(_given(archive), timeout=60)[0].decode() == STARTED
    assert [path.name for path in _place(tmp_path).iterdir()] == [bundle.key()]


@pytest.mark.parametrize("how", [bundle.TOLD, bundle.WAIT])
def test_one_waits_for_what_another_brings(archive: Bundle, how: str) -> None:
    command = bundle.command(TOKEN, ["-c", "started"], Settings(), how)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as waiting:
        assert waiting.stdout is not None
        assert b"lacks" in waiting.stdout.readline()
        assert _start(_given(archive))[1] == STARTED
        given = b"\n" if how == bundle.TOLD else b""
        assert waiting.communicate(given, timeout=60)[0].decode() == STARTED


@pytest.mark.slow
def test_one_that_waits_ends_with_its_client(archive: Bundle) -> None:
    """And removes what had arrived."""
    command = bundle.command(TOKEN, ["-c", "started"], Settings(), bundle.TOLD)
    copied = Path(f"/tmp/wheelmount-{TOKEN}.tar.gz")
    copied.touch()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as waiting:
        assert waiting.stdout is not None
        assert b"lacks" in waiting.stdout.readline()
        assert waiting.stdin is not None
        waiting.stdin.close()
        while copied.exists():
            time.sleep(0.01)
        copied.touch()  # by the last piece on its way
        assert waiting.wait(timeout=60) == 1
        assert waiting.stdout.read() == b""
    assert not copied.exists()


@pytest.mark.parametrize("how", ["open", "link", "stranger"])
def test_a_place_that_others_may_have_filled_is_refused(
    tmp_path: Path, archive: Bundle, how: str
) -> None:
    place = _place(tmp_path)
    _start(_given(archive))  # what lies there could be run
    if how == "open":
        place.chmod(0o770)
    elif how == "link":
        place.rename(tmp_path / "other")
        place.symlink_to(tmp_path / "other")
    else:
        os.chown(place, 65534, 65534)
    said, printed = _start(_given(archive))
    assert printed == ""
    assert said[0]["error"].endswith("bundles is no private directory of this user")
    assert "WHEELMOUNT_PYTHON" in said[0]["hint"]


def _python(tmp_path: Path) -> Path:
    """Make a program in place of the client's Python, in a directory of its own."""
    (tmp_path / "tools/venv/bin").mkdir(parents=True)
    program = tmp_path / "tools/venv/bin/python"
    program.write_text("#!/bin/sh\nprintf own")
    program.chmod(0o755)
    return program


@pytest.mark.parametrize("how", ["own", "link", "passage", "group of one"])
def test_the_client_s_python_is_used_where_only_this_user_may_have_placed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    program = _python(tmp_path)
    if how == "link":
        program.rename(tmp_path / "other")
        program.symlink_to("../../../other")
    elif how == "passage":
        (tmp_path / "tools").chmod(0o1777)
    elif how == "group of one":
        program.parent.chmod(0o775)
    monkeypatch.setattr(sys, "executable", str(program))
    assert _start(b"") == ([], "own")


@pytest.mark.parametrize(
    "how",
    [
        *("stranger", "stranger's directory", "open", "open to a group", "open above", "sticky"),
        *("link of a stranger", "stranger's link above", "link to a stranger's", "open beside"),
    ],
)
def test_a_python_that_others_may_have_placed_is_not_used(
    tmp_path: Path, archive: Bundle, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    program = _python(tmp_path)
    tools, folder = tmp_path / "tools", program.parent
    if how == "stranger":
        os.chown(program, 65534, 65534)
    elif how == "stranger's directory":
        os.chown(tools / "venv", 65534, 65534)
    elif how == "open":
        program.chmod(0o757)
    elif how == "open to a group":
        os.chown(folder, 0, 65534)
        folder.chmod(0o775)
    elif how == "open above":
        tools.chmod(0o777)
    elif how == "sticky":
        folder.chmod(0o1777)  # beside it others may add what Python reads
    elif how == "link of a stranger":
        program.rename(tmp_path / "other")
        program.symlink_to(tmp_path / "other")
        os.chown(program, 65534, 65534, follow_symlinks=False)
    elif how == "stranger's link above":
        tools.rename(tmp_path / "other")
        tools.symlink_to(tmp_path / "other")
        os.chown(tools, 65534, 65534, follow_symlinks=False)
    elif how == "link to a stranger's":
        program.rename(tmp_path / "other")
        program.symlink_to(tmp_path / "other")
        os.chown(tmp_path / "other", 65534, 65534)
    else:
        (tools / "venv").chmod(0o1777)  # as for a pyvenv.cfg
    monkeypatch.setattr(sys, "executable", str(program))
    said, printed = _start(_given(archive))
    assert (said, printed) == ([{"lacks": os.uname().nodename}], STARTED)


@pytest.mark.parametrize(
    ("options", "reason"),
    [("size=64k", "No space left on device"), ("size=64m,noexec", "cannot be run in")],
)
def test_a_disk_that_does_not_do_is_named(
    tmp_path: Path, archive: Bundle, options: str, reason: str
) -> None:
    place = _place(tmp_path)
    place.parent.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", options, "none", str(place.parent)]
    subprocess.run(mount, check=True)
    try:
        said, printed = _start(_given(archive))
        assert printed == ""
        assert reason in said[-1]["error"], said
        assert list(place.iterdir()) == []
    finally:
        subprocess.run(["umount", str(place.parent)], check=True)


def test_another_kind_of_machine_is_refused_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = platform.machine()
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    said, printed = _start(b"")
    assert printed == ""
    assert [each["error"] for each in said] == [
        f"it has no wheelmount, and is {own}, where this client is riscv64"
    ]


@pytest.mark.parametrize("path", ["", "/no/archive"])
def test_a_glibc_that_is_too_old_is_refused_before_anything_is_unpacked(
    tmp_path: Path, archive: Bundle, path: str
) -> None:
    has = platform.libc_ver()[1]
    needed = int(has.split(".")[1]) + 1
    said, printed = _start(dataclasses.replace(archive, glibc=needed).order(path))
    assert printed == ""
    assert [each.get("error", "lacks") for each in said] == [
        "lacks",
        f"it has no wheelmount, and glibc {has}, where this client needs 2.{needed}",
    ]
    assert list(_place(tmp_path).iterdir()) == []
    assert _start(_given(archive))[1] == STARTED


def test_the_oldest_glibc_is_found_in_programs(tmp_path: Path) -> None:
    shutil.copy2(Path("/bin/sh").resolve(), tmp_path / "program")
    (tmp_path / "text").write_text("GLIBC_2.99\0")
    needed = bundle._needed_glibc(tmp_path)
    assert 17 <= needed <= int(platform.libc_ver()[1].split(".")[1])
    with (tmp_path / "program").open("ab") as program:
        program.write(b"\0GLIBC_2.98\0GLIBC_2.3.4\0")
    assert bundle._needed_glibc(tmp_path) == 98


def test_libraries_are_smaller_without_symbols_and_load(tmp_path: Path) -> None:
    source = Path(str(importlib.import_module("xxhash._xxhash").__file__))
    library = tmp_path / source.name
    shutil.copy2(source, library)
    sizes = [library.stat().st_size]
    for _ in range(2):
        bundle._trim(library)
        sizes.append(library.stat().st_size)
    assert sizes[0] > sizes[1] == sizes[2]
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import _xxhash as made"
    code += "; print(made.__file__, made.xxh64(b'text').hexdigest())"
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{library} {xxhash.xxh64(b'text').hexdigest()}\n"


@pytest.mark.slow
def test_an_archive_is_the_same_each_time(tmp_path: Path) -> None:
    root = tmp_path / "content"
    for name in ("python", "venv"):
        (root / name).mkdir(parents=True)
        (root / name / "data").write_bytes(os.urandom(9 << 20))  # several parts
    for name in ("one", "two"):
        bundle._pack(root, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    with tarfile.open(tmp_path / "one") as archive:
        for name in ("python", "venv"):
            taken = archive.extractfile(f"{name}/data")
            assert taken is not None
            assert taken.read() == (root / name / "data").read_bytes()


def _age(path: Path, days: int) -> None:
    stamp = time.time() - days * 86400 - 60
    os.utime(path, (stamp, stamp))


def test_what_nothing_has_started_for_long_is_removed(tmp_path: Path, archive: Bundle) -> None:
    place = _place(tmp_path)
    place.mkdir(parents=True, mode=0o700)
    days = {"old": 61, "kept": 59, "new-0-1": 2, "new-0-2": 0}
    for name, age in days.items():
        (place / name).mkdir()
        _age(place / name, age)
    assert _start(_given(archive))[1] == STARTED
    assert {path.name for path in place.iterdir()} == {"kept", "new-0-2", bundle.key()}


def test_what_is_removed_in_part_is_not_used(
    tmp_path: Path, archive: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the start of a step is killed meanwhile."""
    place = _place(tmp_path)
    (place / "old").mkdir(parents=True)
    place.chmod(0o700)
    _age(place / "old", 61)
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "rm").symlink_to("/bin/true")
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", f"{programs}:{path}")
    assert _start(_given(archive))[1] == STARTED
    (left,) = {each.name for each in place.iterdir()} - {bundle.key()}
    assert left == "new-old", "as what arrived in part"
    _age(place / left, 2)
    (place / bundle.key()).rename(place / "other")
    monkeypatch.setenv("PATH", path)
    assert _start(_given(archive))[1] == STARTED
    assert {each.name for each in place.iterdir()} == {bundle.key(), "other"}


def test_where_the_client_s_python_is_no_other_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "own python"
    program.write_text(f"#!/bin/sh\nprintf {STARTED!r}\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    assert _start(b"") == ([], STARTED)
    assert not _place(tmp_path).exists()
