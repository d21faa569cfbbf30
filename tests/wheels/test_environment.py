"""Unpacked wheels into real environments, and what pip and uv make of those then."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import uv

from wheelmount.errors import UnavailableError, WheelError
from wheelmount.wheels.archive import hash_file
from wheelmount.wheels.bytecode import Compiler
from wheelmount.wheels.linktree import Item, Plan, grow
from wheelmount.wheels.shipment import Shipment
from wheelmount.wheels.target import Target
from wheelmount.wheels.unpacked import Unpacked

from .support import make_wheel, with_files

MODES = ["copy", "symlink"]


class Host:
    """An environment with pip, and a tree that is mounted: here, its directory."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.wheels = place / "wheels"
        self.tree = place / "tree"
        self.venv = place / "some venv"  # with a blank, which no "#!" can have
        self.python = str(self.venv / "bin" / "python")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.venv], check=True)
        self.packages = Path(
            self.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
        )

    def run(self, *arguments: str) -> str:
        """What the environment's Python prints."""
        done = subprocess.run(
            [self.python, *arguments], capture_output=True, text=True, cwd="/", check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def tool(self, *arguments: str) -> str:
        """What pip of the running Python, or uv, says of the environment."""
        name, *rest = arguments
        command = {
            "pip": [sys.executable, "-m", "pip", "--python", self.python],
            "uv": [uv.find_uv_bin(), "pip"],
        }[name]
        environment = {**os.environ, "VIRTUAL_ENV": str(self.venv)}
        done = subprocess.run(
            [*command, *rest], capture_output=True, text=True, env=environment, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def ship(self, *wheels: Path, compiler: Compiler | None = None) -> Shipment:
        unpacked = Unpacked(self.place / "unpacked")
        recipes = unpacked.add([(wheel, hash_file(wheel)) for wheel in wheels], compiler)
        items = [Item(wheel.name, recipe) for wheel, recipe in zip(wheels, recipes, strict=True)]
        plan = Plan.make(items, Target.here())
        grow(self.tree, plan, unpacked)
        return Shipment(self.tree, plan.file)

    def install(
        self, *wheels: Path, mode: str = "copy", compiler: Compiler | None = None, code: int = 0
    ) -> str:
        """Install, as a host does; what it said."""
        command = self.ship(*wheels, compiler=compiler).command(self.python, str(self.tree), mode)
        done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)
        assert done.returncode == code, done.stderr
        return done.stderr

    def files(self) -> dict[str, bytes]:
        """All files and links of the environment."""
        found = {}
        for path in self.venv.rglob("*"):
            if path.is_symlink():
                found[str(path)] = os.fsencode(path.readlink())
            elif path.is_file() and "__pycache__" not in path.parts:
                found[str(path)] = path.read_bytes()
        return found


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def full_wheel(place: Path, version: str = "1.0") -> Path:
    """A wheel with everything that a wheel can have."""
    info = f"full-{version}.dist-info"
    return with_files(
        make_wheel(place, "full", version),
        {
            "full/__init__.py": b"def main():\n    print('ran', __file__)\n",
            "full/a, b.txt": b"comma",
            f"{info}/entry_points.txt": b"[console_scripts]\nfull-run=full:main\n",
            f"full-{version}.data/scripts/full-script": b"#!python\nimport full; full.main()\n",
            f"full-{version}.data/scripts/full-shell": b"#!/bin/sh\necho shell\n",
            f"full-{version}.data/data/share/full/data.txt": b"data",
            f"full-{version}.data/headers/full.h": b"#define FULL",
            f"full-{version}.data/purelib/full_more.py": b"MORE = 1\n",
        },
    )


@pytest.mark.parametrize("mode", MODES)
def test_everything_that_a_wheel_can_have(host: Host, mode: str) -> None:
    said = host.install(full_wheel(host.wheels), mode=mode)
    assert " + full==1.0" in said
    package = host.packages / "full" / "__init__.py"
    assert package.is_symlink() == (mode == "symlink")
    assert host.run("-c", "import full, full_more; full.main()") == f"ran {package}"
    for script in ("full-run", "full-script"):
        done = subprocess.run(
            [host.venv / "bin" / script], capture_output=True, text=True, check=True
        )
        assert done.stdout == f"ran {package}\n"
    assert subprocess.check_output([host.venv / "bin" / "full-shell"]) == b"shell\n"
    assert (host.venv / "share" / "full" / "data.txt").read_text() == "data"
    (header,) = (host.venv / "include").rglob("full.h")
    assert header.parent.name == "full"
    info = host.packages / "full-1.0.dist-info"
    assert (info / "INSTALLER").read_text() == "wheelmount\n"
    assert not any(path.is_symlink() for path in info.iterdir())
    # All that RECORD says is there, with just these bytes.
    check = """
import importlib.metadata, base64, hashlib
for file in importlib.metadata.distribution("full").files:
    data = file.locate().read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
    assert file.hash is None or (file.hash.value, file.size) == (digest, len(data)), file
    print(file.name)
"""
    listed = set(host.run("-c", check).splitlines())
    assert {"full-run", "full-shell", "data.txt", "full.h", "a, b.txt", "INSTALLER"} <= listed


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["pip", "uv"])
@pytest.mark.parametrize("mode", MODES)
def test_pip_and_uv_know_what_was_installed(host: Host, mode: str, tool: str) -> None:
    before = host.files()
    compiler = Compiler.find(Target.here())
    needs = make_wheel(host.wheels, "needs", requires=["full>=1"])
    host.install(full_wheel(host.wheels), needs, mode=mode, compiler=compiler)
    listed = host.tool(tool, "list")
    assert "full" in listed
    assert "needs" in listed
    host.tool(tool, "check")
    yes = ["-y"] if tool == "pip" else []
    host.tool(tool, "uninstall", *yes, "full", "needs")
    left = {Path(path).name for path in set(host.files()) - set(before)}
    assert left <= {"wheelmount-links.pth", ".lock"}  # the second is uv's
    assert not (host.packages / "full").exists()
    assert not (host.packages / "__pycache__").exists() or not any(
        "full" in path.name for path in (host.packages / "__pycache__").iterdir()
    )


@pytest.mark.parametrize("mode", MODES)
def test_another_version_takes_the_place_of_the_first(host: Host, mode: str) -> None:
    old = with_files(make_wheel(host.wheels, "own", "1.0"), {"own_old/__init__.py": b"OLD = 1\n"})
    host.install(old, mode=mode)
    host.run("-c", "import own_old")  # leaves bytecode, as Python does
    assert host.install(old, mode=mode).startswith(("copied 0", "linked 0"))
    said = host.install(make_wheel(host.wheels, "own", "2.0"), mode=mode)
    assert " - own==1.0\n + own==2.0" in said
    assert host.run("-c", "import own; print(own.VALUE)") == "2.0"
    assert not (host.packages / "own_old").exists()
    assert [path.name for path in host.packages.glob("own-*")] == ["own-2.0.dist-info"]


def test_a_wheel_that_was_built_anew_is_installed_anew(host: Host) -> None:
    host.install(make_wheel(host.wheels, "own", module=b"VALUE = 1\n"))
    host.run("-c", "import own")
    # Of one size, and within the same second: only the contents tell bytecode of the one from
    # that of the other.
    host.install(make_wheel(host.wheels, "own", module=b"VALUE = 2\n"))
    assert host.run("-c", "import own; print(own.VALUE)") == "2"


def test_from_links_to_copies_and_back(host: Host) -> None:
    own = make_wheel(host.wheels, "own")
    for mode in ("symlink", "copy", "symlink"):
        assert "1 package in" in host.install(own, mode=mode)
        assert (host.packages / "own.py").is_symlink() == (mode == "symlink")
        assert (host.packages / "wheelmount-links.pth").exists() == (mode == "symlink")


@pytest.mark.slow
def test_copies_outlive_the_mount_and_links_say_that_they_do_not(host: Host) -> None:
    own = make_wheel(host.wheels, "own")
    host.install(own)
    shutil.rmtree(host.tree)
    assert host.run("-c", "import own; print(own.VALUE)") == "1.0"
    host.install(own, mode="symlink")
    shutil.rmtree(host.tree)
    done = subprocess.run(
        [host.python, "-c", "import own"], capture_output=True, text=True, cwd="/", check=False
    )
    assert done.returncode == 1
    assert done.stderr.count(f"are links into {host.tree}, which is not mounted") == 1
    assert "hint: " in done.stderr
    assert "own" in host.tool("pip", "list")
    (host.tree / "plans").mkdir(parents=True)  # another tree there, or an image's own directory
    done = subprocess.run(
        [host.python, "-c", "import own"], capture_output=True, text=True, cwd="/", check=False
    )
    assert f"are links into {host.tree}, which is not mounted" in done.stderr
    assert "--packages" in done.stderr
    shutil.rmtree(host.tree)
    host.install(own)
    assert host.run("-c", "import own; print(own.VALUE)") == "1.0"


@pytest.mark.parametrize("mode", MODES)
def test_bytecode_is_that_of_the_client(host: Host, mode: str) -> None:
    own = with_files(make_wheel(host.wheels, "own"), {"own_bad.py": b"this is no Python\n"})
    host.install(own, mode=mode, compiler=Compiler.find(Target.here()))
    code = (
        "import own; print(own.__cached__); print(own.__spec__.loader.get_code('own').co_filename)"
    )
    cached, filename = host.run("-v", "-c", code).splitlines()
    assert Path(cached).is_symlink() == (mode == "symlink")
    assert filename == str(host.packages / "own.py")
    done = subprocess.run([host.python, "-v", "-c", "import own"], capture_output=True, cwd="/")
    assert f"code object from {cached!r}".encode() in done.stderr  # and it was not made again
    # Who edits what is installed sees it run.
    if mode == "copy":
        (host.packages / "own.py").write_text("VALUE = 'new'\n")
        assert host.run("-c", "import own; print(own.VALUE)") == "new"


def test_a_python_that_dies_while_it_compiles(host: Host) -> None:
    dying = host.place / "dying"
    dying.write_text("#!/bin/sh\ncat >/dev/null\nkill -9 $$\n")
    dying.chmod(0o755)
    with pytest.raises(UnavailableError, match="ended with -9 while it compiled"):
        host.ship(make_wheel(host.wheels, "own"), compiler=Compiler(str(dying), "cpython-311"))
    assert not list((host.place / "unpacked").glob(".unpack-*"))


@pytest.mark.slow
def test_packages_that_share_directories_and_files(host: Host) -> None:
    wheels = [
        with_files(make_wheel(host.wheels, name), {f"space/{name}.py": b"", "space/both.txt": text})
        for name, text in {"one": b"1", "other": b"2"}.items()
    ]
    host.install(*wheels)
    host.run("-c", "import space.one, space.other")
    assert (host.packages / "space" / "both.txt").read_text() == "2"  # the later, as with pip
    assert host.install(*wheels).startswith("copied 0")
    host.tool("pip", "uninstall", "-y", "other")
    host.run("-c", "import space.one")


@pytest.mark.parametrize("mode", MODES)
def test_one_place_by_two_ways(host: Host, mode: str) -> None:
    library = host.packages.relative_to(host.venv)
    more = {
        "a-1.0.data/data/bin/a": b"data",
        "a-1.0.data/scripts/a": b"#!python\nprint('script')\n",
        f"a-1.0.data/data/{library}/b.py": b"",
    }
    host.install(
        with_files(make_wheel(host.wheels, "a"), more), make_wheel(host.wheels, "b"), mode=mode
    )
    assert host.run(str(host.venv / "bin" / "a")) == "script"
    assert host.run("-c", "import b; print(b.VALUE)") == "1.0"


def test_a_file_where_another_has_a_directory_is_refused(host: Host) -> None:
    one = with_files(make_wheel(host.wheels, "one"), {"space": b""})
    other = with_files(make_wheel(host.wheels, "other"), {"space/file.py": b""})
    with pytest.raises(WheelError, match=r"has a file space, and other.* a directory"):
        host.ship(one, other)


@pytest.mark.parametrize("mode", MODES)
def test_what_fails_leaves_everything_as_it_was(host: Host, mode: str) -> None:
    host.install(full_wheel(host.wheels, "1.0"), mode=mode)
    (host.packages / "later").mkdir()
    (host.packages / "later" / "there.py").mkdir()  # a directory, where a file is to be
    before = host.files()
    later = with_files(make_wheel(host.wheels, "later"), {"later/there.py": b""})
    full = full_wheel(host.wheels, "2.0")
    said = host.install(full, later, mode=mode, code=65)
    assert "is a directory, and a file must take its place\nhint: " in said
    assert host.files() == before
    # And where it fails in the midst of things: a file is missing in the tree.
    shutil.rmtree(host.packages / "later")
    before = host.files()
    shipment = host.ship(full, later)
    (gone,) = host.tree.glob("full-2*/purelib/full-2.0.dist-info/METADATA")
    gone.unlink()
    command = shipment.command(host.python, str(host.tree), mode)
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)
    assert done.returncode == 74
    assert f"error: {gone}: No such file" in done.stderr
    assert host.files() == before
    assert not [path for path in host.packages.iterdir() if path.name.startswith("~")]


def test_one_that_was_killed_is_made_good_by_the_next(host: Host) -> None:
    own = make_wheel(host.wheels, "own")
    host.install(own)
    (host.packages / "own-1.0.dist-info" / "RECORD").unlink()
    (host.packages / "own.py").unlink()
    (host.packages / "~wheelmount-1").mkdir()
    host.install(own)
    assert host.run("-c", "import own; print(own.VALUE)") == "1.0"
    assert not (host.packages / "~wheelmount-1").exists()
    # What others have put there without a list of files can't be taken away.
    (host.packages / "own-1.0.dist-info" / "RECORD").unlink()
    (host.packages / "own-1.0.dist-info" / "INSTALLER").write_text("conda\n")
    said = host.install(make_wheel(host.wheels, "own", "2.0"), code=65)
    assert "was installed by conda" in said


def test_wheels_for_another_python_are_refused(host: Host) -> None:
    shipment = host.ship(make_wheel(host.wheels, "own"))
    plan = host.tree / shipment.plan
    for change, reason in [
        ({"python": "cpython 3.8"}, "the wheels are for cpython 3.8"),
        ({"machine": "riscv64"}, "the wheels are for riscv64"),
        ({"glibc": 99}, "the wheels need glibc 2.99"),
    ]:
        plan.write_text(json.dumps(json.loads(plan.read_text()) | change))
        command = shipment.command(host.python, str(host.tree), "copy")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 65
        assert reason in done.stderr
        assert "hint: " in done.stderr
        host.ship(make_wheel(host.wheels, "own"))


def test_two_at_once_take_turns(host: Host) -> None:
    shipment = host.ship(*(make_wheel(host.wheels, f"own{n}") for n in range(30)))
    command = shipment.command(host.python, str(host.tree), "copy")
    several = [
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd="/") for _ in range(3)
    ]
    said = [process.communicate(timeout=60)[1] for process in several]
    assert sorted(text.split(" packages")[0] for text in said) == [
        "copied 0",
        "copied 0",
        "copied 30",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["hardlink", "symlink", "copy"])
def test_plain_uv_makes_links_from_a_cache_of_links(host: Host, mode: str) -> None:
    full, needs = full_wheel(host.wheels), make_wheel(host.wheels, "needs", requires=["full"])
    shipment = host.ship(full, needs, compiler=Compiler.find(Target.here()))
    full.unlink()  # uv never sees the wheels
    needs.unlink()
    fill = [*shipment.command(host.python, str(host.tree), "uv"), str(host.place / "cache")]
    path = f"{Path(uv.find_uv_bin()).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "VIRTUAL_ENV": str(host.venv)}
    done = subprocess.run(fill, capture_output=True, text=True, env=environment, check=True)
    exports = [word for word in shlex.split(done.stdout) if word != "export"]
    environment |= dict(word.split("=", 1) for word in exports)
    environment["UV_LINK_MODE"] = mode

    def install(name: str) -> subprocess.CompletedProcess[str]:
        command = ["uv", "pip", "install", name]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    done = install("needs")
    assert done.returncode == 0, done.stderr
    package = host.packages / "full" / "__init__.py"
    inside = package.resolve().is_relative_to(host.tree)
    assert inside == (mode != "copy")
    assert host.run("-c", "import full, full_more; full.main()") == f"ran {package}"
    for script in ("full-run", "full-script"):
        run = [host.venv / "bin" / script]
        assert subprocess.check_output(run, text=True) == f"ran {package}\n"
    assert (host.venv / "share" / "full" / "data.txt").read_text() == "data"
    assert list(package.parent.glob("__pycache__/*.pyc"))
    host.tool("uv", "check")
    host.tool("uv", "uninstall", "full", "needs")
    assert not package.parent.exists()
    assert not (host.venv / "share" / "full" / "data.txt").exists()
    # What the cache has lost is missed, and not made up.
    shutil.rmtree(host.place / "cache" / "archive-v0")
    assert install("needs").returncode != 0
    again = subprocess.run(fill, capture_output=True, text=True, env=environment, check=False)
    assert again.returncode == 65
    assert "is not empty\nhint: " in again.stderr


def test_each_content_is_kept_once(host: Host) -> None:
    data = os.urandom(100_000)
    one, other = (
        with_files(make_wheel(host.wheels, "own", version), {"own_data.bin": data})
        for version in ("1.0", "2.0")
    )
    digest = hash_file(one)
    host.ship(one)
    host.ship(other)
    first, second = host.tree.glob("own-*/purelib/own_data.bin")
    assert first.samefile(second)
    one.write_bytes(b"")  # it is not unpacked again
    unpacked = Unpacked(host.place / "unpacked")
    assert unpacked.add([(one, digest)])[0].files["purelib"]["own_data.bin"].size == len(data)


def test_a_wheel_that_leads_out_is_not_unpacked(host: Host) -> None:
    wheel = with_files(make_wheel(host.wheels, "own"), {"../out.py": b""})
    with pytest.raises(WheelError, match=r"own-1.0.*leads out of the environment"):
        host.ship(wheel)
    cut = make_wheel(host.wheels, "cut")
    cut.write_bytes(cut.read_bytes()[:-50])
    with pytest.raises(WheelError, match=r"cut-1.0.*cannot be unpacked"):
        host.ship(cut)
    assert not list((host.place / "unpacked").glob(".unpack-*"))
