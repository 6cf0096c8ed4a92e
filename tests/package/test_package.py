"""Check that wheel and sdist contain the whole package, including mods, masks and templates."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKS = ("mods", "masks", "templates")


def _python(*args: str, cwd: Path) -> str:
    run = subprocess.run(
        [sys.executable, *args], cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def _build(target: str, source: Path, out: Path) -> Path:
    _python("-m", "hatchling", "build", "--target", target, "--directory", str(out), cwd=source)
    (built,) = out.iterdir()
    return built


def _files(base: Path) -> set[str]:
    """Return the package's files below `base`, following links and skipping caches."""
    found: set[str] = set()
    for path in base.iterdir():
        if path.is_dir():
            if path.name != "__pycache__":
                found |= {f"{path.name}/{name}" for name in _files(path)}
        elif path.suffix != ".pyc":
            found.add(path.name)
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.mark.parametrize("name", LINKS)
def test_links_lead_to_the_top_level_folders(name: str) -> None:
    link = ROOT / "attnkit" / name
    assert link.is_symlink()
    assert str(link.readlink()) == f"../{name}"  # relative, because a clone can be anywhere
    assert (ROOT / name).is_dir()


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        licences = [name for name in archive.namelist() if name.endswith("/LICENSE")]
    assert names == {f"attnkit/{name}" for name in _files(ROOT / "attnkit")}
    assert "attnkit/py.typed" in names
    assert len(licences) == 1


def test_sdist_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    """The sdist contains no links and builds the same wheel as the checkout."""
    sdist = _build("sdist", ROOT, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        assert [member.name for member in archive if member.issym() or member.islnk()] == []
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    again = _build("wheel", source, tmp_path / "again")
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as two:
        assert {i.filename: i.CRC for i in one.infolist()} == {
            i.filename: i.CRC for i in two.infolist()
        }


def test_wheel_imports_from_a_clean_folder(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    code = (
        "import sys, importlib.util as u\n"
        f"sys.path.insert(0, {str(target)!r})\n"
        "import attnkit\n"
        "print(attnkit.__file__)\n"
        f"for name in {LINKS!r}:\n"
        "    print(list(u.find_spec('attnkit.' + name).submodule_search_locations)[0])\n"
    )
    found = [Path(line) for line in _python("-c", code, cwd=tmp_path).splitlines()]
    base = target / "attnkit"
    assert found == [base / "__init__.py", *(base / name for name in LINKS)]


def test_the_program_that_tries_a_wheel_runs(wheel: Path, tmp_path: Path) -> None:
    """`make try-wheel` runs it in a fresh environment, with the commands too."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = (
        "import sys\n"
        f"sys.path[:0] = [{str(tmp_path / 'site')!r}, {str(Path(__file__).parent)!r}]\n"
        "import smoke\n"
        "print(smoke.attention())\n"
        "print(smoke.variants())\n"
        "print(smoke.attnkit.__file__)\n"
    )
    first, second, file = _python("-c", code, cwd=tmp_path).splitlines()
    assert first == "forward and backward agree with SDPA"
    assert second.startswith("explained ")
    assert Path(file) == tmp_path / "site" / "attnkit" / "__init__.py"


def test_the_extra_for_checks_has_what_the_messages_name() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert extras["check"] == ["hypothesis"]
    assert set(extras["check"]) <= set(extras["test"])
