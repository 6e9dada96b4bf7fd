"""Tasks, splits and the pretraining stream: the published facts, to the letter."""

import random
from copy import deepcopy
from itertools import islice
from string import ascii_lowercase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_course.data.tasks import (
    FAMILIES,
    SPLITS,
    CodingTask,
    frozen_tasks,
    make_task,
    pretraining_batches,
    pretraining_task,
)
from glm_course.tokenizer import ByteTokenizer

PUBLISHED = {  # family: argument, descriptions, body, tests
    "increment": (
        "x",
        ("Return x plus one.", "Increase x by one."),
        "return x + 1",
        ((-3, -2), (0, 1), (7, 8)),
    ),
    "double": (
        "x",
        ("Return two times x.", "Double the input."),
        "return x * 2",
        ((-4, -8), (0, 0), (6, 12)),
    ),
    "square": (
        "x",
        ("Return x squared.", "Multiply x by itself."),
        "return x * x",
        ((-4, 16), (0, 0), (5, 25)),
    ),
    "absolute": (
        "x",
        ("Return the absolute value of x.", "Make a negative x positive."),
        "return -x if x < 0 else x",
        ((-7, 7), (0, 0), (9, 9)),
    ),
    "nonnegative": (
        "x",
        ("Clamp x to at least zero.", "Return zero when x is negative."),
        "return x if x > 0 else 0",
        ((-5, 0), (0, 0), (8, 8)),
    ),
    "even": (
        "x",
        ("Return whether x is even.", "Check divisibility by two."),
        "return x % 2 == 0",
        ((-3, False), (0, True), (8, True)),
    ),
    "reverse": (
        "text",
        ("Return text in reverse order.", "Reverse the string."),
        "return text[::-1]",
        (("", ""), ("abc", "cba"), ("level", "level")),
    ),
    "list_sum": (
        "values",
        ("Return the sum of values.", "Add every number in the list."),
        "return sum(values)",
        (([], 0), ([1, 2, 3], 6), ([-2, 5], 3)),
    ),
}
families = st.sampled_from(list(PUBLISHED))
seeds = st.integers(0, 10**6)


def label_tokens(examples) -> int:
    """Tokens the loss counts: all but the first of each example."""
    return sum(len(ids) - 1 for ids in examples)


def test_families_are_as_published_and_in_order():
    assert list(FAMILIES.items()) == list(PUBLISHED.items())
    # 0 == False: the equality above does not tell a truth value from a number
    results = [type(result) for _, _, _, tests in FAMILIES.values() for _, result in tests]
    assert results == [int] * 15 + [bool] * 3 + [str] * 3 + [int] * 3


def test_confirm_has_the_published_names():
    names = [task.entry_point for task in frozen_tasks("confirm", 2, ["increment", "double"])]
    assert names[:3] == ["increment_jgsmuqb", "increment_qrdadnk", "double_ywkaoot"]


def test_split_seeds_are_as_published_and_move_by_53_a_family():
    published = {"dev": 1701, "final": 2909, "rl": 3907, "confirm": 8123}
    assert published | {"fresh": 9677} == SPLITS
    for split, seed in SPLITS.items():
        expected = [
            make_task(family, index, seed + 53 * f)
            for f, family in enumerate(PUBLISHED)
            for index in range(3)
        ]
        assert frozen_tasks(split, 3) == expected


@given(families, st.integers(0, 10**6), seeds)
def test_a_task_follows_the_published_recipe(family, index, seed):
    argument, descriptions, body, tests = PUBLISHED[family]
    state = (seed + 1) * 1_000_003 + index * 9176 + sum(ord(letter) for letter in family)
    rng = random.Random(state)
    letters = "".join([rng.choice(ascii_lowercase) for _ in range(7)])
    description = descriptions[rng.randrange(2)]
    assert make_task(family, index, seed) == CodingTask(
        family=family,
        entry_point=f"{family}_{letters}",
        description=description,
        prompt=(
            "# Complete this Python function.\n"
            f"# {description}\n"
            f"def {family}_{letters}({argument}):"
        ),
        completion=f"\n    {body}\n",
        tests=tests,
    )


def test_no_task_is_in_two_splits_or_in_the_first_400_steps_of_pretraining():
    prompts = [{task.prompt for task in frozen_tasks(split, 100)} for split in SPLITS]
    prompts.append({pretraining_task(i, seed=42).prompt for i in range(400 * 32)})
    assert [len(group) for group in prompts] == [800] * len(SPLITS) + [12_800]
    assert len(set().union(*prompts)) == len(SPLITS) * 800 + 12_800


def test_a_longer_split_begins_each_family_with_the_shorter_one():
    longer = [task for i, task in enumerate(frozen_tasks("dev", 5)) if i % 5 < 2]
    assert longer == frozen_tasks("dev", 2)


def test_chosen_families_keep_their_tasks_and_the_order_of_the_table():
    everything = frozen_tasks("rl", 2)
    chosen = frozen_tasks("rl", 2, ["even", "increment"])
    assert chosen == [task for task in everything if task.family in ("increment", "even")]
    assert [task.family for task in chosen] == ["increment", "increment", "even", "even"]


def test_both_descriptions_of_every_family_occur_in_every_split():
    for split in SPLITS:
        found = {(task.family, task.description) for task in frozen_tasks(split, 20)}
        assert len(found) == 16


@pytest.mark.parametrize("split", SPLITS)
def test_reference_completions_pass_their_own_tests(split):
    for task in frozen_tasks(split, 4):
        namespace = {}
        exec(task.prompt + task.completion, namespace)
        for argument, expected in deepcopy(task.tests):
            result = namespace[task.entry_point](argument)
            assert (type(result), result) == (type(expected), expected)


def test_label_tokens_of_batches_of_32_are_as_published():
    seen, total = {}, 0
    for step, batch in enumerate(islice(pretraining_batches(32, seed=42), 400), start=1):
        assert len(batch) == 32
        total += label_tokens(batch)
        seen[step] = total
    assert (seen[100], seen[200], seen[400]) == (345_995, 691_022, 1_381_760)


def test_label_tokens_of_batches_of_16_are_as_published():
    batches = islice(pretraining_batches(16, seed=42), 100)
    assert sum(map(label_tokens, batches)) == 173_237


def test_every_pretraining_example_fits_in_128_tokens():
    longest = max(len(ids) for batch in islice(pretraining_batches(32, 42), 400) for ids in batch)
    assert longest <= 128


@given(st.integers(1, 8), seeds, st.integers(0, 50))
def test_a_step_rebuilt_alone_equals_the_same_step_of_the_stream(batch_size, seed, step):
    stream = list(islice(pretraining_batches(batch_size, seed), step + 2))
    alone = list(islice(pretraining_batches(batch_size, seed, start=step), 2))
    assert alone == stream[step:]


@given(st.integers(1, 12), seeds)
def test_examples_do_not_depend_on_the_batch_size(batch_size, seed):
    batched = [ids for batch in islice(pretraining_batches(batch_size, seed), 3) for ids in batch]
    single = [batch[0] for batch in islice(pretraining_batches(1, seed), 3 * batch_size)]
    assert batched == single


@given(st.integers(0, 10**6), seeds)
def test_a_pretraining_example_is_a_task_of_a_random_family(number, seed):
    family = list(PUBLISHED)[random.Random(seed * 10_000_019 + number).randrange(8)]
    assert pretraining_task(number, seed) == make_task(family, number, seed)


def test_a_batch_holds_prompt_and_completion_between_bos_and_eos():
    tokenizer = ByteTokenizer()
    for number, ids in enumerate(next(pretraining_batches(32, seed=42))):
        task = pretraining_task(number, seed=42)
        assert ids == [1, *tokenizer.encode(task.prompt + task.completion), 2]


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="unknown split 'test'; choose from dev, final, rl"):
        frozen_tasks("test", 1)


def test_an_unknown_family_is_refused():
    with pytest.raises(ValueError, match="unknown family 'cube'; choose from increment"):
        frozen_tasks("dev", 1, ["even", "cube"])


@pytest.mark.parametrize("count", [0, -3])
def test_a_split_of_no_tasks_is_refused(count):
    with pytest.raises(ValueError, match=f"per_family must be at least 1, got {count}"):
        frozen_tasks("dev", count)
