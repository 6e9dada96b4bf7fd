"""Decoding: what is sampled, from what distribution, when it stops, and what it depends on."""

from contextlib import nullcontext, suppress
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from glm_course import generate as module
from glm_course.data.tasks import frozen_tasks
from glm_course.device import place
from glm_course.generate import (
    NEWLINE,
    Completion,
    allowed_ids,
    draw,
    generate,
    sampling_log_probs,
)
from glm_course.model import LanguageModel
from glm_course.tokenizer import BOS, EOS, PAD, SEP, ByteTokenizer
from glm_course.train.pretrain import new_model
from glm_course.train.rl import score
from glm_course.verifier import is_complete
from tests.reference import generate_plain

TASKS = frozen_tasks("dev", 1)
PROMPTS = [
    *(task.prompt for task in TASKS),
    "",
    "#",
    "# Complete this",
    "é ∑ \N{SNOWMAN}",
    "x" * 100,
]
LAST_UNIFORM = 1 - 2**-24  # the largest number torch.rand draws in float32
BYTES = set(range(4, 260))


@pytest.fixture(scope="module")
def model(precise) -> LanguageModel:
    """In fp64, where one way to compute and another agree to 1e-9."""
    return precise


def encode(prompt: str) -> list[int]:
    return ByteTokenizer().encode(prompt, bos=True)


def ids(completions: list[list[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[c.ids for c in group] for group in completions]


def same(left: list[list[Completion]], right: list[list[Completion]]) -> None:
    """Equal ids, texts and stops; log-probabilities equal up to the rounding of fp64."""
    for a, b in zip(sum(left, []), sum(right, []), strict=True):
        assert (a.ids, a.text, a.stopped) == (b.ids, b.text, b.stopped)
        assert a.log_probs == pytest.approx(b.log_probs, abs=1e-9)


def oracle(i: int, text: str) -> bool:
    return is_complete(TASKS[i], text)


# --- one draw ------------------------------------------------------------------------------------

weights = st.lists(
    st.one_of(st.just(0.0), st.floats(1e-30, 1.0), st.sampled_from([1e-7, 1e-8, 0.5, 1.0])),
    min_size=1,
    max_size=40,
).filter(any)
uniforms = st.one_of(
    st.sampled_from([0.0, 2**-24, 0.5, LAST_UNIFORM]), st.floats(0, LAST_UNIFORM, width=32)
)


@given(weights, uniforms)
def test_an_id_of_zero_probability_is_never_drawn(weights, uniform):
    log_probs = torch.tensor(weights).log().log_softmax(-1)
    [drawn] = draw(log_probs[None], torch.tensor([uniform])).tolist()
    assert 0 <= drawn < len(weights)
    assert log_probs[drawn].exp() > 0 and weights[drawn] > 0


@given(st.lists(st.integers(0, 8), min_size=1, max_size=20).filter(any), st.integers(0, 255))
def test_a_draw_inverts_the_distribution_function(eighths, step):
    total = sum(eighths)
    uniform = (step + 0.5) / 256
    expected = next(
        i for i in range(len(eighths)) if sum(eighths[: i + 1]) / total > uniform + 1e-6
    )
    near = any(abs(sum(eighths[:i]) / total - uniform) < 1e-5 for i in range(len(eighths) + 1))
    [drawn] = draw((torch.tensor(eighths) / total).log()[None], torch.tensor([uniform])).tolist()
    assert near or drawn == expected


def test_every_row_has_its_own_draw():
    log_probs = torch.tensor([[0.25, 0.75], [0.75, 0.25], [0.0, 1.0]]).log()
    assert draw(log_probs, torch.tensor([0.5, 0.5, 0.0])).tolist() == [1, 0, 1]


def test_many_draws_follow_the_distribution():
    shares = torch.tensor([0.4, 0.0, 0.3, 0.15, 0.1, 0.04, 0.01, 0.0])
    noise = torch.rand(20_000, generator=torch.Generator().manual_seed(0))
    counts = draw(shares.log().expand(len(noise), -1), noise).bincount(minlength=len(shares))
    real = shares > 0
    assert counts[~real].sum() == 0
    expected = 20_000 * shares[real].double() / shares[real].double().sum()
    assert chisquare(counts[real], expected).pvalue > 0.01


@pytest.mark.parametrize("temperature", [0.35, 1.0, 1.7])
def test_first_tokens_follow_the_models_distribution(model, temperature):
    prompt = "# Complete this Python function.\n# "  # many descriptions may follow
    logits = model(torch.tensor([encode(prompt)]))[0, -1]
    logits[[PAD, BOS, SEP]] = -torch.inf
    expected = 2000 * (logits / temperature).softmax(-1)
    [group] = generate(
        model, [prompt], samples=2000, max_new_tokens=1, temperature=temperature, seed=5
    )
    counts = torch.tensor([c.ids[0] for c in group]).bincount(minlength=260)
    common = expected >= 5  # the rest, too rare for the test one by one, is one class
    counts, expected = (
        torch.cat([x[common], x[~common].sum()[None]]) for x in (counts.double(), expected.double())
    )
    assert common.sum() >= 2
    assert chisquare(counts, expected * counts.sum() / expected.sum()).pvalue > 0.01


# --- which ids -----------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [260, 263, 300])
def test_eos_and_the_256_bytes_may_be_sampled_and_nothing_else(vocabulary):
    allowed = allowed_ids(vocabulary, "cpu")
    assert set(allowed.nonzero().flatten().tolist()) == BYTES | {EOS}


@pytest.mark.parametrize("temperature", [0, 0.35, 100.0])
def test_forbidden_ids_are_never_sampled_however_likely(tiny, temperature):
    model = new_model(replace(tiny, vocab_size=263), 0)
    forbidden = torch.tensor([PAD, BOS, SEP, 260, 261, 262])
    head = model.head
    model.head = lambda streams: head(streams).index_fill(-1, forbidden, 50.0)
    assert int(model(torch.tensor([[BOS]]))[0, -1].argmax()) in forbidden
    groups = generate(
        model, ["def f(x):", ""], samples=20, temperature=temperature, max_new_tokens=10
    )
    sampled = {i for group in groups for c in group for i in c.ids}
    assert sampled <= BYTES | {EOS}
    assert all(lp > -50 for group in groups for c in group for lp in c.log_probs)


@given(st.floats(0.01, 100), st.integers(0, 2**31))
def test_sampling_log_probs_are_a_distribution_over_the_allowed(temperature, seed):
    logits = torch.randn(3, 263, generator=torch.Generator().manual_seed(seed))
    log_probs = sampling_log_probs(logits, temperature)
    allowed = allowed_ids(263, "cpu")
    assert torch.equal(log_probs == -torch.inf, (~allowed).expand(3, -1))
    expected = torch.log_softmax(logits[:, allowed].double() / temperature, -1)
    torch.testing.assert_close(log_probs[:, allowed].double(), expected, rtol=1e-5, atol=1e-5)


def test_sampling_log_probs_leave_the_logits_as_they_were():
    logits = torch.zeros(1, 260)
    sampling_log_probs(logits, 0.5)
    assert torch.equal(logits, torch.zeros(1, 260))


# --- greedy, and plain ---------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_decoding_equals_running_the_whole_prefix_again(model, tiny, temperature):
    """The cache, the shared prompt and the batch change no token that plain decoding draws."""
    prompts, seed, new_tokens = [PROMPTS[0], "#", PROMPTS[6]], 4, 20
    arguments = {"samples": 3, "temperature": temperature, "seed": seed}
    groups = generate(model, prompts, max_new_tokens=new_tokens, **arguments)
    noise = torch.rand(3, 3, new_tokens, generator=torch.Generator().manual_seed(seed))
    for prompt, group, uniforms in zip(prompts, groups, noise, strict=True):
        rows = generate_plain(model.state_dict(), tiny, encode(prompt), uniforms, temperature)
        for c, row in zip(group, rows.tolist(), strict=True):
            ends = row.index(EOS) + 1 if EOS in row else new_tokens
            assert list(c.ids) == row[:ends]


def test_greedy_samples_of_a_prompt_are_all_alike_whatever_the_seed(model):
    [group] = generate(model, PROMPTS[:1], samples=3, temperature=0, seed=1)
    [[other]] = generate(model, PROMPTS[:1], temperature=0, seed=2)
    same([group], [[other] * 3])


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-42, 5e-324])
def test_the_lowest_temperatures_sample_the_likeliest_token_or_are_refused(writable, temperature):
    arguments = {"max_new_tokens": 12}
    greedy = generate(writable, PROMPTS[:3], temperature=0, **arguments)
    with nullcontext() if temperature == 1e-3 else suppress(ValueError):
        cold = generate(writable, PROMPTS[:3], temperature=temperature, **arguments)
        assert ids(cold) == ids(greedy)


# --- what a row depends on -----------------------------------------------------------------------


def test_one_seed_gives_one_text_and_another_seed_another(model):
    first, again, other = (generate(model, PROMPTS[:2], samples=4, seed=s) for s in (7, 7, 8))
    assert first == again
    assert ids(first) != ids(other)


def test_torchs_own_random_state_is_neither_read_nor_changed(model):
    torch.manual_seed(1)
    first = generate(model, PROMPTS[:1], samples=2)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert generate(model, PROMPTS[:1], samples=2) == first
    assert torch.equal(torch.get_rng_state(), before)


def test_samples_of_one_prompt_differ(model):
    [group] = generate(model, PROMPTS[:1], samples=16, temperature=1.0)
    assert len({c.ids for c in group}) > 8


def test_greedy_rows_do_not_depend_on_their_batch_mates(model):
    together = generate(model, PROMPTS, temperature=0, max_new_tokens=32)
    alone = [generate(model, [p], temperature=0, max_new_tokens=32)[0] for p in PROMPTS]
    same(together, alone)


@pytest.mark.parametrize("rows", [1, 7, 24])
def test_how_many_rows_are_decoded_at_once_changes_nothing(model, monkeypatch, rows):
    arguments = {"samples": 3, "temperature": 0.8, "max_new_tokens": 32, "seed": 11}
    wanted = generate(model, PROMPTS, **arguments)
    monkeypatch.setattr(module, "ROWS", rows)
    same(generate(model, PROMPTS, **arguments), wanted)


@pytest.mark.parametrize("samples", [1, 5])
def test_a_first_prompts_samples_do_not_depend_on_the_prompts_behind_it(model, samples):
    together = generate(model, PROMPTS, samples=samples, temperature=0.8, max_new_tokens=20)
    alone = generate(model, PROMPTS[:1], samples=samples, temperature=0.8, max_new_tokens=20)
    same(together[:1], alone)


def test_the_first_samples_of_a_group_do_not_depend_on_its_size(model):
    [few] = generate(model, PROMPTS[:1], samples=2, temperature=0.8)
    [many] = generate(model, PROMPTS[:1], samples=9, temperature=0.8)
    same([few], [many[:2]])


def test_dropping_finished_rows_changes_no_other_row(writable, monkeypatch):
    """Without eos and stopping rule no row ever ends; with the rule many do, and are dropped."""
    writable.double()
    head = writable.head
    writable.head = lambda streams: head(streams).index_fill(-1, torch.tensor([EOS]), -1e9)
    sizes = []
    step = writable.step
    monkeypatch.setattr(
        writable, "step", lambda token, c: sizes.append(len(token)) or step(token, c)
    )
    prompts = [task.prompt for task in TASKS]
    arguments = {"samples": 3, "temperature": 0.5, "max_new_tokens": 40, "seed": 2}
    whole = generate(writable, prompts, **arguments)
    assert set(sizes) == {24}
    sizes.clear()

    def some_lines(i: int, text: str) -> bool:  # whatever the model has learned, rows end apart
        return text.count("\n") > i % 4

    thinned = generate(writable, prompts, is_complete=some_lines, **arguments)
    assert len(set(sizes)) > 2, "hardly a row was dropped: no test"
    for a, b in zip(sum(whole, []), sum(thinned, []), strict=True):
        assert b.ids == a.ids[: len(b.ids)]
        assert b.log_probs == pytest.approx(a.log_probs[: len(b.ids)], abs=1e-9)


# --- when a row stops ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(model) -> list[tuple[int, Completion]]:
    """Completions that ended in each of the three ways, with the number of their task."""
    prompts = [task.prompt for task in TASKS]
    groups = generate(
        model, prompts, samples=12, temperature=0.5, max_new_tokens=30, is_complete=oracle
    )
    done = [(i, c) for i, group in enumerate(groups) for c in group]
    assert {c.stopped for _, c in done} == {"eos", "complete", "length"}
    return done


def test_eos_stays_in_the_ids_and_out_of_the_text(stopped):
    for _, c in stopped:
        assert (c.ids[-1] == EOS) == (c.stopped == "eos")
        assert EOS not in c.ids[:-1]
        assert c.text == ByteTokenizer().decode(i for i in c.ids if i != EOS)


def test_a_row_is_complete_at_its_first_newline_that_completes_it(stopped):
    for i, c in stopped:
        ends = [n + 1 for n, token in enumerate(c.ids) if token == NEWLINE]
        complete = [n for n in ends if oracle(i, ByteTokenizer().decode(c.ids[:n]))]
        assert complete == ([len(c.ids)] if c.stopped == "complete" else [])


def test_the_limit_is_exact(stopped):
    for _, c in stopped:
        assert len(c.ids) == 30 if c.stopped == "length" else len(c.ids) <= 30


def test_every_sampled_token_has_a_log_probability(stopped):
    for _, c in stopped:
        assert len(c.log_probs) == len(c.ids)
        assert all(lp <= 0 for lp in c.log_probs)


def test_without_a_rule_only_eos_and_the_limit_end_a_row(model):
    prompts = [task.prompt for task in TASKS]
    groups = generate(model, prompts, samples=4, temperature=0.5, max_new_tokens=30)
    assert {c.stopped for group in groups for c in group} == {"eos", "length"}


def test_the_rule_is_asked_after_newlines_about_the_text_so_far(model):
    asked = []

    def rule(i: int, text: str) -> bool:
        asked.append((i, text))
        return False

    groups = generate(
        model, PROMPTS[:3], samples=2, temperature=0.5, max_new_tokens=40, is_complete=rule
    )
    wanted = [
        (i, ByteTokenizer().decode(c.ids[: n + 1]))
        for i, group in enumerate(groups)
        for c in group
        for n, token in enumerate(c.ids)
        if token == NEWLINE
    ]
    assert wanted and sorted(asked) == sorted(wanted)


def test_ending_at_the_last_token_allowed_is_not_running_into_the_limit(stopped, model):
    for how in ("eos", "complete"):
        i, wanted = next((i, c) for i, c in stopped if c.stopped == how)
        head, forced = model.head, iter(wanted.ids)

        def follow(streams, head=head, forced=forced):
            return head(streams).index_fill(-1, torch.tensor([next(forced)]), 1e4)

        model.head = follow
        try:
            [[done]] = generate(
                model,
                [TASKS[i].prompt],
                temperature=0,
                max_new_tokens=len(wanted.ids),
                is_complete=lambda _, text, i=i: oracle(i, text),
            )
        finally:
            del model.head
        assert (done.ids, done.stopped) == (wanted.ids, how)


# --- log-probabilities ---------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 0.35, 1.0])
def test_log_probabilities_are_those_of_the_full_forward(model, temperature):
    prompts = PROMPTS[:4] + ["#"]
    groups = generate(model, prompts, samples=3, temperature=temperature, max_new_tokens=40)
    for prompt, group in zip(prompts, groups, strict=True):
        start = encode(prompt)
        for c in group:
            logits = model(torch.tensor([start + list(c.ids[:-1])]))[0, len(start) - 1 :]
            logits[:, [PAD, BOS, SEP]] = -torch.inf
            wanted = (logits / (temperature or 1)).log_softmax(-1)
            wanted = wanted[torch.arange(len(c.ids)), list(c.ids)]
            assert c.log_probs == pytest.approx(wanted.tolist(), abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_in_other_dtypes_are_near_those_in_fp64(writable, model, dtype):
    arguments = {"samples": 4, "temperature": 0.35, "max_new_tokens": 12}
    place(writable, torch.device("cpu"), dtype)
    groups = generate(writable, PROMPTS[:4], **arguments)
    within = 1e-4 if dtype == torch.float32 else 0.5
    for prompt, group in zip(PROMPTS, groups, strict=False):
        for c in group:
            scored = score(model, [prompt], [c.ids], temperature=0.35, masked=True)
            assert c.log_probs == pytest.approx(scored[0].tolist(), abs=within)


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [-0.1, float("inf"), float("nan"), float("-inf")])
def test_a_temperature_that_is_none_is_refused(model, temperature):
    with pytest.raises(ValueError, match=f"temperature must be 0 or .*{temperature}"):
        generate(model, PROMPTS[:1], temperature=temperature)


@pytest.mark.parametrize("counts", [{"samples": 0}, {"samples": -1}, {"max_new_tokens": 0}])
def test_nothing_to_sample_is_refused(model, counts):
    with pytest.raises(ValueError, match="at least 1 sample and 1 token"):
        generate(model, PROMPTS[:1], **counts)


def test_no_prompts_are_refused(model):
    with pytest.raises(ValueError, match="at least one prompt"):
        generate(model, [])


def test_the_longest_that_fits_is_decoded_and_one_more_is_refused(model, tiny):
    short, longest = "#", "x" * 150  # 151 tokens with bos
    room = tiny.max_length - 151
    done = generate(model, [short, longest], temperature=0, max_new_tokens=room)
    assert done[1][0].stopped != "length" or len(done[1][0].ids) == room
    with pytest.raises(ValueError, match=f"151 tokens and {room + 1} new .*max_length 192"):
        generate(model, [short, longest], max_new_tokens=room + 1)
