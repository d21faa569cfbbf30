"""The examples of tests without a network: a real project's, from a mounted wheelhouse."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


TEST = """
import pytest, mine
@pytest.mark.parametrize("number", range(10))
def test_it(number):
    assert mine.WHAT == "{what}"
"""


def test_a_checkout_is_tested_by_several_hosts(ci: Path, workplace: Path) -> None:
    """As it is, also what was not committed; twice in one directory, which lies in the checkout."""
    project = workplace / "work" / "mine"
    (project / "tests").mkdir(parents=True)
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "mine"\nversion = "1"\n[tool.setuptools]\npy-modules = ["mine"]\n'
    )
    git = ["git", "-C", str(project), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "pyproject.toml"], ["commit", "-qm", "Begin"]):
        subprocess.run([*git, *words], check=True)
    script = CHECKOUT / "examples" / "ci" / "run.sh"
    job = project / "job"
    environment = {**os.environ, "IMAGE": str(ci), "JOB": str(job), "WHEELMOUNT_HOSTS": "local:2"}
    for what in ("first", "second"):
        (project / "mine.py").write_text(f"WHAT = {what!r}\n")
        (project / "tests" / "test_mine.py").write_text(TEST.format(what=what))
        done = subprocess.run(
            [str(script), str(project), "pytest", "pytest-cov", "setuptools"],
            env=environment, capture_output=True, text=True, timeout=500, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("5 passed") == 2, done.stdout
    for host in ("host0", "host1"):
        reports = project / "job-reports" / host
        assert 'tests="5"' in (reports / "junit.xml").read_text()
        assert "<coverage " in (reports / "coverage.xml").read_text()


@pytest.mark.parametrize("name", ["github.yml", "gitlab.yml", "slurm.sh"])
def test_examples_name_what_is_there(name: str) -> None:
    folder = CHECKOUT / "examples" / "ci"
    text = (folder / name).read_text()
    scripts = set(re.findall(r"examples/[\w/-]+\.sh", text))
    assert f"examples/ci/{'test' if name == 'slurm.sh' else 'prepare'}.sh" in scripts
    for script in scripts:
        assert (CHECKOUT / script).is_file()
        subprocess.run(["bash", "-n", CHECKOUT / script], check=True)
    (run,) = re.findall(r"wheelmount run (.*)", text)
    done = subprocess.run(
        [sys.executable, "-m", "wheelmount.cli.main", "run", "--help"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    for option in re.findall(r"--[\w-]+", run):
        assert option in done.stdout


@pytest.mark.parametrize(
    ("name", "schema"),
    [("github.yml", "vendor.github-workflows"), ("gitlab.yml", "vendor.gitlab-ci")],
)
def test_examples_are_what_their_engines_take(name: str, schema: str) -> None:
    """By the schemas that describe them, as these engines run elsewhere only."""
    example = CHECKOUT / "examples" / "ci" / name
    subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, example], check=True
    )


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
        done = lab.run(LOGIN, [*batch, str(folder / "slurm.sh")])
        said = lab.run("host0", ["cat", "/tmp/offline.out"]).stdout
    assert done.returncode == 0, said
    assert re.search(r"\d{3} passed", said), said
