"""Claims: the verdict is exact, NaN never passes, and a broken entry is refused by name."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glm_course import claims
from glm_course.claims import Claim, claim, load

GOOD = {
    "says": "loss after ten steps",
    "original": 2.5,
    "recorded": 2.4,
    "low": 2.0,
    "high": 3.0,
    "why": "five seeds",
    "chapter": "09_pretraining",
}
finite = st.floats(allow_nan=False, allow_infinity=False)


def entry(name: str = "loss", **changes) -> str:
    """One entry of the file as YAML; a field set to ... is left out."""
    fields = {k: v for k, v in (GOOD | changes).items() if v is not ...}
    lines = (f"  {k}: {'null' if v is None else v}" for k, v in fields.items())
    return f"{name}:\n" + "\n".join(lines) + "\n"


@pytest.fixture
def book(tmp_path, monkeypatch):
    """Writes a claims file and makes `claim` read it."""
    path = tmp_path / "claims.yaml"
    monkeypatch.setattr(claims, "CLAIMS", path)

    def write(text: str):
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [
        (2.0, "reproduced"),
        (3.0, "reproduced"),
        (torch.tensor(2.5), "reproduced"),
        (1.9999, "DID NOT REPRODUCE"),
        (3.0001, "DID NOT REPRODUCE"),
        (math.nan, "DID NOT REPRODUCE"),
        (math.inf, "DID NOT REPRODUCE"),
        (torch.tensor(math.nan), "DID NOT REPRODUCE"),
    ],
)
def test_range_ends_are_inside_and_nan_never_passes(book, capsys, measured, verdict):
    book(entry())
    claim("loss", measured)
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"{verdict}: loss after ten steps"
    assert second.startswith("  original 2.5, accepted 2 to 3, here ⟨")


def test_only_the_measured_value_depends_on_the_run(book, capsys):
    book(entry())
    printed = []
    for value in (2.123456789, 2.5):
        claim("loss", value)
        printed.append(capsys.readouterr().out)
    assert "⟨2.12346⟩" in printed[0]
    assert "⟨2.5⟩" in printed[1]
    assert len({re.sub("⟨.*?⟩", "", lines) for lines in printed}) == 1


def test_an_exact_claim_takes_one_value_and_prints_it_in_full(book, capsys):
    book(entry(original="null", recorded=25730592, low=25730592, high=25730592))
    claim("loss", 25730592)
    claim("loss", 25730593)
    assert capsys.readouterr().out.splitlines() == [
        "reproduced: loss after ten steps",
        "  accepted exactly 25,730,592, here ⟨25,730,592⟩",
        "DID NOT REPRODUCE: loss after ten steps",
        "  accepted exactly 25,730,592, here ⟨25,730,593⟩",
    ]


@given(low=finite, high=finite, measured=st.floats())
def test_holds_is_membership_of_the_closed_range(low, high, measured):
    low, high = sorted((low, high))
    made = Claim("x", **GOOD | {"low": low, "high": high, "recorded": low})
    assert made.holds(measured) == (low <= measured <= high)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"recorded": 5.0}, "lies outside"),
        ({"low": "nan"}, "low must be a finite number"),
        ({"low": ".nan"}, "low must be a finite number"),
        ({"high": ".inf"}, "high must be a finite number"),
        ({"low": "1e-4"}, "low must be a finite number"),
        ({"low": "yes"}, "low must be a finite number"),
        ({"recorded": None}, "recorded must be a finite number"),
        ({"why": ...}, "why"),
        ({"why": None}, "why must be a sentence"),
        ({"chapter": ...}, "chapter"),
        ({"tolerance": 0.1}, "unknown field 'tolerance'"),
        ({"measured_on": "laptop"}, "measured_on must be a mapping"),
    ],
)
def test_a_broken_entry_is_refused_by_name(book, changes, complaint):
    with pytest.raises(ValueError, match=rf"claims\.yaml: loss: .*{complaint}"):
        load(book(entry(**changes)))


@pytest.mark.parametrize(
    "text",
    [entry() + entry(), entry() + "  low: 1.0\n", entry(measured_on="{torch: a, torch: b}")],
    ids=["entry", "field", "nested"],
)
def test_a_repeated_key_is_refused(book, text):
    with pytest.raises(ValueError, match="appears twice"):
        load(book(text))


def test_measured_on_is_kept(book):
    path = book(entry(measured_on="{device: cpu, threads: 2, torch: 2.13.0, commit: abc}"))
    assert load(path)["loss"].measured_on["threads"] == 2


def test_an_empty_file_has_no_claims(book):
    assert load(book("# none yet\n")) == {}


def test_an_unknown_name_lists_near_ones(book):
    book(entry("pretraining.loss_400") + entry("sampling.greedy"))
    with pytest.raises(LookupError, match=r"'pretraining\.loss'.*pretraining\.loss_400"):
        claim("pretraining.loss", 1.0)


def test_without_a_checkout_the_error_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="checkout"):
        load(tmp_path / "claims.yaml")


def test_the_claims_of_the_book_load():
    assert all(name == made.name for name, made in load().items())


def test_a_tensor_in_a_graph_is_measured_without_a_warning(book, capsys, recwarn):
    book(entry())
    claim("loss", torch.tensor(2.5, requires_grad=True) * 1)
    assert capsys.readouterr().out.startswith("reproduced")
    assert not recwarn.list
