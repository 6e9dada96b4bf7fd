"""What test modules share: one hypothesis profile, and a tiny model that has learned a little."""

import signal
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from glm_course.config import ModelConfig
from glm_course.model import LanguageModel
from glm_course.train.optimizer import AdamWSettings
from glm_course.train.pretrain import PretrainSettings, load_model, pretrain

# A shell that starts pytest in the background has it ignore Ctrl-C, and Python keeps that.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")

STEPS = 200


@pytest.fixture(scope="session")
def tiny() -> ModelConfig:
    """Sizes of a model that takes a step in milliseconds: a linear layer, then a sparse one."""
    return ModelConfig(width=32, layers=2, heads=2, expert_hidden=32, experts=4, sparse_every=2)


@pytest.fixture(scope="session")
def trained(tiny, tmp_path_factory) -> Path:
    """Checkpoint folder of a tiny model that solves some tasks and fails at others. Read only."""
    output = tmp_path_factory.mktemp("trained") / "run"
    run = PretrainSettings(
        model=tiny,
        steps=STEPS,
        batch_size=8,
        seed=3,
        milestones=(),
        optimizer=AdamWSettings(learning_rate=1e-2),
    )
    for _ in pretrain(run, output=output, device="cpu", dtype="fp32", save_every=STEPS):
        pass
    return output / f"step_{STEPS:04d}"


@pytest.fixture(scope="session")
def model(trained) -> LanguageModel:
    """The trained tiny model. Read only."""
    return load_model(trained, device="cpu").requires_grad_(False)


@pytest.fixture(scope="session")
def precise(trained) -> LanguageModel:
    """The trained tiny model in fp64: what should agree does so to 1e-9, on any machine. Read only.

    In fp32 its log-probabilities differ by up to 4e-5 between two ways to compute them.
    """
    return load_model(trained, device="cpu").double().requires_grad_(False)


@pytest.fixture
def writable(trained) -> LanguageModel:
    """A copy of the trained tiny model that a test may change."""
    return load_model(trained, device="cpu")


@pytest.fixture
def one_thread():
    """Sums of one thread: what must agree to the bit does so on any machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
