import ast
import copy
import random
import re
import threading
import time
import tracemalloc
import warnings

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from glm_course import verifier
from glm_course.data.tasks import SPLITS, CodingTask, frozen_tasks
from glm_course.verifier import Verdict, is_complete, reward, verify

TASKS = {task.family: task for task in frozen_tasks("dev", 1)}


def made_task(*tests, argument="x"):
    return CodingTask("made", "f", "", f"# A task.\ndef f({argument}):", "", tests)


def body(*lines):
    return "".join(f"\n    {line}" for line in lines) + "\n"


def outcome(task, completion):
    verdict = verify(task, completion)
    return verdict.status, verdict.tests_passed


# --- Verdicts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("split", SPLITS)
def test_reference_completions_pass(split):
    for task in frozen_tasks(split, 20):
        assert verify(task, task.completion) == Verdict("passed", 3, "3 of 3 tests passed")
        assert is_complete(task, task.completion)


@pytest.mark.parametrize(
    "family, line, expected",
    [
        # What a half-trained model writes.
        ("increment", "return x * 1", ("failed", 0)),
        ("double", "return x * * 0", ("invalid", 0)),
        ("absolute", "return x if x x 0 else x", ("invalid", 0)),
        ("even", "return x * 2 x", ("invalid", 0)),
        # Right for some arguments.
        ("absolute", "return x", ("failed", 2)),
        ("double", "return x * x", ("failed", 1)),
        ("nonnegative", "return -x if x < 0 else x", ("failed", 2)),
        ("reverse", "return text", ("failed", 2)),
        # Right by another way.
        ("increment", "return -~x", ("passed", 3)),
        ("double", "return x << 1", ("passed", 3)),
        ("square", "return abs(x) ** 2", ("passed", 3)),
        ("absolute", "return max(x, -x)", ("passed", 3)),
        ("nonnegative", "return (x > 0) * x", ("passed", 3)),
        ("even", "return not x & 1", ("passed", 3)),
        ("even", "return x % 2 is 0", ("passed", 3)),
        (
            "reverse",
            "return sum([[c] for c in text], [])[::-1] and text[-1::-1] or ''",
            ("passed", 3),
        ),
        ("list_sum", "return sum(v for v in values)", ("passed", 3)),
        ("list_sum", "values += [0]; return sum(values)", ("passed", 3)),
        # An equal value of another type is not the result.
        ("even", "return int(x % 2 == 0)", ("failed", 0)),
        ("double", "return x * 2.0", ("failed", 0)),
        ("square", "return x * x or False", ("failed", 2)),
        ("reverse", "return [c for c in text][::-1]", ("failed", 0)),
        ("increment", "pass", ("failed", 0)),
    ],
)
def test_status_and_tests_passed(family, line, expected):
    assert outcome(TASKS[family], body(line)) == expected


@pytest.mark.parametrize(
    "result, wanted",
    [
        ("[True]", [1]),
        ("[[1.0]]", [[1]]),
        ("(1,)", [1]),
        ("{1: True}", {1: 1}),
        ("-0.0", 0.0),
        ("'1'", 1),
        ("None", False),
        ("sum", "<built-in function sum>"),
        ("...", None),
    ],
)
def test_the_result_must_have_the_same_type_and_value_at_every_level(result, wanted):
    assert outcome(made_task((0, wanted)), body(f"return {result}")) == ("failed", 0)
    same = made_task((0, ast.literal_eval(result) if result != "sum" else ...))
    assert outcome(same, body(f"return {result}"))[0] == ("failed" if result == "sum" else "passed")


def test_nan_is_the_same_result_as_nan():
    task = made_task((0, float("nan")))
    assert outcome(task, body("return 1e999 - 1e999")) == ("passed", 1)


def test_arguments_are_fresh_for_every_test_and_candidate():
    task = TASKS["list_sum"]
    before = copy.deepcopy(task.tests)
    candidates = {
        body("values += [0]", "return sum(values)"): ("passed", 3),
        body("values *= 2", "return sum(values)"): ("failed", 1),
        body("values[:] = [7]", "return sum(values)"): ("failed", 0),
        body("values[0] = 9", "return sum(values)"): ("failed", 0),
        task.completion: ("passed", 3),
    }
    order = list(candidates) * 3
    random.Random(0).shuffle(order)
    assert [outcome(task, c) for c in order] == [candidates[c] for c in order]
    assert task.tests == before


def test_reward_grades_the_three_outcomes():
    verdicts = [Verdict(status, 0, "") for status in ("passed", "failed", "invalid")]
    assert [reward(v) for v in verdicts] == [1.0, 0.0, -0.1]
    assert [reward(v, invalid=-1.0) for v in verdicts] == [1.0, 0.0, -1.0]


# --- The language -------------------------------------------------------------------------------

TWO_KILOBYTES = 2048 - len(made_task().prompt)
INVALID = {
    "nothing": "",
    "a newline": "\n",
    "no body": "\n# done\n",
    "a second function": body("return x") + "def g(x):\n    return x\n",
    "the same function twice": body("return x") + "def f(x):\n    return x\n",
    "a top-level call": body("return x") + "print(f(1))\n",
    "a top-level name": body("return x") + "f\n",
    "a top-level assignment": body("return x") + "y = 1\n",
    "a top-level f-string": body("return x") + "f'{1}'\n",
    "a top-level import": body("return x") + "import os\n",
    "a decorated function": body("return x") + "@f\ndef g(x): pass\n",
    "a function with defaults": body("return x") + "def g(x=1 / 0): pass\n",
    "import": body("import os", "return x"),
    "import from": body("from os import path", "return x"),
    "import by name": body("return __import__('os').getpid()"),
    "attribute": body("return x.real"),
    "method": body("return ''.join(x)"),
    "format method": body("return '{:>999999999}'.format(x)"),
    "a way to every class": body("return ().__class__.__base__.__subclasses__()"),
    "attribute assignment": body("x.y = 1"),
    "for": body("for i in x: pass"),
    "while": body("while True: pass"),
    "with": body("with x: pass"),
    "try": body("try: return x", "finally: pass"),
    "raise": body("raise SystemExit"),
    "assert": body("assert x"),
    "del": body("del x"),
    "lambda": body("return (lambda: x)"),
    "class": body("class A: pass"),
    "nested function": body("def sum(v): return v", "return sum(x)"),
    "async function": body("async def g(): pass"),
    "async comprehension": body("return [i async for i in x]"),
    "await": body("return await x"),
    "yield": body("yield x"),
    "global": body("global x"),
    "global of another name": body("global y", "y = x"),
    "nonlocal": body("nonlocal x"),
    "match": body("match x:", "    case _: return x"),
    "break": body("break"),
    "walrus": body("return (y := x)"),
    "walrus in a comprehension": body("return [y := i for i in x]"),
    "f-string": body("return f'{x}'"),
    "f-string that only parses since 3.12": body("return f'{x['a']}'"),
    "format width": body("return f'{x:>999999999}'"),
    "template string": body("return t'{x}'"),
    "bytes": body("return b'a'"),
    "imaginary": body("return 1j"),
    "two underscores": body("return __builtins__"),
    "two underscores assigned": body("__x = 1"),
    "two underscores as keyword": body("return sum(x, __start=1)"),
    "two underscores in a comprehension": body("return [__i for __i in x]"),
    "two underscores, fullwidth": body("return ＿＿import＿＿"),
    "a name that is not ASCII": body("é = x"),
    "a builtin in fullwidth letters": body("return ｓｕｍ(x)"),
    "recursion": body("return f(x)"),
    "a call of another builtin": body("return range(x)"),
    "eval": body("return eval('x')"),
    "exit": body("exit()"),
    "a call of an alias": body("g = sum", "return g(x)"),
    "a call of a call": body("return str(x)()"),
    "a call of an expression": body("return [sum][0](x)"),
    "unpacked keywords": body("return sum(x, **{'start': 1})"),
    "repeated keyword": body("return sum(x, start=1, start=2)"),
    "a generator expression as a value": body("return (i for i in x)"),
    "a generator expression printed": body("return str(i for i in x)"),
    "a generator expression among arguments": body("return min((i for i in x), 0)"),
    "starred return": body("return *x"),
    "starred assignment": body("y = *x"),
    "starred target alone": body("*y = x"),
    "two starred targets": body("*a, *b = x"),
    "starred comprehension target": body("return [i for *i in x]"),
    "subscript as comprehension target": body("return [0 for x[0] in x]"),
    "annotated subscript": body("x[0]: int = 1"),
    "assignment to a literal": body("1 = x"),
    "assignment to a call": body("sum(x) = 1"),
    "a call before its parenthesis": body("return sum(i for i in x, 1)"),
    "NUL": body("return x\0"),
    "NUL in a string": body("return '\0'"),
    "lone surrogate": body("return x\ud800"),
    "lone surrogate in a string": body("return '\ud800'"),
    "lone surrogate in a comment": body("return x # \udfff"),
    "replacement character": body("return x\ufffd"),
    "too long": body("return x") + "#" * 2048,
    "too long in bytes only": body("return x") + "#" + "é" * 1010,
    "very much too long": body("return x") + " " * 10**6,
    "opening parentheses": "(" * TWO_KILOBYTES,
    "opening brackets": body("return " + "[" * 900),
    "balanced brackets": body("return " + "[" * 900 + "]" * 900),
    "opening braces": body("return " + "{" * 1900),
    "minus signs": body("return " + "-" * 1900 + "1"),
    "tildes": body("return " + "~" * 500 + "x"),
    "nots": body("return " + "not " * 400 + "x"),
    "conditionals": body("return " + "x if x else " * 150 + "x"),
    "powers": body("return " + "x**" * 600 + "x"),
    "a long sum": body("return " + "x+" * 900 + "x"),
    "lambdas": body("return " + "lambda:" * 250 + "x"),
    "attributes": body("return x" + ".a" * 900),
    "subscripts": body("return x" + "[0]" * 600),
    "calls": body("return x" + "()" * 900),
    "calls in calls": body("return " + "abs(" * 150 + "x" + ")" * 150),
    "many comprehension clauses": body("return [0" + " for i in x" * 150 + "]"),
    "comprehensions in comprehensions": body("return " + "[0 for i in " * 90 + "x" + "]" * 90),
    "deep blocks": "".join("\n" + " " * i + "if x:" for i in range(1, 60)) + " return x\n",
    "unfinished string": body("return '"),
    "unfinished line": "\n    return x \\",
    "wrong indentation": "\n    y = 1\n  return x\n",
    "tabs and spaces": "\n    y = 1\n\treturn x\n",
    "octal of old": body("return 010"),
    "bad escape": body("return '\\N{no such character}'"),
}


@pytest.mark.parametrize("completion", INVALID.values(), ids=INVALID)
def test_outside_the_language_is_invalid(completion):
    task = made_task(([1], [1]))
    assert outcome(task, completion) == ("invalid", 0)
    assert not is_complete(task, completion)
    assert not is_complete(task, completion + "\n")


@pytest.mark.parametrize(
    "prompt",
    [
        "def f(x=1 / 0):",
        "def f(x: 1 / 0):",
        "def f(x) -> 1 / 0:",
        "@sum\ndef f(x):",
        "def f(*x):",
        "def f(x, /):",
        "def f(*, x):",
        "def f(x, y):",
        "def f():",
        "def g(x):",
        "async def f(x):",
        "def f[T](x):",
    ],
)
def test_a_definition_that_could_fail_or_is_not_the_one_asked_for_is_invalid(prompt):
    task = CodingTask("made", "f", "", prompt, "", ((1, 1),))
    assert verify(task, "\n    return 1\n").status == "invalid"


PROGRAMS = [  # bodies of f(x), called with [3, 1, 2]
    "'doc'; return 1",
    "pass; return None",
    "'doc'",
    "y: int = 1; return y",
    "a, *b, c = x; return [a, b, c]",
    "a, b, *c, d = x; return c",
    "[a, (b, *c)] = x[0], x; return (a, b, c)",
    "() = []; return 1",
    "a = b = x; b += [0]; return a",
    "x[1:] = 'ab'; return x",
    "x[::2] = {8: 0, 9: 0}; return x",
    "x += 'ab'; return x",
    "x *= 2; return x",
    "x[0] -= 5; return x",
    "x[0], x[1] = x[1], x[0]; return x",
    "i = 0; i, x[i] = 1, 9; return x",
    "t = (x,); u = t; t += (1,); return (t, u)",
    "d = {'a': 1, **{'b': 2}}; d['c'] = 3; return d",
    "d = e = {1: 2}; d |= {3: 4}; return {v: k for k in e for v in [e[k]]}",
    "d = {}; d |= [(1, 2)]; return d",
    "s = t = {1}; s |= {2}; return 2 in t",
    "return {*x, 3} - {1} == {3, 2}, {1} < {1, 2}, {1: 2} == {1.0: 2.0}",
    "return sum({i % 2 for i in x})",
    "return 2 in {'a', 2}, 'b' not in {'a', 'b'}, 'a' in 'xay', 1 in {1: 2}, 9 in (1, 2)",
    "return [*x, *'ab', *{7: 8}, *{9}]",
    "return 0 < x[1] < x[2] != 0",
    "return 3 > x[0] > 1 / 0",
    "return x[1] and 0 or x[5:] or 'z'",
    "return 0 and 1 / 0, 1 or 1 / 0",
    "return [[i * j for j in x if j > 1] for i in x if i - 1]",
    "return [i for i in x for i in [i, -i]]",
    "return [i + j for i in x if i > 1 if i < 3 for j in x]",
    "i = 9; y = [i for i in x]; return i",
    "return [(a, b) for a, *b in ['xyz']]",
    "x = [x for x in x]; return x",
    "return [y for i in x for y in [i]] if 0 else [x for y in x][0]",
    "return sum([[i] for i in x], [])",
    "return sum(x, start=0.5), sum([True, True]), sum([], True), sum([], None)",
    "return sum((i * i for i in x), 1), sum([i for i in x if i > 1])",
    "return min(x), max(x), min('b', 'a'), max([], default=7), min([1], default=7)",
    "return max(['aa', 'b'], key=len), min(1, -2, key=abs), min(x, key=None)",
    "return max(['b', 'ab', 'c'], key=len), max('ab', 'cd', key=len), max(1, True), min(0, False)",
    "return min((i for i in x), key=str), max((i for i in []), default=0), min({5: 0, 4: 0})",
    "return min(*x), sum(*[x]), max(1, *x)",
    "n = 1e999 - 1e999; return min(n, 1) == 1, max(1, n) == 1, n in [n], n == n",
    "return str(x), str(), str(True), str('a'), str(1.0), str({1: 'a'}), str(object=5), str(None)",
    "return int('-12'), int('ff', 16), int('11', base=2), int(2.9), int(), int(True), int(' 1_0 ')",
    "return bool(x), bool([]), bool(), len('ab'), abs(-2.5), abs(True), len({1: 2})",
    "return '%s-%03d|%5.2f|%r|%%' % (x, 7, 0.5, 'a')",
    "return '%(a)s%(a)s' % {'a': 1}",
    "return '%*d|%-*.*f' % (4, 7, 8, 2, 0.5)",
    "return 'ab' % (), '' % [], '%s' % x, '%c' % 97",
    "y = '%d'; y %= 3; return y",
    "sum = 3; return sum",
    "sum = len; return sum(x)",
    "return [len(i) for len in [max] for i in [x]]",
    "k = len; return min(['bb', 'a'], key=k)",
    "return ~True, -True, +False, not 0, ~5, -x[0]",
    "return 7 // -2, -7 % 3, 2 ** -1, 2 ** 10, 1 << 3, 12 >> 1, 6 & 3, 6 | 1, 6 ^ 2, True | False",
    "return 7.5 // 2, -7.5 % 2, 2 ** 0.5, 1 / 4, 0.1 + 0.2, -0.0, 2 ** 100, 10 ** 20 // 7",
    "return 1 ** 10 ** 40, 0 << 9",
    "return x is x, x is x[:], None is None, 1 is not None",
    "return [] < [1] < [1, 0], (1, 2) > (1,), 'a' < 'b', 1 == True, 'a' == 1, None != 0",
    "return x[::-1], x[-1], x[:-1], x[5:], x[::2], 'abc'[1], (1, 2)[True], x[None:]",
    "return x * 2, 0 * x, -1 * 'a', 'ab' * True, () * 5",
    "return x + [x], 'a' + 'b', (1,) + (2,)",
    "if x[0] > 5: return 1\n    elif x: return 2\n    else: return 3",
    "if not x: y = 1\n    return 4",
    "y = 1\n    if y:\n        y = 2\n        if y: return y\n    return 0",
    "return 1if x else 2",
    "return '\\d\\n\\x41' 'b', 0x1f, 0b11, 1_000, 1e3, ...",
    "return -x[0] if x[0] < 0 else x[0]",
    "return ((((((((((x))))))))))",
    "return " + "(" * 190 + "x" + ")" * 190,
    "return " + "+".join(["x[0]"] * 80),
    "return " + "x[0] if x else " * 80 + "1",
]
ERRORS = (ArithmeticError, LookupError, NameError, TypeError, ValueError)
NAMED_ERRORS = (*ERRORS, OverflowError, ZeroDivisionError, IndexError, KeyError, UnboundLocalError)


def ordered_sum(values, /, start=0):
    """The built-in before Python 3.12, which began to correct rounding in sums of floats."""
    if isinstance(start, str):
        raise TypeError
    for value in values:
        start = start + value
    return start


def python_says(source, argument):
    """What Python makes of f(argument): ("passed", result) or ("failed", the error)."""
    scope = {"sum": ordered_sum}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(source, "<test>", "exec"), scope)
        try:
            return "passed", scope["f"](copy.deepcopy(argument))
        except ERRORS as error:
            return "failed", type(error).__name__.replace("UnboundLocalError", "NameError")


def verifier_says(completion, argument, wanted):
    """("passed", wanted) where the verifier finds that result, else ("failed", its reason)."""
    verdict = verify(made_task((argument, wanted)), completion)
    if verdict.status == "passed":
        return "passed", wanted
    reason = verdict.message.removeprefix("test 1: ").replace("UnboundLocalError", "NameError")
    return verdict.status, reason


@pytest.mark.parametrize("text", PROGRAMS)
def test_the_language_means_what_python_means(text):
    status, result = python_says("def f(x):" + body(text), [3, 1, 2])
    assert status == "passed"
    assert verifier_says(body(text), [3, 1, 2], result) == (status, result)


@pytest.mark.parametrize(
    "text, reason",
    [
        ("return y", "NameError"),
        ("return f", "NameError"),
        ("return range", "NameError"),
        ("y += 1", "UnboundLocalError"),
        ("if x: return y\n    y = 1", "UnboundLocalError"),
        ("return sum(x)\n    sum = 1", "UnboundLocalError"),
        ("y: int\n    return y", "UnboundLocalError"),
        ("return [j for i in x if j for j in x]", "UnboundLocalError"),
        ("return [i for i in i]", "NameError"),
        ("sum = 3; return sum(x)", "TypeError"),
        ("return [abs(0) for abs in x]", "TypeError"),
        ("return 1 / 0", "ZeroDivisionError"),
        ("return 1 % 0", "ZeroDivisionError"),
        ("return 0 ** -1", "ZeroDivisionError"),
        ("return 1 << -1", "ValueError"),
        ("return 10.0 ** 400", "OverflowError"),
        ("return int(1e999)", "OverflowError"),
        ("return int(1e999 - 1e999)", "ValueError"),
        ("return [] * 10 ** 30", "OverflowError"),
        ("return x[3]", "IndexError"),
        ("return x['a']", "TypeError"),
        ("return x[1:2, 3]", "TypeError"),
        ("return {}[1]", "KeyError"),
        ("return {}[1:2]", "TypeError"),
        ("d = {}; d[1:2] = 3", "TypeError"),
        ("d = {}; d[x] = 1", "TypeError"),
        ("return {x}", "TypeError"),
        ("return {x: 1}", "TypeError"),
        ("return {**x}", "TypeError"),
        ("a, b = x", "ValueError"),
        ("a, b, c, d, *e = x", "ValueError"),
        ("a, b = 1", "TypeError"),
        ("'ab'[0] = 'c'", "TypeError"),
        ("sum[0] = 1", "TypeError"),
        ("return x + 1", "TypeError"),
        ("return -'a'", "TypeError"),
        ("return 1 < 'a'", "TypeError"),
        ("return x @ x", "TypeError"),
        ("return 1 in 1", "TypeError"),
        ("return len(1)", "TypeError"),
        ("return abs(x)", "TypeError"),
        ("return int('a')", "ValueError"),
        ("return int(x)", "TypeError"),
        ("return int('1', 99)", "ValueError"),
        ("return str(1, 2)", "TypeError"),
        ("return sum()", "TypeError"),
        ("return sum(1)", "TypeError"),
        ("return sum(x, 1, start=2)", "TypeError"),
        ("return sum(x, begin=1)", "TypeError"),
        ("return sum('ab')", "TypeError"),
        ("return sum([], '')", "TypeError"),
        ("return min()", "TypeError"),
        ("return min([])", "ValueError"),
        ("return min(1)", "TypeError"),
        ("return min(1, 'a')", "TypeError"),
        ("return min(1, 2, default=0)", "TypeError"),
        ("return min(x, key=3)", "TypeError"),
        ("return min(x, reverse=True)", "TypeError"),
        ("return '%d' % 'a'", "TypeError"),
        ("return '%d %d' % (1,)", "TypeError"),
        ("return '%d' % (1, 2)", "TypeError"),
        ("return '%q' % 1", "ValueError"),
        ("return '%(a)s' % {}", "KeyError"),
        ("sum = str; return sum(i for i in x)", "TypeError"),
    ],
)
def test_an_error_of_the_candidate_fails_the_test(text, reason):
    verdict = verify(made_task(([3, 1, 2], 0)), body(text))
    assert verdict == Verdict("failed", 0, f"test 1: {reason}")


@pytest.mark.parametrize(
    "expression, result",
    [
        ("10 ** 9 is 10 ** 9", True),
        ("'ab' is 'a' + 'b'", True),
        ("1 is 1.0", False),
        ("1 is True", False),
        ("[] is []", False),
        ("{} is not {}", True),
    ],
)
def test_numbers_and_strings_are_identical_when_equal(expression, result):
    assert outcome(made_task((0, result)), body(f"return {expression}")) == ("passed", 1)


def test_floats_are_summed_from_left_to_right_on_every_python():
    total = 0.0
    for _ in range(10):
        total += 0.1
    assert outcome(made_task((0, total)), body("return sum([0.1] * 10)")) == ("passed", 1)


@pytest.mark.parametrize(
    "text",
    [
        "return str(s)",
        "return '%s' % s",
        "return '%(a)s' % {'a': [s]}",
        "return [i for i in s]",
        "return [*s]",
        "a, b = s; return a",
        "return min(s, key=len)",
        "return sum([[i] for i in s], [])",
        "y = []; y += s; return y",
        "y = []; y[:] = s; return y",
        "return s",
    ],
)
def test_the_order_of_a_set_that_python_does_not_fix_is_never_used(text):
    verdict = verify(made_task((0, {"a", "b"})), body("s = {'a', 'b'}", text))
    assert verdict == Verdict("failed", 0, "test 1: the order of a set is not fixed")


# --- Limits -------------------------------------------------------------------------------------

GROW = [f"y = {y}" for y in ["[y, y]"] * 60]
DIGITS = "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]"
LIMITS = {  # bodies of f(x), called with 7
    "power": ["return x ** 99999999"],
    "power of powers": ["return 9 ** 9 ** 9 ** 9"],
    "power in place": ["x **= 10 ** 9", "return x"],
    "negative power": ["return (-x) ** 10 ** 10"],
    "shift": ["return x << 10 ** 9"],
    "shift by a shift": ["return 1 << (1 << (1 << 60))"],
    "squares of squares": ["x *= x"] * 100 + ["return x"],
    "sums of sums": ["x += x ** x ** 3"] * 20 + ["return x"],
    "long number negated": ["return bool(-(-(-(-(-(2 ** 2000))))))"],
    "division of long numbers": ["x = 7 ** 1500"] + ["y = [x // 3 % 10 ** 400 for i in '%s']"] * 40,
    "product of a comprehension": ["y = [3 ** 1000 * 7 ** 1000 for i in [0] * 9000]"],
    "text": ["return 'a' * 10 ** 10"],
    "text from the left": ["return 10 ** 10 * 'a'"],
    "text doubled": ["y = 'a'"] + ["y += y"] * 60,
    "text doubled by formats": ["y = 'a'"] + ["y = '%s%s' % (y, y)"] * 60,
    "list": ["return [0] * 10 ** 10"],
    "list doubled in place": ["y = [0]"] + ["y *= 2"] * 60,
    "list extended by itself": ["y = [0]"] + ["y += y"] * 60,
    "list of long lists": ["return [[0] * 10 ** 4] * 10 ** 4"],
    "lists in lists": ["return [[[[0] * 99] * 99] * 99] * 99"],
    "long lists kept": ["return [[i] * 9000 for i in [0] * 9000]"],
    "slices kept": ["y = [0] * 5000", "return [y[:] for i in y]"],
    "slice assigned to itself": ["y = [0]"] + ["y[:0] = y"] * 60,
    "sum of lists": ["return sum([[0] * 5000] * 5000, [])"],
    "sum of tuples": ["return sum(((0,) * 99 for i in [0] * 5000), ())"],
    "sum of long numbers": ["return sum([7 ** 1000] * 9000)"],
    "min of long lists": ["return min([[0] * 5000 + [i] for i in [1, 2]] * 5000)"],
    "max by text": ["return max([7 ** 1000] * 9000, key=str)"],
    "comprehension": ["return [0 " + f"for i in {DIGITS} " * 40 + "]"],
    "comprehension of nothing": ["return [0 " + f"for i in {DIGITS} " * 40 + "if 0]"],
    "comprehensions in comprehensions": ["return " + "[" * 15 + "0" + f" for i in {DIGITS}]" * 15],
    "any order of clauses": ["y = [0] * 5000", "return sum(1 for i in y for j in y)"],
    "shared parts compared": ["y = 0", *GROW, "z = 0", *[g.replace("y", "z") for g in GROW]]
    + ["return y == z"],
    "shared parts ordered": ["y = 0", *GROW, "return [y] < [y, y]"],
    "shared parts searched": ["y = 0", *GROW, "return 1 in y"],
    "shared parts picked": ["y = 0", *GROW, "z = 0", *[g.replace("y", "z") for g in GROW]]
    + ["return max(y, z)"],
    "shared parts printed": ["y = 0", *GROW, "return str(y)"],
    "shared parts formatted": ["y = 0", *GROW, "return '%s' % y"],
    "shared parts hashed": ["y = 0", *[g.replace("[y, y]", "(y, y)") for g in GROW], "return {y}"],
    "shared parts as a key": ["y = 0", *[g.replace("[y, y]", "(y, y)") for g in GROW]]
    + ["d = {}", "d[y] = 0"],
    "shared parts returned": ["y = 0", *GROW, "return y"],
    "shared parts in a dict": ["y = 0"] + ["y = {0: y, 1: y}"] * 60 + ["return str(y)"],
    "a list in itself, returned": ["y = [0]", "y[0] = y", "return y"],
    "a list in itself, compared": ["y = [0]", "y[0] = y", "z = [0]", "z[0] = z", "return y == z"],
    "a list in itself, printed": ["y = [0]", "y += [y]", "return str(y)"],
    "a dict in itself": ["d = {}", "d[0] = d", "return '%s' % d"],
    "deep values": ["y = 0"] + ["y = " + "[" * 9 + "y" + "]" * 9] * 60 + ["return y"],
    "deep values compared": ["y = z = 0"]
    + [f"{n} = " + "[" * 9 + n + "]" * 9 for n in "yz" for _ in range(30)]
    + ["return y == z"],
    "format width": ["return '%999999999d' % x"],
    "format precision": ["return '%.999999999f' % x"],
    "format width from the values": ["return '%*d' % (10 ** 9, x)"],
    "format precision from the values": ["return '%.*d' % (10 ** 9, x)"],
    "negative format width": ["return '%*d' % (-10 ** 9, x)"],
    "format width for a key": ["return '%(a)999999999s' % {'a': x}"],
    "format with a very long width": ["return '%" + "9" * 1500 + "d' % x"],
    "many formats": ["return '%(a)s' * 600 % {'a': '😀' * 6000}"],
    "many format widths": ["return '%999d' * 1000 % ((1,) * 1000)"],
    "text of a long number": ["return str(7 ** 7 ** 5)"],
    "number of a long text": ["return bool(int('7' * 4000))"],
    "number of a long text in another base": ["return int('z' * 19000, 36)"],
    "texts searched": ["return ('a' * 5000 + 'b') in 'a' * 15000"],
    "work is not earned": ["y = 'aaa' * -(10 ** 5)", "return sum([1] * 19000)"],
    "work is not earned from the left": ["y = -(10 ** 5) * 'aaa'", "return sum([1] * 19000)"],
    "keys that collide": [f"d = {DIGITS}"]
    + ["return {(2 ** 61 - 1) * (a + 10 * b + 100 * c + 1000 * e): 0"]
    + ["for a in d for b in d for c in d for e in d}"],
    "elements that collide": [f"d = {DIGITS}"]
    + ["return {(2 ** 61 - 1) * (a + 10 * b + 100 * c) for a in d for b in d for c in d}"],
    "many keys": ["d = {i: 0 for i in " + DIGITS + "}"]
    + ["d |= {(k, i): 0 for k in d for i in d}"] * 9,
    "union of sets": ["s = {0}"]
    + ["s |= {2 * i + k for i in s for k in [1, 2]}"] * 30
    + ["return s"],
    "unpacking": ["y = [0] * 9000"] + ["y = [*y, *y]"] * 30,
    "unpacking into a call": ["return max(*[0] * 9000, *[0] * 9000, *[0] * 9000)"],
    "starred target": ["y = [0] * 4000"] + ["a, *y = y + y"] * 30,
}


@pytest.mark.parametrize("lines", LIMITS.values(), ids=LIMITS)
def test_a_limit_exceeded_fails_the_test_in_bounded_time_and_memory(lines):
    task = made_task((7, 0))
    tracemalloc.start()
    started = time.thread_time()
    verdict = verify(task, body(*lines))
    seconds, (_, peak) = time.thread_time() - started, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert verdict.status == "failed"
    assert verdict.message in (
        "test 1: out of work",
        "test 1: a value is nested more than 100 levels deep",
    )
    assert seconds < 1
    assert peak < 5 * 2**20


@pytest.mark.parametrize(
    "expression, result",
    [
        ("(-1) ** 10 ** 30", 1),
        ("0 << 10 ** 9", 0),
        ("[] * 10 ** 10", []),
        ("10 ** 10 * ''", ""),
        ("'a' * -(10 ** 10)", ""),
        ("2 ** 1000 % 1000", 2**1000 % 1000),
        ("sum([1] * 1500)", 1500),
        ("[0] * 2000 == [0] * 2000", True),
        ("len('a' * 19000)", 19000),
        ("2.0 ** -(10 ** 9)", 0.0),
    ],
)
def test_what_is_cheap_stays_allowed(expression, result):
    assert outcome(made_task((0, result)), body(f"return {expression}")) == ("passed", 1)


def test_each_test_has_a_budget_of_its_own():
    task = made_task((10**9, 1), (1, 2), (10**10, 1), (2, 4))
    verdict = verify(task, body("return 2 ** x"))
    assert verdict == Verdict("failed", 2, "test 1: out of work")


# --- The verifier as a part of a trainer --------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, TypeError, KeyError, MemoryError, RecursionError])
@pytest.mark.parametrize(
    "broken", ["load", "charge", "binary", "iterate", "assign", "call", "turns"]
)
def test_a_fault_of_the_verifier_is_an_error_not_a_score(monkeypatch, broken, error):
    def fault(*args, **kwargs):
        raise error("a bug")

    monkeypatch.setattr(verifier._Run, broken, fault)
    with pytest.raises(error, match="a bug"):
        verify(made_task(([1], 2)), body("y = [sum(i + 1 for i in x)]", "a, *b = y", "return a"))


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, RecursionError, AssertionError])
def test_an_operation_that_breaks_python_is_an_error_not_a_score(monkeypatch, error):
    def fault(*args):
        raise error("a bug")

    monkeypatch.setitem(verifier.BINARY, ast.Add, (fault, fault))
    with pytest.raises(error, match="a bug"):
        verify(made_task((1, 2)), body("return x + 1"))


def test_every_allowed_node_is_checked_or_run():
    source = verifier.__loader__.get_source(verifier.__name__)
    interpreter = source[source.index("class _Run") :]
    for kind in verifier.EXPRESSIONS | verifier.STATEMENTS - {ast.Pass}:
        assert (
            f"case ast.{kind.__name__}(" in interpreter or f"| ast.{kind.__name__}(" in interpreter
        )


@pytest.mark.parametrize(
    "line",
    ["return '\\d'", "return 1if x else 2", "return 0x1for x", "return x is 'a'", "return ~True"]
    + ["return '\\777'", "return 1.if x else 2", "x is 1; return 1", "return 1jif x else 2"],
)
def test_no_warning_is_shown_or_turned_into_an_error(line):
    task = made_task((1, 1))
    calm = verify(task, body(line))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        filters = list(warnings.filters)
        assert verify(task, body(line)) == calm
        assert warnings.filters == filters
    assert caught == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert verify(task, body(line)) == calm


def test_threads_agree_and_leave_the_filters_of_warnings_alone():
    task = TASKS["increment"]
    candidates = [
        task.completion,
        body("'\\d'; return x + 1"),
        body("return x ** 9 ** 9"),
        "(",
    ] * 20
    filters = list(warnings.filters)
    verdicts = {}

    def work(name):
        verdicts[name] = [verify(task, c) for c in candidates]

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(verdicts) == 4 and all(v == verdicts[0] for v in verdicts.values())
    assert warnings.filters == filters


def test_a_completion_is_complete_at_its_first_valid_newline():
    task = TASKS["absolute"]
    text = task.completion
    complete = [text[:n] for n in range(len(text) + 1) if is_complete(task, text[:n])]
    assert complete == [text]
    assert not is_complete(task, text.rstrip("\n"))
    assert is_complete(task, text + "\n")
    assert is_complete(task, body("return 1 / 0"))
    assert not is_complete(task, text + "x")
    assert not is_complete(task, text + "x\n")


def test_typical_candidates_are_scored_quickly():
    tasks = frozen_tasks("dev", 4)
    candidates = [(t, c) for t in tasks for c in (t.completion, body("return x * 1"), body("x x"))]
    started = time.thread_time()
    for task, completion in candidates:
        verify(task, completion)
    assert (time.thread_time() - started) / len(candidates) < 1e-3
    started = time.thread_time()
    for task, completion in candidates:
        is_complete(task, completion)
    assert (time.thread_time() - started) / len(candidates) < 5e-4


# --- Any text -----------------------------------------------------------------------------------

PIECES = [
    *("x", "y", "values", "text", "sum", "len", "abs", "min", "max", "bool", "int", "str", "key"),
    *(
        "return",
        "if",
        "else",
        "elif",
        "for",
        "in",
        "not",
        "and",
        "or",
        "is",
        "None",
        "True",
        "pass",
    ),
    *(
        "import",
        "lambda",
        "def",
        "class",
        "while",
        "with",
        "yield",
        "await",
        "async",
        "del",
        "print",
    ),
    *"+-*/%@&|^~<>=!:;,.()[]{}#_'\"\\",
    *(
        "**",
        "//",
        "<<",
        ">>",
        "==",
        "<=",
        "!=",
        "+=",
        "*=",
        ":=",
        "->",
        "[::-1]",
        "0",
        "1",
        "2",
        "-3",
    ),
    *("9" * 30, "1.5", "1e999", "'a'", "''", "'%s'", "'%9999999d'", "f'{x}'", "b'a'", "__import__"),
    *(
        "\n",
        "\n    ",
        "\n        ",
        "\t",
        " ",
        "\0",
        "\r",
        "\x0c",
        "\ufffd",
        "é",
        "\ud800",
        "٣",
        "0_0",
    ),
]


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(sorted(TASKS)),
    st.text(max_size=80)
    | st.text("x()[]{}+-*%:=,.'\n 0123456789abdefimnorsstuv", max_size=80)
    | st.binary(max_size=80).map(lambda b: b.decode("utf-8", "replace"))
    | st.lists(st.sampled_from(PIECES), max_size=40).map("".join).map("\n    return ".__add__)
    | st.lists(st.sampled_from(PIECES), max_size=40).map(" ".join).map("\n    ".__add__),
)
def test_any_text_gets_a_verdict(family, completion):
    task = TASKS[family]
    started = time.thread_time()
    verdict = verify(task, completion)
    assert time.thread_time() - started < 1
    assert verdict.status in ("passed", "failed", "invalid")
    assert (verdict.status == "passed") == (verdict.tests_passed == 3)
    assert verify(task, completion) == verdict
    complete = verdict.status != "invalid" and completion.endswith("\n")
    assert is_complete(task, completion) == complete


# Random programs in the language, against Python itself: N stands for a number, T for a text, L for
# a list of numbers, A for anything, now and then for something of another kind. A program that the
# verifier finds too much work is not given to Python.

LEAVES = {
    "N": ["n", "n", "0", "1", "2", "-3", "7", "True", "i", "j", "1.5"],
    "T": ["t", "t", "''", "'b'", "'ab'", "'12'", "'%s'"],
    "L": ["v", "v", "v", "[]", "[4]", "[1, 0, 2]"],
    "A": ["None", "n", "t", "v", "()", "False", "len"],
}
FORMS = {
    "N": [
        *(
            "N + N",
            "N - N",
            "N * N",
            "N // N",
            "N % N",
            "N / N",
            "N & N",
            "N | N",
            "N ^ N",
            "N << 2",
        ),
        *("N >> 1", "N ** 2", "2 ** N", "-N", "~N", "+N", "not A", "abs(N)", "bool(A)", "int(T)"),
        *("int(N)", "int(T, N)", "len(L)", "len(T)", "len(A)", "sum(L)", "sum(L, N)", "min(L)"),
        *(
            "max(L, default=N)",
            "min(N, N)",
            "max(N, N, key=abs)",
            "min(L, key=str)",
            "L[N]",
            "L[-1]",
        ),
        *("N < N", "N >= N > N", "N == N != A", "A == A", "N in L", "T in T", "N not in {N, N}"),
        *("A is None", "L < L", "T <= T", "(N, A) < (N, A)", "N and N", "N or N", "N if A else N"),
        *("sum(N for i in L)", "max((N for i in L if A), default=N)", "sum([N for i in T])"),
        *("{N: N, **{N: N}}[N]", "len({A: N for i in L})", "len({N for i in L})", "sum({N, N})"),
        *("{N, N} == {N}", "{N: A} == {N: A}", "len({N, 1} | {N})", "len({N: 1} | {N: 2})"),
    ],
    "T": [
        *("T + T", "T * N", "N * T", "T[N]", "T[N:]", "T[:N]", "T[::-1]", "T[N:N:N]", "str(A)"),
        *(
            "str(N)",
            "'%s|%r' % (A, A)",
            "'%d' % N",
            "'%5.1f' % N",
            "'%-4s|' % T",
            "T % N",
            "T % (N, T)",
        ),
        *("max(T, T)", "min(T, key=int)", "max([T, T, T], key=len)", "T if A else T", "T or T"),
        *(
            "sum([[i] for i in T], [])[N]",
            "'%(a)s' % {'a': A}",
            "{N: T, N: T}[N]",
            "'%*d' % (N, N)",
        ),
    ],
    "L": [
        *("[N, N]", "[*L, N]", "L + L", "L * N", "L[N:]", "L[:N]", "L[N:N:N]", "L[::-1]", "L or L"),
        *("[N for i in L]", "[N for i in L for j in L if A]", "[N for i in L if A if A]"),
        *("[[N for j in L] for i in L][N]", "[N for i, *j in [L, L]]", "[i for i in i]"),
        *("sum([[N] for i in L], [])", "[*{N, N}]", "[*{N: N, N: N}]", "[i for i in {N: A}]"),
        *("L if A else L", "[sum for sum in L]", "max(L, L)", "[max(L), min(L)]", "[*T]"),
    ],
    "A": [
        "N",
        "T",
        "L",
        "(A, A)",
        "[A, A]",
        "{N: A}",
        "(A, *L)",
        "[A for i in T]",
        "(N, T) + (A,)",
    ],
}
STATEMENTS = [
    *("i = N", "i = j = N", "n -= N", "n = A", "t += T", "t *= N", "v += L", "v += T", "v *= N"),
    *("v[N] = N", "v[N:] = L", "v[::N] = T", "v[N] += N", "i, *j = L", "i, j = A", "[n, i] = L"),
    *("w = v; v += L", "sum = len", "y: int = N", "n = {N: A}; n[N] = A", "n |= N", "A"),
    *("if A: n = N", "if A: return A", "if A: return A\n    elif A: n = N\n    else: t = T"),
]


def fill(rng, template, depth):
    """The template with its capitals replaced by random expressions."""

    def expression(match):
        kind = match[0] if rng.random() < 0.97 else rng.choice("NTLA")
        if depth == 0 or rng.random() < 0.3:
            return rng.choice(LEAVES[kind])
        return f"({fill(rng, rng.choice(FORMS[kind]), depth - 1)})"

    return re.sub(r"\b[NTLA]\b", expression, template)


@settings(max_examples=800, deadline=None)
@given(st.integers(0, 2**32))
def test_random_programs_mean_what_python_means(seed):
    rng = random.Random(seed)
    lines = rng.choices(STATEMENTS, k=rng.randrange(4)) + ["return A"]
    completion = body("n, t, v = x", *(fill(rng, line, 3) for line in lines))
    argument = rng.choice([[3, "abca", [2, -1, 2]], [0, "", []], [-4, "%d", [7, 1, 0, True]]])
    verdict = verify(made_task((argument, "unknown yet")), completion)
    assume(not any(m in verdict.message for m in ("out of work", "100 levels", "order of a set")))
    status, result = python_says("def f(x):" + completion, argument)
    if status == "passed":
        assert verifier_says(completion, argument, result) == ("passed", result)
    else:  # which error comes first may differ: Python reads the sources of generators early
        assert verdict.message.removeprefix("test 1: ") in {
            error.__name__ for error in NAMED_ERRORS
        }


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(sorted(TASKS)),
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 3), st.sampled_from(PIECES[:80])), max_size=3
    ),
)
def test_mutations_of_references_are_scored_as_python_would(family, edits):
    task = TASKS[family]
    completion = task.completion
    for position, length, piece in edits:
        completion = completion[:position] + piece + completion[position + length :]
    verdict = verify(task, completion)
    if verdict.status == "invalid":
        return
    assume("out of work" not in verdict.message)
    passed = 0
    for argument, wanted in task.tests:
        source = (task.prompt + completion).replace(task.entry_point, "f")
        status, result = python_says(source, argument)
        passed += status == "passed" and type(result) is type(wanted) and result == wanted
    assert verdict.tests_passed == passed
    assert verdict.status == ("passed" if passed == 3 else "failed")
