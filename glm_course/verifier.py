"""Executable reward: does a completion turn its prompt into a function that passes its tests?

A candidate is a model's output, so it may be any text at all, and it is scored inside the process
that trains the model. It therefore never reaches `exec`, `eval` or `compile`. `ast.parse` gives its
syntax tree, an allow-list says which nodes may occur in it, and a small interpreter walks the tree.
The interpreter knows no attributes, loops, imports or exceptions, and eight builtins by name.

Bounded: the source (2,048 bytes), the nesting of its tree and of any value (100 levels), and the
work of each test. One unit of work is one node evaluated, or one element, character or squared
30-bit digit about to be visited or made; every operation is paid for before it is carried out, so
the one number bounds time and memory together. No clock, signal or process is involved: a verdict
depends on the task and the completion alone, on every platform. A candidate out of work fails that
test. An error raised by `verify` is always a fault of the verifier, never a score.

Where Python leaves a result open, one is chosen here: equal numbers or strings of one type are
identical (`x % 2 is 0`), floats are summed from left to right, and running through a set of
anything but integers fails, because the order would follow random hashes. Left out although Python
has them: f-strings, whose grammar changed in 3.12; bytes; nested functions, which could only be
called under the name of a builtin; `:=`; generator expressions that are not consumed on the spot
by sum, min or max.
"""

import ast
import copy
import operator
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import GeneratorType
from typing import Any, Literal

from glm_course.data.tasks import CodingTask

MAX_BYTES = 2048  # of prompt and completion together, in UTF-8
MAX_DEPTH = 100  # levels of the syntax tree; levels of nested values
MAX_WORK = 20_000  # units a test; a reference body takes 4 to 18, the worst known case 0.03 s, 1 MB

BUILTINS: dict[str, Any] = {f.__name__: f for f in (sum, len, abs, min, max, bool, int, str)}
STATEMENTS = {ast.Return, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.If, ast.Expr, ast.Pass}
COMPREHENSIONS = {ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp}
EXPRESSIONS = COMPREHENSIONS | {
    *(ast.Constant, ast.Name, ast.IfExp, ast.BoolOp, ast.Compare, ast.BinOp),
    *(ast.UnaryOp, ast.Call, ast.Subscript, ast.Slice, ast.Tuple, ast.List, ast.Set, ast.Dict),
}
ALLOWED = STATEMENTS | EXPRESSIONS | {ast.Starred, ast.comprehension, ast.keyword}
MARKS = (ast.expr_context, ast.boolop, ast.operator, ast.unaryop, ast.cmpop)  # all harmless

BINARY: dict[type, tuple[Callable, Callable]] = {  # x + y, x += y
    ast.Add: (operator.add, operator.iadd),
    ast.Sub: (operator.sub, operator.isub),
    ast.Mult: (operator.mul, operator.imul),
    ast.MatMult: (operator.matmul, operator.imatmul),
    ast.Div: (operator.truediv, operator.itruediv),
    ast.FloorDiv: (operator.floordiv, operator.ifloordiv),
    ast.Mod: (operator.mod, operator.imod),
    ast.Pow: (operator.pow, operator.ipow),
    ast.LShift: (operator.lshift, operator.ilshift),
    ast.RShift: (operator.rshift, operator.irshift),
    ast.BitAnd: (operator.and_, operator.iand),
    ast.BitOr: (operator.or_, operator.ior),
    ast.BitXor: (operator.xor, operator.ixor),
}
UNARY: dict[type, Callable] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
    ast.Invert: lambda value: ~+value,  # plus makes a bool an int: Python warns of ~True
}


def _identical(left: Any, right: Any) -> bool:
    """`is`, as if every number and every string existed only once."""
    scalar = type(left) is type(right) and type(left) in (int, float, str)
    return left is right or (scalar and left == right)


COMPARE: dict[type, Callable] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
    ast.Is: _identical,
    ast.IsNot: lambda left, right: not _identical(left, right),
}


@dataclass(frozen=True)
class Verdict:
    """Outcome of one candidate; `message` is a short reason for a reader."""

    status: Literal["passed", "failed", "invalid"]
    tests_passed: int
    message: str


def verify(task: CodingTask, completion: str) -> Verdict:
    """Run prompt + completion on the task's tests, each with a fresh argument and budget of work.

    passed: every result has the expected type and value, nested ones included. invalid: outside
    the allow-list, so nothing was run. failed: the rest, errors and exhausted budgets among them.
    """
    try:
        function, names = _parse(task, completion)
    except _Invalid as reason:
        return Verdict("invalid", 0, str(reason))
    failures = []
    for number, (argument, expected) in enumerate(task.tests, start=1):
        try:
            _Run().test(function, names, copy.deepcopy(argument), expected)
        except _Failed as reason:
            failures.append(f"test {number}: {reason}")
    passed = len(task.tests) - len(failures)
    if failures:
        return Verdict("failed", passed, failures[0])
    return Verdict("passed", passed, f"{passed} of {passed} tests passed")


def is_complete(task: CodingTask, completion: str) -> bool:
    """Whether prompt + completion is a valid candidate that ends in a newline; nothing is run."""
    if not completion.endswith("\n"):
        return False
    try:
        _parse(task, completion)
    except _Invalid:
        return False
    return True


def reward(verdict: Verdict, invalid: float = -0.1, tests: int | None = None) -> float:
    """1 for passed, 0 for failed, `invalid` for invalid.

    Told how many tests there are, it gives a failed candidate the share of them that it passes.
    """
    if verdict.status == "failed" and tests is not None:
        return verdict.tests_passed / tests
    return {"passed": 1.0, "failed": 0.0, "invalid": invalid}[verdict.status]


class _Invalid(Exception):
    """The candidate is outside the language."""


class _Failed(Exception):
    """The candidate raised an error of its own, ran out of work or returned the wrong result."""


# --- From text to a checked syntax tree ---------------------------------------------------------

_warnings_lock = threading.Lock()


def _parse(task: CodingTask, completion: str) -> tuple[ast.FunctionDef, set[str]]:
    """The requested function and its local names. Raises _Invalid."""
    source = task.prompt + completion
    if len(source) > MAX_BYTES or len(source.encode("utf-8", "replace")) > MAX_BYTES:
        raise _Invalid(f"longer than {MAX_BYTES} bytes")
    try:
        tree = _parse_quietly(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # NUL bytes and lone surrogates are ValueErrors; too deep for the parser is one of the last.
        raise _Invalid("does not parse") from None
    body = [s for s in tree.body if not (type(s) is ast.Expr and _is_string(s.value))]
    if len(body) != 1 or type(body[0]) is not ast.FunctionDef or body[0].name != task.entry_point:
        raise _Invalid("the top level holds something but the one requested function")
    function = body[0]
    plain = function.args.args and len(list(ast.walk(function.args))) == 2
    if not plain or list(ast.iter_child_nodes(function)) != [function.args, *function.body]:
        # Without defaults, annotations and decorators, nothing in a definition can fail.
        raise _Invalid("the signature is not one plain argument")
    names = {function.args.args[0].arg}
    for statement in function.body:
        _check(statement, 1, names)
    return function, names


def _parse_quietly(source: str) -> ast.Module:
    """`ast.parse` without its warnings (of odd escapes, or a number that touches a keyword).

    Filters of warnings belong to the whole process and turn warnings into errors where a user says
    so. They are touched only for source that might warn, and by one thread at a time.
    """
    if not re.search(r"\\|[0-9]\.?[A-Za-z]", source):
        return ast.parse(source)
    with _warnings_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)


def _is_string(node: ast.AST) -> bool:
    return type(node) is ast.Constant and type(node.value) is str


def _check(node: ast.AST, depth: int, names: set[str], in_comprehension: bool = False) -> None:
    """Hold `node` and all below it to the allow-list; add the names it binds to `names`.

    The names a comprehension binds are its own. Raises _Invalid, also where Python itself would
    refuse the tree, but only after parsing.
    """
    kind = type(node)
    if depth > MAX_DEPTH:
        raise _Invalid(f"nested more than {MAX_DEPTH} levels deep")
    if kind not in ALLOWED:
        raise _Invalid(f"{kind.__name__} is not allowed")
    if kind is ast.Name:
        if node.id.startswith("__"):
            raise _Invalid("a name starts with two underscores")
        if len(node.id) != node.end_col_offset - node.col_offset:  # which others exist varies
            raise _Invalid("a name is not ASCII")
        if type(node.ctx) is ast.Store and not in_comprehension:
            names.add(node.id)
    elif kind is ast.Constant:
        if type(node.value) in (bytes, complex):
            raise _Invalid(f"{type(node.value).__name__} literals are not allowed")
    elif kind is ast.Call:
        keywords = [keyword.arg for keyword in node.keywords]
        if type(node.func) is not ast.Name or node.func.id not in BUILTINS:
            raise _Invalid(f"calls anything but {', '.join(BUILTINS)}")
        if None in keywords or len(set(keywords)) < len(keywords):
            raise _Invalid("a keyword argument is unpacked or repeated")
        if any(keyword.startswith("__") for keyword in keywords):
            raise _Invalid("a name starts with two underscores")
    elif kind in COMPREHENSIONS:
        in_comprehension = True
        depth += len(node.generators)
        for generator in node.generators:
            _targets(generator.target)
            if generator.is_async:
                raise _Invalid("async is not allowed")
    elif kind is ast.AnnAssign and not node.simple:
        raise _Invalid("only a plain name can be annotated")
    elif kind in (ast.Tuple, ast.List) and type(node.ctx) is ast.Store and _stars(node.elts)[1:]:
        raise _Invalid("two starred targets")
    for child in ast.iter_child_nodes(node):
        if isinstance(child, MARKS):
            continue
        if type(child) is ast.Starred and kind not in (ast.Tuple, ast.List, ast.Set, ast.Call):
            raise _Invalid("a starred expression stands alone")
        if type(child) is ast.GeneratorExp and not _is_consumed(child, node):
            raise _Invalid("a generator expression is not the argument of sum, min or max")
        _check(child, depth + 1, names, in_comprehension)


def _stars(nodes: list[ast.expr]) -> list[int]:
    """Positions of the starred ones."""
    return [i for i, node in enumerate(nodes) if type(node) is ast.Starred]


def _targets(target: ast.AST) -> set[str]:
    """Names a comprehension's target binds. Raises _Invalid for targets that are not names."""
    if type(target) is ast.Name:
        return {target.id}
    if type(target) is ast.Starred:
        return _targets(target.value)
    if type(target) in (ast.Tuple, ast.List):
        return set().union(*map(_targets, target.elts))
    raise _Invalid("a comprehension assigns to something but names")


def _is_consumed(generator: ast.GeneratorExp, call: ast.AST) -> bool:
    return (
        type(call) is ast.Call
        and call.args[:1] == [generator]
        and type(call.func) is ast.Name
        and call.func.id in ("sum", "min", "max")
        and (len(call.args) == 1 or call.func.id == "sum")
    )


# --- The interpreter ----------------------------------------------------------------------------


@dataclass
class _Scope:
    """Names local to the function or to one comprehension, and the values of those bound so far."""

    names: set[str]
    parent: "_Scope | None" = None
    values: dict[str, Any] = field(default_factory=dict)


def _is_int(value: Any) -> bool:
    return type(value) in (int, bool)


def _int_work(bits: int) -> int:
    """Units for an integer of `bits` bits: its digits squared, as `*` and `str` take."""
    return (bits // 30 + 1) ** 2


class _Run:
    """One test of one candidate: the work it has left, and what its nodes mean.

    Errors of the candidate are raised as _Failed: here by name, or by `attempt`, which holds no
    code but the one operation of Python it is given. Any other exception is a fault of this class.
    """

    def __init__(self) -> None:
        self.work = MAX_WORK

    def test(self, function: ast.FunctionDef, names: set[str], argument: Any, wanted: Any) -> None:
        """Call the function. Raises _Failed unless the result is `wanted`, in type and value."""
        scope = _Scope(names, values={function.args.args[0].arg: argument})
        (result,) = self.block(function.body, scope) or (None,)
        self.weigh(result, ordered=True)
        # repr tells apart what == confuses (True, 1 and 1.0; 0.0 and -0.0), at any level.
        shown = self.attempt(repr, result)
        if shown != repr(wanted):
            raise _Failed(f"expected {wanted!r}, got {shown[:60]}")

    # Paying and failing.

    def charge(self, units: int) -> None:
        self.work -= units
        if self.work < 0:
            raise _Failed("out of work")

    def weigh(self, value: Any, ordered: bool = False, depth: int = 0) -> int:
        """Charge for a visit to every part of `value`, shared parts each time; returns the charge.

        A value that contains itself exhausts the budget or the depth. `ordered`: the visit follows
        the order of sets. Raises _Failed for slices and generators, which are not values here.
        """
        kind = type(value)
        if kind is int or kind is bool:
            units = _int_work(value.bit_length())
        else:
            units = 1 + len(value) if kind is str else 1
        self.charge(units)
        if kind in (list, tuple, set, dict):
            if depth == MAX_DEPTH:
                raise _Failed(f"a value is nested more than {MAX_DEPTH} levels deep")
            if kind is set and ordered:
                self.check_order(value)
            for part in (*value, *value.values()) if kind is dict else value:
                units += self.weigh(part, ordered, depth + 1)
        elif kind in (slice, GeneratorType):
            raise _Failed("TypeError")
        return units

    def check_order(self, value: set) -> None:
        if len(value) > 1 and not all(map(_is_int, value)):
            raise _Failed("the order of a set is not fixed")

    def attempt(self, operation: Callable, *args: Any, **kwargs: Any) -> Any:
        """One operation of Python's own on the candidate's values, already paid for."""
        try:
            return operation(*args, **kwargs)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise _Failed(type(error).__name__) from None

    # Statements.

    def block(self, statements: list[ast.stmt], scope: _Scope) -> tuple[Any] | None:
        """Execute statements in turn: (value,) as soon as one returns, None if none does."""
        for statement in statements:
            self.charge(1)
            match statement:
                case ast.Return(value):
                    return (self.evaluate(value, scope) if value else None,)
                case ast.If(test, body, orelse):
                    returned = self.block(body if self.evaluate(test, scope) else orelse, scope)
                    if returned:
                        return returned
                case ast.Assign(targets, right):
                    value = self.evaluate(right, scope)
                    for target in targets:
                        self.assign(target, value, scope)
                case ast.AnnAssign(target, _, right):
                    if right:
                        self.assign(target, self.evaluate(right, scope), scope)
                case ast.AugAssign(ast.Name(name), op, right):
                    old = self.load(name, scope)
                    new = self.binary(op, old, self.evaluate(right, scope), in_place=True)
                    scope.values[name] = new
                case ast.AugAssign(ast.Subscript(left, index), op, right):
                    container, key = self.evaluate(left, scope), self.evaluate(index, scope)
                    old = self.get_item(container, key)
                    new = self.binary(op, old, self.evaluate(right, scope), in_place=True)
                    self.set_item(container, key, new)
                case ast.Expr(value):
                    self.evaluate(value, scope)
        return None

    def assign(self, target: ast.expr, value: Any, scope: _Scope) -> None:
        match target:
            case ast.Name(name):
                scope.values[name] = value
            case ast.Starred(inner):
                self.assign(inner, value, scope)
            case ast.Subscript(left, index):
                container = self.evaluate(left, scope)
                self.set_item(container, self.evaluate(index, scope), value)
            case ast.Tuple(targets) | ast.List(targets):
                items = self.iterate(value)
                spare = len(items) - len(targets) + 1
                for star in _stars(targets):
                    if spare >= 0:
                        items[star : star + spare] = [items[star : star + spare]]
                if len(items) != len(targets):
                    raise _Failed("ValueError")
                for inner, item in zip(targets, items, strict=True):
                    self.assign(inner, item, scope)

    # Expressions.

    def evaluate(self, node: ast.expr, scope: _Scope) -> Any:
        self.charge(1)
        match node:
            case ast.Constant(value):
                return value
            case ast.Name(name):
                return self.load(name, scope)
            case ast.BinOp(left, op, right):
                return self.binary(op, self.evaluate(left, scope), self.evaluate(right, scope))
            case ast.Compare():
                return self.compare(node, scope)
            case ast.IfExp(test, body, orelse):
                return self.evaluate(body if self.evaluate(test, scope) else orelse, scope)
            case ast.UnaryOp(op, operand):
                value = self.evaluate(operand, scope)
                self.weigh(0 if type(op) is ast.Not else value)
                return self.attempt(UNARY[type(op)], value)
            case ast.Subscript(container, index):
                return self.get_item(self.evaluate(container, scope), self.evaluate(index, scope))
            case ast.Slice(lower, upper, step):
                parts = (lower, upper, step)
                return slice(*[self.evaluate(part, scope) if part else None for part in parts])
            case ast.Call(ast.Name(name), args, keywords):
                function = self.load(name, scope)  # a local variable may have taken the name
                arguments = self.elements(args, scope)
                return self.call(
                    function, arguments, {k.arg: self.evaluate(k.value, scope) for k in keywords}
                )
            case ast.BoolOp(op, operands):
                for operand in operands:
                    value = self.evaluate(operand, scope)
                    if bool(value) is (type(op) is ast.Or):
                        break
                return value
            case ast.List(nodes):
                return self.elements(nodes, scope)
            case ast.Tuple(nodes):
                return tuple(self.elements(nodes, scope))
            case ast.Set(nodes):
                return self.make_set(self.elements(nodes, scope))
            case ast.Dict(keys, values):
                return self.make_dict(self.pairs(keys, values, scope))
            case ast.ListComp(element, generators):
                return [self.evaluate(element, turn) for turn in self.turns(generators, scope)]
            case ast.SetComp(element, generators):
                turns = self.turns(generators, scope)
                return self.make_set(self.evaluate(element, turn) for turn in turns)
            case ast.DictComp(key, value, generators):
                turns = self.turns(generators, scope)
                return self.make_dict(
                    (self.evaluate(key, turn), self.evaluate(value, turn)) for turn in turns
                )
            case ast.GeneratorExp(element, generators):
                return (self.evaluate(element, turn) for turn in self.turns(generators, scope))
        raise AssertionError(f"no meaning for {type(node).__name__}")

    def load(self, name: str, scope: _Scope | None) -> Any:
        while scope:
            if name in scope.names:
                if name not in scope.values:
                    raise _Failed("UnboundLocalError")
                return scope.values[name]
            scope = scope.parent
        if name not in BUILTINS:
            raise _Failed("NameError")
        return BUILTINS[name]

    def compare(self, node: ast.Compare, scope: _Scope) -> bool:
        left = self.evaluate(node.left, scope)
        for op, comparator in zip(node.ops, node.comparators, strict=True):
            right = self.evaluate(comparator, scope)
            self.weigh(left)
            self.weigh(right)
            if not self.attempt(COMPARE[type(op)], left, right):
                return False
            left = right
        return True

    def binary(self, op: ast.operator, left: Any, right: Any, in_place: bool = False) -> Any:
        kind = type(op)
        if _is_int(left) and _is_int(right):
            bits = left.bit_length() + right.bit_length()
            if kind is ast.Pow and abs(left) > 1 and right > 0:
                bits = left.bit_length() * right
            elif kind is ast.LShift and left and right > 0:
                bits = left.bit_length() + right
            self.charge(_int_work(bits))
        elif kind is ast.Mult and type(left) in (str, list, tuple) and _is_int(right):
            self.charge(len(left) * max(right, 0))
        elif kind is ast.Mult and _is_int(left) and type(right) in (str, list, tuple):
            self.charge(max(left, 0) * len(right))
        elif kind is ast.Mod and type(left) is str:
            self.charge_format(left, right)
        else:
            if in_place and kind is ast.Add and type(left) is list:
                right = self.iterate(right)  # += takes anything it can run through
            self.weigh(left)
            self.weigh(right)
        return self.attempt(BINARY[kind][in_place], left, right)

    def charge_format(self, template: str, values: Any) -> None:
        """Pay for `template % values`: at most all the values at each %, and every width."""
        self.charge(len(template) + 10 * template.count("%") * self.weigh(values, ordered=True))
        self.charge(sum(10 ** min(len(n), 9) for n in re.findall("[0-9]+", template)))
        if "*" in template and type(values) is tuple:  # a width may be one of the values
            self.charge(sum(abs(value) for value in values if _is_int(value)))

    # Containers.

    def iterate(self, value: Any) -> list:
        """The elements of `value`, in order."""
        if type(value) is GeneratorType:
            return list(value)  # pays as it goes
        if type(value) not in (str, list, tuple, dict, set):
            raise _Failed("TypeError")
        if type(value) is set:
            self.check_order(value)
        self.charge(len(value))
        return list(value)

    def elements(self, nodes: list[ast.expr], scope: _Scope) -> list:
        """Values of the items of a display or the arguments of a call."""
        values = []
        for node in nodes:
            if type(node) is ast.Starred:
                values.extend(self.iterate(self.evaluate(node.value, scope)))
            else:
                values.append(self.evaluate(node, scope))
        return values

    def pairs(self, keys: list, values: list, scope: _Scope) -> Iterator[tuple[Any, Any]]:
        """Items of a dict display; a key of None marks `**value`."""
        for key, value in zip(keys, values, strict=True):
            if key:
                yield self.evaluate(key, scope), self.evaluate(value, scope)
            else:
                mapping = self.evaluate(value, scope)
                if type(mapping) is not dict:
                    raise _Failed("TypeError")
                yield from mapping.items()

    def make_dict(self, items: Iterable[tuple[Any, Any]]) -> dict:
        result: dict = {}
        for key, value in items:
            self.set_item(result, key, value)
        return result

    def make_set(self, items: Iterable[Any]) -> set:
        return set(self.make_dict((item, None) for item in items))

    def get_item(self, container: Any, index: Any) -> Any:
        self.charge_index(container, index)
        return self.attempt(operator.getitem, container, index)

    def set_item(self, container: Any, index: Any, value: Any) -> None:
        self.charge_index(container, index)
        if type(index) is slice and type(container) is list:
            value = self.iterate(value)
        self.attempt(operator.setitem, container, index, value)

    def charge_index(self, container: Any, index: Any) -> None:
        if type(container) is dict:
            self.weigh(index)  # a key is hashed to its depths
        elif type(index) is slice and type(container) in (str, list, tuple):
            self.charge(len(container))

    def turns(
        self, generators: list[ast.comprehension], outer: _Scope, inner: _Scope | None = None
    ) -> Iterator[_Scope]:
        """The scope of a comprehension, once a turn; `outer` is where its first source is read.

        No expression changes what another one reads, so a generator expression may read that source
        later than Python does: if an error comes of it, it comes all the same.
        """
        first, *rest = generators
        if inner is None:
            inner = _Scope(set().union(*(_targets(g.target) for g in generators)), outer)
        for item in self.iterate(self.evaluate(first.iter, outer)):
            self.charge(1)
            self.assign(first.target, item, inner)
            if all(self.evaluate(condition, inner) for condition in first.ifs):
                if rest:
                    yield from self.turns(rest, inner, inner)
                else:
                    yield inner

    # Calls.

    def call(self, function: Any, args: list, keywords: dict[str, Any]) -> Any:
        if function is sum:
            return self.sum(args, keywords)
        if function is min or function is max:
            return self.extreme(function, args, keywords)
        if function is int or function is str or function is abs:
            for arg in (*args, *keywords.values()):
                self.charge(10 * self.weigh(arg, ordered=True))  # text may be ten times as long
        elif function is not len and function is not bool:
            raise _Failed("TypeError")
        return self.attempt(function, *args, **keywords)

    def sum(self, args: list, keywords: dict[str, Any]) -> Any:
        if not 1 <= len(args) <= 2 - len(keywords) or keywords.keys() - {"start"}:
            raise _Failed("TypeError")
        total = args[1] if len(args) == 2 else keywords.get("start", 0)
        if type(total) is str:
            raise _Failed("TypeError")
        for item in self.iterate(args[0]):
            total = self.binary(ast.Add(), total, item)
        return total

    def extreme(self, pick: Callable, args: list, keywords: dict[str, Any]) -> Any:
        """min or max, as `pick` says."""
        if not args or keywords.keys() - {"key", "default"} or args[1:] and "default" in keywords:
            raise _Failed("TypeError")
        items = args if args[1:] else self.iterate(args[0])
        if not items and "default" in keywords:
            return keywords["default"]
        key = keywords.get("key")
        keys = items if key is None else [self.call(key, [item], {}) for item in items]
        self.weigh(keys)
        return items[self.attempt(pick, range(len(items)), key=keys.__getitem__)]
