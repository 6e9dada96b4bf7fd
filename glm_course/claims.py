"""Headline numbers: what the original reported, what we recorded, and whether this run agrees.

A chapter calls `claim(name, measured)`. The verdict is printed in plain words and nbval compares it
to the letter; the measured value stands between ⟨ ⟩, which the sanitiser blanks, because training
drifts with threads and instruction sets. So a number may move within its range, and a number that
leaves it changes the printed line and fails the chapter. The ranges live in `book/claims.yaml`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, SupportsFloat

import yaml

CLAIMS = Path(__file__).parents[1] / "book" / "claims.yaml"
ORIGINAL = CLAIMS.parent / "results" / "original.yaml"


@dataclass(frozen=True)
class Claim:
    """One headline number. `low` == `high` states an exact value, for counts and other integers."""

    name: str
    says: str  # the sentence the number belongs to
    original: float | None  # value the original project reported, None where it reported none
    recorded: float  # our recorded value
    low: float  # accepted range, both ends included
    high: float
    why: str  # where the range comes from
    chapter: str  # the one that measures it, "09_pretraining"
    measured_on: Mapping[str, Any] | None = None  # device, threads, torch, commit
    study: str | None = None  # "seeds: greedy_after": low and high are this study's interval

    def __post_init__(self) -> None:
        for name in ("original", "recorded", "low", "high"):
            value = getattr(self, name)
            if name == "original" and value is None:
                continue
            # YAML reads 1e-4 as text and "yes" as a truth value; only 1.0e-4 is a number.
            if type(value) not in (int, float) or not math.isfinite(value):
                raise ValueError(f"{name} must be a finite number, got {value!r}")
        for name in ("says", "why", "chapter"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"{name} must be a sentence, got {value!r}")
        if self.measured_on is not None and not isinstance(self.measured_on, Mapping):
            raise ValueError(f"measured_on must be a mapping, got {self.measured_on!r}")
        if not self.low <= self.recorded <= self.high:
            raise ValueError(
                f"recorded value {self.recorded!r} lies outside {self.low!r} to {self.high!r}"
            )

    def holds(self, measured: SupportsFloat) -> bool:
        """Whether `measured` lies in the accepted range; NaN never does."""
        return self.low <= float(measured) <= self.high


class _UniqueKeys(yaml.SafeLoader):
    """YAML keeps the last of two equal keys without a word; here the second one is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                line = key_node.start_mark.line + 1
                raise ValueError(f"line {line}: {key!r} appears twice")
            seen.add(key)
        return super().construct_mapping(node, deep)


def load(path: Path = CLAIMS) -> dict[str, Claim]:
    """Claims by name, in the order of the file.

    Raises FileNotFoundError where there is no book beside the library, and ValueError naming the
    entry for a missing, unknown or repeated field, a value of the wrong kind, or a recorded value
    outside its own range.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} does not exist: claims are part of the book, so run this from a checkout "
            "of the course, installed with `pip install -e .`"
        ) from None
    try:
        entries = yaml.load(text, Loader=_UniqueKeys) or {}  # a SafeLoader: no objects are built
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None
    known = {field.name for field in fields(Claim)}
    claims = {}
    for name, entry in entries.items():
        try:
            if not isinstance(entry, dict):
                raise ValueError("must be a mapping of fields")
            if unknown := sorted(entry.keys() - known):
                raise ValueError(f"unknown field {unknown[0]!r}")
            claims[name] = Claim(name, **entry)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path.name}: {name}: {error}") from None
    return claims


def original(path: Path = ORIGINAL) -> dict[str, Any]:
    """The figures that the original project reported, by topic; see the head of the file."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def claim(name: str, measured: SupportsFloat) -> None:
    """Print the verdict on one measured number, a float or a tensor of one element.

    Raises LookupError for a name that is not in `book/claims.yaml`.
    """
    claims = load(CLAIMS)
    if name not in claims:
        near = get_close_matches(name, claims, n=3) or list(claims)
        raise LookupError(
            f"no claim {name!r} in {CLAIMS.name}; near it: {', '.join(near) or 'none'}"
        )
    c = claims[name]
    if hasattr(measured, "detach"):  # float() of a tensor in a graph warns
        measured = measured.detach()
    verdict = "reproduced" if c.holds(measured) else "DID NOT REPRODUCE"
    original = "" if c.original is None else f"original {_show(c.original)}, "
    exact = c.low == c.high
    accepted = f"exactly {_show(c.low)}" if exact else f"{_show(c.low)} to {_show(c.high)}"
    print(f"{verdict}: {c.says}")
    print(f"  {original}accepted {accepted}, here ⟨{_show(float(measured), digits=6)}⟩")


def _show(value: float, digits: int = 12) -> str:
    """A count in full, anything else to `digits` significant digits."""
    whole = math.isfinite(value) and value == int(value)
    return f"{value:,.0f}" if whole else f"{value:,.{digits}g}"
