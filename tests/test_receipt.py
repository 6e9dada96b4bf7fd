import itertools
import json
import os
import platform
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_course import receipt
from glm_course.receipt import code_hash, data_hash, environment, library_hash, read, write

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


# Files


@given(st.dictionaries(st.text(), JSON, max_size=5))
@settings(deadline=None, max_examples=50)
def test_a_receipt_comes_back_as_written(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("r") / "receipt.json"
    write(path, value)
    assert read(path) == value
    assert list(read(path)) == list(value)


def test_keys_stay_in_order_and_rows_take_a_line_each(tmp_path):
    write(
        tmp_path / "r.json",
        {
            "config": {"width": 192, "empty": {}},
            "rows": [{"step": 1, "loss": 5.55}, {"step": 2, "loss": 4.9}],
            "curve": [(1, 0.5), (2, 0.25)],
            "families": ["even", "double"],
            "nothing": [],
        },
    )
    assert (tmp_path / "r.json").read_text() == (
        "{\n"
        ' "config": {\n  "width": 192,\n  "empty": {}\n },\n'
        ' "rows": [\n  {"step": 1, "loss": 5.55},\n  {"step": 2, "loss": 4.9}\n ],\n'
        ' "curve": [\n  [1, 0.5],\n  [2, 0.25]\n ],\n'
        ' "families": ["even", "double"],\n'
        ' "nothing": []\n'
        "}\n"
    )


def test_parents_are_made(tmp_path):
    write(tmp_path / "a" / "b" / "r.json", {})
    assert read(tmp_path / "a" / "b" / "r.json") == {}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"rows": [{"loss": 1.0}, {"loss": float("nan")}]}, "receipt.rows[1].loss is nan"),
        ({"a": {"b": float("-inf")}}, "receipt.a.b is -inf"),
        ({"a": [[np.float32(1)]]}, "receipt.a[0][0] is of type float32"),
        ({"a": torch.ones(1)}, "receipt.a is of type Tensor"),
        ({"a": Path("x")}, "receipt.a is of type"),
        ({"rows": [{3: 4}]}, "receipt.rows[0] has the key 3"),
    ],
)
def test_what_json_cannot_hold_is_refused_by_name_before_anything_is_written(
    tmp_path, value, message
):
    with pytest.raises(ValueError) as caught:
        write(tmp_path / "new" / "r.json", value)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_a_receipt_is_never_overwritten_unasked(tmp_path):
    path = tmp_path / "r.json"
    write(path, {"run": 1})
    with pytest.raises(FileExistsError) as caught:
        write(path, {"run": 2})
    assert str(caught.value) == f"{path} exists already, and a receipt is not overwritten"
    assert read(path) == {"run": 1} and os.listdir(tmp_path) == ["r.json"]
    write(path, {"run": 3}, replace=True)
    assert read(path) == {"run": 3} and os.listdir(tmp_path) == ["r.json"]


@pytest.mark.parametrize(("stage", "refused"), [("fsync", "first"), ("replace", "second")])
def test_of_two_runs_that_see_no_receipt_one_is_refused(tmp_path, monkeypatch, stage, refused):
    path, refusals = tmp_path / "r.json", []

    def run(name: str) -> None:
        try:
            write(path, {"run": name})
        except FileExistsError:
            refusals.append(name)

    call, processes = getattr(os, stage), itertools.count()

    def second_run_comes_between(*arguments) -> None:
        monkeypatch.setattr(os, stage, call)
        run("second")
        call(*arguments)

    monkeypatch.setattr(os, "getpid", lambda: next(processes))
    monkeypatch.setattr(os, stage, second_run_comes_between)
    run("first")
    assert refusals == [refused]
    assert read(path) == {"run": "second" if refused == "first" else "first"}
    assert os.listdir(tmp_path) == ["r.json"]


@pytest.mark.parametrize("stage", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_earlier_receipt(tmp_path, monkeypatch, stage):
    write(tmp_path / "r.json", {"run": 1})

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, stage, full_disk)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "r.json", {"run": 2}, replace=True)
    assert read(tmp_path / "r.json") == {"run": 1} and os.listdir(tmp_path) == ["r.json"]


@pytest.mark.parametrize("content", [b"", b"{", b"\x89PNG\r\n\x1a\n", b"[1]", b"[" * 100_000])
def test_what_is_no_receipt_is_named_in_one_sentence(tmp_path, content):
    path = tmp_path / "r.json"
    path.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path} ") and "\n" not in str(caught.value)
    assert str(caught.value).endswith(", so it is no receipt")


def test_a_missing_receipt_and_a_folder_are_named_in_one_sentence(tmp_path):
    for path in (tmp_path / "no.json", tmp_path):
        with pytest.raises(FileNotFoundError) as caught:
            read(path)
        assert str(caught.value) == f"{path} is no file, so no receipt can be read from it"


# Environment


def test_the_environment_tells_what_numbers_drift_with():
    told = environment("cpu", "float32")
    assert told["torch"] == torch.__version__ and told["python"] == platform.python_version()
    assert told["device"] == "cpu" and told["dtype"] == "float32"
    assert told["threads"] == torch.get_num_threads()
    assert told["library_hash"] == library_hash()
    assert told["machine"] == told["device_name"] != ""
    assert json.loads(json.dumps(told)) == told


def test_the_environment_names_no_person_host_or_folder(monkeypatch):
    secret = "seldom-seen-name"
    for variable in ("USER", "LOGNAME", "USERNAME", "HOSTNAME", "HOME"):
        monkeypatch.setenv(variable, secret)
    monkeypatch.setattr(socket, "gethostname", lambda: secret)
    monkeypatch.setattr(platform, "node", lambda: secret)
    text = json.dumps(environment("cpu", "float32"))
    assert secret not in text
    assert str(Path(__file__).resolve().parents[1]) not in text


def package(folder: Path, sources: dict[str, bytes]) -> Path:
    (folder / "sub").mkdir(parents=True)
    for name, source in sources.items():
        (folder / name).write_bytes(source)
    return folder


def test_the_library_hash_follows_every_name_and_line_and_nothing_else(tmp_path):
    first = package(tmp_path / "1", {"a.py": b"x = 1\n", "sub/b.py": b"y\n"})
    digest = library_hash(first)
    (first / "notes.txt").write_text("z")
    assert library_hash(first) == digest
    assert (
        library_hash(package(tmp_path / "2", {"a.py": b"x = 1\r\n", "sub/b.py": b"y\r\n"}))
        == digest
    )
    others = [
        package(tmp_path / "3", {"a.py": b"x = 2\n", "sub/b.py": b"y\n"}),
        package(tmp_path / "4", {"a.py": b"x = 1\n", "sub/c.py": b"y\n"}),
        package(tmp_path / "5", {"a.py": b"x = 1\n", "b.py": b"y\n"}),
        package(tmp_path / "6", {"a.py": b"x = 1\n"}),
        package(tmp_path / "7", {"a.py": b"", "sub/b.py": b"x = 1\ny\n"}),
    ]
    assert len({digest, *map(library_hash, others)}) == 6


def test_a_code_hash_follows_the_named_parts_alone(tmp_path):
    lib = package(tmp_path / "1", {"a.py": b"x\n", "b.py": b"y\n", "sub/c.py": b"z\n"})
    parts, other = code_hash("sub", "a.py", package=lib), code_hash("b.py", package=lib)
    assert parts == code_hash("a.py", "sub", package=lib) != other
    assert code_hash("a.py", "b.py", "sub", package=lib) == library_hash(lib)
    (lib / "b.py").write_bytes(b"changed\n")
    assert code_hash("a.py", "sub", package=lib) == parts
    assert code_hash("b.py", package=lib) != other
    (lib / "sub" / "c.py").write_bytes(b"changed\n")
    assert code_hash("a.py", "sub", package=lib) != parts
    with pytest.raises(ValueError, match=r"^gone\.py holds no Python file in 1$"):
        code_hash("a.py", "gone.py", package=lib)


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_is_marked_when_the_package_differs_from_it(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    lib = package(tmp_path / "lib", {"__init__.py": b"", "a.py": b"x\n"})
    assert receipt.git_commit(lib) == "unknown"
    git(tmp_path, "init", "-q")
    assert receipt.git_commit(lib) == "unknown"  # no commit holds it yet
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert receipt.git_commit(lib) == commit and len(commit) == 40
    (tmp_path / "README").write_text("beside the package")
    assert receipt.git_commit(lib) == commit
    (lib / "a.py").write_text("y\n")
    assert receipt.git_commit(lib) == f"{commit}+changes"
    (lib / "a.py").write_text("x\n")
    (lib / "new.py").write_text("")
    assert receipt.git_commit(lib) == f"{commit}+changes"


def test_a_package_inside_another_projects_repository_has_no_commit(tmp_path):
    (tmp_path / ".gitignore").write_text(".venv/\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "theirs")
    lib = package(tmp_path / ".venv" / "lib", {"__init__.py": b""})
    assert receipt.git_commit(lib) == "unknown"


def test_without_git_the_commit_is_unknown(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert receipt.git_commit() == "unknown"


# Measures


ALLOCATE = """
import numpy as np
from glm_course.receipt import peak_memory_bytes
before = peak_memory_bytes()
held = np.ones(before + 64 * 2**20, dtype=np.uint8)
risen = peak_memory_bytes()
del held
print(before, risen, peak_memory_bytes())
"""


def test_peak_memory_rises_with_what_is_allocated_and_stays():
    # In a process of its own: here, earlier tests have left freed memory that would be used again.
    out = subprocess.run([sys.executable, "-c", ALLOCATE], capture_output=True, check=True).stdout
    before, risen, after = map(int, out.split())
    mib = 2**20
    assert 32 * mib < before < 2**30
    assert before + 64 * mib < risen < 2 * before + 128 * mib
    assert after > risen - mib  # Linux counts pages in batches


def test_the_data_hash_follows_every_id_boundary_and_order():
    same = [data_hash([[[1, 2], [3]], [[4]]]), data_hash(iter([[(1, 2), (3,)], ((4,),)]))]
    assert same[0] == same[1] and len(same[0]) == 64
    others = [
        [[[1, 2], [3]], [[5]]],
        [[[1, 2, 3]], [[4]]],
        [[[1, 2], [3], [4]]],
        [[[4]], [[1, 2], [3]]],
        [[[3], [1, 2]], [[4]]],
        [[[12], [3]], [[4]]],
        [[[1, 2], [3]]],
        [],
    ]
    assert len({same[0], *map(data_hash, others)}) == len(others) + 1
