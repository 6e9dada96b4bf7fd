import hashlib
import json
import os
import pickle
import random
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from glm_course import checkpoint
from glm_course.checkpoint import CheckpointError, cached, load, load_into, save, weights_hash
from glm_course.config import BASE, STUDY_MINI

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(200))


def weights(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"a": torch.full((2, 3), value), "b": torch.arange(4.0) * value}


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, tuple]:
    """Name to dtype, shape and raw bytes: equal for NaNs too, unequal for -0.0 and 0.0."""
    return {
        name: (t.dtype, t.shape, t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, t in tensors.items()
    }


def files(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def reseal(folder: Path) -> None:
    """Have the manifest vouch for the files as they are, as a forger would."""
    facts = json.loads((folder / "manifest.json").read_text())
    for name in facts["files"]:
        data = (folder / name).read_bytes()
        facts["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(facts))


def refusal(folder: Path, config=None) -> str:
    """Message of the refusal to load, which must be one sentence."""
    with pytest.raises(CheckpointError) as caught:
        load(folder, config)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400 + len(str(folder))
    assert caught.value.__suppress_context__ or caught.value.__cause__ is None
    return message


@pytest.fixture
def full(tmp_path) -> Path:
    """A checkpoint with all five files."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    folder = tmp_path / "full"
    save(
        folder,
        model.state_dict(),
        STUDY_MINI,
        optimizer=optimizer.state_dict(),
        progress={"step": 1},
    )
    return folder


# Round trips


def test_every_tensor_comes_back_bit_for_bit(tmp_path):
    given = {
        "bf16": torch.randn(3, 5).bfloat16(),
        "half": torch.randn(2).half(),
        "double": torch.tensor([0.1, -0.0, float("nan"), float("inf")], dtype=torch.float64),
        "ids": torch.tensor([[2**62, -1]]),
        "mask": torch.tensor([True, False]),
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
        "ünï.0": torch.ones(1, requires_grad=True),
    }
    digest = save(tmp_path / "c", given, BASE)
    loaded = load(tmp_path / "c", BASE)
    assert bits(loaded.weights) == bits({k: t.detach() for k, t in given.items()})
    assert loaded.hash == digest == weights_hash(given)
    assert loaded.config == BASE
    assert loaded.optimizer is None and loaded.progress is None


def test_tied_sliced_transposed_and_expanded_tensors_come_back_as_values(tmp_path):
    whole = torch.randn(4, 6)
    given = {
        "embedding": whole,
        "tied": whole,
        "row": whole[1],
        "columns": whole[:, 2:4],
        "transposed": whole.t(),
        "expanded": torch.ones(1, 3).expand(5, 3),
    }
    save(tmp_path / "c", given, BASE)
    loaded = load(tmp_path / "c").weights
    assert bits(loaded) == bits(given)
    assert len({t.untyped_storage().data_ptr() for t in loaded.values()}) == len(given)


def test_saving_leaves_the_tensors_and_the_optimizer_as_they_were(tmp_path):
    given = weights()
    before = bits(given)
    optimizer = torch.optim.SGD([nn.Parameter(given["a"])])
    group = optimizer.state_dict()["param_groups"]
    save(tmp_path / "c", given, BASE, optimizer=optimizer.state_dict())
    assert bits(given) == before and optimizer.state_dict()["param_groups"] == group


def trainer(seed: int):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    decayed, plain = list(model[0].parameters()), list(model[2].parameters())
    groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0, "lr": 0.1 + 0.2}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def train(model, optimizer, schedule, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 4) * random.random()).square().mean().backward()
        optimizer.step()
        schedule.step()


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path):
    random.seed(0)
    model, optimizer, schedule = trainer(0)
    train(model, optimizer, schedule, 3)
    version, state, gauss = random.getstate()
    progress = {
        "step": 3,
        "python": [version, state, gauss],
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
        "schedule": schedule.state_dict(),
    }
    save(
        tmp_path / "c",
        model.state_dict(),
        BASE,
        optimizer=optimizer.state_dict(),
        progress=progress,
    )
    train(model, optimizer, schedule, 4)

    random.seed(99)
    again, optimizer2, schedule2 = trainer(99)
    loaded = load(tmp_path / "c", BASE)
    load_into(again, loaded)
    optimizer2.load_state_dict(loaded.optimizer)
    assert optimizer2.state_dict()["param_groups"] == loaded.optimizer["param_groups"]
    schedule2.load_state_dict(loaded.progress["schedule"])
    version, state, gauss = loaded.progress["python"]
    random.setstate((version, tuple(state), gauss))
    torch.set_rng_state(
        torch.tensor(list(bytes.fromhex(loaded.progress["torch"])), dtype=torch.uint8)
    )
    train(again, optimizer2, schedule2, 4)

    assert bits(again.state_dict()) == bits(model.state_dict())
    theirs, ours = optimizer.state_dict(), optimizer2.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for i, entry in theirs["state"].items():
        assert bits(ours["state"][i]) == bits(entry)
    assert schedule2.get_last_lr() == schedule.get_last_lr()


def test_optimizer_state_that_is_no_tensor_comes_back(tmp_path):
    state = {
        "state": {0: {"momentum_buffer": None, "count": 3}, 12: {"momentum_buffer": torch.ones(2)}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0, 12]}],
    }
    save(tmp_path / "c", weights(), BASE, optimizer=state)
    loaded = load(tmp_path / "c").optimizer
    assert loaded["param_groups"] == state["param_groups"]
    assert loaded["state"][0] == state["state"][0]
    assert torch.equal(loaded["state"][12]["momentum_buffer"], torch.ones(2))


def test_an_optimizer_that_has_not_stepped_comes_back(tmp_path):
    fresh = torch.optim.AdamW(nn.Linear(2, 2).parameters()).state_dict()
    save(tmp_path / "c", weights(), BASE, optimizer=fresh)
    assert load(tmp_path / "c").optimizer == fresh


def test_progress_json_cannot_hold_is_refused_and_nothing_is_left(tmp_path):
    for bad in (torch.ones(1), float("nan"), {1, 2}):
        with pytest.raises(CheckpointError, match=r"^training\.json cannot be written: [^\n]*$"):
            save(tmp_path / "c", weights(), BASE, progress={"x": bad})
    assert files(tmp_path) == set()


# Hash of weights

TENSORS = st.dictionaries(
    st.text(max_size=5),
    st.tuples(
        st.lists(st.integers(-100, 100), max_size=6),
        st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]),
    ),
    min_size=1,
    max_size=5,
)


def build(spec: dict) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(values).to(dtype) for name, (values, dtype) in spec.items()}


@given(TENSORS, st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=50)
def test_the_hash_does_not_depend_on_order_or_strides(spec, rng):
    tensors = build(spec)
    names = list(tensors)
    rng.shuffle(names)
    shuffled = {n: torch.stack([tensors[n], tensors[n]], dim=-1)[..., 0] for n in names}
    assert weights_hash(shuffled) == weights_hash(tensors)


@given(TENSORS, st.data())
@settings(deadline=None, max_examples=50)
def test_the_hash_changes_with_any_name_dtype_shape_or_byte(spec, data):
    tensors = build(spec)
    digest = weights_hash(tensors)
    name = data.draw(st.sampled_from(sorted(tensors)))
    tensor = tensors.pop(name)
    others = [tensor[None], tensor.to(torch.float64)]
    if tensor.numel():
        changed = tensor.clone()
        i = data.draw(st.integers(0, tensor.numel() - 1))
        changed.view(torch.uint8)[i * tensor.element_size()] ^= 1
        others.append(changed)
    assert weights_hash(tensors) != digest
    assert weights_hash(tensors | {name + "x": tensor}) != digest
    for other in others:
        assert weights_hash(tensors | {name: other}) != digest
    assert weights_hash(tensors | {name: tensor}) == digest


def test_tensors_contiguous_at_an_odd_stride_hash_by_their_bytes(tmp_path):
    odd = {"one": torch.arange(4.0)[::3][1:], "none": torch.arange(4.0)[::2][2:]}
    plain = {"one": torch.tensor([3.0]), "none": torch.zeros(0)}
    assert odd["one"].stride() == (3,) and odd["none"].is_contiguous()
    assert save(tmp_path / "c", odd, BASE) == weights_hash(plain)
    assert bits(load(tmp_path / "c").weights) == bits(plain)


def test_the_hash_is_the_one_documented():
    digest = hashlib.sha256(
        b'["a", "bfloat16", [2]]\n\x80\x3f\x00\xc0' + b'["b", "int64", []]\n\x07' + bytes(7)
    )
    given = {"b": torch.tensor(7), "a": torch.tensor([1.0, -2.0]).bfloat16()}
    assert weights_hash(given) == digest.hexdigest()


# Refusals


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "config.json", "training.json"]
)
@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (Path.unlink, "is missing"),
        (lambda file: file.write_bytes(b""), "is empty"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "is truncated to"),
        (lambda file: file.write_bytes(file.read_bytes()[:5]), "is truncated to 5 of"),
        (lambda file: file.write_bytes(file.read_bytes() + b" "), "was changed"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1] + b"\xff"), "was changed"),
    ],
)
def test_a_damaged_file_is_named_with_the_cause(full, name, damage, cause):
    damage(full / name)
    assert refusal(full).startswith(f"{full / name} {cause}")


@pytest.mark.parametrize("content", [PNG, pickle.dumps(list(range(50))), b"PK\x03\x04" + bytes(99)])
@pytest.mark.parametrize("forged", [False, True])
def test_a_foreign_file_under_a_checkpoints_name_is_named(full, content, forged):
    for name in ("optimizer.safetensors", "model.safetensors"):
        kept = (full / name).read_bytes()
        (full / name).write_bytes(content)
        if forged:
            reseal(full)
        assert refusal(full) == f"{full / name} is no safetensors file"
        (full / name).write_bytes(kept)


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"\x02" + bytes(7) + b"{}", "holds other weights"),
        (b"\x02" + bytes(7) + b"{]", "is no valid safetensors file"),
        (b"\xff" * 7 + b"\x00{}", "is no valid safetensors file"),
        (b"{}", "is no valid safetensors file"),
    ],
)
def test_a_forged_weights_file_is_named(full, content, cause):
    (full / "model.safetensors").write_bytes(content)
    reseal(full)
    assert refusal(full).startswith(f"{full / 'model.safetensors'} {cause}")


def test_nothing_is_ever_unpickled(full, tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)

    for name in files(full) - {"manifest.json"}:
        kept = (full / name).read_bytes()
        (full / name).write_bytes(pickle.dumps(Bomb()))
        reseal(full)
        assert name in refusal(full)
        (full / name).write_bytes(kept)
    reseal(full)
    (full / "manifest.json").write_bytes(pickle.dumps(Bomb()))
    assert "manifest.json" in refusal(full)
    assert not (tmp_path / "exploded").exists()


def test_a_missing_folder_a_file_and_an_empty_folder_are_named(tmp_path):
    assert refusal(tmp_path / "no").startswith(f"{tmp_path / 'no'} does not exist")
    (tmp_path / "file").write_bytes(PNG)
    assert refusal(tmp_path / "file").startswith(f"{tmp_path / 'file'} is a file")
    (tmp_path / "empty").mkdir()
    assert refusal(tmp_path / "empty").startswith(f"{tmp_path / 'empty'} holds no manifest.json")


@pytest.mark.parametrize(
    ("manifest", "cause"),
    [
        ("", "is not JSON"),
        ("\ufffd{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1]", "holds no JSON object"),
        ("{}", "is no checkpoint manifest"),
        ('{"format": 1}', "is no checkpoint manifest"),
        ('{"format": 1, "files": {}}', "does not describe config.json"),
        ('{"format": 1, "files": {"config.json": 3}}', "does not describe config.json"),
        ('{"format": 2, "files": {}}', "has format 2, and this version reads 1 only"),
        ('{"format": 1, "files": {"../full/config.json": {}}}', "lists '../full/config.json'"),
    ],
)
def test_a_manifest_of_another_kind_is_named(full, manifest, cause):
    (full / "manifest.json").write_text(manifest, encoding="utf-8")
    assert refusal(full).startswith(f"{full / 'manifest.json'} {cause}")


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"depth": 3}, ": key 'depth' is unknown"),
        ({"width": None}, ": key 'width' is missing"),
        ({"width": "96"}, " describes no model: "),
        ({"width": -1}, " describes no model: width must be positive"),
    ],
)
def test_a_configuration_this_version_does_not_know_is_named(full, change, cause):
    config = json.loads((full / "config.json").read_text()) | change
    known = {k: v for k, v in config.items() if v is not None}
    (full / "config.json").write_text(json.dumps(known))
    reseal(full)
    assert refusal(full).startswith(f"{full / 'config.json'}{cause}")


def test_the_field_in_which_a_configuration_differs_is_named(full):
    assert load(full, STUDY_MINI).config == STUDY_MINI
    message = refusal(full, replace(STUDY_MINI, experts=6))
    assert message == f"{full / 'config.json'} has experts 4, where 6 is asked for"


def test_training_state_that_does_not_fit_its_optimizer_file_is_named(full):
    for training in ({}, {"scalars": {"x.y": 1}, "param_groups": []}, {"scalars": 1}):
        (full / "training.json").write_text(json.dumps(training))
        reseal(full)
        assert refusal(full).startswith(f"{full / 'training.json'} and optimizer.safetensors")


@given(st.sampled_from(sorted(checkpoint.FILES)), st.integers(0, 10**6), st.integers(0, 7))
@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_no_flipped_bit_gets_through(full, name, position, bit):
    kept = (full / name).read_bytes()
    good = load(full)
    damaged = bytearray(kept)
    damaged[position % len(kept)] ^= 1 << bit
    (full / name).write_bytes(damaged)
    try:
        loaded = load(full)
    except CheckpointError as error:
        assert "\n" not in str(error) and str(full) in str(error)
    else:  # a size in the manifest that became smaller: the hash still vouches for the bytes
        assert name == "manifest.json"
        assert bits(loaded.weights) == bits(good.weights) and loaded.config == good.config
    finally:
        (full / name).write_bytes(kept)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"weight": None}, "lacks 'weight'"),
        ({"extra": torch.ones(1)}, "has 'extra', unknown to the model"),
        (
            {"weight": torch.ones(3, 2)},
            "has 'weight' as float32 [3, 2], in the model float32 [2, 3]",
        ),
        (
            {"bias": torch.ones(2).bfloat16()},
            "has 'bias' as bfloat16 [2], in the model float32 [2]",
        ),
        (
            {f"x{i}": torch.ones(1) for i in range(9)},
            "has 'x0', unknown to the model; has 'x1', unknown to the model; "
            "has 'x2', unknown to the model; and 6 more",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named_and_leave_the_model_alone(tmp_path, change, cause):
    model = nn.Linear(3, 2)
    before = bits(model.state_dict())
    changed = {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)} | change
    save(tmp_path / "c", {k: t for k, t in changed.items() if t is not None}, BASE)
    with pytest.raises(CheckpointError) as caught:
        load_into(model, load(tmp_path / "c"))
    assert str(caught.value) == f"{tmp_path / 'c' / 'model.safetensors'} {cause}"
    assert bits(model.state_dict()) == before


# Writing


def test_a_checkpoint_is_never_overwritten_unasked(tmp_path):
    first = save(tmp_path / "c", weights(1), BASE)
    with pytest.raises(
        FileExistsError, match="exists already, and a checkpoint is not overwritten"
    ):
        save(tmp_path / "c", weights(2), BASE)
    os.rename(tmp_path / "c", tmp_path / "c.old")  # an interrupted replacement counts as one
    with pytest.raises(FileExistsError):
        save(tmp_path / "c", weights(2), BASE)
    assert load(tmp_path / "c").hash == first


def test_replacing_deletes_nothing_that_is_no_checkpoint(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("x")
    (tmp_path / "notes").write_text("y")
    (tmp_path / "c.old").mkdir()
    (tmp_path / "c.old" / "photo.jpg").write_text("z")
    for name in ("thesis", "notes", "c"):
        with pytest.raises(FileExistsError):
            save(tmp_path / name, weights(), BASE, replace=True)
    assert (tmp_path / "thesis" / "chapter.tex").read_text() == "x"
    assert (tmp_path / "notes").read_text() == "y"
    assert (tmp_path / "c.old" / "photo.jpg").read_text() == "z"


def test_removing_takes_the_checkpoint_and_what_a_killed_run_left_and_nothing_else(tmp_path):
    for name in ("latest", "latest.old", "latest.new", "step_0100"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").touch()
    checkpoint.remove(tmp_path / "latest")
    assert files(tmp_path) == {"step_0100"}
    checkpoint.remove(tmp_path / "latest")  # there is none, which is what was asked for
    (tmp_path / "step_0100" / "notes.txt").touch()
    with pytest.raises(FileExistsError, match=r"holds notes\.txt"):
        checkpoint.remove(tmp_path / "step_0100")
    assert files(tmp_path / "step_0100") == {"model.safetensors", "notes.txt"}


def test_replacing_drops_what_the_new_checkpoint_does_not_have(full):
    digest = save(full, weights(5), BASE, replace=True)
    assert files(full) == {"model.safetensors", "config.json", "manifest.json"}
    assert files(full.parent) == {"full"}
    assert load(full).hash == digest


def test_everyone_who_may_read_one_file_may_read_them_all(full):
    assert len({file.stat().st_mode for file in full.iterdir()}) == 1


class Killed(BaseException):
    """Stands for SIGKILL: see `alive_for`."""


def alive_for(monkeypatch, calls: int) -> None:
    """Let `calls` system calls that change names or flush succeed, and none after.

    A killed process cleans nothing up, so every later call fails as well.
    """
    done = 0

    def mortal(real):
        def call(*arguments, **keywords):
            nonlocal done
            if done == calls:
                raise Killed
            done += 1
            return real(*arguments, **keywords)

        return call

    for name in ("mkdir", "fsync", "rename", "replace", "unlink", "rmdir"):
        monkeypatch.setattr(os, name, mortal(getattr(os, name)))


@pytest.mark.parametrize("start", ["whole", "only .old"])
def test_killed_at_any_moment_the_old_or_the_new_checkpoint_loads(tmp_path, start, monkeypatch):
    outcomes = []
    for calls in range(100):
        path = tmp_path / str(calls) / "latest"
        optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters()).state_dict()
        old = save(path, weights(1), BASE, optimizer=optimizer, progress={"step": 1})
        if start == "only .old":
            os.rename(path, path.with_name("latest.old"))
        new = weights_hash(weights(2))
        with monkeypatch.context() as patch:
            alive_for(patch, calls)
            try:
                save(path, weights(2), BASE, progress={"step": 2}, replace=True)
                survived = True
            except Killed:
                survived = False
        loaded = load(path, BASE)
        outcomes.append({old: "old", new: "new"}[loaded.hash])
        assert loaded.progress == {"step": 1 if outcomes[-1] == "old" else 2}
        last = save(path, weights(3), BASE, replace=True)  # a resumed run carries on
        assert load(path).hash == last and files(path.parent) == {"latest"}
        if survived:
            break
    assert survived and outcomes.count("old") > 5 and outcomes.count("new") > 3
    assert outcomes == sorted(outcomes, reverse=True)  # old up to a moment, new from then on


def test_killed_at_any_moment_a_first_checkpoint_is_whole_or_absent(tmp_path, monkeypatch):
    outcomes = []
    for calls in range(100):
        path = tmp_path / str(calls) / "step_0100"
        with monkeypatch.context() as patch:
            alive_for(patch, calls)
            try:
                save(path, weights(1), BASE)
                survived = True
            except Killed:
                survived = False
        outcomes.append(path.exists())
        if not path.exists():
            assert save(path, weights(1), BASE)
        assert load(path, BASE).hash == weights_hash(weights(1))
        if survived:
            break
    assert survived and outcomes.count(False) > 5


def test_a_failed_save_leaves_the_old_checkpoint_and_no_debris(tmp_path, monkeypatch):
    old = save(tmp_path / "c", weights(1), BASE)

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path / "c", weights(2), BASE, replace=True)
    assert load(tmp_path / "c").hash == old and files(tmp_path) == {"c"}


KILLED_BETWEEN_RENAMES = """
import os, sys, torch
from glm_course.checkpoint import save
from glm_course.config import BASE
save(sys.argv[1], {"a": torch.ones(2)}, BASE)
rename = os.rename
def die(source, target):
    if str(source).endswith(".new"):
        os._exit(9)
    rename(source, target)
os.rename = die
save(sys.argv[1], {"a": torch.zeros(2)}, BASE, replace=True)
"""


def test_a_process_that_dies_between_the_two_renames_leaves_the_old_checkpoint(tmp_path):
    path = tmp_path / "latest"
    died = subprocess.run([sys.executable, "-c", KILLED_BETWEEN_RENAMES, str(path)], timeout=60)
    assert died.returncode == 9
    assert files(tmp_path) == {"latest.old", "latest.new"}
    assert torch.equal(load(path, BASE).weights["a"], torch.ones(2))


# Cache


def fill(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "data.bin").write_bytes(b"12345")
    (folder / "empty").touch()
    save(folder / "step_0100", weights(), BASE)


def never(folder: Path) -> None:
    raise AssertionError("made again")


def test_a_cache_entry_is_made_once_and_found_again(tmp_path):
    first = cached({"name": "pretrain", "seed": 1}, fill, tmp_path)
    assert first.parent == tmp_path and first.name.startswith("pretrain-")
    assert cached({"seed": 1, "name": "pretrain"}, never, tmp_path) == first
    assert load(first / "step_0100", BASE).hash == weights_hash(weights())
    assert cached({"name": "pretrain", "seed": 2}, fill, tmp_path) != first


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: (entry / "sub" / "data.bin").write_bytes(b"1234"),
        lambda entry: (entry / "sub" / "data.bin").write_bytes(b"12354"),
        lambda entry: (entry / "empty").unlink(),
        lambda entry: (entry / "manifest.json").unlink(),
        lambda entry: (entry / "manifest.json").write_text("{"),
    ],
)
def test_a_damaged_cache_entry_is_made_again_with_a_warning(tmp_path, damage, capsys):
    entry = cached({"name": "x"}, fill, tmp_path)
    assert capsys.readouterr().err == ""
    damage(entry)
    assert cached({"name": "x"}, fill, tmp_path) == entry
    assert capsys.readouterr().err == f"cache entry {entry.name} is damaged, making it again\n"
    assert (entry / "sub" / "data.bin").read_bytes() == b"12345"
    assert cached({"name": "x"}, never, tmp_path) == entry


def test_a_maker_that_fails_leaves_no_entry(tmp_path):
    def interrupted(folder: Path) -> None:
        fill(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached({"name": "x"}, interrupted, tmp_path)
    assert not [child for child in tmp_path.iterdir() if child.is_dir()]
    assert cached({"name": "x"}, fill, tmp_path).is_dir()


def test_what_a_killed_maker_left_does_not_end_up_in_the_entry(tmp_path):
    entry = cached({"name": "x"}, fill, tmp_path)
    os.rename(entry, entry.with_name(entry.name + ".new"))
    (entry.with_name(entry.name + ".new") / "half").touch()
    cached({"name": "x"}, lambda folder: (folder / "whole").touch(), tmp_path)
    assert files(entry) == {"whole", "manifest.json"}


def test_the_cache_lies_where_the_environment_says_else_in_the_checkout(tmp_path, monkeypatch):
    monkeypatch.setenv("GLM_COURSE_CACHE", str(tmp_path))
    assert cached({"name": "x"}, fill).parent == tmp_path
    monkeypatch.delenv("GLM_COURSE_CACHE")
    assert checkpoint.cache_root() == Path(__file__).resolve().parents[1] / ".cache"
    monkeypatch.setattr(checkpoint, "__file__", str(tmp_path / "site-packages" / "g" / "c.py"))
    assert checkpoint.cache_root().name == "glm_course"


CACHE_MAKER = """
import sys
from pathlib import Path
from glm_course.checkpoint import cached
def make(folder):
    print("making", flush=True)
    (folder / "made").write_text(sys.stdin.readline())
print(cached({"name": "x"}, make, Path(sys.argv[1])))
"""


def test_a_process_waits_for_another_that_makes_the_same_entry(tmp_path):
    other = subprocess.Popen(
        [sys.executable, "-c", CACHE_MAKER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with other:
        assert other.stdout.readline() == "making\n"
        found = []
        us = threading.Thread(target=lambda: found.append(cached({"name": "x"}, never, tmp_path)))
        us.start()
        us.join(timeout=0.3)
        assert us.is_alive() and not found
        output, _ = other.communicate("by the other", timeout=60)
        us.join(timeout=60)
    assert found == [Path(output.strip())]
    assert (found[0] / "made").read_text() == "by the other"
