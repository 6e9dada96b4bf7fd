"""Checkpoints on disk: weights, configuration, optimiser and progress, whole or not there at all.

A checkpoint is a folder:

    model.safetensors       weights
    config.json             the ModelConfig
    optimizer.safetensors   tensors of the optimiser's state, named "parameter index.state name"
    training.json           progress, param_groups, and optimiser state that is no tensor
    manifest.json           format version, hash of the weights, size and SHA-256 of the other files

Files are written into `<path>.new`, flushed to the disk, and the folder is renamed into place, so a
run killed at any moment leaves a complete checkpoint or none. Replacing one takes two renames, as
few systems swap folders in one: `<path>` becomes `<path>.old`, `<path>.new` becomes `<path>`.
Killed between the two, only `<path>.old` is there, and `load` falls back to it. A path has one
writer.

Reading trusts nothing: every file is held to the manifest before it is parsed, and nothing is ever
unpickled. Left out: sharding, asynchronous writes, weights of other formats.
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from platformdirs import user_cache_dir
from safetensors import SafetensorError
from safetensors.torch import load as parse_safetensors
from safetensors.torch import save_file
from torch import Tensor, nn

from glm_course.config import ModelConfig

FORMAT = 1
MODEL, CONFIG, MANIFEST = "model.safetensors", "config.json", "manifest.json"
OPTIMIZER, TRAINING = "optimizer.safetensors", "training.json"
FILES = {MODEL, CONFIG, OPTIMIZER, TRAINING, MANIFEST}


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: one sentence naming the file and the cause."""


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint folder holds, every tensor on the CPU.

    An optimiser adopts the tensors of `optimizer` instead of copying them: load once more for a
    second optimiser.
    """

    path: Path  # the folder read, `<path>.old` where a replacement was interrupted
    config: ModelConfig
    weights: dict[str, Tensor]
    optimizer: dict[str, Any] | None  # for torch.optim.Optimizer.load_state_dict
    progress: dict[str, Any] | None  # as JSON gives it back: tuples have become lists
    hash: str  # weights_hash(weights)


def weights_hash(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 of tensors by name, dtype, shape and raw bytes, as 64 hexadecimal digits.

    The same for any order of the names, any device, strides or file layout; the bytes are
    little-endian, as on every machine PyTorch is built for.
    """
    digest = hashlib.sha256()
    for name in sorted(weights):
        # A copy, since a tensor with an axis of length 0 or 1 can be contiguous at any stride.
        tensor = weights[name].detach().cpu().clone(memory_format=torch.contiguous_format)
        header = [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        digest.update(json.dumps(header).encode() + b"\n")
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def save(
    path: str | Path,
    weights: Mapping[str, Tensor],
    config: ModelConfig,
    *,
    optimizer: Mapping[str, Any] | None = None,
    progress: Mapping[str, Any] | None = None,
    replace: bool = False,
) -> str:
    """Write a checkpoint folder and return the hash of its weights.

    `weights` may be on any device, tied or views of one another. `optimizer` is a torch optimiser's
    state_dict(); `progress` anything JSON can hold: step, position in the schedule, random states.
    With `replace`, an earlier checkpoint at `path` gives way. Raises FileExistsError when `path`
    exists and may not be replaced, CheckpointError for what JSON cannot hold.
    """
    path = Path(path)
    new, old = _sibling(path, "new"), _sibling(path, "old")
    if not replace and (path.exists() or old.exists()):
        raise FileExistsError(f"{path} exists already, and a checkpoint is not overwritten")
    for folder in (path, new, old):
        _refuse_foreign(folder)

    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(new, ignore_errors=True)  # left by a killed run
    new.mkdir()
    try:
        digest = weights_hash(weights)
        save_file(_unshared(weights), new / MODEL)
        _write_json(new / CONFIG, asdict(config))
        training = {} if progress is None else {"progress": progress}
        if optimizer is not None:
            tensors, training["scalars"] = _flatten_state(optimizer["state"])
            training["param_groups"] = optimizer["param_groups"]
            save_file(_unshared(tensors), new / OPTIMIZER)
        if training:
            _write_json(new / TRAINING, training)
        _write_manifest(new, weights=digest)
        for file in new.iterdir():
            shutil.copymode(new / CONFIG, file)  # safetensors shuts out all but the owner
            _flush(file)
        _flush(new)

        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.rename(path, old)
        os.rename(new, path)  # fails, rather than overwrites, should a checkpoint have appeared
        _flush(path.parent)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)
    return digest


def load(path: str | Path, config: ModelConfig | None = None) -> Checkpoint:
    """Read a checkpoint folder, or the one a killed replacement left beside it.

    Raises CheckpointError, one sentence, when anything is missing, empty, truncated, foreign,
    changed since it was saved, or of a later format, or when its configuration is not `config`.
    """
    path = Path(path)
    if not path.exists():
        if not (path.name and _sibling(path, "old").is_dir()):
            raise CheckpointError(f"{path} does not exist, so no checkpoint can be read from it")
        path = _sibling(path, "old")
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file, and a checkpoint is a folder")

    manifest = _read_manifest(path)
    files = manifest["files"]
    if unknown := files.keys() - FILES:
        raise CheckpointError(f"{path / MANIFEST} lists {min(unknown)!r}, unknown to this version")

    def read(name: str) -> bytes:
        return _read(path / name, files.get(name))

    saved = _parse_config(path / CONFIG, read(CONFIG))
    if config is not None and saved != config:
        _refuse_config(path / CONFIG, saved, config)
    training = _parse_json(path / TRAINING, read(TRAINING)) if TRAINING in files else {}
    optimizer = None
    if OPTIMIZER in files:
        tensors = _parse_tensors(path / OPTIMIZER, read(OPTIMIZER))
        optimizer = _restore_optimizer(path, tensors, training)
    weights = _parse_tensors(path / MODEL, read(MODEL))
    digest = weights_hash(weights)
    if digest != manifest.get("weights"):
        raise CheckpointError(f"{path / MODEL} holds other weights than {MANIFEST} vouches for")
    return Checkpoint(path, saved, weights, optimizer, training.get("progress"), digest)


def load_into(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Copy the weights of a checkpoint into `model`, all of them or, after an error, none.

    Raises CheckpointError naming the first tensors that are missing, unexpected, or of another
    shape or dtype: torch itself would convert a dtype in silence.
    """
    there, wanted = checkpoint.weights, model.state_dict()
    problems = [f"lacks {name!r}" for name in wanted if name not in there]
    problems += [
        f"has {name!r}, unknown to the model" for name in sorted(there) if name not in wanted
    ]
    for name in wanted:
        if name in there and _describe(there[name]) != _describe(wanted[name]):
            here, in_model = _describe(there[name]), _describe(wanted[name])
            problems.append(f"has {name!r} as {here}, in the model {in_model}")
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise CheckpointError(f"{checkpoint.path / MODEL} {'; '.join(problems[:3])}{more}")
    model.load_state_dict(there, strict=True)


def remove(path: str | Path) -> None:
    """Delete a checkpoint folder and what an interrupted replacement left beside it, if there."""
    path = Path(path)
    for folder in (path, _sibling(path, "old"), _sibling(path, "new")):
        _refuse_foreign(folder)
        shutil.rmtree(folder, ignore_errors=True)


def cached(
    name_parts: Mapping[str, Any],
    make: Callable[[Path], None],
    root: str | Path | None = None,
) -> Path:
    """Folder `<name>-<key>` of the cache, filled by `make(folder)` unless it is there and intact.

    `name_parts` is what the contents depend on (library hash, configuration, dtype, threads, seed,
    steps), and its "name". The key is a hash of its JSON. `make` gets an empty folder, which is
    renamed into place when it returns; the manifest.json in it is ours. A damaged entry is made
    again, with a line on stderr. A second process that asks for the same entry waits for the first.
    """
    root = cache_root() if root is None else Path(root)
    key = hashlib.sha256(json.dumps(name_parts, sort_keys=True).encode()).hexdigest()[:16]
    folder = root / f"{name_parts['name']}-{key}"
    new = _sibling(folder, "new")
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(_sibling(folder, "lock")):  # the system releases it when its holder is killed
        if folder.exists():
            if _intact(folder):
                return folder
            print(f"cache entry {folder.name} is damaged, making it again", file=sys.stderr)
            shutil.rmtree(folder)
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        try:
            make(new)
            _write_manifest(new)
            os.rename(new, folder)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
    return folder


def cache_root() -> Path:
    """$GLM_COURSE_CACHE, else .cache in the checkout, else the user's cache folder."""
    if chosen := os.environ.get("GLM_COURSE_CACHE"):
        return Path(chosen)
    checkout = Path(__file__).resolve().parents[1]
    if (checkout / "pyproject.toml").is_file():
        return checkout / ".cache"
    return Path(user_cache_dir("glm_course", appauthor=False))


def _sibling(path: Path, suffix: str) -> Path:
    return path.with_name(f"{path.name}.{suffix}")


def _refuse_foreign(folder: Path) -> None:
    """Raise FileExistsError where replacing `folder` would delete what is no checkpoint of ours."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise FileExistsError(f"{folder} exists already and is no checkpoint folder")
    for child in folder.iterdir():
        if child.name not in FILES and not child.name.startswith("."):  # .DS_Store and the like
            raise FileExistsError(f"{folder} also holds {child.name}, so it is not replaced")


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors, each with a storage of its own, which safetensors asks for."""
    plain, storages = {}, set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        plain[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    return plain


def _flatten_state(state: Mapping[int, Mapping[str, Any]]) -> tuple[dict[str, Tensor], dict]:
    """State of an optimiser as tensors and the rest, both named "parameter index.state name"."""
    flat = {f"{i}.{name}": value for i, entry in state.items() for name, value in entry.items()}
    tensors = {name: value for name, value in flat.items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in flat.items() if name not in tensors}


def _restore_optimizer(path: Path, tensors: dict[str, Tensor], training: dict) -> dict[str, Any]:
    """The optimiser's state_dict, inverse of `_flatten_state`; tuples such as betas come back."""
    state: dict[int, dict[str, Any]] = {}
    try:
        for name, value in (tensors | training["scalars"]).items():
            index, _, entry = name.partition(".")
            state.setdefault(int(index), {})[entry] = value
        groups = [
            {k: tuple(v) if isinstance(v, list) and k != "params" else v for k, v in group.items()}
            for group in training["param_groups"]
        ]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise CheckpointError(
            f"{path / TRAINING} and {OPTIMIZER} beside it hold no optimiser state"
        ) from None
    return {"state": state, "param_groups": groups}


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _write_json(file: Path, value: Any) -> None:
    try:
        text = json.dumps(value, indent=1, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{file.name} cannot be written: {error}") from None
    file.write_text(text + "\n", encoding="utf-8", newline="\n")


def _write_manifest(folder: Path, **facts: Any) -> None:
    """List size and SHA-256 of every file below `folder`, by its path relative to it."""
    files = {}
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        if file.is_file() and name != MANIFEST:
            with file.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            files[name] = {"bytes": file.stat().st_size, "sha256": digest}
    _write_json(folder / MANIFEST, {"format": FORMAT, **facts, "files": files})


def _flush(path: Path) -> None:
    """Have the system put a file, or the names in a folder, on the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows opens no folders, and keeps their entries in its own journal
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_manifest(folder: Path) -> dict[str, Any]:
    file = folder / MANIFEST
    if not file.is_file():
        raise CheckpointError(f"{folder} holds no {MANIFEST}, so it is no complete checkpoint")
    manifest = _parse_json(file, file.read_bytes())
    version, files = manifest.get("format"), manifest.get("files")
    if type(version) is not int or not isinstance(files, dict):
        raise CheckpointError(f"{file} is no checkpoint manifest")
    if version != FORMAT:
        raise CheckpointError(f"{file} has format {version}, and this version reads {FORMAT} only")
    return manifest


def _read(file: Path, entry: Any) -> bytes:
    """Bytes of a file that is what the manifest says it is."""
    if not isinstance(entry, dict) or not isinstance(entry.get("bytes"), int):
        raise CheckpointError(f"{file.parent / MANIFEST} does not describe {file.name}")
    if not file.is_file():
        raise CheckpointError(f"{file} is missing")
    data = file.read_bytes()
    if not data and entry["bytes"]:
        raise CheckpointError(f"{file} is empty")
    # Eight bytes of header length, then a JSON object: tells a foreign file from a short one.
    if file.suffix == ".safetensors" and len(data) > 8 and data[8:9] != b"{":
        raise CheckpointError(f"{file} is no safetensors file")
    if len(data) < entry["bytes"]:
        raise CheckpointError(f"{file} is truncated to {len(data)} of {entry['bytes']} bytes")
    if hashlib.sha256(data).hexdigest() != entry.get("sha256"):
        raise CheckpointError(f"{file} was changed since it was saved: its SHA-256 differs")
    return data


def _parse_json(file: Path, data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError):
        raise CheckpointError(f"{file} is not JSON") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds no JSON object")
    return value


def _parse_tensors(file: Path, data: bytes) -> dict[str, Tensor]:
    try:
        return parse_safetensors(data)  # into memory of its own: the file may go away
    except (SafetensorError, AssertionError, KeyError, RuntimeError, ValueError):
        raise CheckpointError(f"{file} is no valid safetensors file") from None


def _parse_config(file: Path, data: bytes) -> ModelConfig:
    values = _parse_json(file, data)
    known = {field.name for field in fields(ModelConfig)}
    for verdict, names in (("unknown", values.keys() - known), ("missing", known - values.keys())):
        if names:
            raise CheckpointError(f"{file}: key {min(names)!r} is {verdict}")
    try:
        return ModelConfig(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{file} describes no model: {error}") from None


def _refuse_config(file: Path, saved: ModelConfig, asked: ModelConfig) -> None:
    for field in fields(ModelConfig):
        here, there = getattr(saved, field.name), getattr(asked, field.name)
        if here != there:
            raise CheckpointError(f"{file} has {field.name} {here!r}, where {there!r} is asked for")


def _intact(folder: Path) -> bool:
    """Whether every file of a cache entry is still what its manifest says."""
    try:
        for name, entry in _read_manifest(folder)["files"].items():
            _read(folder / name, entry)
    except (CheckpointError, OSError):
        return False
    return True
