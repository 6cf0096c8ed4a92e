"""Check that rows name the commit of the code that ran, and are refused where there is none."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
FILES = ("attnkit/api.py", "attnkit/emulator/loop.c", "templates/sm90/kernel.py", "masks/one.py")
FILES += ("mods/one.py", "benchmarks/gpu.py", "benchmarks/cases.toml", "pyproject.toml")


@pytest.fixture
def committed(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module("committed")
    monkeypatch.setattr(module, "find_spec", lambda name: None)  # attnkit is that of this tree
    return module


def git(root: Path, *words: str) -> str:
    own = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", *own, *words], cwd=root, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    for name in FILES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\n")
    (root / "attnkit" / "masks").symlink_to("../masks")
    (root / "benchmarks" / "results").mkdir()
    (root / ".gitignore").write_text("__pycache__/\nmods/private.py\n")
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "all")
    return root


def copied(checkout: Path) -> Path:
    """Copy a checkout without its git folder, as to a machine without git; return the copy."""
    place = checkout.parent / "copy"
    shutil.copytree(checkout, place, symlinks=True, ignore=shutil.ignore_patterns(".git"))
    return place


def test_a_clean_checkout_names_its_commit(committed: Any, checkout: Path) -> None:
    (checkout / "benchmarks" / "results" / "gpu.jsonl").write_text("{}\n")  # rows are no code
    (checkout / "attnkit" / "__pycache__").mkdir()
    (checkout / "attnkit" / "__pycache__" / "api.pyc").write_bytes(b"\0")
    commit = git(checkout, "rev-parse", "HEAD")[:12]
    assert committed.committed(root=checkout) == committed.described(checkout) == commit
    assert committed.stamp(checkout) == f"{commit}:{committed.digest(checkout)}"


@pytest.mark.parametrize("name", [FILES[1], "masks/new.py", "benchmarks/new.py", "mods/private.py"])
def test_a_changed_checkout_is_refused(committed: Any, checkout: Path, name: str) -> None:
    """Edited, untracked and ignored files are refused, whether staged or not."""
    whole = committed.stamp(checkout)
    (checkout / name).write_text("# edited\n")
    for _ in range(2):
        for attempt in (committed.stamp, lambda root: committed.committed(None, root)):
            with pytest.raises(committed.NotCommitted, match=re.escape(name)):
                attempt(checkout)
        with pytest.raises(committed.NotCommitted, match="digest"):
            committed.committed(whole, checkout)
        assert committed.described(checkout).endswith("+changes")
        git(checkout, "add", ".")


def test_a_removed_file_is_a_change(committed: Any, checkout: Path) -> None:
    (checkout / "masks" / "one.py").unlink()
    with pytest.raises(committed.NotCommitted, match=r"masks/one\.py"):
        committed.committed(root=checkout)


def test_a_copy_needs_the_stamp_of_its_files(committed: Any, checkout: Path) -> None:
    whole, copy = committed.stamp(checkout), copied(checkout)
    assert committed.committed(whole, copy) == whole.partition(":")[0]
    assert committed.described(copy) == ""
    with pytest.raises(committed.NotCommitted, match="pass --commit COMMIT:DIGEST"):
        committed.committed(None, copy)
    with pytest.raises(committed.NotCommitted, match="is no git checkout"):
        committed.stamp(copy)
    for wrong in ("", whole.partition(":")[0], f"{whole}+", f"x{whole[1:]}"):
        with pytest.raises(committed.NotCommitted, match="expected COMMIT:DIGEST"):
            committed.committed(wrong, copy)


@pytest.mark.parametrize("name", [*FILES, "benchmarks/new.py"])
def test_a_copy_with_other_files_is_refused(committed: Any, checkout: Path, name: str) -> None:
    whole, copy = committed.stamp(checkout), copied(checkout)
    (copy / name).write_text("# edited\n")
    with pytest.raises(committed.NotCommitted, match="have the digest"):
        committed.committed(whole, copy)


def test_files_that_swap_contents_or_names_change_the_digest(
    committed: Any, checkout: Path
) -> None:
    before = committed.digest(checkout)
    (checkout / "masks" / "one.py").rename(checkout / "masks" / "two.py")
    renamed = committed.digest(checkout)
    (checkout / "masks" / "two.py").rename(checkout / "masks" / "one.py")
    assert committed.digest(checkout) == before != renamed


def test_a_copy_inside_another_repository_has_no_git(committed: Any, checkout: Path) -> None:
    copy = checkout / "results" / "copy"
    shutil.copytree(checkout, copy, symlinks=True, ignore=shutil.ignore_patterns(".git", "results"))
    assert committed.head(copy) is None
    with pytest.raises(committed.NotCommitted, match="is no git checkout"):
        committed.committed(None, copy)


def test_a_stamp_of_another_commit_is_refused(committed: Any, checkout: Path) -> None:
    other = f"{'0' * 12}:{committed.digest(checkout)}"
    with pytest.raises(committed.NotCommitted, match="--commit says 000000000000"):
        committed.committed(other, checkout)
    assert committed.committed(committed.stamp(checkout), checkout)


def test_the_code_that_runs_is_that_of_the_tree(
    committed: Any, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout is refused if `import attnkit` loads another tree.

    With another PYTHONPATH, for example, the installed attnkit would be measured.
    """
    spec = SimpleNamespace(origin=str(ROOT / "attnkit" / "__init__.py"))
    monkeypatch.setattr(committed, "find_spec", lambda name: spec)
    with pytest.raises(committed.NotCommitted, match="attnkit is imported from"):
        committed.committed(root=checkout)
    spec.origin = str(checkout / "attnkit" / "__init__.py")
    assert committed.committed(root=checkout)


def test_rows_hold_the_commit(
    committed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(committed, "committed", lambda given: f"{given}!")
    path = tmp_path / "rows.jsonl"
    file = committed.row_file(path, "a" * 7)
    file.append({"commit": "b+changes", "ms": 1})
    assert json.loads(path.read_text()) == {"commit": "aaaaaaa!", "ms": 1}

    def refuse(given: Any) -> str:
        raise committed.NotCommitted("it is dirty")

    monkeypatch.setattr(committed, "committed", refuse)
    committed.row_file(None).append({"ms": 1})  # nothing is written, so nothing is asked
    with pytest.raises(SystemExit) as ended:
        committed.row_file(path)
    assert ended.value.code == 2
    assert "it is dirty" in capsys.readouterr().err


def test_the_digest_reads_every_tracked_file(committed: Any) -> None:
    """The digest covers every tracked file of the product, also files of a new kind."""
    names = ["ls-files", "--stage", "-z", "--", *committed.FOLDERS]
    try:
        listed = git(ROOT, *names)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this checkout has no git")
    entries = [entry.partition("\t") for entry in listed.split("\0") if entry]
    tracked = {ROOT / name for mode, _, name in entries if not mode.startswith("120000")}
    present = {path for path in tracked if path.exists()}
    assert present <= set(committed.product_files())


def test_a_comparison_of_machine_code_is_of_two_commits(
    committed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    pytest.importorskip("cutlass", reason="the DSL exists for Linux only")
    program = importlib.import_module("machine_code")
    monkeypatch.setattr(committed, "committed", lambda given: "b" * 12)
    kernel = {"variant": "masks/causal", "kernel": "forward", "digest": "1", "registers": 1}
    monkeypatch.setattr(program, "jobs", lambda options: [])
    monkeypatch.setattr(program, "results", lambda wanted, workers: iter([dict(kernel)]))
    before, record = tmp_path / "before.jsonl", tmp_path / "record.jsonl"
    monkeypatch.setattr(
        sys, "argv", ["machine_code.py", "--against", str(before), "--record", str(record)]
    )
    for commit in ("a" * 12 + "+changes", ""):
        before.write_text(json.dumps(kernel | {"commit": commit}) + "\n")
        with pytest.raises(SystemExit, match="2"):
            program.main()
        assert "expected those of a committed tree" in capsys.readouterr().err
    before.write_text(json.dumps(kernel | {"commit": "a" * 12}) + "\n")
    assert program.main() == 0
    row = json.loads(record.read_text())
    assert (row["before"], row["after"], row["kernels"]) == ("a" * 12, "b" * 12, 1)
    assert (row["differ"], row["unknown"]) == (0, 0)


def test_every_program_that_writes_rows_asks_for_the_commit() -> None:
    """Every program opens its row file through `row_file` and has the option `--commit`."""
    for path in BENCHMARKS.glob("*.py"):
        text = path.read_text()
        if path.name == "committed.py":
            continue
        assert not re.search(r"\.open\(\"a\"\)", text), path.name
        if re.search(r"\"--(save|json|record)\"", text):
            assert "row_file(" in text, path.name
            assert "add_commit(" in text, path.name
