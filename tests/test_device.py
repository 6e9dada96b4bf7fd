"""Devices and dtypes: names, what auto means, what is cast, and that importing asks no device."""

import subprocess
import sys

import pytest
import torch

from glm_course.device import (
    DEVICES,
    DTYPES,
    at_least_fp32,
    describe,
    pick_device,
    pick_dtype,
    place,
    set_threads,
)
from glm_course.train.pretrain import new_model

CPU, CUDA, MPS = (torch.device(name) for name in ("cpu", "cuda", "mps"))


@pytest.fixture
def machine(monkeypatch):
    """Pretend that CUDA and MPS are there or not."""

    def have(*, cuda: bool = False, mps: bool = False) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    return have


@pytest.mark.parametrize("name", ["tpu", "", "CUDA", "cuda:0"])
def test_an_unknown_device_is_refused_with_the_names_there_are(name):
    with pytest.raises(ValueError, match=f"unknown device '{name}'.*auto, cuda, mps, cpu"):
        pick_device(name)


@pytest.mark.parametrize("name", ["fp16", "", "BF16", "bfloat16"])
def test_an_unknown_dtype_is_refused_with_the_names_there_are(name):
    with pytest.raises(ValueError, match=f"unknown dtype '{name}'.*auto, fp32, bf16"):
        pick_dtype(name, CPU)


@pytest.mark.parametrize("name", ["cuda", "mps"])
def test_a_device_that_is_not_there_is_refused(machine, name):
    machine()
    with pytest.raises(ValueError, match=f"device {name} is not available here; .*auto"):
        pick_device(name)


def test_auto_is_cuda_else_mps_else_cpu(machine):
    for there, wanted in (
        ({"cuda": True, "mps": True}, CUDA),
        ({"mps": True}, MPS),
        ({}, CPU),
    ):
        machine(**there)
        assert pick_device() == pick_device("auto") == wanted


def test_a_device_that_is_there_can_be_named(machine):
    machine(cuda=True, mps=True)
    assert [pick_device(name) for name in DEVICES[1:]] == [CUDA, MPS, CPU]


def test_auto_dtype_is_bf16_on_cuda_alone():
    assert [pick_dtype("auto", d) for d in (CUDA, MPS, CPU)] == [
        torch.bfloat16,
        torch.float32,
        torch.float32,
    ]
    for device in (CUDA, MPS, CPU):
        named = [pick_dtype(name, device) for name in DTYPES[1:]]
        assert named == [torch.float32, torch.bfloat16]


def test_narrow_numbers_are_widened_and_wide_ones_kept():
    widened = [at_least_fp32(torch.zeros(1, dtype=d)).dtype for d in (torch.bfloat16, torch.half)]
    assert widened == [torch.float32, torch.float32]
    for dtype in (torch.float32, torch.float64):
        x = torch.zeros(1, dtype=dtype)
        assert at_least_fp32(x) is x


def test_place_rounds_matrices_and_nothing_else(tiny):
    model = new_model(tiny, 0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    table = model.table.clone()
    assert place(model, CPU, torch.bfloat16) is model
    for name, p in model.named_parameters():
        matrix = p.ndim >= 2
        assert p.dtype == (torch.bfloat16 if matrix else torch.float32), name
        assert torch.equal(p, before[name].to(p.dtype)), name
        assert p.requires_grad
    assert {p.ndim for p in model.parameters()} == {1, 2, 3}
    assert model.table.dtype == torch.float32 and torch.equal(model.table, table)


def test_a_placed_model_computes_nearly_the_same_with_logits_in_fp32(tiny):
    model, ids = new_model(tiny, 0), torch.arange(4, 100)[None]
    with torch.no_grad():
        wide = model(ids)
        narrow = place(model, CPU, torch.bfloat16)(ids)
        logits, cache = model.prefill(ids[:, :-1])
        stepped = model.step(ids[:, -1], cache)
    assert narrow.dtype == logits.dtype == stepped.dtype == torch.float32
    torch.testing.assert_close(narrow, wide, rtol=0, atol=0.02)
    torch.testing.assert_close(stepped, wide[:, -1], rtol=0, atol=0.02)


def test_placing_in_fp32_changes_no_bit(tiny):
    model, same = new_model(tiny, 0), new_model(tiny, 0)
    place(model, CPU, torch.float32)
    for p, q in zip(model.parameters(), same.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_device_is_described_in_words():
    assert describe(CPU) == f"CPU, {torch.get_num_threads()} threads"
    assert describe(MPS) == "Apple GPU (MPS)"


def test_threads_are_set_for_this_process_and_those_it_starts(monkeypatch, one_thread):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert set_threads(2) == torch.get_num_threads() == 2
    started = "import os; print(os.environ['OMP_NUM_THREADS'])"
    assert subprocess.check_output([sys.executable, "-c", started], text=True) == "2\n"
    assert set_threads(None) == 2


@pytest.mark.parametrize("count", [0, -1, 1025])
def test_a_number_of_threads_that_cannot_be_is_refused(count, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    before = torch.get_num_threads()
    with pytest.raises(ValueError, match=f"threads must be from 1 to 1024, got {count}"):
        set_threads(count)
    assert torch.get_num_threads() == before


IMPORT_ALL = """
import pkgutil, importlib, torch

def asked(*_):
    raise AssertionError("a device was asked for at import")

for name in ("is_available", "device_count", "init", "_lazy_init", "current_device"):
    setattr(torch.cuda, name, asked)
torch.backends.mps.is_available = asked

import glm_course
names = [m.name for m in pkgutil.walk_packages(glm_course.__path__, "glm_course.")]
names.remove("glm_course.__main__")
for name in names:
    importlib.import_module(name)
assert not torch.cuda.is_initialized()
print(len(names))
"""


def test_importing_the_library_asks_no_device_and_starts_none():
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20
