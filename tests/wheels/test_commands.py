"""``wheelmount download`` and ``wheelmount check``, as a user has them."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import Cli

from .support import Index, make_wheel

BOTH = ["--platform", "x86_64", "--platform", "aarch64", "--python-version", "3.12"]


@pytest.mark.slow
def test_download_and_check(cli: Cli, uv_index: Index, workplace: Path) -> None:
    for name, requires in (("a", ["b>=1"]), ("b", []), ("c", ["a"])):
        make_wheel(uv_index.directory, name, requires=requires)
    done = cli("download", "a", "-d", "wheels", *BOTH)
    assert done.stdout.split() == ["a-1.0-py3-none-any.whl", "b-1.0-py3-none-any.whl"]
    assert "aarch64 with glibc 2.28" in done.stderr
    done = cli("download", "a", "-d", "wheels", *BOTH, "--json", "-q")
    report = json.loads(done.stdout)
    assert (len(report["wheels"]), report["fetched"], done.stderr) == (2, [], "")
    done = cli("check", "wheels", "-q")
    assert (done.returncode, done.stdout) == (0, "complete for uv: 2 wheels, 0.0 MB\n")
    done = cli("check", "wheels", "c", "-q", "--json", *BOTH)
    assert done.returncode == 65
    found = json.loads(done.stdout)
    assert not found["complete"]
    assert [gap["platform"] for gap in found["gaps"]] == [
        "x86_64-manylinux_2_28", "aarch64-manylinux_2_28"
    ]  # fmt: skip
    assert found["gaps"][0]["missing"] == [{"requirement": "c", "wanted_by": "you"}]
    error = json.loads(done.stderr)
    assert error["code"] == 65
    assert error["message"].startswith("wheels has no wheel for Python 3.12 on x86_64 with glibc")
    assert error["hint"] == "run wheelmount download for this target"
    done = cli("check", "wheels", "c", "-q", *BOTH)
    assert done.stderr.startswith("error: wheels has no wheel for Python 3.12 on x86_64 with glibc")
    assert done.stderr.endswith("hint: run wheelmount download for this target\n")
    assert done.stderr.count("\n") == 2
    done = cli("download", "c", "--prune", "-q", "-d", "wheels", *BOTH)
    assert (workplace / "work" / "wheels" / "a-1.0-py3-none-any.whl").exists()


@pytest.mark.slow
def test_forget(cli: Cli, uv_index: Index, workplace: Path) -> None:
    wheel = make_wheel(uv_index.directory, "a")
    assert cli("download", "a", "-d", "wheels", *BOTH).returncode == 0
    done = cli("download", "a", "-d", "wheels", "--forget", "--prune", "--dry-run")
    assert (done.returncode, done.stdout) == (64, "")
    assert "--forget and --dry-run exclude each other" in done.stderr
    assert (workplace / "work" / "wheels" / wheel.name).exists()
    done = cli("download", "a", "-d", "wheels", "--forget", "--prune", "--json", "-q")
    assert json.loads(done.stdout) == {"directory": "wheels", "forgotten": 2}
    assert not (workplace / "work" / "wheels" / wheel.name).exists()


@pytest.mark.slow
def test_many_at_once(cli: Cli, uv_index: Index, workplace: Path) -> None:
    wanted = ["b", "c", "d", "e"]
    make_wheel(uv_index.directory, "a", padding=100_000)
    for name in wanted:
        make_wheel(uv_index.directory, name, requires=["a"])
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(cli, "download", n, "-d", "wheels", "--prune") for n in wanted]
        assert [call.result().returncode for call in calls] == [0, 0, 0, 0]
    assert len(list((workplace / "work" / "wheels").glob("*.whl"))) == 5
    assert cli("check", "wheels").stdout == "complete for uv: 5 wheels, 0.1 MB\n"
    assert not list((workplace / "work" / "wheels").glob("pylock.*.toml"))


@pytest.mark.slow
def test_a_bad_wheel_and_who_takes_it(cli: Cli, uv_index: Index, workplace: Path) -> None:
    wheel = make_wheel(uv_index.directory, "a")
    data = wheel.read_bytes()
    row = data.index(b"a.py,sha256=") + 12
    wheel.write_bytes(data[:row] + b"AAAA" + data[row + 4 :])  # RECORD's own bytes: a broken CRC
    done = cli("download", "a", "-d", "wheels")
    assert done.returncode == 65
    assert "a-1.0-py3-none-any.whl is not sound: Unable to retrieve" in done.stderr
    assert not list((workplace / "work" / "wheels").glob("*.whl*"))


@pytest.mark.slow
def test_what_cannot_be_meant(cli: Cli) -> None:
    for arguments, hint in (
        (["download", "-d", "x"], "name a package"),
        (["download", "-d", "x", "./nowhere"], "give a wheel"),
        (["download", "-d", "x", "--group", "test"], "file with -r"),
        (["download", "-d", "x", "a", "--platform", "vax"], "give linux"),
        (["install", "a", "--platform", "x86_64", "--platform", "aarch64"], "give one"),
        (["check", "nowhere"], "run wheelmount download"),
    ):
        done = cli(*arguments)
        assert done.returncode in (64, 66), arguments
        assert hint in done.stderr
        assert done.stderr.count("\n") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "unneeded"),
    [("wheels", {"monarch", "httpx", "installer", "filelock", "tarfile"}), ("run", {"httpx"})],
)
def test_what_is_not_needed_is_not_loaded(module: str, unneeded: set[str]) -> None:
    """Loading Monarch takes longer than a check of a hundred wheels."""
    program = f"import sys, wheelmount.cli.{module}; print(*{unneeded}.intersection(sys.modules))"
    command = [sys.executable, "-c", program]
    assert subprocess.check_output(command, timeout=60, text=True) == "\n"


def test_hosts_of_this_machine_are_described_without_monarch() -> None:
    program = """
    import sys
    from wheelmount.config import Settings
    from wheelmount.hosts.spec import parse
    from wheelmount.operations.site import Site
    from wheelmount.operations.targets import of_hosts
    from wheelmount.progress import SILENT
    (target,) = of_hosts(Site(parse("local:2"), Settings(), SILENT))
    print({"monarch"}.intersection(sys.modules), "%d.%d" % sys.version_info[:2] in str(target))
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    assert subprocess.check_output(command, timeout=60, text=True) == "set() True\n"
