"""What uv says, sorted. The texts are uv's own, of 0.13 and (drawn as a tree) of 0.9."""

from __future__ import annotations

from typing import NoReturn

import pytest
import uv

from wheelmount import child
from wheelmount.errors import InputError, UnavailableError, WaitError
from wheelmount.wheels import compiler
from wheelmount.wheels.compiler import Kind, compile_requirements, explain
from wheelmount.wheels.wanted import Wanted

from .support import TARGET

NO_SOLUTION = "error: No solution found when resolving dependencies\n  cause: Because "
END = ", we can conclude that your requirements are unsatisfiable.\n"


@pytest.mark.parametrize(
    ("said", "kind", "subject"),
    [
        (
            f"{NO_SOLUTION}nosuch was not found in the package registry and you need it{END}",
            Kind.UNKNOWN_PACKAGE,
            "nosuch",
        ),
        (
            "  × No solution found when resolving dependencies:\n  ╰─▶ Because nosuch was not "  # noqa: RUF001
            "found in the\n      package registry and you require nosuch, we can conclude that "
            "your\n      requirements are unsatisfiable.\n",
            Kind.UNKNOWN_PACKAGE,
            "nosuch",
        ),
        (
            f"{NO_SOLUTION}nosuch was not found in the provided package locations{END}",
            Kind.UNKNOWN_PACKAGE,
            "nosuch",
        ),
        (
            f"{NO_SOLUTION}all versions of pyfuse3 have no usable wheels and you require "
            f"pyfuse3{END}\nhint: Wheels are required for `pyfuse3` because building from source "
            "is disabled for all packages (i.e., with `--no-build`)\n",
            Kind.NO_SOURCE_BUILD,
            "pyfuse3",
        ),
        (
            f"{NO_SOLUTION}xformers==0.0.20 has no usable wheels{END}",
            Kind.NO_SOURCE_BUILD,
            "xformers",
        ),
        (
            f"{NO_SOLUTION}torch==2.0.1 has no wheels with a matching Python ABI tag (e.g., "
            f"`cp312`) and you require torch==2.0.1{END}\nhint: only `cp311`",
            Kind.NO_FITTING_WHEEL,
            "torch",
        ),
        (
            "error: Request failed after 3 retries in 9.8s\n"
            "  cause: Failed to fetch: http://127.0.0.1:1/simple/requests/\n"
            "  cause: tcp connect error\n",
            Kind.NO_NETWORK,
            "http://127.0.0.1:1/simple/requests/",
        ),
        (
            f"{NO_SOLUTION}idna was not found in the cache and you require idna{END}",
            Kind.NO_NETWORK,
            "idna",
        ),
        (
            f"{NO_SOLUTION}idna was not found in the package registry and you require idna{END}\n"
            "hint: An index URL (http://127.0.0.1:8766/401) could not be queried due to a lack of "
            "valid authentication credentials (401 Unauthorized)\n",
            Kind.DENIED,
            "http://127.0.0.1:8766/401",
        ),
        (
            "error: Error parsing included file in `r.txt` at position 0\n  cause: failed to read "
            "from file `/w/no.txt`: No such file or directory (os error 2)\n",
            Kind.BAD_FILE,
            "/w/no.txt",
        ),
        (
            "error: Couldn't parse requirement in `r.txt` at position 0\n",
            Kind.BAD_FILE,
            "r.txt",
        ),
        (
            "error: Failed to download `own @ http://h/own.whl`\n  cause: Failed to fetch: http://h/"
            "own.whl\n  cause: HTTP status client error (404 Not Found) for url (http://h/own.whl)",
            Kind.GONE,
            "http://h/own.whl",
        ),
        (
            "error: Failed to parse: p/pyproject.toml\n  cause: Invalid `pyproject.toml`\n",
            Kind.BAD_FILE,
            "p/pyproject.toml",
        ),
        (
            "error: Failed to read `six @ file:///w/six.whl`\n  cause: Failed to read metadata: "
            "/w/six.whl\n  cause: Failed to read from zip file\n",
            Kind.BAD_WHEEL,
            "/w/six.whl",
        ),
        ("error: Requested extra not found: nope\n", Kind.NO_EXTRA, "nope"),
        (
            "error: The dependency group 'nope' was not found in the project: e/pyproject.toml\n",
            Kind.NO_EXTRA,
            "nope",
        ),
        (
            f"{NO_SOLUTION}there is no version of a==9 and you require a==9{END}",
            Kind.NO_VERSION,
            "a",
        ),
        (f"{NO_SOLUTION}you require a<2 and a>2{END}", Kind.CONFLICT, ""),
        ("error: failed to decode file `/w/r.txt`: not UTF-8\n", Kind.BAD_FILE, "/w/r.txt"),
        ("error: it is something else\n", Kind.OTHER, ""),
        ("", Kind.OTHER, ""),
    ],
)  # fmt: skip
def test_kinds(said: str, kind: Kind, subject: str) -> None:
    failure = explain(said)
    assert (failure.kind, failure.subject) == (kind, subject)
    assert failure.reason
    assert "\n" not in failure.reason + failure.hint
    assert "--no-build" not in failure.hint


def test_a_reason_is_short() -> None:
    assert explain(f"{NO_SOLUTION}you require a<2 and a>2{END}").reason == "you require a<2 and a>2"


def test_a_conflict_keeps_its_lines() -> None:
    said = f"{NO_SOLUTION}a depends on b<1,\n      we know c.\n      And because d{END}"
    assert explain(said).reason == "a depends on b<1, we know c.\n  And because d"


def test_nothing_required() -> None:
    with pytest.raises(InputError):
        Wanted.of([])


def test_a_bounded_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "TIMEOUT", 0.0)
    with pytest.raises(WaitError) as caught:
        compile_requirements(Wanted.of(["a"]), TARGET, [])
    assert caught.value.hint


def test_no_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> NoReturn:
        raise FileNotFoundError

    monkeypatch.setattr(uv, "find_uv_bin", absent)
    with pytest.raises(UnavailableError, match="uv is not installed"):
        compile_requirements(Wanted.of(["a"]), TARGET, [])


def test_never_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def run(command: list[str], **options: object) -> child.Done:
        seen.extend([command, options["given"], options.get("shell", False)])
        return child.Done(0, "", "", whole=True)

    monkeypatch.setattr(child, "run", run)
    compile_requirements(Wanted.of(["a==1; os_name == '$(x)'"]), TARGET, [])
    command, given, shell = seen
    assert isinstance(command, list)
    assert shell is False
    assert given == 'a==1; os_name == "$(x)"\n'
    assert not any("$(x)" in argument for argument in command)
