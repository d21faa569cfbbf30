"""What is typed is what runs: nothing of the user's command is taken for an option of ours."""

from __future__ import annotations

import os
import random
from pathlib import Path

import click
import pytest

from tests.conftest import Cli
from wheelmount.cli.containers import execute, shell
from wheelmount.cli.run import run
from wheelmount.operations import scripts

ODD = [
    *(
        "--",
        "-",
        "",
        "-q",
        "-h",
        "--help",
        "--json",
        "-xvf",
        "-lq",
        "--hosts",
        "local:9",
        "--quiet",
    ),
    *("--image=x", "-i", "a b", "\n", "'", '"', "$(id)", "ä", "--mntpoint", "-nq", "@file", "*"),
    os.fsdecode(b"not-utf8-\xff\xfe"),
]
"""Words that could be mistaken for something else."""


def _words(seed: int) -> list[str]:
    chosen = random.Random(seed)  # noqa: S311 - the same every time
    return [chosen.choice(ODD) for _ in range(chosen.randrange(9))]


@pytest.mark.parametrize("seed", range(40))
def test_any_words_are_the_command_s(seed: int) -> None:
    words = _words(seed)
    for command in (execute, shell):
        for start in (["echo"], ["--", "echo"], ["-q", "--image", "i.sif", "echo"]):
            params = command.make_context("x", [*start, *words]).params
            assert params["command"] == ("echo", *words)
            assert params["quiet"] == ("-q" in start)
    for start in (
        ["d", "s"],
        ["--", "d", "s"],
        ["d", "--", "s"],
        ["-q", "d", "--mntpoint", "--", "s"],
        ["--mntpoint", "--", "d", "-q", "s"],
    ):
        params = run.make_context("run", [*start, *words]).params
        assert (str(params["source"]), params["script"]) == ("d", "s")
        assert params["arguments"] == tuple(words)
        assert params["quiet"] == ("-q" in start)
        assert params["mntpoint"] == ("--" if "--mntpoint" in start else None)
    assert run.make_context("run", ["d", "-q", "-", "-q"]).params["arguments"] == ("-q",)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (execute, ["-x", "echo"]),
        (execute, ["--unknown", "echo"]),
        (shell, ["-ix"]),
        (run, ["-z", "d", "s"]),
        (run, ["d", "--unknown", "s"]),
        (run, ["d", "-lq", "s"]),
    ],
)
def test_unknown_options_of_ours_are_refused(command: click.Command, words: list[str]) -> None:
    with pytest.raises(click.UsageError, match="No such option"):
        command.make_context("x", words)


@pytest.mark.hosts
def test_a_script_gets_them_byte_for_byte(cli: Cli, source: Path, workplace: Path) -> None:
    script = workplace / "work" / "script.sh"
    script.write_text("printf '%s\\0' \"$@\"")
    done = cli("run", source, "--json", "--output-dir", "x", "script.sh", "-x")
    assert "exclude each other" in done.stderr
    done = cli("run", "-q", source, "--output-dir", workplace / "work" / "out", "script.sh", *ODD)
    assert done.returncode == 0, done.stderr
    written = (workplace / "work" / "out" / "host0.out").read_bytes()
    assert written == b"".join(os.fsencode(word) + b"\0" for word in ODD)


@pytest.mark.parametrize(
    ("first", "words"),
    [
        ("#!/bin/sh", ("/bin/sh",)),
        ("#! /usr/bin/env  -S python3 -I ", ("/usr/bin/env", "-S python3 -I")),
        ("#!", ("bash",)),
        ("echo", ("bash",)),
        ("", ("bash",)),
    ],
)
def test_a_script_says_what_runs_it(first: str, words: tuple[str, ...]) -> None:
    assert scripts.interpreter(f"{first}\nrest".encode()) == words


@pytest.mark.hosts
def test_a_script_may_be_of_any_interpreter(cli: Cli, source: Path) -> None:
    script = "#!/usr/bin/env python3\nimport sys\nprint(sys.argv[1:], open('.hidden').read())"
    done = cli("run", "-q", source, "-", "-x", input=script, stdin=None)
    assert done.stdout == "['-x'] hidden\n\n", done.stderr


@pytest.mark.slow
def test_variables_are_set_for_a_script(
    cli: Cli, source: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAIN", "of here\nand more")
    monkeypatch.delenv("NONE", raising=False)
    script = workplace / "script"
    script.write_text('printf "%s|%s|%s" "$PLAIN" "$GIVEN" "$EMPTY$1"')
    given = ["--env", "PLAIN", "--env", "GIVEN=a=b $c", "--env", "EMPTY="]
    done = cli("run", "-q", "--hosts", "local:1", *given, source, script, "--env")
    assert (done.returncode, done.stdout) == (0, "of here\nand more|a=b $c|--env"), done.stderr
    for wrong, said in (("NONE", "NONE has no value here"), ("1A=b", "cannot name a variable")):
        refused = cli("run", "-q", "--env", wrong, source, script)
        assert refused.returncode == 64
        assert said in refused.stderr


@pytest.mark.parametrize(
    ("words", "script", "rest", "hosts", "said"),
    [
        (["d", "s", "--json", "--x"], "s", ("--json", "--x"), 1, "--json is passed on to s: "),
        (["d", "s", "--env=A=b"], "s", ("--env=A=b",), 1, "--env=A=b is passed on to s: "),
        (["--", "d", "s", "--json"], "s", ("--json",), 1, ""),
        (["d", "--", "s", "--json"], "s", ("--json",), 1, ""),
        (["-q", "d", "s", "--json"], "s", ("--json",), 1, ""),
        (["d", "s", "--help"], "s", ("--help",), 1, ""),
        (["d", "s", "-v", "--json"], "s", ("-v", "--json"), 1, ""),
        (
            ["f", "--hosts", "local:3", "-q", "--x"],
            "-q",
            ("--x",),
            3,
            "--hosts local:3 is read as ",
        ),
        (["--with", "x", "--", "f", "--json"], "--json", (), 1, ""),
        (["--with", "x", "python", "--json"], "--json", (), 1, "--json is passed on to python: "),
        (["--with", "x", "python", "-m", "m"], "-m", ("m",), 1, ""),
        (["d", "-m", "m", "--json", "-q"], "--json", ("-q",), 1, ""),
        (["-m", "m", "--json", "-q"], "--json", ("-q",), 1, ""),
    ],
)
def test_an_option_behind_the_command_is_told_of(
    words: list[str],
    script: str,
    rest: tuple[str, ...],
    hosts: int,
    said: str,
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(workplace / "work")
    Path("d").mkdir()
    Path("f").touch()
    params = run.make_context("run", words).params
    assert (params["script"], params["arguments"]) == (script, rest)
    assert params["spec"].count == hosts
    assert not params["as_json"]
    assert params["module"] == ("m" if words[:2] in (["-m", "m"], ["d", "-m"]) else None)
    told = capsys.readouterr().err
    assert told.startswith(f"note: {said}") if said else not told
