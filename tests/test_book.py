"""What chapters must keep, each rule shown to catch what it forbids, and the tools behind them."""

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jupytext
import nbformat
import pytest
import yaml
from jupytext.compare import compare_notebooks
from markdown_it import MarkdownIt
from mdit_py_plugins.colon_fence import colon_fence_plugin
from nbformat import NotebookNode

from glm_course import book as tool
from glm_course.claims import load

BOOK = tool.BOOK
CHAPTERS = tool.chapters()
MOST_LINES, LONGEST_LINE = 40, 72
SOLUTION_SECONDS = 120  # all solutions of a chapter together

# Printed text that differs from run to run or from machine to machine.
UNSTABLE = re.compile(
    r"""\b0x[0-9a-f]{6,}                                 # an address
      | (?<![\w.])/(?:home|Users|root|tmp|work|usr|opt|private|mnt)/  # a path
      | \b[A-Z]:\\                                       # a path of Windows
      | \b\d{1,2}:\d{2}:\d{2}\b | \b20\d\d-\d\d-\d\d\b   # a time of day, a date
      | \b\d+(?:\.\d+)?\s?(?:ns|[µu]s|ms|s|sec|seconds|min|minutes|hours|it/s|s/it)\b  # a duration
    """,
    re.VERBOSE,
)
MEASURED = re.compile("⟨[^⟩]*⟩")  # blanked by the sanitiser, so it may hold anything


# Rules. Each looks at a notebook and yields complaints.


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def prose(notebook: NotebookNode) -> str:
    return "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")


def pictures(cell: NotebookNode) -> list[NotebookNode]:
    return [o for o in cell.outputs if any(k.startswith("image/") for k in o.get("data", {}))]


def directives(text: str, name: str) -> Iterator[tuple[str, str]]:
    """Argument and content of each directive `name` at the top level of `text`."""
    for token in MarkdownIt().use(colon_fence_plugin).parse(text):
        if token.type in ("fence", "colon_fence"):
            kind, _, argument = token.info.strip().partition(" ")
            if kind == f"{{{name}}}":
                yield argument.strip(), token.content


def cells_ran_in_order(notebook: NotebookNode) -> Iterator[str]:
    for number, cell in enumerate(code_cells(notebook), start=1):
        if cell.execution_count != number:
            yield f"code cell {number} has execution count {cell.execution_count}"


def no_cell_ends_with_a_semicolon(notebook: NotebookNode) -> Iterator[str]:
    for number, cell in enumerate(code_cells(notebook), start=1):
        if re.search(r";\s*(#.*)?\s*\Z", cell.source):
            yield f"code cell {number} ends with ';', which nbval does not honour"


def no_cell_escapes_nbval(notebook: NotebookNode) -> Iterator[str]:
    for number, cell in enumerate(code_cells(notebook), start=1):
        for tag in cell.metadata.get("tags", []):
            if tag.startswith("nbval") or tag in ("raises-exception", "skip-execution"):
                yield f"code cell {number} has the tag {tag}"
        if re.search(r"^\s*#\s*(NBVAL_|PYTEST_VALIDATE)", cell.source, re.MULTILINE):
            yield f"code cell {number} has a comment that switches nbval off"


def no_error_and_no_stderr(notebook: NotebookNode) -> Iterator[str]:
    for number, cell in enumerate(code_cells(notebook), start=1):
        for output in cell.outputs:
            if output.output_type == "error":
                yield f"code cell {number} raised {output.ename}"
            if output.get("name") == "stderr":
                yield f"code cell {number} wrote to stderr: {output.text[:60]!r}"


def printed(cell: NotebookNode) -> Iterator[str]:
    for output in cell.outputs:
        if "text" in output:
            yield output.text
        yield from (v for k, v in output.get("data", {}).items() if k == "text/plain")


def nothing_printed_depends_on_the_run(notebook: NotebookNode) -> Iterator[str]:
    for number, cell in enumerate(code_cells(notebook), start=1):
        for text in printed(cell):
            for match in UNSTABLE.finditer(MEASURED.sub("", text)):
                yield f"code cell {number} prints {match.group()!r}"


def claims_reproduced(notebook: NotebookNode) -> Iterator[str]:
    for number, cell in enumerate(code_cells(notebook), start=1):
        if any("DID NOT REPRODUCE" in text for text in printed(cell)):
            yield f"code cell {number} holds a claim that did not reproduce"


def code_fits_the_page(notebook: NotebookNode) -> Iterator[str]:
    for number, cell in enumerate(code_cells(notebook), start=1):
        lines = cell.source.splitlines()
        if len(lines) > MOST_LINES:
            yield f"code cell {number} has {len(lines)} lines, more than {MOST_LINES}"
        for line in lines:
            if len(line) > LONGEST_LINE:
                yield f"code cell {number} has {len(line)} characters in a line: {line[:40]}..."


def pictures_have_alt_text(notebook: NotebookNode) -> Iterator[str]:
    for number, cell in enumerate(code_cells(notebook), start=1):
        alt = cell.metadata.get("mystnb", {}).get("image", {}).get("alt") or ""
        if pictures(cell) and not alt.strip():
            yield f"code cell {number} draws a picture without mystnb: image: alt:"
        if len(pictures(cell)) > 1:
            yield f"code cell {number} draws several pictures under one alt text"
    for match in re.finditer(r"!\[\s*\]\(", prose(notebook)):
        yield f"an image in the prose has no alt text: {match.group()}"


def pictures_have_the_course_style(notebook: NotebookNode) -> Iterator[str]:
    cells = code_cells(notebook)
    if any(map(pictures, cells)) and not any("use_course_style()" in c.source for c in cells):
        yield "draws pictures and never calls use_course_style()"


def sections_are_there(notebook: NotebookNode) -> Iterator[str]:
    text = prose(notebook)
    opening = "".join(c for a, c in directives(text, "admonition") if a == "In this chapter")
    for word in ("Do", "Learn", "Need", "Costs"):
        if f"**{word}:**" not in opening:
            yield f"the admonition 'In this chapter' lacks **{word}:**"
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    for heading in ("Exercises", "Take away"):
        if heading not in headings:
            yield f"no section '## {heading}'"


def exercises_have_solutions(notebook: NotebookNode) -> Iterator[str]:
    text = prose(notebook)
    contents = [content for _, content in directives(text, "exercise")]
    labels = [label for c in contents for label in re.findall(r"^:label: *(\S+)$", c, re.MULTILINE)]
    solved = dict(directives(text, "solution"))
    if len(contents) < 2:
        yield f"has {len(contents)} exercises, fewer than two"
    if len(labels) != len(contents):
        yield "has an exercise without a label"
    for label in labels:
        if label not in solved:
            yield f"exercise {label} has no solution"
        elif not re.search(r"^:class: *dropdown$", solved[label], re.MULTILINE):
            yield f"the solution of {label} is not folded"


RULES: list[Callable[[NotebookNode], Iterator[str]]] = [
    cells_ran_in_order,
    no_cell_ends_with_a_semicolon,
    no_cell_escapes_nbval,
    no_error_and_no_stderr,
    nothing_printed_depends_on_the_run,
    claims_reproduced,
    code_fits_the_page,
    pictures_have_alt_text,
    pictures_have_the_course_style,
    sections_are_there,
    exercises_have_solutions,
]


def claims_made(notebook: NotebookNode) -> list[str]:
    """What each verdict among the outputs is about, in order: the `says` of the claim."""
    text = "\n".join(text for cell in code_cells(notebook) for text in printed(cell))
    return re.findall(r"^(?:reproduced|DID NOT REPRODUCE): (.+)$", text, re.MULTILINE)


def solutions(notebook: NotebookNode) -> list[tuple[str, str]]:
    """Label and code of every ```python block inside a solution."""
    return [
        (label, token.content)
        for label, content in directives(prose(notebook), "solution")
        for token in MarkdownIt().parse(content)
        if token.type == "fence" and token.info.strip() == "python"
    ]


def run_solutions(blocks: list[tuple[str, str]], seconds: float = SOLUTION_SECONDS) -> None:
    """Run each block in a namespace of its own, all in one fresh process with the book as cwd.

    Raises CalledProcessError with the traceback in stderr, or TimeoutExpired.
    """
    program = (
        "import json, sys\n"
        "for label, code in json.load(sys.stdin):\n"
        "    exec(compile(code, f'<solution of {label}>', 'exec'), {'__name__': '__main__'})\n"
    )
    subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(blocks),
        cwd=BOOK,
        env={**os.environ, "MPLBACKEND": "agg", "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=seconds,
        check=True,
    )


# The rules catch what they forbid.

SMALL = (
    tool.HEADER
    + """# Small

````{admonition} In this chapter
**Do:** a. **Learn:** b. **Need:** c. **Costs:** d.
````

```{code-cell} ipython3
from glm_course.claims import claim
from glm_course.plots import use_course_style

use_course_style()
claim("small.one", 1)
```

```{code-cell} ipython3
---
mystnb:
  image:
    alt: A line.
---
print("two")
```

## Exercises

````{exercise}
:label: ex-a
Why?
````

````{solution} ex-a
:class: dropdown
So:

```python
assert 1 + 1 == 2
```
````

````{exercise}
:label: ex-b
How?
````

````{solution} ex-b
:class: dropdown
Thus.
````

## Take away

Enough.
"""
)


def stream(text: str, name: str = "stdout") -> NotebookNode:
    return nbformat.v4.new_output("stream", name=name, text=text)


def picture() -> NotebookNode:
    return nbformat.v4.new_output("display_data", data={"image/png": "AA==", "text/plain": "<F>"})


def small() -> NotebookNode:
    """A chapter that keeps every rule, as if executed."""
    notebook = jupytext.reads(SMALL, fmt="md:myst")
    for number, cell in enumerate(code_cells(notebook), start=1):
        cell.execution_count = number
    code_cells(notebook)[0].outputs = [stream("reproduced: one\n  accepted 1 to 2, here ⟨3 s⟩\n")]
    code_cells(notebook)[1].outputs = [picture(), stream("two\n")]
    notebook.metadata.glm_course = {
        "code": tool.code_hash(notebook),
        "library": tool.library_hash(),
        "source": tool.source_hash(notebook),
    }
    return notebook


def prints(text: str, name: str = "stdout") -> Callable[[NotebookNode], None]:
    return lambda n: code_cells(n)[1].outputs.append(stream(text, name))


def source(old: str, new: str) -> Callable[[NotebookNode], None]:
    def change(notebook):
        changed = [cell for cell in notebook.cells if old in cell.source]
        assert changed, f"{old!r} is not in the sample"
        for cell in changed:
            cell.source = cell.source.replace(old, new)

    return change


def cell(**changes) -> Callable[[NotebookNode], None]:
    return lambda n: code_cells(n)[1].update(changes)


def error() -> NotebookNode:
    return nbformat.v4.new_output("error", ename="ValueError", evalue="x", traceback=[])


BREAKS = [
    (cells_ran_in_order, cell(execution_count=None)),
    (cells_ran_in_order, cell(execution_count=7)),
    (no_cell_ends_with_a_semicolon, source('print("two")', "draw();")),
    (no_cell_ends_with_a_semicolon, source('print("two")', "draw();  # quiet\n")),
    (no_cell_escapes_nbval, lambda n: code_cells(n)[1].metadata.update(tags=["nbval-skip"])),
    (no_cell_escapes_nbval, lambda n: code_cells(n)[1].metadata.update(tags=["raises-exception"])),
    (no_cell_escapes_nbval, source('print("two")', '# NBVAL_IGNORE_OUTPUT\nprint("two")')),
    (no_error_and_no_stderr, lambda n: code_cells(n)[1].outputs.append(error())),
    (no_error_and_no_stderr, prints("UserWarning", "stderr")),
    (nothing_printed_depends_on_the_run, prints("<object at 0x7f3a2c0d51b0>")),
    (nothing_printed_depends_on_the_run, prints("saved to /home/me/model.pt")),
    (nothing_printed_depends_on_the_run, prints(r"saved to C:\model.pt")),
    (nothing_printed_depends_on_the_run, prints("took 1.3 s")),
    (nothing_printed_depends_on_the_run, prints("12.5ms a step")),
    (nothing_printed_depends_on_the_run, prints("at 12:31:05")),
    (nothing_printed_depends_on_the_run, prints("on 2026-03-01")),
    (claims_reproduced, prints("DID NOT REPRODUCE: one")),
    (code_fits_the_page, source('print("two")', "x = 1\n" * 41)),
    (code_fits_the_page, source('print("two")', "x = " + "1" * 69)),
    (pictures_have_alt_text, lambda n: code_cells(n)[1].metadata.clear()),
    (pictures_have_alt_text, lambda n: code_cells(n)[1].metadata.mystnb.image.update(alt=" ")),
    (pictures_have_alt_text, lambda n: code_cells(n)[1].outputs.append(picture())),
    (pictures_have_alt_text, source("Enough.", "![](picture.png)")),
    (pictures_have_the_course_style, source("use_course_style()", "pass")),
    (sections_are_there, source("**Costs:**", "Costs:")),
    (sections_are_there, source("In this chapter", "Here")),
    (sections_are_there, source("## Take away", "## The end")),
    (sections_are_there, source("## Exercises", "### Exercises")),
    (exercises_have_solutions, source(":label: ex-b", ":label: ex-c")),
    (exercises_have_solutions, source(":label: ex-b\n", "")),
    (exercises_have_solutions, source("{solution} ex-a", "{admonition} ex-a")),
    (exercises_have_solutions, source(":class: dropdown\nThus", "Thus")),
    (exercises_have_solutions, source("{exercise}", "{note}")),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_good_chapter_keeps_the_rule(rule):
    assert list(rule(small())) == []


@pytest.mark.parametrize(("rule", "breaks"), BREAKS, ids=lambda x: getattr(x, "__name__", ""))
def test_a_broken_chapter_is_caught(rule, breaks):
    notebook = small()
    breaks(notebook)
    assert list(rule(notebook))


def test_every_rule_is_shown_to_catch_something():
    assert {rule for rule, _ in BREAKS} == set(RULES)


@pytest.mark.parametrize("text", ["640x480", "192 streams", "a/b", "0x1f", "2 x 3", "§ 12:30"])
def test_ordinary_text_is_not_taken_for_unstable(text):
    assert not UNSTABLE.search(text)


def test_claims_are_found_among_the_outputs():
    notebook = small()
    prints("DID NOT REPRODUCE: two\n  accepted 1 to 2, here ⟨3⟩\n")(notebook)
    assert claims_made(notebook) == ["one", "two"]


def test_solutions_are_found_and_a_wrong_one_fails():
    blocks = solutions(small())
    assert blocks == [("ex-a", "assert 1 + 1 == 2\n")]
    run_solutions(blocks)
    with pytest.raises(subprocess.CalledProcessError) as failure:
        run_solutions([*blocks, ("ex-b", "assert 1 + 1 == 3")])
    assert "solution of ex-b" in failure.value.stderr


def test_solutions_do_not_see_each_other():
    with pytest.raises(subprocess.CalledProcessError):
        run_solutions([("ex-a", "x = 1"), ("ex-b", "print(x)")])


def test_a_solution_that_hangs_is_stopped():
    with pytest.raises(subprocess.TimeoutExpired):
        run_solutions([("ex-a", "while True: pass")], seconds=0.5)


# The tools that keep text and notebook in step.


@pytest.fixture
def pair(tmp_path):
    """A book of one chapter, executed and in step."""
    (tmp_path / "01_small.md").write_text(SMALL, encoding="utf-8")
    tool.write(small(), tmp_path / "01_small.ipynb")
    return tmp_path


def edit_text(folder: Path, old: str, new: str) -> None:
    path = folder / "01_small.md"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def edit_notebook(folder: Path, old: str, new: str) -> None:
    path = folder / "01_small.ipynb"
    notebook = jupytext.read(path)
    source(old, new)(notebook)
    tool.write(notebook, path)


def both(folder: Path) -> tuple[NotebookNode, NotebookNode]:
    return jupytext.read(folder / "01_small.md"), jupytext.read(folder / "01_small.ipynb")


WORDS = ("Enough.", "Quite enough.")
CODE = ('print("two")', 'print("zwei")')


def test_an_executed_pair_is_fresh(pair):
    assert tool.state("01_small", pair)[0] == "fresh"


def test_a_text_without_notebook_has_to_run(pair):
    (pair / "01_small.ipynb").unlink()
    assert tool.state("01_small", pair)[0] == "run"


def test_code_edited_in_the_text_has_to_run(pair):
    edit_text(pair, *CODE)
    assert tool.state("01_small", pair)[0] == "run"


def test_code_edited_in_both_alike_has_to_run(pair):
    edit_text(pair, *CODE)
    edit_notebook(pair, *CODE)
    assert tool.state("01_small", pair)[0] == "run"


def test_other_library_code_has_to_run(pair, monkeypatch):
    monkeypatch.setattr(tool, "library_hash", lambda: "other")
    assert tool.state("01_small", pair) == ("run", "was executed with other library code")


def test_prose_edited_in_the_text_reaches_the_notebook_and_keeps_outputs(pair):
    edit_text(pair, *WORDS)
    before = [c.outputs for c in code_cells(both(pair)[1])]
    assert tool.state("01_small", pair)[0] == "prose"
    tool.sync_chapter("01_small", pair)
    text, notebook = both(pair)
    compare_notebooks(notebook, text, fmt="md:myst", allow_expected_differences=True)
    assert [c.outputs for c in code_cells(notebook)] == before
    assert [c.execution_count for c in code_cells(notebook)] == [1, 2]
    assert tool.state("01_small", pair)[0] == "fresh"


def test_prose_edited_in_the_notebook_reaches_the_text(pair):
    edit_notebook(pair, *WORDS)
    assert tool.state("01_small", pair)[0] == "notebook"
    tool.sync_chapter("01_small", pair)
    text = (pair / "01_small.md").read_text(encoding="utf-8")
    assert text == SMALL.replace(*WORDS)
    assert tool.state("01_small", pair)[0] == "fresh"


def test_code_edited_in_the_notebook_reaches_the_text_and_has_to_run(pair):
    edit_notebook(pair, *CODE)
    tool.sync_chapter("01_small", pair)
    assert (pair / "01_small.md").read_text(encoding="utf-8") == SMALL.replace(*CODE)
    assert tool.state("01_small", pair)[0] == "run"


def test_a_lost_text_comes_back_from_the_notebook(pair):
    (pair / "01_small.md").unlink()
    tool.sync_chapter("01_small", pair)
    assert (pair / "01_small.md").read_text(encoding="utf-8") == SMALL


def test_a_text_in_another_form_is_brought_into_the_one_form(pair):
    edit_text(
        pair, "---\nmystnb:\n  image:\n    alt: A line.\n---", ":mystnb: {image: {alt: A line.}}\n"
    )
    assert tool.state("01_small", pair)[0] == "prose"
    tool.sync_chapter("01_small", pair)
    assert (pair / "01_small.md").read_text(encoding="utf-8") == SMALL
    assert tool.state("01_small", pair)[0] == "fresh"


@pytest.mark.parametrize("other", [("Enough.", "Too much."), CODE], ids=["prose", "code"])
def test_different_edits_on_both_sides_are_refused_and_neither_is_lost(pair, other):
    edit_text(pair, *WORDS)
    edit_notebook(pair, *other)
    files = [(pair / f"01_small.{kind}").read_bytes() for kind in ("md", "ipynb")]
    assert tool.state("01_small", pair)[0] == "conflict"
    with pytest.raises(ValueError, match="differently"):
        tool.sync_chapter("01_small", pair)
    assert files == [(pair / f"01_small.{kind}").read_bytes() for kind in ("md", "ipynb")]


def test_sync_of_a_fresh_pair_changes_nothing(pair):
    files = [(pair / f"01_small.{kind}").read_bytes() for kind in ("md", "ipynb")]
    tool.sync_chapter("01_small", pair)
    assert files == [(pair / f"01_small.{kind}").read_bytes() for kind in ("md", "ipynb")]


def with_widgets(*ids: str) -> NotebookNode:
    """The sample with two widget models of the given ids, one referring to the other."""
    notebook = small()
    state = {
        ids[0]: {"model_name": "LayoutModel", "state": {}},
        ids[1]: {"model_name": "BoxModel", "state": {"layout": f"IPY_MODEL_{ids[0]}"}},
    }
    notebook.metadata.widgets = {tool.WIDGETS: {"state": state}}
    view = {"application/vnd.jupyter.widget-view+json": {"model_id": ids[1]}, "text/plain": "Box"}
    code_cells(notebook)[1].outputs = [nbformat.v4.new_output("display_data", data=view)]
    return notebook


def test_normalising_hides_ids_and_timings_and_nothing_else():
    one, two = with_widgets("f" * 32, "0" * 32), with_widgets("1" * 32, "a" * 32)
    two.metadata.language_info = {"version": "3.13.1"}
    code_cells(two)[0].metadata.execution = {"iopub.status.busy": "2026-01-01"}
    assert nbformat.writes(tool.normalise(one)) == nbformat.writes(tool.normalise(two))
    code_cells(two)[0].outputs = [stream("other")]
    assert nbformat.writes(tool.normalise(one)) != nbformat.writes(tool.normalise(two))


def test_a_renamed_widget_is_still_the_one_that_is_shown():
    notebook = tool.normalise(with_widgets("f" * 32, "0" * 32))
    state = notebook.metadata.widgets[tool.WIDGETS].state
    data = code_cells(notebook)[1].outputs[0].data
    shown = state[data["application/vnd.jupyter.widget-view+json"].model_id]
    assert shown.model_name == "BoxModel"
    assert state[shown.state.layout.removeprefix("IPY_MODEL_")].model_name == "LayoutModel"


def test_normalising_a_written_notebook_again_changes_nothing(tmp_path):
    path = tmp_path / "a.ipynb"
    tool.write(with_widgets("f" * 32, "0" * 32), path)
    first = path.read_bytes()
    tool.write(jupytext.read(path), path)
    assert path.read_bytes() == first


def test_normalising_leaves_its_argument_alone():
    notebook = with_widgets("f" * 32, "0" * 32)
    before = copy.deepcopy(notebook)
    tool.normalise(notebook)
    assert notebook == before


def test_executing_twice_gives_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "library_hash", lambda: "this")
    text = SMALL.replace('claim("small.one", 1)', "x = 1").replace('print("two")', DRAW)
    (tmp_path / "01_small.md").write_text(text, encoding="utf-8")
    files = []
    for _ in range(2):
        notebook, seconds, _ = tool.execute("01_small", tmp_path)
        tool.write(notebook, tmp_path / "01_small.ipynb")
        files.append((tmp_path / "01_small.ipynb").read_bytes())
    assert seconds > 0
    assert files[0] == files[1]
    assert pictures(code_cells(notebook)[1])
    assert notebook.metadata.widgets[tool.WIDGETS]["state"]
    assert tool.state("01_small", tmp_path)[0] == "fresh"


DRAW = """import ipywidgets
import matplotlib.pyplot as plt

plt.plot([1, 2])
plt.show()
print({"a", "b", "c"})
ipywidgets.IntSlider(3)"""


# The chapters of the book keep the rules.


def toc_entries() -> list[str]:
    toc = yaml.safe_load((BOOK.parent / "_toc.yml").read_text(encoding="utf-8"))
    return [toc["root"], *(c["file"] for part in toc["parts"] for c in part["chapters"])]


def test_the_contents_list_every_page_once_and_no_other():
    pages = {f"book/{chapter}.ipynb" for chapter in CHAPTERS}
    pages |= {f"book/{p.name}" for p in BOOK.glob("*.md") if p.stem not in CHAPTERS}
    assert sorted(toc_entries()) == sorted(pages)


def test_chapters_are_in_the_order_of_their_numbers():
    names = [Path(entry).stem for entry in toc_entries() if entry.endswith(".ipynb")]
    assert names == sorted(names)


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_chapter_is_a_pair_in_step(chapter):
    text, notebook = (jupytext.read(BOOK / f"{chapter}.{kind}") for kind in ("md", "ipynb"))
    compare_notebooks(notebook, text, fmt="md:myst", allow_expected_differences=True)
    assert (BOOK / f"{chapter}.md").read_text(encoding="utf-8") == tool.text_of(notebook)


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_chapter_was_executed_with_this_library(chapter):
    kind, why = tool.state(chapter)
    assert kind == "fresh", f"{chapter} {why}: python -m glm_course.book check says what to run"


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_notebook_is_normalised(chapter, tmp_path):
    path = BOOK / f"{chapter}.ipynb"
    tool.write(jupytext.read(path), tmp_path / path.name)
    assert (tmp_path / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_chapter_keeps_the_rule(chapter, rule):
    assert list(rule(jupytext.read(BOOK / f"{chapter}.ipynb"))) == []


def test_every_claim_is_made_once_by_the_chapter_it_names_and_no_other_is():
    stated = sorted((claim.chapter, claim.says) for claim in load().values())
    notebooks = {chapter: jupytext.read(BOOK / f"{chapter}.ipynb") for chapter in CHAPTERS}
    assert stated == sorted((c, says) for c in CHAPTERS for says in claims_made(notebooks[c]))


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_solutions_run(chapter):
    run_solutions(solutions(jupytext.read(BOOK / f"{chapter}.md")))
