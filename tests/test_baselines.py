"""Baselines without a network: probabilities that add up, text alone as the source."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_course.baselines import Lookup, NgramBytes, pretraining_examples
from glm_course.data.tasks import FAMILIES, SPLITS, frozen_tasks, pretraining_task
from glm_course.tokenizer import BOS, EOS, ByteTokenizer

tokenizer = ByteTokenizer()
examples = st.lists(
    st.lists(st.integers(4, 7), max_size=8).map(lambda ids: [BOS, *ids, EOS]),
    min_size=1,
    max_size=4,
)


def witten_bell(training, order, context, target) -> Fraction:
    """The recursion as the paper writes it, counting afresh at every level."""
    context = tuple(context[max(0, len(context) - order + 1) :])
    followers = [
        ids[t]
        for ids in training
        for t in range(1, len(ids))
        if len(context) <= t and tuple(ids[t - len(context) : t]) == context
    ]
    shorter = (
        witten_bell(training, len(context), context[1:], target) if context else Fraction(1, 260)
    )
    if not followers:
        return shorter
    unlike = len(set(followers))
    return (followers.count(target) + unlike * shorter) / (len(followers) + unlike)


@pytest.fixture(scope="module")
def training():
    return pretraining_examples(steps=100)


@pytest.fixture(scope="module")
def five_gram(training):
    return NgramBytes(5, training)


def passes(task, completion) -> bool:
    namespace = {}
    try:
        exec(task.prompt + completion, namespace)
        function = namespace[task.entry_point]
        return all(function(argument) == result for argument, result in task.tests)
    except Exception:
        return False


def test_examples_are_those_of_the_first_steps_of_pretraining(training):
    assert len(training) == 3200
    assert sum(len(ids) - 1 for ids in training) == 345_995
    task = pretraining_task(number=3199, seed=42)
    assert tokenizer.decode(training[-1]) == task.prompt + task.completion


@pytest.mark.parametrize("steps, batch_size", [(0, 32), (-1, 32), (100, 0)])
def test_no_examples_are_refused(steps, batch_size):
    with pytest.raises(ValueError, match="are none"):
        pretraining_examples(steps, batch_size)


def test_a_bigram_by_hand():
    # targets: a b a b eos. u() = 3 of 5; after a: b twice; after b: a once, eos once
    a, b = 101, 102
    model = NgramBytes(2, [[BOS, a, b, a, b, EOS]])
    p_b = (2 + 3 / 260) / (5 + 3)
    assert model.probability([], b) == pytest.approx(p_b, rel=1e-14)
    assert model.probability([a], b) == pytest.approx((2 + 1 * p_b) / (2 + 1), rel=1e-14)
    assert model.probability([b], b) == pytest.approx((0 + 2 * p_b) / (2 + 2), rel=1e-14)
    assert model.probability([BOS], b) == pytest.approx((0 + 1 * p_b) / (1 + 1), rel=1e-14)
    assert model.probability([99], b) == pytest.approx(p_b, rel=1e-14)


@given(examples, st.integers(1, 5), st.lists(st.integers(0, 9), max_size=7), st.integers(0, 9))
def test_probabilities_follow_the_paper(training, order, context, target):
    expected = witten_bell(training, order, context, target)
    assert NgramBytes(order, training).probability(context, target) == pytest.approx(
        float(expected), rel=1e-12
    )


@given(examples, st.integers(1, 5), st.lists(st.integers(0, 9), max_size=7))
def test_probabilities_sum_to_one_after_any_context(training, order, context):
    model = NgramBytes(order, training)
    total = math.fsum(model.probability(context, target) for target in range(260))
    assert total == pytest.approx(1, abs=1e-12)


@given(examples, examples, st.integers(1, 5))
def test_nats_per_byte_is_the_mean_surprise_of_every_token_after_bos(training, held_out, order):
    surprises = [
        -math.log(witten_bell(training, order, ids[:t], ids[t]))
        for ids in held_out
        for t in range(1, len(ids))
    ]
    expected = math.fsum(surprises) / len(surprises)
    measured = NgramBytes(order, training).nats_per_byte(held_out)
    assert measured == pytest.approx(expected, rel=1e-12)


def test_unseen_names_set_a_floor_that_longer_contexts_do_not_pass(training):
    held_out = pretraining_examples(steps=4, seed=43)
    loss = {order: NgramBytes(order, training).nats_per_byte(held_out) for order in (1, 3, 8)}
    assert loss[1] > loss[3] > loss[8]
    targets = sum(len(ids) - 1 for ids in held_out)
    assert loss[8] > len(held_out) * 7 * math.log(26) / targets  # seven letters nobody can know


def test_a_five_gram_writes_one_fluent_body_whatever_the_task(five_gram):
    tasks = [task for task in frozen_tasks("confirm", 4) if "(x):" in task.prompt]
    body = "\n    return x * 2\n"
    assert {five_gram.complete(task.prompt) for task in tasks} == {body}
    assert {task.family for task in tasks if passes(task, body)} == {"double"}


def test_greedy_takes_the_most_likely_token_of_all_260(five_gram):
    prompt = frozen_tasks("dev", 1)[0].prompt
    context = tokenizer.encode(prompt, bos=True)
    for _ in range(6):
        context.append(max(range(260), key=lambda i: five_gram.probability(context, i)))
    assert five_gram.complete(prompt, max_new=6) == tokenizer.decode(context)[len(prompt) :]


def test_a_completion_stops_at_eos_or_at_the_token_limit():
    model = NgramBytes(3, [[BOS, *tokenizer.encode("abc"), EOS]])
    assert model.complete("a") == "bc"
    assert model.complete("a", max_new=1) == "b"
    assert model.complete("a", max_new=0) == ""
    loop = NgramBytes(2, [[BOS, *[101] * 9]])
    assert loop.complete("a") == "a" * 48


def test_ties_go_to_the_lower_id():
    model = NgramBytes(1, [[BOS, 102, 101]])
    assert model.complete("", max_new=2) == "aa"


@pytest.mark.parametrize("order", [0, -1])
def test_an_order_below_one_is_refused(order):
    with pytest.raises(ValueError, match="order must be at least 1"):
        NgramBytes(order, [[BOS, 101, EOS]])


def test_nothing_to_count_or_to_predict_is_refused():
    with pytest.raises(ValueError, match="at least one example"):
        NgramBytes(3, [])
    model = NgramBytes(3, [[BOS, 101, EOS]])
    for empty in ([], [[BOS]]):
        with pytest.raises(ValueError, match="no token to predict"):
            model.nats_per_byte(empty)


def test_lookup_solves_every_split_from_the_first_100_steps(training):
    lookup = Lookup(training)
    assert len(lookup.completions) == 16
    for split in SPLITS:
        for task in frozen_tasks(split, 8):
            assert lookup.complete(task.prompt) == task.completion
            assert passes(task, lookup.complete(task.prompt))


def test_lookup_knows_only_sentences_it_has_read(training):
    lookup = Lookup(training[:10])
    read = {pretraining_task(i, seed=42).description for i in range(10)}
    tasks = frozen_tasks("confirm", 16)
    assert len(read) < len({task.description for task in tasks}) == 16
    for task in tasks:
        expected = task.completion if task.description in read else ""
        assert lookup.complete(task.prompt) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_lookup_answers_nothing_to_a_changed_prompt(training, family):
    lookup = Lookup(training)
    prompt = frozen_tasks("dev", 1, [family])[0].prompt
    argument = FAMILIES[family][0]
    assert lookup.complete(prompt) != ""
    assert lookup.complete(prompt.replace(f"({argument})", "(y)")) == ""
    assert lookup.complete(prompt.replace("# Complete", "# Finish")) == ""
    assert lookup.complete(prompt + "\n") == ""
    assert lookup.complete("") == ""


def test_lookup_refuses_text_that_is_no_task():
    with pytest.raises(ValueError, match="does not begin with a task's prompt: 'hello'"):
        Lookup([tokenizer.encode("hello", bos=True, eos=True)])
