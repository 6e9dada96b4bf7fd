"""Chapters: execute them, keep text and notebook in step, and tell what is stale.

    python -m glm_course.book run 02_bytes      execute, and write the notebook
    python -m glm_course.book sync 02_bytes     carry an edit across without executing
    python -m glm_course.book check             what is stale, and what mends it

A chapter is a pair: `book/NN_title.md`, which authors edit, and `book/NN_title.ipynb`, the same
with outputs, which the rendered book shows and nbval compares. Executing unchanged code again gives
the same bytes, because whatever differs from run to run is renamed or dropped. A notebook remembers
what it was executed from, so that neither old outputs nor a lost edit go unnoticed.
"""

import copy
import hashlib
import json
import os
import re
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

import jupytext
import nbformat
import typer
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbclient.util import run_sync
from nbformat import NotebookNode
from tqdm import tqdm

from glm_course.receipt import library_hash

LIBRARY = Path(__file__).parent
BOOK = LIBRARY.parent / "book"
CELL_SECONDS = 1800  # limit of one cell, as for nbval in pyproject.toml
# What a chapter's kernel gets beside the caller's environment: waiting threads that sleep and leave
# the cores to others, inline figures even where the shell names another backend, and no progress
# bars, which show times.
KERNEL = {
    "GLM_COURSE_PROGRESS": "off",
    "OMP_WAIT_POLICY": "PASSIVE",
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
}
KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}
PAIRING = {"default_lexer": "ipython3", "formats": "ipynb,md:myst"}
HEADER = """---
jupytext:
  formats: ipynb,md:myst
  text_representation:
    extension: .md
    format_name: myst
kernelspec:
  display_name: Python 3
  language: python
  name: python3
---

"""
WIDGETS = "application/vnd.jupyter.widget-state+json"

app = typer.Typer(
    help=__doc__.split("\n")[0],
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
State = Literal["fresh", "run", "prose", "notebook", "conflict"]


def chapters(book: Path = BOOK) -> list[str]:
    """Names of the chapters, in order: every `NN_title` that has a text or a notebook."""
    found = (p for p in book.glob("[0-9][0-9]_*") if p.suffix in (".md", ".ipynb"))
    return sorted({p.stem for p in found})


def body(notebook: NotebookNode) -> str:
    """The notebook as MyST text without header: equal for a text and its notebook."""
    # Cell options in one order: a notebook file has them sorted, a text as its author wrote them.
    cells = json.loads(json.dumps(notebook.cells, sort_keys=True))
    bare = nbformat.v4.new_notebook(cells=[nbformat.from_dict(cell) for cell in cells])
    bare.metadata = {
        "kernelspec": KERNELSPEC,
        "jupytext": {"default_lexer": "ipython3", "notebook_metadata_filter": "-all"},
    }
    return jupytext.writes(bare, fmt="md:myst")


def text_of(notebook: NotebookNode) -> str:
    """The text of a chapter in the one form it has on disk.

    JupyterLab does not open a pair that differs, be it in the order of a cell's options.
    """
    return HEADER + body(notebook)


def source_hash(notebook: NotebookNode) -> str:
    """SHA-256 of prose, code and cell options."""
    return hashlib.sha256(body(notebook).encode()).hexdigest()


def code_hash(notebook: NotebookNode) -> str:
    """SHA-256 of the code alone, cell by cell: prose and cell options may change under it."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256(json.dumps(code).encode()).hexdigest()


def state(chapter: str, book: Path = BOOK) -> tuple[State, str]:
    """What a chapter needs, and why.

    "run": execute it. "prose": only words or their form changed since it was executed, so `sync`
    can keep the outputs. "notebook": the notebook alone was edited, so `sync` must bring the text
    up to date. "conflict": both were edited, differently.
    """
    text_path, notebook_path = book / f"{chapter}.md", book / f"{chapter}.ipynb"
    if not notebook_path.exists():
        return "run", "has not been executed"
    if not text_path.exists():
        return "notebook", "has a notebook but no text"
    text, notebook = jupytext.read(text_path), jupytext.read(notebook_path)
    executed = notebook.metadata.get("glm_course", {})
    text_hash, notebook_hash = source_hash(text), source_hash(notebook)
    if text_hash != notebook_hash and notebook_hash != executed.get("source"):
        if text_hash == executed.get("source"):
            return "notebook", "was edited in the notebook alone"
        return "conflict", "was edited in the text and in the notebook, differently"
    # From here the text is the newer side, or both are the same.
    if code_hash(text) != executed.get("code"):
        return "run", "holds code that has not been executed"
    if executed.get("library") != library_hash():
        return "run", "was executed with other library code"
    if text_hash != executed.get("source"):
        return "prose", "holds prose that its notebook does not record yet"
    if text_path.read_text(encoding="utf-8") != text_of(text):
        return "prose", "is not written the way Jupytext writes it"
    return "fresh", "is up to date"


def normalise(notebook: NotebookNode) -> NotebookNode:
    """A copy without what differs from run to run: ids, timings, the Python version.

    Normalising twice changes nothing.
    """
    notebook = copy.deepcopy(notebook)
    kept = {k: notebook.metadata[k] for k in ("glm_course", "widgets") if k in notebook.metadata}
    notebook.metadata = nbformat.from_dict({"jupytext": PAIRING, "kernelspec": KERNELSPEC, **kept})
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i:03d}"
        if cell.cell_type == "code":
            for key in ("execution", "ExecuteTime", "trusted"):
                cell.metadata.pop(key, None)
    return _rename_widgets(notebook)


def _rename_widgets(notebook: NotebookNode) -> NotebookNode:
    """Number the widget models, which carry random ids."""
    state = notebook.metadata.get("widgets", {}).get(WIDGETS, {}).get("state", {})
    if not state:
        return notebook
    # Equal digits, so that the order of names, in which nbformat writes them, is the order here.
    names = {old: f"{i:032x}" for i, old in enumerate(state)}
    pattern = re.compile("|".join(map(re.escape, names)))
    text = pattern.sub(lambda match: names[match.group()], json.dumps(notebook))
    return nbformat.from_dict(json.loads(text))


def write(notebook: NotebookNode, path: Path) -> None:
    """Write a normalised notebook as UTF-8 with \\n line ends."""
    _write(path, nbformat.writes(normalise(notebook)) + "\n")


def write_text(notebook: NotebookNode, path: Path) -> None:
    """Write a chapter's text in its one form."""
    _write(path, text_of(notebook))


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


def execute(chapter: str, book: Path = BOOK) -> tuple[NotebookNode, float, float | None]:
    """Execute a chapter's text in a fresh kernel; nothing is written.

    Returns the notebook, the seconds it took and the peak resident memory of its kernel in MiB
    (None on Windows). Raises CellExecutionError, CellTimeoutError or DeadKernelError.
    """
    notebook = jupytext.read(book / f"{chapter}.md")
    notebook.metadata.glm_course = {
        "code": code_hash(notebook),
        "library": library_hash(),
        "source": source_hash(notebook),
    }
    code_cells = sum(cell.cell_type == "code" for cell in notebook.cells)
    bar = tqdm(total=code_cells, desc=chapter, unit="cell", leave=False)
    client = NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name=KERNELSPEC["name"],
        coalesce_streams=True,  # else one print may come in one piece or in two
        record_timing=False,
        extra_arguments=["--log-level=ERROR"],  # no warning that the kernel talks over loopback
        resources={"metadata": {"path": str(book)}},
        on_cell_executed=lambda **_: bar.update(),
    )
    # A fixed hash seed gives sets one order here; nbval leaves it random and so finds a chapter
    # that depends on it.
    environment = {**os.environ, **KERNEL, "PYTHONHASHSEED": "0"}
    start = time.perf_counter()
    with bar, client.setup_kernel(env=environment):
        for index, cell in enumerate(notebook.cells):
            client.execute_cell(cell, index)
        seconds = time.perf_counter() - start
        peak = _peak_mib(client)
    client.set_widgets_metadata()
    return notebook, seconds, peak


def _peak_mib(client: NotebookClient) -> float | None:
    """Peak resident memory of the kernel so far, in MiB."""
    if sys.platform == "win32":
        return None
    kilo = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    usage = "__import__('resource').getrusage(__import__('resource').RUSAGE_SELF).ru_maxrss"
    ask = run_sync(client.kc.execute_interactive)
    reply = ask("", user_expressions={"peak": usage}, timeout=60)
    return int(reply["content"]["user_expressions"]["peak"]["data"]["text/plain"]) * kilo / 2**20


def record(results: dict[str, dict], path: Path) -> None:
    """Merge `results`, by chapter, into the JSON file at `path`."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.parent.mkdir(exist_ok=True)
    _write(path, json.dumps(known | results, indent=2, sort_keys=True) + "\n")


def sync_chapter(chapter: str, book: Path = BOOK) -> str:
    """Carry an edit across the pair without executing; returns what was done, in words.

    Raises ValueError when both sides were edited differently: keep one and delete the other.
    """
    kind, why = state(chapter, book)
    text_path, notebook_path = book / f"{chapter}.md", book / f"{chapter}.ipynb"
    if kind == "conflict":
        raise ValueError(
            f"{chapter} {why}: move what you want to keep into one of them, delete the other, and "
            "run this again"
        )
    if kind == "notebook":
        notebook = jupytext.read(notebook_path)
        done = "text written from the notebook"
    elif kind == "prose":
        text, notebook = jupytext.read(text_path), jupytext.read(notebook_path)
        old = [cell for cell in notebook.cells if cell.cell_type == "code"]
        new = [cell for cell in text.cells if cell.cell_type == "code"]
        for before, after in zip(old, new, strict=True):
            after.outputs, after.execution_count = before.outputs, before.execution_count
        notebook.cells = text.cells
        done = "text carried into the notebook, outputs kept"
    else:
        return f"nothing to carry across: it {why}"
    # The outputs still belong to this code; words around it may have changed.
    executed = notebook.metadata.get("glm_course", {})
    if code_hash(notebook) == executed.get("code"):
        executed["source"] = source_hash(notebook)
    write_text(notebook, text_path)
    write(notebook, notebook_path)
    return done


def _named(names: list[str]) -> list[str]:
    """Chapters named on the command line, by name or by path; all when none is named."""
    known = chapters()
    chosen = [Path(name).stem for name in names] or known
    if unknown := [name for name in chosen if name not in known]:
        raise typer.BadParameter(f"no chapter {unknown[0]!r}; there are: {', '.join(known)}")
    return chosen


Names = Annotated[list[str], typer.Argument(metavar="[CHAPTER]...", help="All when none is named.")]


@app.command()
def run(
    names: Names = (),
    keep_record: Annotated[
        bool, typer.Option("--record", help="Write seconds and memory to book/results.")
    ] = False,
) -> None:
    """Execute chapters and write their notebooks."""
    chosen = _named(list(names))
    for chapter in chosen:
        kind, why = state(chapter)
        if kind in ("notebook", "conflict"):
            sys.exit(f"{chapter} {why}: run `python -m glm_course.book sync {chapter}` first")
    for chapter in chosen:
        text = BOOK / f"{chapter}.md"
        write_text(jupytext.read(text), text)  # before and not after: authors may go on writing
        try:
            notebook, seconds, peak = execute(chapter)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            sys.exit(f"{chapter} failed; its notebook is as it was.\n{error}")
        write(notebook, BOOK / f"{chapter}.ipynb")
        memory = "" if peak is None else f", peak {peak:.0f} MiB"
        print(f"{chapter}: {seconds:.1f} s{memory}", flush=True)
        if keep_record:
            measured = {
                "seconds": round(seconds, 1),
                "peak_mib": peak and round(peak),
                "cores": os.cpu_count(),
                "torch": version("torch"),
            }
            record({chapter: measured}, BOOK / "results" / "execution.json")


@app.command()
def sync(names: Names = ()) -> None:
    """Carry an edit from text to notebook or back, without executing."""
    for chapter in _named(list(names)):
        try:
            print(f"{chapter}: {sync_chapter(chapter)}")
        except ValueError as error:
            sys.exit(str(error))


@app.command()
def check() -> None:
    """Say which chapters are stale and what mends them; exit status 1 if any is."""
    states = {chapter: state(chapter) for chapter in chapters()}
    stale = {chapter: found for chapter, found in states.items() if found[0] != "fresh"}
    for chapter, (kind, why) in stale.items():
        verb = "run" if kind == "run" else "sync"
        print(f"{chapter} {why}: python -m glm_course.book {verb} {chapter}")
    print(f"{len(states) - len(stale)} of {len(states)} chapters are up to date")
    sys.exit(bool(stale))


if __name__ == "__main__":
    app()
