"""Definitions taken from chapters: what is kept, and that nothing else runs."""

import pytest

from glm_course import plain as module
from glm_course.plain import plain

PAGE = """---
kernelspec:
  display_name: Python 3
  name: python3
---

# A chapter

```{code-cell} ipython3
import math

LIMIT = 3
start = 1 / 0
TABLE = math.nothing
```

```{code-cell} ipython3
def area(r):
    return math.pi * r**2 + LIMIT


class Shape:
    sides = 4


print("this must not run", 1 / 0)
```
"""


@pytest.fixture
def book(tmp_path, monkeypatch):
    (tmp_path / "99_chapter.md").write_text(PAGE, encoding="utf-8")
    monkeypatch.setattr(module, "BOOK", tmp_path)
    plain.cache_clear()
    yield
    plain.cache_clear()


def test_definitions_work_and_nothing_else_runs(book, capsys):
    chapter = plain("99_chapter")
    assert chapter.area(0) == chapter.LIMIT == 3
    assert chapter.Shape.sides == 4
    assert not hasattr(chapter, "start") and not hasattr(chapter, "TABLE")
    assert capsys.readouterr().out == ""


def test_a_chapter_that_is_not_there_is_named(book):
    with pytest.raises(FileNotFoundError, match="98_none"):
        plain("98_none")


def test_a_chapter_of_the_book_gives_its_loss():
    assert callable(plain("09_pretraining").loss_plain)
