"""Receipts: one JSON file a run, with what is needed to judge its numbers and to repeat them.

A receipt holds configuration, seeds, environment, hashes, one row a step and what came of it. It
names no person, host or folder, so it can be published as it is. Left out: tracking services.
"""

import hashlib
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

PACKAGE = Path(__file__).resolve().parent


def environment(device: str, dtype: str) -> dict[str, Any]:
    """What numerical results drift with: versions, hardware, threads and the state of the code.

    `device` and `dtype` are what the run computes on and in, "cuda:0" and "bfloat16" say.
    """
    machine = _processor()
    on_cuda = torch.device(device).type == "cuda"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "machine": machine,
        "device": device,
        "device_name": torch.cuda.get_device_name(device) if on_cuda else machine,
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "git_commit": git_commit(),
        "library_hash": library_hash(),
    }


def code_hash(*parts: str, package: Path = PACKAGE) -> str:
    """SHA-256 of the .py files that `parts` (files, or folders with all below) name in `package`.

    By relative path, in 64 hexadecimal digits. Line ends are read as newlines, so a checkout on
    Windows has the hash of one on Linux. Raises ValueError for a part that holds no .py file.
    """
    files = {}
    for part in parts:
        path = package / part
        found = [path] if path.is_file() else list(path.rglob("*.py"))
        if not found:
            raise ValueError(f"{part} holds no Python file in {package.name}")
        files |= {file.relative_to(package).as_posix(): file for file in found}
    digest = hashlib.sha256()
    for name in sorted(files):
        source = files[name].read_bytes().replace(b"\r\n", b"\n")
        digest.update(f"{name}\n{len(source)}\n".encode() + source)
    return digest.hexdigest()


def library_hash(package: Path = PACKAGE) -> str:
    """`code_hash` of the whole package."""
    return code_hash(".", package=package)


def git_commit(package: Path = PACKAGE) -> str:
    """Commit that `package` is checked out at, "+changes" appended where its files differ from it.

    "unknown" without git, and for a package installed inside some other project's repository.
    """

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(package), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")
        commit = git("rev-parse", "HEAD")
        return f"{commit}+changes" if git("status", "--porcelain", "--", ".") else commit
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def peak_memory_bytes(device: str = "cpu") -> int:
    """Peak memory so far, in bytes: of this process, or with a CUDA `device`, of tensors on it.

    MPS shares the computer's memory, so there too it is the peak of the process.
    """
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset
    if sys.platform == "linux":
        # getrusage would do but for one thing: a process inherits its parent's peak.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, others KiB


def data_hash(batches: Iterable[Sequence[Sequence[int]]]) -> str:
    """SHA-256 of batches of sequences of token ids, boundaries included, in order."""
    digest = hashlib.sha256()
    for batch in batches:
        digest.update(json.dumps(batch, separators=(",", ":")).encode() + b"\n")
    return digest.hexdigest()


def write(path: str | Path, receipt: dict[str, Any], *, replace: bool = False) -> None:
    """Write a receipt as JSON, whole or not at all; keys stay in order, rows take a line each.

    With `replace`, an earlier receipt of the same run gives way; without, FileExistsError is raised
    where `path` exists. Raises ValueError naming the key of what JSON cannot hold: NaN and
    infinities, tensors, NumPy scalars, keys that are not strings.
    """
    path = Path(path)
    _refuse_unwritable(receipt, "receipt")
    text = _layout(receipt) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        with new.open("w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        if not replace:
            path.open("x").close()  # claims the name: of two runs that want it, one gets it
        os.replace(new, path)
    except FileExistsError:
        raise FileExistsError(f"{path} exists already, and a receipt is not overwritten") from None
    finally:
        new.unlink(missing_ok=True)


def read(path: str | Path) -> dict[str, Any]:
    """A receipt as written.

    Raises FileNotFoundError or ValueError, one sentence naming the file and the cause.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file, so no receipt can be read from it")
    try:
        receipt = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is not JSON, so it is no receipt") from None
    if not isinstance(receipt, dict):
        raise ValueError(f"{path} holds no JSON object, so it is no receipt")
    return receipt


def _processor() -> str:
    """Model name of the CPU, as its maker gives it where the system tells."""
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return platform.processor() or platform.machine()


def _refuse_unwritable(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for key, entry in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!r}, which is no string")
            _refuse_unwritable(entry, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for i, entry in enumerate(value):
            _refuse_unwritable(entry, f"{where}[{i}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} is {value}, which JSON cannot hold")
    elif not (value is None or isinstance(value, str | int | float)):
        raise ValueError(f"{where} is of type {type(value).__name__}, which JSON cannot hold")


def _layout(value: Any, indent: str = "\n") -> str:
    """JSON of `value`: a line for each entry of a dict and each row of a list of containers."""
    deeper = indent + " "
    if isinstance(value, dict) and value:
        lines = [f"{json.dumps(key)}: {_layout(entry, deeper)}" for key, entry in value.items()]
        return "{" + deeper + f",{deeper}".join(lines) + indent + "}"
    if isinstance(value, list | tuple) and any(isinstance(v, dict | list | tuple) for v in value):
        return "[" + deeper + f",{deeper}".join(map(json.dumps, value)) + indent + "]"
    return json.dumps(value)
