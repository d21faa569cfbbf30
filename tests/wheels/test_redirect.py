"""Plain ``pip install`` and ``uv pip install`` under the two files, as in a container.

The containers here are namespaces: the system's own Python, its ``/usr`` and ``/etc`` under
overlays, and no network but a loopback, to which names are to be resolved: who asks for anything
is seen there.
"""

from __future__ import annotations

import configparser
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import uv

from wheelmount.errors import InputError
from wheelmount.wheels.redirect import environment, pip_conf, uv_toml

from .support import LOOPBACK, make_wheel

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]

# Everything changed lies on a tmpfs of the namespace, and goes with it.
INSIDE = """
set -e
mount -t tmpfs none /mnt
cd /mnt
mkdir -p etc/up etc/work usr/up usr/work home
for tree in etc usr; do
  mount -t overlay none -o "lowerdir=/$tree,upperdir=$tree/up,workdir=$tree/work" "/$tree"
done
mkdir -p /etc/uv
cp "$FILES/pip.conf" /etc/pip.conf
cp "$FILES/uv.toml" /etc/uv/uv.toml
cp "$UV" /usr/local/bin/uv
rm -f /etc/resolv.conf
echo nameserver 127.0.0.1 > /etc/resolv.conf
/usr/bin/python3 -c "$LOOPBACK"
packets() { echo "packets $(sed -n 's/^ *lo: *[0-9]* *\\([0-9]*\\).*/\\1/p' /proc/net/dev)"; }
cd home
export HOME=/mnt/home PATH=/usr/local/bin:/usr/bin:/bin
set +e
eval "$1"
"""


UNSHARE = ["unshare", "--map-root-user", "--net", "--mount", "--propagation", "slave"]


def namespace(script: str, files: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*UNSHARE, "sh", "-c", INSIDE, "sh", script],
        env={
            "PATH": os.environ["PATH"],
            "FILES": str(files),
            "UV": uv.find_uv_bin(),
            "LOOPBACK": LOOPBACK,
        },
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


@functools.cache
def why_not() -> str:
    """Why there can be no container here; empty if there can."""
    if shutil.which("unshare") is None:
        return "no unshare"
    # Asked in a namespace and not here: another Python may come first on this PATH.
    command = [*UNSHARE, "/usr/bin/python3", "-m", "pip", "-V"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"no namespace, or no system pip: {done.stderr[-200:]}"


@pytest.fixture
def container(tmp_path: Path) -> Path:
    """The directory of the two files, which point at wheels of ``own`` and ``other``."""
    if why_not():
        pytest.skip(why_not())
    packages = make_wheel(tmp_path / "some packages", "own", requires=["other"]).parent
    make_wheel(packages, "other")
    (tmp_path / "pip.conf").write_text(pip_conf(str(packages)))
    (tmp_path / "uv.toml").write_text(uv_toml(str(packages)))
    return tmp_path


SHOW = "python3 -c 'import own, other; print(own.VALUE, other.__file__)'"
INSTALL = {"pip": "pip install", "uv": "uv pip install"}


def test_the_files_of_the_project() -> None:
    assert (ROOT / "pip.conf").read_text() == pip_conf() == pip_conf("/packages")
    assert (ROOT / "images" / "uv.toml").read_text() == uv_toml()
    with_space = pip_conf("/with space"), uv_toml("/with space")
    assert "/packages" not in "".join(with_space)


@pytest.mark.parametrize("packages", ["/packages", "/with space/ü", '/quo"te\\'])
def test_both_are_read_as_meant(packages: str) -> None:
    parser = configparser.RawConfigParser()
    parser.read_string(pip_conf(packages))
    links = parser["global"]["find-links"]
    assert links in (packages, Path(packages).as_uri())
    assert len(links.split()) == 1
    assert tomllib.loads(uv_toml(packages))["find-links"] == [packages]
    assert "pip" in tomllib.loads(uv_toml(packages))
    assert "pip" not in tomllib.loads(uv_toml(packages, system=False))


@pytest.mark.parametrize("packages", ["packages", "", "/a\nextra-index-url = http://x", "/a\0"])
def test_paths_that_cannot_be_written(packages: str) -> None:
    for text in (pip_conf, uv_toml):
        with pytest.raises(InputError):
            text(packages)


@pytest.mark.slow
@pytest.mark.parametrize("tool", INSTALL)
def test_plain_install(container: Path, tool: str) -> None:
    done = namespace(f"{INSTALL[tool]} own && {SHOW}", container)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("1.0 /usr/")


@pytest.mark.slow
@pytest.mark.parametrize("tool", INSTALL)
def test_a_missing_package(container: Path, tool: str) -> None:
    done = namespace(f"{INSTALL[tool]} no-such-thing; code=$?; packets; exit $code", container)
    assert done.stdout.endswith("packets 0\n")  # no network is asked
    assert done.returncode != 0
    said = "No matching distribution found" if tool == "pip" else "not found in the provided pack"
    assert said in done.stderr
    assert "cache" not in done.stderr


@pytest.mark.parametrize("tool", INSTALL)
def test_a_url_fails_at_once(container: Path, tool: str) -> None:
    done = namespace(f"{INSTALL[tool]} 'x @ http://10.1.1.1/x-1-py3-none-any.whl'", container)
    assert done.returncode != 0
    assert "retrying" not in done.stderr.lower()  # which would take seconds


INDEX = "http://127.0.0.1:9/simple"
OTHER = "http://packages.example.org/simple"
OF_THE_USER = {
    "pip": f"""
export PIP_INDEX_URL={INDEX} PIP_EXTRA_INDEX_URL={OTHER}
mkdir -p .config/pip && cd .config/pip
printf '[global]\\nindex-url={INDEX}\\nextra-index-url={OTHER}\\nretries=5\\n' > pip.conf
""",
    "uv": f"""
export UV_INDEX={OTHER} UV_DEFAULT_INDEX={INDEX} UV_INDEX_URL={INDEX} UV_EXTRA_INDEX_URL={OTHER}
mkdir -p .config/uv
printf '[[index]]\\nurl="{INDEX}"\\ndefault=true\\n' | tee .config/uv/uv.toml > uv.toml
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("tool", INSTALL)
def test_indexes_of_the_user_have_no_say(container: Path, tool: str) -> None:
    script = f"{OF_THE_USER[tool]}\n{INSTALL[tool]} own && {SHOW}; {INSTALL[tool]} no-such-thing"
    done = namespace(f"{script}; packets", container)
    assert "1.0 /usr/" in done.stdout
    assert "no-such-thing" in done.stderr
    assert "http" not in done.stdout + done.stderr
    assert done.stdout.endswith("packets 0\n")


AGAINST = {
    "pip": "mkdir -p .config/pip; printf '[global]\\nno-index=0\\nfind-links=/no\\n' "
    "> .config/pip/pip.conf",
    "uv": "printf 'no-index=false\\noffline=false\\n' > uv.toml",
}


@pytest.mark.slow
@pytest.mark.parametrize("tool", INSTALL)
def test_the_environment_outranks_files_that_say_otherwise(container: Path, tool: str) -> None:
    exports = "".join(f"export {name}={value}\n" for name, value in environment().items())
    script = f"{AGAINST[tool]}\n{INSTALL[tool]} own && {SHOW}; {INSTALL[tool]} no-such-thing"
    done = namespace(f"{exports}{script}; packets", container)
    assert "1.0 /usr/" in done.stdout
    assert done.stdout.endswith("packets 0\n")
    assert "No matching" in done.stderr or "not found in the provided pack" in done.stderr
    assert "http" not in done.stdout + done.stderr
    # Without it they are obeyed, and that is seen: the two variables are there for a reason.
    alone = f"{AGAINST[tool]}\nexport UV_HTTP_RETRIES=0\n{INSTALL[tool]} no-such-thing; packets"
    done = namespace(alone, container)
    assert int(done.stdout.split()[-1]) > 0, done.stderr


@pytest.mark.slow
def test_projects_and_virtual_environments_of_uv(container: Path) -> None:
    script = """
printf '[project]\\nname="x"\\nversion="1"\\nrequires-python=">=3.8"\\n' > pyproject.toml
uv add own && uv run python -c 'import own; print("project", own.VALUE)'
uv run --no-project --with other python -c 'import other; print("with", other.VALUE)'
uv venv -q v && uv pip install -q -p v other && v/bin/python -c 'import other; print("venv")'
"""
    done = namespace(script, container)
    assert {"project 1.0", "with 1.0", "venv"} <= set(done.stdout.splitlines()), done.stderr


@pytest.mark.slow
def test_an_active_virtual_environment_where_people_work_in_one(container: Path) -> None:
    script = "uv venv -q v; . v/bin/activate; uv pip install -q own; ls v/lib/*/site-packages"
    assert "own.py" not in namespace(script, container).stdout
    (container / "uv.toml").write_text(uv_toml(str(container / "some packages"), system=False))
    assert "own.py" in namespace(script, container).stdout


@pytest.mark.slow
@pytest.mark.parametrize("tool", INSTALL)
def test_a_wheel_that_was_built_anew(container: Path, tool: str) -> None:
    new = make_wheel(container / "new", "own", module=b"VALUE = 'new'\n")
    old = container / "some packages" / new.name
    os.utime(new, ns=(old.stat().st_atime_ns, old.stat().st_mtime_ns))
    remove = {"pip": "pip uninstall -y own", "uv": "uv pip uninstall own"}[tool]
    # -B: both have one size and may be of one second, by which Python takes them for the same.
    show = "python3 -B -c 'import own; print(own.VALUE)'"
    script = f"""
{INSTALL[tool]} own >&2 && {show} && {remove} >&2 && mount --bind '{new}' '{old}'
{INSTALL[tool]} own >&2 && {show}
"""
    done = namespace(script, container)
    assert done.stdout.split() == ["1.0", "new"], done.stderr
