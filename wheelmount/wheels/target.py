"""Targets of wheels: a Python on a Linux platform with glibc or musl.

Platforms are named as uv's ``--python-platform`` names them, because uv resolves for exactly those;
the tags that follow from one (PEP 425, PEP 600) are expanded by ``packaging.tags``.
"""

from __future__ import annotations

import platform as this_platform
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from packaging.markers import Environment
from packaging.tags import Tag, compatible_tags, cpython_tags, generic_tags, platform_tags

from wheelmount.errors import InputError, UnavailableError
from wheelmount.wheels.interpreter import running_version

GLIBC_MINORS = (17, 28, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40)
"""The glibc 2.x for which uv knows a platform on each of ``MACHINES``."""

MACHINES = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}
"""Names people type for a processor, and the one that uv and wheels use."""

# What uv takes for a bare "x86_64-unknown-linux-gnu": distributions since 2018.
_COMMON_MINOR = 28

# The names that PEP 513, 571 and 599 gave to platforms before PEP 600 numbered them.
_LEGACY = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}

# The one musl that uv resolves for, as uv and as wheels name it: Alpine's since 2021.
_MUSL = "unknown-linux-musl"
_MUSL_TAG = "musllinux_1_2"

PYPY_VERSION = "7.3.0"
"""The version of PyPy that markers see; its ABI has been that of 7.3 since 2019."""

_PYPY_ABI = "pp73"

_PYTHON = re.compile(r"(?P<pypy>pypy)?(?P<release>3\.(?P<minor>\d{1,2})(?:\.\d{1,2})?)(?P<free>t)?")
_OLDEST, _OLDEST_FREE_THREADED = 8, 13
_MANYLINUX = re.compile(r"manylinux(?:_2_(?P<minor>\d{1,3})|(?P<legacy>2014))")


@dataclass(frozen=True, slots=True)
class Target:
    """One Python on one platform.

    Attributes:
        python_version: ``"3.11"``, or with a patch level where one matters, ``"3.11.9"``;
            ``"3.14t"`` is the free-threaded build, ``"pypy3.11"`` PyPy.
        platform: a name of uv's ``--python-platform``, such as ``"x86_64-manylinux_2_36"``.
    """

    python_version: str
    platform: str

    @classmethod
    def here(cls) -> Target:
        """Return the target of the running interpreter.

        Raises:
            UnavailableError: this is not Linux with a glibc that uv knows.
        """
        implementation = sys.implementation.name
        if implementation not in ("cpython", "pypy") or sys.platform != "linux":
            raise UnavailableError(
                f"this Python is {implementation} on {sys.platform}",
                hint="name the target: --python-version 3.12 --platform x86_64",
            )
        for tag in platform_tags():
            found = re.fullmatch(r"manylinux_2_(\d+)_(\w+)", tag)
            if found and found[2] in MACHINES:
                minor = _nearest(int(found[1]))
                if minor is not None:
                    return cls(running_version(), f"{found[2]}-manylinux_2_{minor}")
        raise UnavailableError(
            f"no wheels are made for this machine ({this_platform.machine()}, this libc)",
            hint="name the target: --python-version 3.12 --platform x86_64",
        )

    @classmethod
    def parse(cls, python_version: str | None = None, platform: str | None = None) -> Target:
        """Parse a target given by the user.

        Args:
            python_version: ``3.12``, ``3.12.4``, ``3.14t`` or ``pypy3.11``; default the running
                one.
            platform: ``linux`` (this machine), a processor (``x86_64``, ``aarch64``: with
                glibc 2.28), a wheel's platform tag (``manylinux_2_28_aarch64``,
                ``manylinux2014_x86_64``, ``musllinux_1_2_x86_64``), or a name of uv's; default this
                machine. A glibc between two that uv knows counts as the older.

        Raises:
            InputError: a name that means none of these.
            UnavailableError: a default was asked for and this machine has none.
        """
        if python_version is None:
            python_version = cls.here().python_version
        found = _PYTHON.fullmatch(python_version)
        oldest = _OLDEST_FREE_THREADED if found and found["free"] else _OLDEST
        if not found or int(found["minor"]) < oldest or (found["pypy"] and found["free"]):
            raise InputError(
                f"{python_version!r} is not a version of Python that wheels are resolved for",
                hint="give a version of CPython such as 3.12, 3.14t for its free-threaded build, "
                "or pypy3.11",
            )
        return cls(python_version, _parse_platform(platform))

    @classmethod
    def parse_all(
        cls, python_versions: Sequence[str] = (), platforms: Sequence[str] = ()
    ) -> list[Target]:
        """Each Python on each platform, of those that somebody typed; see ``parse``."""
        return list(
            dict.fromkeys(
                cls.parse(version, platform)
                for version in python_versions or (None,)
                for platform in platforms or (None,)
            )
        )

    @property
    def machine(self) -> str:
        """The processor, ``x86_64`` or ``aarch64``."""
        return self.platform.partition("-")[0]

    @property
    def release(self) -> str:
        """The version of the language, as far as it was given: ``3.14`` of ``3.14t``."""
        return self.python_version.removeprefix("pypy").removesuffix("t")

    @property
    def minor_release(self) -> str:
        """The same without a patch level."""
        return ".".join(self.release.split(".")[:2])

    @property
    def implementation(self) -> str:
        """The target's ``sys.implementation.name``: ``cpython`` or ``pypy``."""
        return "pypy" if self.python_version.startswith("pypy") else "cpython"

    @property
    def free_threaded(self) -> bool:
        """Whether it is a build of CPython without the global interpreter lock (PEP 703)."""
        return self.python_version.endswith("t")

    def tags(self) -> list[Tag]:
        """Tags of the wheels that install on this target, the best first."""
        major, minor = (int(part) for part in self.minor_release.split("."))
        platforms = list(self._platform_tags())
        if self.implementation == "pypy":
            interpreter = f"pp{major}{minor}"
            own = generic_tags(interpreter, [f"pypy{major}{minor}_{_PYPY_ABI}"], platforms)
        else:
            interpreter = f"cp{major}{minor}"
            abi = f"{interpreter}t" if self.free_threaded else interpreter
            own = cpython_tags((major, minor), [abi], platforms)
        return [*own, *compatible_tags((major, minor), interpreter, platforms)]

    def _platform_tags(self) -> Iterator[str]:
        if self.platform.endswith(_MUSL):
            for minor in (2, 1, 0):  # PEP 656
                yield f"musllinux_1_{minor}_{self.machine}"
            yield f"linux_{self.machine}"
            return
        newest = int(self.platform.rpartition("_")[2])
        # PEP 600: a glibc runs what was built for any older one; x86_64 wheels begin at 2.5.
        oldest = 5 if self.machine == "x86_64" else 17
        for minor in range(newest, oldest - 1, -1):
            yield f"manylinux_2_{minor}_{self.machine}"
            if minor in _LEGACY:
                yield f"{_LEGACY[minor]}_{self.machine}"
        yield f"linux_{self.machine}"

    def environment(self) -> Environment:
        """Values of the environment markers (PEP 508) on this target.

        ``platform_release`` and ``platform_version`` are empty, as uv has them: a target is no
        particular kernel.
        """
        full = self.release if self.release != self.minor_release else f"{self.release}.0"
        pypy = self.implementation == "pypy"
        return {
            "implementation_name": self.implementation,
            "implementation_version": PYPY_VERSION if pypy else full,
            "os_name": "posix",
            "platform_machine": self.machine,
            "platform_python_implementation": "PyPy" if pypy else "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": full,
            "python_version": self.minor_release,
            "sys_platform": "linux",
        }

    def __str__(self) -> str:
        language = f"{'PyPy' if self.implementation == 'pypy' else 'Python'} {self.release}"
        language += " (free-threaded)" if self.free_threaded else ""
        if self.platform.endswith(_MUSL):
            return f"{language} on {self.machine} with musl 1.2"
        glibc = self.platform.rpartition("manylinux_")[2].replace("_", ".")
        return f"{language} on {self.machine} with glibc {glibc}"


def needed_glibc(platform: str, target: Target) -> int:
    """The minor version of the glibc 2.x that a wheel of a platform tag needs; 0 where none.

    Args:
        platform: such as ``manylinux_2_28_x86_64``.
        target: what the wheel was chosen for: ``linux_x86_64`` says of itself nothing.
    """
    if found := re.match(r"manylinux_2_(\d+)_", platform):
        return int(found[1])
    if platform.startswith("linux_"):
        found = re.search(r"manylinux_2_(\d+)$", target.platform)
        return int(found[1]) if found else 0
    return next((minor for minor, name in _LEGACY.items() if platform.startswith(f"{name}_")), 0)


def _nearest(minor: int) -> int | None:
    """The newest glibc 2.x known to uv that is not newer than ``minor``."""
    return max((known for known in GLIBC_MINORS if known <= minor), default=None)


def _parse_platform(name: str | None) -> str:
    if name is None or name == "linux":
        return Target.here().platform
    # Written machine first by uv and machine last in a wheel's tag; "manylinux_2_28" is this one's.
    spelled = name.lower()
    machine = next((m for m in MACHINES if spelled.startswith(m)), None)
    if machine is not None:
        rest = spelled[len(machine) :].removeprefix("-")
    else:
        machine = next((m for m in MACHINES if spelled.endswith(f"_{m}")), None)
        rest = spelled if machine is None else spelled[: -len(machine) - 1]
    if rest in (_MUSL, _MUSL_TAG):
        return f"{MACHINES[machine] if machine else Target.here().machine}-{_MUSL}"
    minor: int | None = None
    if machine is not None and rest in ("", "linux", "unknown-linux-gnu"):
        minor = _COMMON_MINOR
    elif found := _MANYLINUX.fullmatch(rest):
        minor = 17 if found["legacy"] else _nearest(int(found["minor"]))
    if minor is None:
        raise InputError(
            f"{name!r} is not a platform that wheels are resolved for",
            hint="give linux, x86_64, aarch64, a tag such as manylinux_2_28_aarch64 "
            "(glibc 2.17 or newer), or musllinux_1_2_x86_64",
        )
    known = MACHINES[machine] if machine else Target.here().machine
    return f"{known}-manylinux_2_{minor}"
