"""One loop under every training run: steps, checkpoints, receipt, interruption, resumption.

A run is a folder:

    receipt.json    settings, environment, one row a step, hashes, outcome
    step_0100/ ...  weights at each milestone
    latest/         weights, optimiser and progress of the last save; gone when the run finishes

A step depends only on its number and on what `latest` holds (data and random numbers are made anew
from seeds), so a run killed at any moment resumes to the same weights, bit for bit.
"""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from glm_course import checkpoint, receipt
from glm_course.train.optimizer import MasterAdamW

Row = dict[str, Any]


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C until the block ends, then let it through: a step is never half done.

    Signals reach the main thread only; elsewhere nothing needs holding.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held = []
    before = signal.signal(signal.SIGINT, lambda *_: held.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if held:
        signal.raise_signal(signal.SIGINT)  # to whoever handles it: KeyboardInterrupt as a rule


def progress(rows: Iterable[Row], total: int, unit: str = "step") -> Iterator[Row]:
    """Pass rows on under a progress bar: a widget in a notebook, a line on stderr in a terminal.

    No bar where stderr is no terminal, or where GLM_COURSE_PROGRESS=off (as when chapters are
    tested, since a bar shows times). The bar shows what rows hold: loss, tokens per second.
    """
    shell = "IPython" in sys.modules and sys.modules["IPython"].get_ipython()
    notebook = hasattr(shell, "kernel")
    off = os.environ.get("GLM_COURSE_PROGRESS") == "off" or not (notebook or sys.stderr.isatty())
    with tqdm(total=total, unit=unit, disable=off) as bar:
        for row in rows:
            bar.update(row["step"] - bar.n)
            shown = {k: f"{row[k]:.4f}" for k in ("loss", "passing") if row.get(k) is not None}
            if row.get("tokens"):
                shown["tokens/s"] = f"{row['tokens'] / max(row['seconds'], 1e-9):.0f}"
            bar.set_postfix(shown, refresh=False)
            yield row


def step_name(step: int) -> str:
    """Folder of the milestone after `step` steps."""
    return f"step_{step:04d}"


def run_steps(
    kind: str,
    settings: dict[str, Any],
    optimizer: MasterAdamW,
    steps: int,
    step: Callable[[int], Row],
    *,
    output: Path | None,
    resume: bool = False,
    milestones: Iterable[int] = (),
    at_milestone: Callable[[int], Row] | None = None,
    save_every: int = 50,
    summarise: Callable[[list[Row]], dict[str, Any]] | None = None,
    keep_weights: bool = True,
    max_seconds: float | None = None,
) -> Iterator[Row]:
    """Run step(0) to step(steps - 1), yielding each row with its number and seconds added.

    Claims `output`, and refuses what is wrong, when it is called and not at the first row.

    `step` does one step and returns its row. At each milestone (the last step is always one) the
    weights are saved, and at_milestone(done) adds an entry to the receipt's `milestones`. With
    `output` None nothing is written; without `keep_weights` the receipt alone, so that the run
    cannot be resumed. The step in which `max_seconds` pass is the last one.

    Raises FileExistsError when `output` holds something and `resume` is false; ValueError when a
    run to resume has other settings or is finished.
    """
    model, marks = optimizer.model, {*milestones, steps}
    if any(not 0 <= mark <= steps for mark in marks):
        raise ValueError(f"milestones must lie between 0 and {steps}: {sorted(marks)}")
    device = str(model.embedding.weight.device)
    report = {
        "kind": kind,
        "status": "running",
        "settings": settings,
        "environment": receipt.environment(device, str(optimizer.dtype)),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "steps": 0,
        "seconds": 0.0,
        "rows": [],
        "milestones": [],
    }
    if output is not None:
        _claim(output, report, resume)
    if resume and output is not None:
        _restore(output, report, optimizer)
    return _run_steps(
        report,
        optimizer,
        steps,
        step,
        output,
        marks,
        at_milestone,
        save_every,
        summarise,
        keep_weights,
        max_seconds,
    )


def _run_steps(
    report: dict[str, Any],
    optimizer: MasterAdamW,
    steps: int,
    step: Callable[[int], Row],
    output: Path | None,
    marks: set[int],
    at_milestone: Callable[[int], Row] | None,
    save_every: int,
    summarise: Callable[[list[Row]], dict[str, Any]] | None,
    keep_weights: bool,
    max_seconds: float | None,
) -> Iterator[Row]:
    """The generator of `run_steps`, which has refused what is wrong before anything runs."""
    model, rows, before = optimizer.model, report["rows"], report["seconds"]
    device = str(model.embedding.weight.device)
    start = time.perf_counter()
    stopped, complete = None, len(rows) >= steps

    def write(status: str) -> None:
        report.update(status=status, steps=len(rows))
        report["seconds"] = round(before + time.perf_counter() - start, 3)
        report["peak_memory_bytes"] = receipt.peak_memory_bytes(device)
        if output is not None:
            receipt.write(output / "receipt.json", report, replace=True)

    def save(name: str, **parts: Any) -> str:
        return checkpoint.save(
            output / name, optimizer.weights(), model.config, replace=True, **parts
        )

    def save_latest() -> None:
        if output is not None and keep_weights:
            keep = {k: report[k] for k in ("rows", "milestones", "seconds")}
            save("latest", optimizer=optimizer.adamw.state_dict(), progress=keep)

    def milestone(done: int) -> None:
        entry = {"step": done}
        if output is not None and keep_weights and done > 0:
            entry["weights"] = save(step_name(done))
        report["milestones"].append(entry | (at_milestone(done) if at_milestone else {}))

    try:
        if 0 in marks and not report["milestones"]:
            milestone(0)
        for i in range(len(rows), steps):
            with interrupts_held():
                began = time.perf_counter()
                row = {"step": i + 1} | step(i)
                row["seconds"] = round(time.perf_counter() - began, 4)
                if not math.isfinite(row.get("loss") or 0):
                    raise ValueError(
                        f"the loss of step {i + 1} is {row['loss']}: training diverged"
                    )
                rows.append(row)
                seconds = before + time.perf_counter() - start
                late = max_seconds is not None and seconds >= max_seconds
                if i + 1 in marks or late:
                    milestone(i + 1)
                complete = i + 1 == steps or late
                if (i + 1 in marks or (i + 1) % save_every == 0) and not complete:
                    write("running")
                    save_latest()
            yield row
            if complete:
                break
    except (KeyboardInterrupt, GeneratorExit) as stop:
        if not complete:
            write("interrupted")
            save_latest()
            raise
        stopped = stop  # after the last step: the run is complete
    except BaseException:
        write("failed")
        raise
    report["weights"] = checkpoint.weights_hash(optimizer.weights())
    if summarise:
        report["summary"] = summarise(rows)
    write("finished")
    if output is not None:
        checkpoint.remove(output / "latest")
    if isinstance(stopped, KeyboardInterrupt):
        raise stopped


def _claim(output: Path, report: dict[str, Any], resume: bool) -> None:
    """Make the run folder and its first receipt, or check that the one there may go on."""
    path = output / "receipt.json"
    if not resume:
        if output.is_file() or (output.is_dir() and any(output.iterdir())):
            raise FileExistsError(f"{output} exists already; choose another --output, or --resume")
        receipt.write(path, report)
        return
    earlier = receipt.read(path)
    if earlier.get("kind") != report["kind"]:
        raise ValueError(f"{path} is of a {earlier.get('kind')} run, not of {report['kind']}")
    if earlier.get("status") == "finished":
        raise ValueError(f"{path}: this run is finished, so there is nothing to resume")
    if not isinstance(earlier.get("settings"), dict):
        raise ValueError(f"{path} holds no settings, so it is not of a run")
    was, now = (run.get("environment", {}).get("dtype") for run in (earlier, report))
    if was != now:
        raise ValueError(f"{path}: the run is in {was}, so it cannot go on in {now}")
    for name in sorted(report["settings"].keys() | earlier["settings"].keys()):
        was, now = earlier["settings"].get(name), report["settings"].get(name)
        if was != now:
            raise ValueError(f"{path}: the run has {name} {was!r}, so it cannot go on with {now!r}")
    report["started"] = earlier["started"]


def _restore(output: Path, report: dict[str, Any], optimizer: MasterAdamW) -> None:
    """Load `latest` into optimiser and report; a run killed before its first save starts anew."""
    latest = output / "latest"
    if not latest.exists() and not latest.with_name("latest.old").exists():
        return
    saved = checkpoint.load(latest, optimizer.model.config)
    optimizer.load(saved.weights, saved.optimizer)
    report.update(saved.progress)


def to_json(settings: Any) -> Any:
    """Settings as JSON gives them back: tuples become lists, so that they compare equal."""
    if isinstance(settings, dict):
        return {k: to_json(v) for k, v in settings.items()}
    return [to_json(v) for v in settings] if isinstance(settings, list | tuple) else settings
