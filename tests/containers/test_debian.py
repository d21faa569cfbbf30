"""Binaries of a package are changed so that they run with this machine's C library."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from wheelmount.containers import debian
from wheelmount.errors import UnavailableError

OLD = "long strtol(const char *s, char **e, int b) { (void)s; (void)e; (void)b; return 42; }"
PROGRAM = "long F(const char *, char **, int); int main(void) { return (int)F(0, 0, 0); }"


def compile_c(folder: Path, source: str, out: str, *options: str) -> Path:
    (folder / "source.c").write_text(source)
    subprocess.run(
        ["gcc", "-w", "-fno-builtin", "source.c", "-o", out, *options], cwd=folder, check=True
    )
    return folder / out


def library(folder: Path, versions: dict[str, str]) -> None:
    """A library with functions of the C library under versions of the C library."""
    nodes = "".join(f"{version} {{ global: {name}; }};\n" for version, name in versions.items())
    (folder / "versions").write_text(nodes)
    source = "\n".join(OLD.replace("strtol", name) for name in versions.values())
    script = f"-Wl,--version-script={folder}/versions"
    compile_c(folder, source, "libtwin.so", "-shared", "-fPIC", "-nostdlib", script)


def program(folder: Path, function: str) -> Path:
    """A program that calls ``function`` of that library."""
    options = (f"-DF={function}", "-L.", "-ltwin", f"-Wl,-rpath,{folder}")
    return compile_c(folder, PROGRAM, "program", *options)


def test_twin_is_replaced(tmp_path: Path) -> None:
    library(tmp_path, {"GLIBC_2.2.5": "strtol", "GLIBC_2.99": "__isoc23_strtol"})
    binary = program(tmp_path, "__isoc23_strtol")
    library(tmp_path, {"GLIBC_2.2.5": "strtol"})  # what an older machine has
    assert subprocess.run([binary], stderr=subprocess.DEVNULL, check=False).returncode == 1
    data = bytearray(binary.read_bytes())
    assert debian.retarget(data, (2, 98)) == ["__isoc23_strtol"]
    binary.write_bytes(data)
    assert subprocess.run([binary], check=False).returncode == 42
    assert debian.retarget(data, (2, 98)) == [], "nothing is left to do"


def test_anything_else_that_is_newer_is_refused(tmp_path: Path) -> None:
    library(tmp_path, {"GLIBC_2.2.5": "strtol", "GLIBC_2.99": "__isoc23_other"})
    with pytest.raises(UnavailableError, match=r"__isoc23_other.*GLIBC_2\.99"):
        debian.retarget(bytearray(program(tmp_path, "__isoc23_other").read_bytes()), (2, 98))


def test_packages_are_found_in_any_language(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """apt translates the word that tells; a machine with other languages is not had here."""
    apt = tmp_path / "apt-cache"
    apt.write_text(
        '#!/bin/sh\n[ "$LC_ALL" = C ] && echo "  Candidate: 1.0" || echo "  Candidato: 1.0"\n'
    )
    apt.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("LC_ALL", "es_ES.UTF-8")
    assert debian.available("fuse2fs")
