"""Vision: pictures, what becomes of them in tower and language model, and runs that learn them."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from glm_course import checkpoint, receipt
from glm_course.checkpoint import CheckpointError, weights_hash
from glm_course.config import BASE, VISION_MINI
from glm_course.data.digits import DIGITS, NOISE, SEGMENTS, digit_images
from glm_course.layers.norm import RMSNorm
from glm_course.model import LanguageModel
from glm_course.tokenizer import BOS, ByteTokenizer
from glm_course.train import vision as module
from glm_course.train.optimizer import AdamWSettings, MasterAdamW
from glm_course.train.vision import (
    MODELS,
    PILOT,
    PROMPT,
    SeeingModel,
    VisionSettings,
    answer_logits,
    answer_loss,
    evaluate,
    held_out_batch,
    new_vision_model,
    pilot,
    pilot_model,
    smoke_test,
    train_vision,
    training_batch,
)
from glm_course.vision import (
    IMAGE,
    IMAGE_END,
    IMAGE_START,
    DirectPatchModel,
    TowerConfig,
    VisionLanguageModel,
    VisionTower,
    axial_table,
)

HELD_OUT = "24148448678ad8f3e3dfc08730179cf0bb42a6d138efaab82d844327ec6ff64d"
SHORT = {"steps": 3, "batch_size": 10, "held_out": 20}
ROTARY = TowerConfig(positions="rotary")

both = pytest.mark.parametrize("name", MODELS)


def fresh(name: str, seed: int = 42) -> SeeingModel:
    return new_vision_model(VisionSettings(model=name, seed=seed))


def in_double(name: str) -> SeeingModel:
    """The model in fp64, its matrices spread out so that every layer matters."""
    model = fresh(name).double()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.mul_(3)
    return model.requires_grad_(False)


def prompts(model: SeeingModel, batch: int, text: str = PROMPT) -> Tensor:
    return torch.tensor([model.prompt(text)] * batch)


@pytest.fixture(scope="module")
def seeing() -> dict[str, SeeingModel]:
    """Both models with the initial weights of seed 42. Read only."""
    return {name: fresh(name).requires_grad_(False) for name in MODELS}


@pytest.fixture(scope="module")
def precise() -> dict[str, SeeingModel]:
    """Both in fp64, where what should agree does so to 1e-9. Read only."""
    return {name: in_double(name) for name in MODELS}


# --- pictures ------------------------------------------------------------------------------------


def test_the_held_out_pictures_are_the_originals_to_the_bit():
    images, labels = held_out_batch(VisionSettings())
    assert (images.dtype, images.shape) == (torch.float32, (200, 3, 32, 32))
    assert labels == [i % 10 for i in range(200)]
    assert weights_hash({"images": images}) == HELD_OUT


def test_pictures_depend_on_the_seed_alone_and_leave_the_global_generator():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    images = digit_images([3, 8], 5)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(digit_images([3, 8], 5), images)
    assert not torch.equal(digit_images([3, 8], 6), images)


def test_pictures_lie_within_0_and_1_and_show_one_colour_on_black():
    images = digit_images(range(10), 3)
    assert images.min() >= 0 and images.max() <= 1
    for image in images:
        lit = image[0] > 0.5 * 0.55
        assert 0.03 < lit.float().mean() < 0.35
        assert image[:, ~lit].max() <= NOISE
        for channel in image:
            assert channel[lit].max() - channel[lit].min() <= NOISE + 1e-6


@pytest.mark.parametrize("digit", range(10))
def test_a_digit_is_its_segments_moved_by_at_most_two_pixels(digit):
    wanted = torch.zeros(32, 32, dtype=torch.bool)
    for y0, y1, x0, x1 in (SEGMENTS[segment] for segment in DIGITS[digit]):
        wanted[y0:y1, x0:x1] = True
    shifts = set()
    for image in digit_images([digit] * 40, 11):
        lit = image[0] > 0.5 * 0.55
        found = [
            (dy, dx)
            for dy in range(-2, 3)
            for dx in range(-2, 3)
            if torch.equal(lit, wanted.roll((dy, dx), (0, 1)))
        ]
        assert len(found) == 1
        shifts.update(found)
    assert {dy for dy, _ in shifts} == {dx for _, dx in shifts} == {-2, -1, 0, 1, 2}


def test_no_two_digits_have_the_same_segments():
    assert len({frozenset(segments) for segments in DIGITS}) == len(DIGITS) == 10


@pytest.mark.parametrize("labels", [[], [10], [0, -1]])
def test_labels_that_are_no_digits_are_refused(labels):
    with pytest.raises(ValueError, match="labels must be digits from 0 to 9"):
        digit_images(labels, 0)


def test_steps_show_every_digit_in_turn_and_never_a_held_out_picture():
    settings = VisionSettings()
    images, labels = training_batch(settings, 7)
    assert labels == [(i + 7) % 10 for i in range(40)]
    assert torch.equal(images, digit_images(labels, 42 + 7))
    _, labels = training_batch(PILOT, 4)
    assert labels == [(i + 12) % 10 for i in range(10)]
    images, labels = held_out_batch(PILOT)
    assert torch.equal(images, digit_images(labels, 100_073)) and len(images) == 100


# --- known numbers -------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "count"), [("faithful", 60_924), ("baseline", 42_500)])
def test_parameter_counts_are_exact(seeing, name, count):
    assert sum(p.numel() for p in seeing[name].parameters()) == count


def test_the_pilot_has_the_originals_parameters_and_trains_as_many():
    model = pilot_model(PILOT, None)
    assert sum(p.numel() for p in model.language.parameters()) == 25_731_168
    assert sum(p.numel() for p in model.parameters()) == 25_875_576
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 2_335_136
    trained = {n.split(".")[0] for n, p in model.named_parameters() if p.requires_grad}
    assert trained == {"language", "tower", "projector"}
    learns = [n for n, p in model.language.named_parameters() if p.requires_grad]
    assert {n for n in learns if not n.startswith("blocks.11.")} == {
        "embedding.weight",
        "norm.weight",
    }


@pytest.mark.parametrize(("name", "loss"), [("faithful", 5.580904), ("baseline", 5.575836)])
def test_losses_before_training_are_the_originals(seeing, name, loss):
    result = evaluate(seeing[name], *held_out_batch(VisionSettings()))
    assert result["loss"] == pytest.approx(loss, abs=1e-5)
    assert (result["correct"], result["of"]) == (0, 200)


@both
def test_initial_weights_depend_on_the_seed_alone(name):
    torch.manual_seed(99)
    torch.rand(5)
    state = torch.get_rng_state()
    wanted = weights_hash(fresh(name, 7).state_dict())
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert weights_hash(fresh(name, 7).state_dict()) == wanted
    assert weights_hash(fresh(name, 8).state_dict()) != wanted


@both
def test_the_language_model_draws_first(seeing, name):
    torch.manual_seed(42)
    language = LanguageModel(VISION_MINI)
    assert weights_hash(language.state_dict()) == weights_hash(seeing[name].language.state_dict())


def test_norms_of_the_tower_have_the_epsilon_of_the_original(seeing):
    norms = [m for m in seeing["faithful"].tower.modules() if isinstance(m, RMSNorm)]
    assert len(norms) == 2 * 4 + 1 and {norm.eps for norm in norms} == {1e-5}


# --- tokens of an image --------------------------------------------------------------------------


@both
def test_shapes(seeing, name):
    model, images = seeing[name], digit_images([1, 2, 3], 0)
    ids = prompts(model, 3)
    assert model.see(images).shape == (3, 16, 32)
    assert model.embed(images, ids).shape == (3, 26 if name == "faithful" else 24, 32)
    logits = model(images, ids)
    assert logits.shape == (3, 26 if name == "faithful" else 24, 263)
    assert logits.dtype == torch.float32
    assert answer_logits(model, images).shape == (3, 263)


def test_the_prompt_holds_the_image_between_its_marks(seeing):
    text = ByteTokenizer().encode(PROMPT)
    assert (IMAGE_START, IMAGE, IMAGE_END) == (260, 261, 262)
    assert seeing["faithful"].prompt(PROMPT) == [BOS, 260, *[261] * 16, 262, *text]
    assert seeing["baseline"].prompt(PROMPT) == [BOS, *text]


def test_image_tokens_stand_where_the_placeholders_stood_and_nothing_else_moves(seeing):
    model, images = seeing["faithful"], digit_images([4, 9], 1)
    ids = prompts(model, 2)
    x, tokens = model.embed(images, ids), model.see(images)
    assert torch.equal(x[:, 2:18], tokens)
    text = [0, 1, *range(18, 26)]
    assert torch.equal(x[:, text], model.language.embed(ids[:, text]))


def test_image_tokens_of_the_baseline_stand_before_bos(seeing):
    model, images = seeing["baseline"], digit_images([4, 9], 1)
    ids = prompts(model, 2)
    x = model.embed(images, ids)
    assert torch.equal(x[:, :16], model.see(images))
    assert torch.equal(x[:, 16:], model.language.embed(ids))


def test_each_image_goes_to_its_own_row(seeing):
    model, images = seeing["faithful"], digit_images([4, 9], 1)
    ids = prompts(model, 2)
    together = model(images, ids)
    for i in range(2):
        assert_close(together[i : i + 1], model(images[i : i + 1], ids[:1]), atol=1e-5, rtol=0)


def without_attention(tower: VisionTower) -> VisionTower:
    """A tower whose blocks add nothing: a token then sees its own patches only."""
    for block in tower.blocks:
        for layer in (block.attention.proj, block.mlp.down):
            layer.weight.zero_()
            layer.bias.zero_()
    return tower


def moved(see, row: int, column: int, side: int) -> list[int]:
    """Which tokens change when the pixels of one patch change."""
    images = digit_images([6], 2).double()
    other = images.clone()
    y, x = side * row, side * column
    other[:, :, y : y + side, x : x + side] = 1 - other[:, :, y : y + side, x : x + side]
    return (see(images) != see(other)).any(-1)[0].nonzero().flatten().tolist()


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_a_patch_moves_its_own_merged_token_alone_row_by_row(positions):
    torch.manual_seed(0)
    tower = VisionTower(TowerConfig(positions=positions), 32).double().requires_grad_(False)
    tower = without_attention(tower)
    for row in range(8):
        for column in range(8):
            assert moved(tower, row, column, 4) == [row // 2 * 4 + column // 2]


def test_a_patch_of_the_baseline_moves_its_own_token_alone(precise):
    for row in range(4):
        for column in range(4):
            assert moved(precise["baseline"].see, row, column, 8) == [row * 4 + column]


def test_with_attention_every_patch_moves_every_token(precise):
    assert moved(precise["faithful"].tower, 5, 2, 4) == list(range(16))


def test_patches_are_read_row_by_row_and_merged_as_two_by_two_neighbours(precise):
    tower = precise["faithful"].tower
    images = digit_images([2], 3).double()
    x, table = tower.patches(images)
    assert table is None
    weight = tower.patch.weight  # [W, C, 4, 4]
    for row, column in ((0, 0), (0, 7), (3, 5), (7, 0)):
        pixels = images[0, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
        wanted = torch.einsum("wcyx,cyx->w", weight, pixels) + tower.patch.bias
        wanted = wanted + tower.positions[8 * row + column]
        assert_close(x[0, 8 * row + column], wanted, atol=1e-12, rtol=0)
    for block in tower.blocks:
        x = block(x, None)
    x, tokens = tower.norm(x)[0], tower(images)[0]
    for row, column in ((0, 0), (1, 3), (3, 2)):
        four = x[[16 * row + 2 * column + i for i in (0, 1, 8, 9)]]  # top two, bottom two
        wanted = torch.einsum("owi,iw->o", tower.merge.weight.flatten(2), four) + tower.merge.bias
        assert_close(tokens[4 * row + column], wanted, atol=1e-12, rtol=0)


def test_a_block_is_the_textbooks(precise):
    block, x = precise["faithful"].tower.blocks[0], torch.randn(2, 5, 24, dtype=torch.float64)

    def norm(x: Tensor, layer: RMSNorm) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.weight

    q, k, v = block.attention.qkv(norm(x, block.attention_norm)).split(24, -1)
    heads = []
    for h in range(4):
        qh, kh, vh = (t[..., 6 * h : 6 * h + 6] for t in (q, k, v))
        qh, kh = norm(qh, block.attention.q_norm), norm(kh, block.attention.k_norm)
        heads.append((qh @ kh.mT / math.sqrt(6)).softmax(-1) @ vh)
    y = x + block.attention.proj(torch.cat(heads, -1))
    mlp, z = block.mlp, norm(y, block.mlp_norm)
    wanted = y + mlp.down(F.silu(mlp.gate(z)) * mlp.up(z))
    assert_close(block(x, None), wanted, atol=1e-10, rtol=0)


def test_attention_maps_are_probabilities_over_all_patches(seeing):
    maps = seeing["faithful"].tower.attention_maps(digit_images([0, 5, 7], 4))
    assert len(maps) == 2
    for probabilities in maps:
        assert probabilities.shape == (3, 4, 64, 64) and not probabilities.requires_grad
        assert probabilities.min() > 0
        assert_close(probabilities.sum(-1), torch.ones(3, 4, 64), atol=1e-5, rtol=0)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_attention_maps_are_what_the_values_are_mixed_by(positions):
    torch.manual_seed(3)
    tower = VisionTower(TowerConfig(positions=positions), 32).double().requires_grad_(False)
    images = digit_images([5], 4)
    x, table = tower.patches(images)
    for block, probabilities in zip(tower.blocks, tower.attention_maps(images), strict=True):
        normed = block.attention_norm(x)
        _, _, v = block.attention.project(normed, table)
        mixed = block.attention.proj((probabilities @ v).transpose(1, 2).flatten(-2))
        assert_close(block.attention(normed, table), mixed, atol=1e-10, rtol=0)
        x = block(x, table)


# --- rotary positions ----------------------------------------------------------------------------


def test_rotary_positions_take_any_size_that_divides_into_blocks():
    torch.manual_seed(0)
    tower = VisionTower(ROTARY, 32).requires_grad_(False)
    assert not hasattr(tower, "positions")
    for height, width in ((32, 32), (8, 8), (40, 24)):
        tokens = tower(torch.rand(2, 3, height, width))
        assert tokens.shape == (2, tower.tokens(height, width), 32)
        assert tower.tokens(height, width) == height * width // 64


def test_a_prompt_makes_room_for_an_image_of_another_size():
    model = new_vision_model(VisionSettings(tower=ROTARY)).requires_grad_(False)
    ids = torch.tensor([model.prompt(PROMPT, (40, 24))])
    assert (ids == IMAGE).sum() == 15
    assert model(torch.rand(1, 3, 40, 24), ids).shape == (1, 25, 263)
    with pytest.raises(ValueError, match="15 image placeholders.* 16 tokens"):
        model(torch.rand(1, 3, 32, 32), ids)


def test_rotary_scores_depend_on_distances_along_both_axes_only():
    table = axial_table(4, 5, 6).to(torch.complex128)
    assert table.shape == (20, 3)
    assert_close(table.abs(), torch.ones(20, 3, dtype=torch.float64), atol=1e-6, rtol=0)
    turn = (table[:, None] * table[None].conj()).view(4, 5, 4, 5, 3)  # between two patches
    assert_close(turn[1, 2, 0, 0], turn[3, 4, 2, 2], atol=1e-6, rtol=0)
    assert (turn[1, 0, 0, 0] - turn[0, 1, 0, 0]).abs().max() > 0.1
    assert (turn[0, 0, 1, 0] - turn[0, 0, 0, 0]).abs().max() > 0.1


def test_a_tower_with_rotary_positions_learns_too():
    settings = VisionSettings(**SHORT, tower=ROTARY)
    rows = list(train_vision(settings, device="cpu"))
    assert rows[-1]["loss"] < rows[0]["loss"]


# --- causality -----------------------------------------------------------------------------------


@both
def test_text_cannot_touch_image_tokens_nor_later_text_earlier(precise, name):
    model, images = precise[name], digit_images([8], 5)
    ids = prompts(model, 1)
    logits = model(images, ids)
    front = logits.shape[1] - ids.shape[1]  # tokens before the ids
    for place in (ids.shape[1] - 7, ids.shape[1] - 1):  # first and last byte of the prompt
        other = ids.clone()
        other[0, place] = 99
        changed = (model(images, other) - logits).abs().amax((0, 2)) > 1e-9
        assert changed.tolist() == [False] * (front + place) + [True] * (ids.shape[1] - place)


@both
def test_the_image_is_seen_by_all_that_stands_after_it(precise, name):
    model, images = precise[name], digit_images([8, 3], 5)
    ids = prompts(model, 1)
    changed = (model(images[:1], ids) - model(images[1:], ids)).abs().amax((0, 2)) > 1e-9
    first = 2 if name == "faithful" else 0
    assert changed.tolist() == [False] * first + [True] * (len(changed) - first)


# --- loss and gradients --------------------------------------------------------------------------


@both
def test_the_loss_is_of_the_answers_byte_after_the_prompts_last(seeing, name):
    model, labels = seeing[name], [7, 0]
    images = digit_images(labels, 6)
    loss, correct = answer_loss(model, images, labels)
    answers = ByteTokenizer().encode("70")
    whole = torch.cat((prompts(model, 2), torch.tensor(answers)[:, None]), 1)
    log_p = model(images, whole).log_softmax(-1)
    last = log_p.shape[1] - 2  # the position that predicts the last id
    wanted = -(log_p[0, last, answers[0]] + log_p[1, last, answers[1]]) / 2
    assert loss.item() == pytest.approx(wanted.item(), abs=1e-5)
    likeliest = log_p[:, last].argmax(-1).tolist()
    assert correct == sum(a == b for a, b in zip(likeliest, answers, strict=True))


@both
def test_gradients_reach_every_parameter(name):
    model = in_double(name).requires_grad_()
    images, labels = training_batch(VisionSettings(), 0)
    answer_loss(model, images.double(), labels)[0].backward()
    for parameter, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), parameter
        # With one layer no mixture matters: equal streams are read, and their mean is the output.
        idle = parameter.startswith("language.blocks.0.mixer.")
        assert (p.grad.abs().max() > 1e-9) != idle, parameter


@pytest.mark.parametrize(
    "parameter",
    [
        "tower.patch.weight",
        "tower.positions",
        "tower.blocks.0.attention.qkv.bias",
        "tower.blocks.1.attention.k_norm.weight",
        "tower.blocks.1.mlp.gate.weight",
        "tower.merge.weight",
        "projector.linear.weight",
        "projector.mlp.down.weight",
        "language.embedding.weight",
    ],
)
def test_gradients_agree_with_finite_differences(parameter):
    model = in_double("faithful")
    p = dict(model.named_parameters())[parameter].requires_grad_()
    labels = [1, 6, 8]
    images = digit_images(labels, 8).double()
    answer_loss(model, images, labels)[0].backward()
    where, step = p.grad.abs().flatten().argmax(), 1e-6
    losses = []
    with torch.no_grad():
        for sign in (1, -1):
            p.view(-1)[where] += sign * step
            losses.append(answer_loss(model, images, labels)[0].item())
            p.view(-1)[where] -= sign * step
    difference = (losses[0] - losses[1]) / (2 * step)
    assert p.grad.view(-1)[where].item() == pytest.approx(difference, rel=1e-4, abs=1e-9)


@both
def test_two_pictures_can_be_learned_by_heart(name):
    model, labels = fresh(name), [3, 8]
    images = digit_images(labels, 9)
    optimizer = MasterAdamW(model, torch.float32, AdamWSettings(5e-3, weight_decay=0.0))
    for _ in range(60):
        answer_loss(model, images, labels)[0].backward()
        optimizer.step()
    result = evaluate(model, images, labels)
    assert result["correct"] == 2 and result["loss"] < 0.1


# --- wrong inputs --------------------------------------------------------------------------------

GOOD = torch.zeros(2, 3, 32, 32)
IMAGES = {
    "three axes": (GOOD[0], r"\[B, 3, H, W\], got \[3, 32, 32\]"),
    "one channel": (GOOD[:, :1], r"\[B, 3, H, W\], got \[2, 1, 32, 32\]"),
    "channels last": (GOOD.permute(0, 2, 3, 1), r"\[B, 3, H, W\], got \[2, 32, 32, 3\]"),
    "too large": (torch.zeros(2, 3, 64, 64), r"\[B, 3, 32, 32\], got \[2, 3, 64, 64\]"),
    "not square": (GOOD[..., :24], r"\[B, 3, 32, 32\], got \[2, 3, 32, 24\]"),
    "no images": (GOOD[:0], r"at least one image, got \[0, 3, 32, 32\]"),
    "bytes": (GOOD.to(torch.uint8), "floats from 0 to 1, got torch.uint8"),
    "0 to 255": (GOOD + 255, "within 0 to 1, got 255 to 255"),
    "below 0": (GOOD - 0.5, "within 0 to 1, got -0.5 to -0.5"),
    "nan": (GOOD * math.nan, "finite and lie within 0 to 1, got nan"),
    "infinite": (GOOD + math.inf, "finite and lie within 0 to 1, got inf"),
}


@both
@pytest.mark.parametrize("wrong", IMAGES)
def test_images_that_do_not_fit_are_refused(seeing, name, wrong):
    images, message = IMAGES[wrong]
    with pytest.raises(ValueError, match=message):
        seeing[name].see(images)


def test_sizes_that_do_not_divide_into_blocks_are_refused():
    with pytest.raises(ValueError, match=r"multiples of 8 pixels, got \[1, 3, 32, 36\]"):
        VisionTower(ROTARY, 32)(torch.zeros(1, 3, 32, 36))


@pytest.mark.parametrize("count", [0, 15, 17])
def test_placeholders_that_do_not_match_the_image_are_refused(seeing, count):
    ids = torch.tensor([[BOS, IMAGE_START, *[IMAGE] * n, *[70] * (20 - n)] for n in (16, count)])
    with pytest.raises(ValueError, match=f"row 1 has {count} image placeholders.* 16 tokens"):
        seeing["faithful"](GOOD, ids)


@both
def test_each_image_needs_one_prompt(seeing, name):
    model = seeing[name]
    for ids in (prompts(model, 3), prompts(model, 2)[0]):
        with pytest.raises(ValueError, match=r"images \[2, 3, 32, 32\], ids \["):
            model(GOOD, ids)


@both
@pytest.mark.parametrize("wrong", [-1, 263])
def test_ids_outside_the_vocabulary_are_refused(seeing, name, wrong):
    ids = prompts(seeing[name], 2)
    ids[1, -1] = wrong
    with pytest.raises(ValueError, match=f"ids run from .*{wrong}.*vocabulary from 0 to 262"):
        seeing[name](GOOD, ids)


def test_a_language_model_without_the_image_ids_is_refused():
    with pytest.raises(ValueError, match="image ids run to 262.* only to 259"):
        VisionLanguageModel(LanguageModel(replace(VISION_MINI, vocab_size=260)))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"image": 36}, "36 pixels a side does not divide into blocks of 4 x 2 = 8"),
        ({"width": 26}, "width 26 does not divide into 4 heads"),
        ({"blocks": 0}, "sizes must be positive"),
        ({"positions": "sine"}, "learned or rotary, got 'sine'"),
        ({"positions": "rotary", "width": 20}, "even width from 4, got 5"),
        ({"positions": "rotary", "width": 8}, "even width from 4, got 2"),
    ],
)
def test_towers_that_cannot_be_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        TowerConfig(**sizes)


def test_baselines_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="32 pixels does not divide into patches of 5"):
        DirectPatchModel(LanguageModel(VISION_MINI), 32, 5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": "both"}, "faithful or baseline, got 'both'"),
        ({"steps": 0}, "at least 1: steps 0"),
        ({"batch_size": 0}, "batch 0"),
        ({"held_out": 0}, "held-out 0"),
        ({"seed": -1}, "must not be negative, got -1"),
        ({"steps": 10_001}, "pictures would be those held out"),
        ({"max_seconds": 0.0}, "positive number, got 0"),
        ({"max_seconds": math.nan}, "positive number, got nan"),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        VisionSettings(**wrong)


def test_what_cannot_run_is_refused_before_anything_is_written(tmp_path):
    for settings, message in (
        (VisionSettings(language=replace(VISION_MINI, max_length=25)), "26 tokens.* 25"),
        (VisionSettings(tower=TowerConfig(image=64)), r"64, 64\], got \[1, 3, 32, 32\]"),
    ):
        with pytest.raises(ValueError, match=message):
            train_vision(settings, output=tmp_path / "run", device="cpu")
    assert list(tmp_path.iterdir()) == []


# --- runs ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """Rows and receipt of a smoke test of each model."""
    runs = {}
    for name in MODELS:
        folder = tmp_path_factory.mktemp("vision") / name
        settings = smoke_test(VisionSettings(model=name))
        rows = list(train_vision(settings, output=folder, device="cpu"))
        runs[name] = rows, receipt.read(folder / "receipt.json"), folder
    return runs


def test_a_smoke_test_caps_steps_batch_and_held_out():
    small = smoke_test(VisionSettings())
    assert (small.steps, small.batch_size, small.held_out) == (40, 20, 100)
    assert replace(small, steps=120, batch_size=40, held_out=200) == VisionSettings()
    assert smoke_test(VisionSettings(**SHORT)) == VisionSettings(**SHORT)


@both
def test_a_smoke_test_learns_something(smoke, name):
    rows, report, _ = smoke[name]
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert rows[0]["loss"] == pytest.approx(math.log(263), abs=0.1)
    before, after = report["summary"]["before"], report["summary"]["after"]
    assert before["correct"] == 0 and before["of"] == after["of"] == 100
    assert after["loss"] < 2.7 < before["loss"]
    assert report["summary"]["learned"] == (after["correct"] > 0)


@both
def test_a_receipt_says_what_was_run_and_no_weights_are_written(smoke, name):
    rows, report, folder = smoke[name]
    assert [child.name for child in folder.iterdir()] == ["receipt.json"]
    assert (report["kind"], report["status"], report["steps"]) == ("vision", "finished", 40)
    assert report["rows"] == rows
    assert set(rows[0]) == {"step", "loss", "correct", "gradient_norm", "seconds"}
    settings = report["settings"]
    assert (settings["model"], settings["seed"], settings["batch_size"]) == (name, 42, 20)
    assert settings["language"]["vocab_size"] == 263 and settings["tower"]["positions"] == "learned"
    assert settings["optimizer"] == {
        "learning_rate": 2e-3,
        "betas": [0.9, 0.999],
        "weight_decay": 0.01,
        "clip": 1.0,
        "warmup": 0,
        "decay_all": True,
    }
    assert report["environment"]["dtype"] == "torch.float32"
    assert [m["step"] for m in report["milestones"]] == [0, 40]
    summary = report["summary"]
    assert {k: v for k, v in report["milestones"][1].items() if k != "step"} == summary["after"]
    assert summary["images"] == 800 and not summary["stopped_by_time"]
    images = held_out_batch(VisionSettings(held_out=100))[0]
    assert summary["held_out_hash"] == weights_hash({"images": images})
    assert summary["parameters"] == summary["trainable_parameters"]


def test_a_run_trains_the_model_it_is_given_and_the_receipt_tells_of_it(tmp_path):
    settings = VisionSettings(**SHORT)
    model = new_vision_model(replace(settings, model="baseline"))
    before = weights_hash(model.state_dict())
    list(train_vision(settings, model, output=tmp_path / "run", device="cpu"))
    report = receipt.read(tmp_path / "run" / "receipt.json")
    assert report["weights"] == weights_hash(model.state_dict()) != before
    assert report["settings"]["model"] == "baseline"
    result = evaluate(model, *held_out_batch(settings))
    assert result["loss"] == pytest.approx(report["summary"]["after"]["loss"], abs=1e-6)


@both
def test_one_seed_gives_the_same_weights_to_the_byte(tmp_path, one_thread, name):
    hashes = []
    for folder, seed in (("first", 5), ("again", 5), ("other", 6)):
        settings = VisionSettings(model=name, seed=seed, **SHORT)
        list(train_vision(settings, output=tmp_path / folder, device="cpu"))
        hashes.append(receipt.read(tmp_path / folder / "receipt.json")["weights"])
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_receipt_is_not_overwritten_and_without_an_output_nothing_is_written(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    settings = VisionSettings(model="baseline", **SHORT)
    assert len(list(train_vision(settings, device="cpu"))) == 3
    assert list(tmp_path.iterdir()) == []
    list(train_vision(settings, output=tmp_path / "run", device="cpu"))
    with pytest.raises(FileExistsError, match="exists already"):
        train_vision(settings, output=tmp_path / "run", device="cpu")


def test_an_interrupted_run_leaves_a_receipt_that_says_so(tmp_path):
    rows = train_vision(VisionSettings(model="baseline", **SHORT), output=tmp_path / "run")
    next(rows)
    rows.close()
    report = receipt.read(tmp_path / "run" / "receipt.json")
    assert (report["status"], report["steps"]) == ("interrupted", 1)
    assert [child.name for child in (tmp_path / "run").iterdir()] == ["receipt.json"]


# --- the pilot -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_pilot(tiny) -> VisionSettings:
    """The pilot with the tiny language model."""
    return replace(PILOT, language=replace(tiny, vocab_size=263), **SHORT)


def test_the_pilot_begins_with_the_checkpoints_weights_and_three_fresh_rows(trained, small_pilot):
    model, saved = pilot_model(small_pilot, trained), checkpoint.load(trained)
    state = model.language.state_dict()
    drawn = new_vision_model(small_pilot)
    for name, weight in saved.weights.items():
        assert torch.equal(state[name][: len(weight)], weight), name
    rows = state["embedding.weight"][260:]
    assert torch.equal(rows, drawn.embedding.weight[260:])
    assert 0.01 < rows.std() < 0.03
    for name, p in drawn.named_parameters():
        if not name.startswith("language."):
            assert torch.equal(p, dict(model.named_parameters())[name]), name


@pytest.mark.parametrize("start", ["random", "checkpoint"])
def test_the_pilot_trains_what_it_should_and_says_where_it_began(
    trained, small_pilot, tmp_path, start
):
    start = trained if start == "checkpoint" else None
    model = pilot_model(small_pilot, start)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    rows = list(pilot(small_pilot, start, model, output=tmp_path / "run", device="cpu"))
    for name, p in model.named_parameters():
        frozen = name.startswith("language.blocks.0.")
        assert torch.equal(p, before[name]) == frozen, name
    report = receipt.read(tmp_path / "run" / "receipt.json")
    assert [child.name for child in (tmp_path / "run").iterdir()] == ["receipt.json"]
    assert (report["kind"], report["status"], len(rows)) == ("vision-pilot", "finished", 3)
    wanted = "random weights" if start is None else f"checkpoint {checkpoint.load(start).hash}"
    assert report["settings"]["start"] == wanted
    assert report["settings"]["tower"]["projector_hidden"] == 128
    summary = report["summary"]
    assert summary["trainable_parameters"] < summary["parameters"]
    assert summary["learned"] == (summary["after"]["correct"] > summary["before"]["correct"])


def test_a_time_limit_ends_training_with_its_evaluation(small_pilot, tmp_path):
    settings = replace(small_pilot, max_seconds=1e-9)
    assert len(list(pilot(settings, output=tmp_path / "run", device="cpu"))) == 1
    report = receipt.read(tmp_path / "run" / "receipt.json")
    assert (report["status"], report["steps"]) == ("finished", 1)
    assert [m["step"] for m in report["milestones"]] == [0, 1]
    assert report["summary"]["stopped_by_time"] and report["summary"]["images"] == 10


def test_a_pilot_from_what_is_no_checkpoint_is_refused(small_pilot, tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        pilot(small_pilot, tmp_path / "nothing", output=tmp_path / "run", device="cpu")
    assert list(tmp_path.iterdir()) == []


def test_the_originals_settings():
    settings = VisionSettings()
    assert (settings.steps, settings.batch_size, settings.seed) == (120, 40, 42)
    assert (settings.held_out, settings.seed + settings.held_out_offset) == (200, 10_042)
    assert (PILOT.steps, PILOT.batch_size, PILOT.seed, PILOT.max_seconds) == (40, 10, 73, 540)
    assert (PILOT.held_out, PILOT.seed + PILOT.held_out_offset) == (100, 100_073)
    assert PILOT.optimizer == AdamWSettings(1e-3, (0.9, 0.999), 0.01, 1.0)
    assert PILOT.language == replace(BASE, vocab_size=263)
    assert module.PROMPT == "Digit: "
