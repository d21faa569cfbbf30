"""When an image is built, kept, and what is left when that fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.containers.test_running import wait_until
from wheelmount import logs
from wheelmount.containers import apptainer, image, inputs
from wheelmount.errors import (
    ContainerError,
    InputError,
    SourceError,
    UnavailableError,
    WaitError,
)

DEFINITION = """Bootstrap: scratch
%arguments
    uv=here/uv
    # other=ignored
%files
    {{ uv }} /usr/bin/uv
    "with space" /x   # a comment
    *.toml /etc
%files from stage
    /not/of/this/machine
%post
    true
"""


@pytest.fixture
def definition(tmp_path: Path, fake_apptainer: Path) -> Path:
    folder = tmp_path / "images"
    (folder / "here").mkdir(parents=True)
    for name in ("here/uv", "other-uv", "with space", "a.toml", "b.toml"):
        (folder / name).write_text(name)
    file = folder / "test.def"
    file.write_text(DEFINITION)
    return file


def builds(definition: Path) -> int:
    return (definition.parent.parent / "bin" / "builds").read_text().count("built")


def test_sources() -> None:
    found = [each.path for each in inputs.sources(DEFINITION, {})]
    assert found == ["here/uv", "with space", "*.toml"]
    assert inputs.sources(DEFINITION, {"uv": "/bin/uv"})[0].path == "/bin/uv"


def test_the_image_it_starts_from_is_an_input(definition: Path, tmp_path: Path) -> None:
    definition.write_text("Bootstrap: localimage\nFrom: {{ base }}\n%arguments\n  base=base.sif\n")
    with pytest.raises(SourceError, match=r"needs base\.sif") as error:
        image.build(definition, tmp_path / "x.sif")
    assert "--build-arg" in str(error.value.hint)
    (definition.parent / "base.sif").write_text("one")
    assert image.build(definition, tmp_path / "x.sif")
    assert image.state(tmp_path / "x.sif") == image.CURRENT
    (definition.parent / "base.sif").write_text("another")
    assert image.state(tmp_path / "x.sif") == image.OUTDATED
    assert image.build(definition, tmp_path / "x.sif")
    (tmp_path / "x.sif").write_text("put in its place")
    assert image.state(tmp_path / "x.sif") == image.FOREIGN
    definition.write_text("Bootstrap: docker\nFrom: python:3\n")
    assert image.build(definition, tmp_path / "y.sif"), "that is no path of this machine"


@pytest.mark.parametrize(
    "text",
    [
        "Bootstrap: localimage # an image here\nFrom: data/f # that one\n",
        "bootstrap: oci-archive\nfrom: data/f:latest\n",
        "Bootstrap: docker-archive\nFrom: data/f\n",
        "Bootstrap: oci\nFrom: data:tag\n",
        "Bootstrap: scratch\n%Files # of this machine\n  data /data\n",
        "Bootstrap: scratch\n%appfiles program\n  data\n",
    ],
)
def test_all_that_comes_from_this_machine_is_an_input(
    text: str, definition: Path, tmp_path: Path
) -> None:
    definition.write_text(text)
    folder = definition.parent / "data"
    folder.mkdir()
    (folder / "f").write_text("one")
    assert image.build(definition, tmp_path / "x.sif")
    assert not image.build(definition, tmp_path / "x.sif")
    (folder / "f").write_text("another")
    assert image.state(tmp_path / "x.sif") == image.OUTDATED
    assert image.build(definition, tmp_path / "x.sif")


def test_an_image_of_docker_is_never_up_to_date(definition: Path, tmp_path: Path) -> None:
    definition.write_text("Bootstrap: docker-daemon\nFrom: mine:latest\n")
    for _ in range(2):
        assert image.build(definition, tmp_path / "x.sif")
        assert image.state(tmp_path / "x.sif") == image.OUTDATED


def test_what_links_lead_to_is_copied_and_so_an_input(definition: Path, tmp_path: Path) -> None:
    definition.write_text("Bootstrap: scratch\n%files\n  data /data\n  here /here\n")
    folder, sif = definition.parent, tmp_path / "x.sif"
    for name in ("v1", "v2"):
        (folder / name).mkdir()
    (folder / "data").symlink_to("v1")
    (folder / "here" / "inner").symlink_to("../v1")
    (folder / "v1" / "round").symlink_to("..")
    Path(os.fsdecode(os.fsencode(folder / "v1") + b"/\xff")).touch()
    assert image.build(definition, sif)
    assert not image.build(definition, sif)
    (folder / "v1" / "f").write_text("one")
    assert image.build(definition, sif)
    for link in (folder / "data", folder / "here" / "inner"):
        link.unlink()
        link.symlink_to(folder / "v2")
        assert image.build(definition, sif)
        assert not image.build(definition, sif)


def test_names_are_split_as_apptainer_splits_them(definition: Path, tmp_path: Path) -> None:
    folder = definition.parent
    (folder / "a b").write_text("one")
    (folder / "o'brien").write_text("for apptainer, the name ends before the quote")
    definition.write_text('Bootstrap: scratch\n%files\n  "a b" /a\n# it\'s no name\n')
    assert image.build(definition, tmp_path / "x.sif")
    (folder / "a b").write_text("another")
    assert image.state(tmp_path / "x.sif") == image.OUTDATED
    definition.write_text("Bootstrap: scratch\n%files\n  o'brien /a\n")
    assert image.state(tmp_path / "x.sif") == image.OUTDATED
    with pytest.raises(SourceError, match="needs o,"):
        image.build(definition, tmp_path / "x.sif")


def test_an_image_does_not_take_the_place_of_a_directory(definition: Path, tmp_path: Path) -> None:
    (tmp_path / "x.sif").mkdir()
    with pytest.raises(InputError, match="is a directory"):
        image.build(definition, tmp_path / "x.sif")


def test_nothing_is_written_where_links_lead(definition: Path, tmp_path: Path) -> None:
    """Others may put links into a directory of images that they may write to."""
    precious = tmp_path / "precious"
    precious.write_text("precious")
    for name in ("x.sif", "x.sif.stamp", "x.sif.log", f".x.sif.{os.getpid()}"):
        (tmp_path / name).symlink_to(precious)
    assert image.build(definition, tmp_path / "x.sif")
    assert image.state(tmp_path / "x.sif") == image.CURRENT
    assert precious.read_text() == "precious"


def test_a_checkout_elsewhere_is_the_same(definition: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(definition.parent, other, copy_function=shutil.copy2)
    args = {"uv": str(definition.parent / "here" / "uv")}
    elsewhere = {"uv": str(other / "here" / "uv")}
    assert inputs.fingerprint(definition, args) == inputs.fingerprint(
        other / definition.name, elsewhere
    )
    assert inputs.fingerprint(definition, args) != inputs.fingerprint(
        definition, {"uv": "other-uv"}
    )


def test_kept_while_nothing_changes(definition: Path, tmp_path: Path) -> None:
    sif = tmp_path / "out" / "test.sif"
    assert image.build(definition, sif)
    assert sif.read_text() == DEFINITION
    assert not image.build(definition, sif)
    assert builds(definition) == 1
    assert {f.name for f in sif.parent.iterdir()} == {
        "test.sif",
        "test.sif.stamp",
        ".test.sif.lock",
    }


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("images/test.def", DEFINITION + "# changed\n"),
        ("images/here/uv", "new"),
        ("images/c.toml", "one more"),
        ("test.sif", "another image"),
        ("test.sif.stamp", "{"),
    ],
)
def test_built_again_after_a_change(file: str, text: str, definition: Path, tmp_path: Path) -> None:
    sif = tmp_path / "test.sif"
    image.build(definition, sif)
    (tmp_path / file).write_text(text)
    assert image.build(definition, sif)
    assert not image.build(definition, sif)


def test_built_again_if_it_is_gone_or_a_mode_changed(definition: Path, tmp_path: Path) -> None:
    sif = tmp_path / "test.sif"
    image.build(definition, sif)
    sif.unlink()
    assert image.build(definition, sif)
    (definition.parent / "here/uv").chmod(0o755)
    assert image.build(definition, sif)


def test_built_again_for_other_arguments(definition: Path, tmp_path: Path) -> None:
    sif = tmp_path / "test.sif"
    image.build(definition, sif)
    assert image.build(definition, sif, build_args={"uv": "other-uv"})
    assert not image.build(definition, sif, build_args={"uv": "other-uv"})


def test_missing_file(definition: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="needs nowhere"):
        image.build(definition, tmp_path / "x.sif", build_args={"uv": "nowhere"})
    with pytest.raises(SourceError, match=r"no\.def cannot be read: No such file"):
        image.build(tmp_path / "no.def", tmp_path / "x.sif")
    with pytest.raises(SourceError, match=r"x\.sif"):
        image.inspect(tmp_path / "x.sif")
    with pytest.raises(ContainerError, match="is a directory and no image"):
        image.inspect(tmp_path)


@pytest.mark.parametrize("argument", [("a b", "x"), ("a", "x,b=y"), ("a", "x\ny")])
def test_arguments_that_cannot_be_passed(
    argument: tuple[str, str], definition: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="cannot be passed"):
        image.build(definition, tmp_path / "x.sif", build_args=dict([argument]))


def test_failed_build_leaves_the_old_image_and_a_log(definition: Path, tmp_path: Path) -> None:
    sif = tmp_path / "out" / "test.sif"
    image.build(definition, sif)
    definition.write_text(DEFINITION + "# BROKEN\n")
    with pytest.raises(ContainerError, match="cannot stat 'nothing'") as error:
        image.build(definition, sif)
    log = sif.with_name("test.sif.log")
    assert str(log) in str(error.value.hint)
    assert "Starting build" in log.read_text()
    assert sif.read_text() == DEFINITION
    assert not [f for f in sif.parent.iterdir() if f.name.startswith(".test.sif.")
                and f.suffix != ".lock"]  # fmt: skip
    definition.write_text(DEFINITION)
    assert not image.build(definition, sif), "the old image is still what its stamp says"


def test_a_log_of_a_build_stays_small(
    definition: Path, tmp_path: Path, fake_apptainer: Path
) -> None:
    size = logs.SIZE + 1000
    fake_apptainer.write_text(
        f"#!/bin/sh\nyes {'x' * 10000} | head -c {size}\necho; echo 'FATAL: it is broken'; exit 1\n"
    )
    with pytest.raises(ContainerError, match="it is broken"):
        image.build(definition, tmp_path / "x.sif")
    assert (tmp_path / "x.sif.log").stat().st_size < 100_000


def test_output_that_is_no_text(definition: Path, tmp_path: Path, fake_apptainer: Path) -> None:
    fake_apptainer.write_text("#!/bin/sh\nprintf '\\377 broken\\n'; exit 1\n")
    with pytest.raises(ContainerError, match="\ufffd broken"):
        image.build(definition, tmp_path / "x.sif")


PEAK = """
import sys
from pathlib import Path
from wheelmount.containers import image
from wheelmount.errors import ContainerError
try:
    image.build(Path(sys.argv[1]), Path(sys.argv[2]))
except ContainerError as error:
    assert len(str(error)) < 2000, len(str(error))
lines = Path("/proc/self/status").read_text().splitlines()
(peak,) = [line.split()[1] for line in lines if "VmHWM" in line]
print(int(peak) >> 10)
"""


@pytest.mark.slow
def test_a_line_without_end_takes_no_memory(
    definition: Path, tmp_path: Path, fake_apptainer: Path
) -> None:
    endless = "head -c 300000000 /dev/zero | tr '\\0' x"
    fake_apptainer.write_text(f"#!/bin/sh\n{endless}; exit 1\n")
    client = [sys.executable, "-c", PEAK, str(definition), str(tmp_path / "x.sif")]
    done = subprocess.run(client, stdout=subprocess.PIPE, check=True, timeout=300)
    assert int(done.stdout) < 200, "MiB"


def test_interrupted_build_is_stopped(definition: Path, tmp_path: Path) -> None:
    class Stop(Exception):  # noqa: N818
        pass

    def interrupt(text: str) -> str:
        raise Stop

    definition.write_text(DEFINITION + "# SLOW\n")
    sessions = []
    real_stop = apptainer.stop

    def stop(session: int) -> None:
        sessions.append(session)
        real_stop(session)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(apptainer, "plain", interrupt)
        patch.setattr(apptainer, "stop", stop)
        with pytest.raises(Stop):
            image.build(definition, tmp_path / "x.sif")
    (session,) = sessions
    assert not apptainer._members(session)
    assert not (tmp_path / "x.sif").exists()


def test_a_build_that_writes_nothing_any_more_ends(
    definition: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apptainer, "BUILD_TIMEOUT", 1.0)
    definition.write_text(DEFINITION + "# SLOW\n")
    with pytest.raises(WaitError, match="the build has written nothing for 1 s") as error:
        image.build(definition, tmp_path / "x.sif")
    assert f"the full log is {tmp_path / 'x.sif.log'}" in str(error.value.hint)
    assert not (tmp_path / "x.sif").exists()


KILLED = """#!/bin/sh
while [ $# -gt 2 ]; do shift; done
echo partial >"$1"
mkdir "$APPTAINER_TMPDIR/usr"
echo partial >"$APPTAINER_TMPDIR/usr/partial"
chmod 0555 "$APPTAINER_TMPDIR/usr"
if grep -q SLOW "$2"; then echo $$ >"$(dirname "$0")/session"; exec sleep 60; fi
cat "$2" >"$1"
"""

BUILD = """
import sys
from pathlib import Path
from wheelmount.containers import image
image.build(*map(Path, sys.argv[1:]))
"""


def test_what_a_killed_build_has_left_is_removed(
    definition: Path, tmp_path: Path, fake_apptainer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_apptainer.write_text(KILLED)
    temporary, sif = tmp_path / "tmp", tmp_path / "out" / "x.sif"
    temporary.mkdir()
    definition.write_text(DEFINITION + "# SLOW\n")
    session = fake_apptainer.with_name("session")
    command = [sys.executable, "-c", BUILD, str(definition), str(sif)]
    with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(temporary)}) as client:
        wait_until(lambda: session.exists() and session.read_text().endswith("\n"))
        client.kill()
    apptainer.stop(int(session.read_text()))
    assert list(temporary.iterdir())
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    definition.write_text(DEFINITION)
    image.build(definition, sif)
    assert not list(temporary.iterdir())
    assert {f.name for f in sif.parent.iterdir()} == {"x.sif", "x.sif.stamp", ".x.sif.lock"}


def test_two_builds_at_once(definition: Path, tmp_path: Path) -> None:
    sif = tmp_path / "test.sif"
    results: list[bool] = []
    threads = [
        threading.Thread(target=lambda: results.append(image.build(definition, sif)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [False, False, True]
    assert builds(definition) == 1


def test_no_apptainer(definition: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnavailableError):
        image.build(definition, tmp_path / "x.sif")


# --- with the real one ----------------------------------------------------------------------------


@pytest.mark.containers
@pytest.mark.timeout(600)
def test_the_image_is_kept(sif: Path) -> None:
    import uv

    definition = Path(__file__).parents[2] / "images" / "python.def"
    assert not image.build(definition, sif, build_args={"uv": uv.find_uv_bin()})


@pytest.mark.containers
@pytest.mark.timeout(600)
def test_inspect(sif: Path, tmp_path: Path) -> None:
    found = image.inspect(sif)
    assert found.labels["org.opencontainers.image.title"] == "wheelmount-python"
    assert "Bootstrap: debootstrap" in found.definition
    (tmp_path / "no.sif").write_text("no image")
    with pytest.raises(ContainerError, match="cannot be read as an image"):
        image.inspect(tmp_path / "no.sif")


@pytest.mark.containers
def test_real_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    definition = tmp_path / "broken.def"
    setup = f"env >{tmp_path}/told"  # on this machine, and not in the image
    definition.write_text(f"Bootstrap: scratch\n%setup\n    {setup}\n%post\n    true\n")
    for name in ("WHEELMOUNT_CREDENTIALS", "HYPERACTOR_TLS_KEY", "MY_TOKEN", "APPTAINERENV_X"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("APPTAINER_DOCKER_PASSWORD", "of the registry")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    with pytest.raises(ContainerError, match=r"broken\.def did not build"):
        image.build(definition, tmp_path / "out" / "broken.sif")
    left = {f.name for f in (tmp_path / "out").iterdir()}
    assert left == {"broken.sif.log", ".broken.sif.lock"}
    told = (tmp_path / "told").read_text()
    assert "APPTAINER_DOCKER_PASSWORD=of the registry" in told
    assert "https_proxy=http://127.0.0.1:1" in told
    assert "secret" not in told
    assert not list(scratch.iterdir())
