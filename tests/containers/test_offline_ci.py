"""The examples of tests without a network: a real project's, from a mounted wheelhouse."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest
import yaml

from benchmarks import suites
from tests.conftest import CHECKOUT
from tests.testbed import LOGIN, Lab
from tests.testbed.slurm import start_slurm

pytestmark = [
    pytest.mark.containers,
    pytest.mark.network,
    pytest.mark.hosts,
    pytest.mark.fuse,
    pytest.mark.timeout(600),
]


@pytest.mark.costly
def test_a_project_is_tested_offline(ci: Path, workplace: Path) -> None:
    """The example, as it stands: pluggy's own tests, with everything they need from the mount."""
    script = CHECKOUT / "examples" / "ci" / "run.sh"
    environment = {**os.environ, "IMAGE": str(ci), "JOB": str(workplace / "job")}
    done = subprocess.run(
        [script], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout
    assert int(passed[1]) > 100
    assert "failed" not in done.stdout
    # As that of a CI, its code tells.
    (workplace / "work" / "broken").write_text("exec python -m pytest -q /nowhere")
    image = ["--image", str(workplace / "job" / "img.sif"), "--overlay", "broken"]
    done = subprocess.run(
        [sys.executable, "-m", "wheelmount.cli.main", "run", workplace / "job",
         *image, workplace / "work" / "broken"],
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == 1, "there is no pytest in a new overlay"


PART = {"packaging": ("specifiers", "version"), "attrs": ("funcs", "make", "3rd_party")}
"""What is left out of suites, as it takes minutes: ``tests/test_NAME.py``."""


@pytest.mark.costly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("project", suites.PROJECTS, ids=attrgetter("name"))
def test_offline_the_suite_of_a_project_counts_what_it_counts_plainly(
    project: suites.Project, ci: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_out = [f"--ignore=tests/test_{name}.py" for name in PART.get(project.name, ())]
    project = replace(project, options=[*project.options, *left_out])
    monkeypatch.setenv("PIP_COMPILE", "0")  # most of what is installed is not imported
    plain, offline = workplace / "work" / "plain", workplace / "work" / "offline"
    plain.mkdir()
    offline.mkdir()
    counted = suites.offline(project, ci, offline)[2]
    assert re.search(r"\d{3} passed", counted)
    assert " failed" not in counted
    (archive,) = (offline / "job" / "source").iterdir()
    assert suites.plain(project, archive, plain)[1] == counted


PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "mine"
version = "1"
[tool.setuptools]
py-modules = ["mine"]
"""

TEST = """
import pytest, mine
@pytest.mark.parametrize("number", range(10))
def test_it(number):
    assert mine.WHAT == "{what}"
"""


@pytest.mark.costly
def test_a_checkout_is_tested_by_several_hosts(ci: Path, workplace: Path) -> None:
    """As it is, also what was not committed; twice in one directory, which lies in the checkout."""
    project = _checkout(workplace / "work" / "mine")
    script = CHECKOUT / "examples" / "ci" / "run.sh"
    job = project / "job"
    environment = {**os.environ, "IMAGE": str(ci), "JOB": str(job), "WHEELMOUNT_HOSTS": "local:2"}
    for what in ("first", "second"):
        _edit(project, what)
        done = subprocess.run(
            [str(script), str(project), "pytest", "pytest-cov", "setuptools"],
            env=environment, capture_output=True, text=True, timeout=500, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("5 passed") == 2, done.stdout
    _check_reports(project / "job-reports")


def _checkout(project: Path) -> Path:
    (project / "tests").mkdir(parents=True)
    (project / "pyproject.toml").write_text(PROJECT)
    git = ["git", "-C", str(project), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "pyproject.toml"], ["commit", "-qm", "Begin"]):
        subprocess.run([*git, *words], check=True)
    return project


def _edit(project: Path, what: str) -> None:
    (project / "mine.py").write_text(f"WHAT = {what!r}\n")
    (project / "tests" / "test_mine.py").write_text(TEST.format(what=what))


def _check_reports(reports: Path) -> None:
    for host in ("host0", "host1"):
        assert 'tests="5"' in (reports / host / "junit.xml").read_text()
        assert "<coverage " in (reports / host / "coverage.xml").read_text()


@pytest.mark.parametrize("name", ["github.yml", "github-slurm.yml", "gitlab.yml", "slurm.sh"])
def test_examples_name_what_is_there(name: str) -> None:
    folder = CHECKOUT / "examples" / "ci"
    text = (folder / name).read_text()
    scripts = set(re.findall(r"examples/[\w/-]+\.sh", text))
    assert f"examples/ci/{'test' if name == 'slurm.sh' else 'prepare'}.sh" in scripts
    for script in scripts:
        assert (CHECKOUT / script).is_file()
        subprocess.run(["bash", "-n", CHECKOUT / script], check=True)
    (run,) = re.findall(r"wheelmount run ((?:.+\n)+)", text)
    done = subprocess.run(
        [sys.executable, "-m", "wheelmount.cli.main", "run", "--help"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    for option in re.findall(r"--[\w-]+", run):
        assert option in done.stdout


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        ("github.yml", "vendor.github-workflows"),
        ("github-slurm.yml", "vendor.github-workflows"),
        ("gitlab.yml", "vendor.gitlab-ci"),
    ],
)
def test_examples_are_what_their_engines_take(name: str, schema: str) -> None:
    """By the schemas that describe them, as these engines run elsewhere only."""
    example = CHECKOUT / "examples" / "ci" / name
    subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, example], check=True
    )


@pytest.mark.costly
@pytest.mark.lab
def test_slurm_runs_it_on_a_node(ci: Path, shared: Path) -> None:
    folder, job = CHECKOUT / "examples" / "ci", shared / "job"
    needs = ["pluggy==1.6.0", "pytest", "setuptools", "setuptools-scm"]
    subprocess.run(
        [folder / "prepare.sh", job, *needs], env={**os.environ, "IMAGE": str(ci)}, check=True
    )
    with Lab(1) as lab:
        start_slurm(lab)
        variables = f"ALL,WHEELMOUNT={CHECKOUT},JOB={job}"
        batch = ["sbatch", "--wait", "--output", "/tmp/offline.out", "--export", variables]
        done = lab.run(LOGIN, [*batch, str(folder / "slurm.sh")], timeout=300)
        said = lab.run("host0", ["cat", "/tmp/offline.out"]).stdout
    assert done.returncode == 0, said
    assert re.search(r"\d{3} passed", said), said


@pytest.mark.costly
@pytest.mark.lab
def test_a_runner_on_a_login_node_runs_it_on_two_nodes(ci: Path, shared: Path) -> None:
    """The workflow's own commands, twice, as a push after another has them run."""
    workflow = yaml.safe_load((CHECKOUT / "examples" / "ci" / "github-slurm.yml").read_text())
    prepare, *others = [s["run"] for s in workflow["jobs"]["offline"]["steps"] if "run" in s]
    project = _checkout(shared / "mine")
    variables = {**os.environ, "WHEELMOUNT": str(CHECKOUT), "JOB": str(shared / "job")}
    state = variables["WHEELMOUNT_STATE_DIR"] = "/tmp/state"
    with Lab(2) as lab:
        start_slurm(lab)
        for what in ("first", "second"):
            _edit(project, what)
            variables["SESSION"] = f"ci-{what}"
            outside = {**variables, "IMAGE": str(ci)}  # a lab has no index
            subprocess.run(["bash", "-ec", prepare], cwd=project, env=outside, check=True)
            for command in others:
                shell = ["bash", "-ec", command]
                done = lab.run(LOGIN, shell, cwd=project, env=variables, timeout=300)
                assert done.returncode == 0, done.stdout + done.stderr
            _check_reports(project / "reports")
            for host in lab.hosts:
                left = lab.run(host, ["find", f"{state}/overlays", "-name", "ci-*"])
                assert (left.returncode, left.stdout) == (0, ""), left.stdout + left.stderr
        assert lab.run(LOGIN, ["squeue", "--noheader"]).stdout == ""
