"""Model sizes: the three presets as published, and sizes that do not fit together refused."""

from dataclasses import FrozenInstanceError, asdict, fields, replace

import pytest

from glm_course.config import BASE, DENSE_CONTROL, STUDY_MINI, VISION_MINI, ModelConfig
from glm_course.model import parameter_counts
from glm_course.train.pretrain import new_model

PUBLISHED = {  # one row a setting: base, study mini, vision mini
    "vocab_size": (260, 260, 263),
    "width": (192, 48, 32),
    "layers": (12, 3, 1),
    "heads": (6, 3, 4),
    "expert_hidden": (384, 96, 48),
    "experts": (8, 4, 4),
    "top_k": (2, 1, 2),
    "selection_bias": (False, False, False),
    "streams": (4, 2, 2),
    "window": (32, 24, 8),
    "stride": (32, 24, 8),
    "max_length": (192, 128, 64),
    "sparse_every": (4, 4, 4),
    "rope_theta": (10_000.0, 10_000.0, 10_000.0),
    "norm_eps": (1e-6, 1e-6, 1e-6),
}


def test_presets_are_as_published_in_every_setting():
    for column, preset in enumerate((BASE, STUDY_MINI, VISION_MINI)):
        assert asdict(preset) == {name: row[column] for name, row in PUBLISHED.items()}


def test_the_default_is_the_base_model():
    assert ModelConfig() == BASE


def test_head_width_is_width_over_heads():
    assert [c.head_dim for c in (BASE, STUDY_MINI, VISION_MINI)] == [32, 16, 8]


def test_every_fourth_layer_of_the_base_model_is_sparse():
    assert [i for i in range(BASE.layers) if BASE.is_sparse(i)] == [3, 7, 11]


@pytest.mark.parametrize("mini", [STUDY_MINI, VISION_MINI])
def test_the_minis_are_too_shallow_for_a_sparse_layer(mini):
    assert not any(mini.is_sparse(i) for i in range(mini.layers))


def test_the_rhythm_is_a_setting():
    every_layer = replace(BASE, sparse_every=1)
    assert all(every_layer.is_sparse(i) for i in range(12))


ROUTING = ("experts", "top_k", "selection_bias")


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("name", [f.name for f in fields(ModelConfig) if f.name not in ROUTING])
def test_every_size_must_be_positive(name, value):
    with pytest.raises(ValueError, match=f"{name} must be positive, got {value}"):
        ModelConfig(**{name: value})


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="width 192 does not divide into 7 heads"):
        ModelConfig(heads=7)


def test_the_head_width_must_be_even_for_rotation():
    with pytest.raises(ValueError, match="head width 3 is odd"):
        ModelConfig(heads=64)


def test_top_k_cannot_exceed_the_experts():
    assert ModelConfig(top_k=8).top_k == 8
    with pytest.raises(ValueError, match="top_k 9 is more than the 8 experts"):
        ModelConfig(top_k=9)


@pytest.mark.parametrize("experts, top_k", [(-1, 0), (8, 0), (8, -1)])
def test_a_token_needs_an_expert_where_there_are_any(experts, top_k):
    with pytest.raises(ValueError, match="at least one of the routed experts"):
        ModelConfig(experts=experts, top_k=top_k)


def test_the_dense_control_has_the_active_weights_of_the_base_model_less_the_router():
    base, dense = (parameter_counts(new_model(config, 0)) for config in (BASE, DENSE_CONTROL))
    assert dense["active"] == dense["total"] == base["active"] - base["router"]
    assert dense["router"] == dense["routed experts"] == 0


def test_a_changed_copy_is_checked_too():
    with pytest.raises(ValueError, match="top_k 2 is more than the 1 experts"):
        replace(BASE, experts=1)


def test_a_configuration_cannot_be_changed_in_place():
    with pytest.raises(FrozenInstanceError):
        BASE.width = 256
