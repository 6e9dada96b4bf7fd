"""Residual streams rebuilt from the text of chapter 06, without looking at its code."""

import pytest
import torch

from glm_course.config import ModelConfig
from glm_course.layers.norm import RMSNorm
from glm_course.layers.streams import StreamMixer
from glm_course.model import LanguageModel


def rms_norm(x, gain, eps=1e-6):
    """Divide x by the root of its mean square (last axis), times a weight per channel."""
    return gain * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def first_logits(count):
    """Return initial read and write logits: reading prefers the first stream, writing the last."""
    down = torch.linspace(0.1, -0.1, count)
    return down, -down


def read(streams, logits):
    """Return the weighted mean of the streams [S, ..., W], weights softmax(logits)."""
    return torch.einsum("s,s...->...", logits.softmax(0), streams)


def write(streams, logits, y):
    """Add to each stream its share, softmax(logits), of y."""
    return streams + torch.einsum("s,...->s...", logits.softmax(0), y)


def block(u, layer):
    """Compute a block's result with its own residual inside: z = u + attention, y = z + experts."""
    z = u + layer["attention"](rms_norm(u, layer["gain1"]))
    return z + layer["experts"](rms_norm(z, layer["gain2"]))


def stack(embedding, layers, count, last_gain):
    """Copy the embedding into streams, let each layer read and write them, norm their mean."""
    streams = torch.stack([embedding] * count)
    for layer in layers:
        y = block(read(streams, layer["read"]), layer)
        streams = write(streams, layer["write"], y)
    return rms_norm(streams.mean(0), last_gain)


def stack_without_streams(embedding, layers, last_gain):
    """Compute the same from the table c: block l reads e + sum of c[l, j] y_j over earlier j."""
    written = []
    for layer in layers:
        u = embedding
        for earlier, y in zip(layers, written, strict=False):
            u = u + (layer["read"].softmax(0) @ earlier["write"].softmax(0)) * y
        written.append(block(u, layer))
    return rms_norm(embedding + sum(written) / len(layers[0]["read"]), last_gain)


def logits_of(ids, table, layers, count, last_gain):
    """Embed ids, run the stack, and multiply by the output matrix, which is the embedding table."""
    return stack(table[ids], layers, count, last_gain) @ table.T


def assert_same(mine, theirs):
    """Assert that two tensors have one shape and differ by at most 1e-5."""
    assert mine.shape == theirs.shape
    assert float((mine - theirs).detach().abs().max()) < 1e-5


def random_model(moved, layers=5, streams=4):
    """Return a small library model, its norms and logits as built or moved far from there."""
    torch.manual_seed(6)
    model = LanguageModel(
        ModelConfig(
            width=32,
            layers=layers,
            heads=2,
            expert_hidden=32,
            experts=4,
            streams=streams,
            window=8,
            stride=8,
            max_length=80,
        )
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if moved and weight.ndim == 1 and "attention." not in name and "moe." not in name:
                weight.add_(torch.randn_like(weight), alpha=0.5)
    return model


def copied_layers(model, length):
    """Return the library's weights under this file's names, its sub-layers as given functions."""
    rotations = model.rotations(length)
    return [
        {
            "read": b.mixer.input_logits,
            "write": b.mixer.output_logits,
            "gain1": b.attention_norm.weight,
            "gain2": b.moe_norm.weight,
            "attention": lambda x, b=b: b.attention(x, rotations),
            "experts": lambda x, b=b: b.moe(x.flatten(0, 1)).view(x.shape),
        }
        for b in model.blocks
    ]


@pytest.mark.parametrize("shape", [(7,), (5, 12), (2, 3, 192)])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_norm_matches_library_for_short_and_long_vectors(shape, scale):
    """Inputs below, near and far above the knee at 0.001, with weights other than ones."""
    torch.manual_seed(0)
    norm = RMSNorm(shape[-1], 1e-6)
    x = scale * torch.randn(shape)
    assert_same(rms_norm(x, norm.weight), norm(x))
    torch.nn.init.normal_(norm.weight)
    assert_same(rms_norm(x, norm.weight), norm(x))


@pytest.mark.parametrize("count", [2, 4, 8])
def test_initial_logits_match_library(count):
    """Reading starts at +0.1 for the first stream, writing at +0.1 for the last."""
    mixer = StreamMixer(count)
    for mine, theirs in zip(
        first_logits(count), (mixer.input_logits, mixer.output_logits), strict=True
    ):
        assert_same(mine, theirs)


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("shape", [(1, 3, 4), (2, 5, 8), (4, 33, 192), (8, 1, 16)])
def test_reading_and_writing_match_library(shape, moved):
    """Streams, and the vectors read from and written to them, with initial and random logits."""
    torch.manual_seed(1)
    mixer = StreamMixer(shape[0])
    if moved:
        for logits in mixer.parameters():
            torch.nn.init.normal_(logits)
    streams, y = torch.randn(shape), torch.randn(shape[1:])
    assert_same(read(streams, mixer.input_logits), mixer.read(streams))
    assert_same(write(streams, mixer.output_logits, y), mixer.write(streams, y))


@pytest.mark.parametrize("moved", [False, True])
def test_block_matches_library(moved):
    """One block on streams that all differ, with given functions in place of its sub-layers."""
    torch.manual_seed(2)
    b = random_model(moved).blocks[1]
    b.moe = torch.nn.Linear(32, 32)
    layer = {
        "gain1": b.attention_norm.weight,
        "gain2": b.moe_norm.weight,
        "attention": torch.sin,
        "experts": b.moe,
    }
    streams = torch.randn(4, 50, 32)
    y = block(read(streams, b.mixer.input_logits), layer)
    assert_same(write(streams, b.mixer.output_logits, y), b(streams, torch.sin))


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize(
    ("streams", "shape"), [(1, (2, 9)), (2, (3, 1)), (4, (2, 80)), (8, (1, 33))]
)
def test_whole_stack_matches_library(streams, shape, moved):
    """Logits of ids without padding, also past the window of the sparse layer."""
    model = random_model(moved, streams=streams)
    ids = torch.randint(0, 260, shape)
    mine = logits_of(
        ids, model.embedding.weight, copied_layers(model, shape[1]), streams, model.norm.weight
    )
    assert_same(mine, model(ids))


@pytest.mark.parametrize("moved", [False, True])
def test_table_of_shares_replaces_the_streams(moved):
    """The chapter's triangular table gives the library's logits, without any streams."""
    model = random_model(moved)
    ids = torch.randint(0, 260, (2, 40))
    table = model.embedding.weight
    x = stack_without_streams(table[ids], copied_layers(model, 40), model.norm.weight)
    assert_same(x @ table.T, model(ids))
