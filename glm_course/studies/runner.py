"""Run a study: one result a seed, several at a time, all in one file that grows as seeds finish.

A study is a module with `run(seed, folder) -> dict` (train and measure; `folder` is for what an
interrupted seed can go on from), `table(runs) -> str`, `figure(runs) -> Figure`, `MINUTES` (of one
seed on two quiet CPU cores) and `SEEDS` (what the book records). A seed that is in the file already
is not run again.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any

import torch

from glm_course import receipt
from glm_course.device import set_threads


def run_study(
    study: ModuleType, seeds: Sequence[int], output: Path, jobs: int = 1
) -> Iterator[dict[str, Any]]:
    """Run the seeds that `output` (a JSON file) lacks; yield each seed's result as it is saved.

    With several jobs the CPU threads are shared out among them. Every seed's result carries the
    environment it ran in. Seeds that are unfinished when one fails, or at Ctrl-C, go on next time.
    Raises ValueError for jobs below one, repeated or negative seeds, or a file that belongs to
    another study.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    if len(set(seeds)) < len(seeds) or any(seed < 0 for seed in seeds):
        raise ValueError(f"seeds must be different and not negative: {list(seeds)}")
    name = study.__name__.rpartition(".")[2]
    results = read_results(study, output) if output.exists() else {"study": name, "runs": []}
    return _run(study, seeds, output, jobs, results)


def read_results(study: ModuleType, output: Path) -> dict[str, Any]:
    """The results file of a study. Raises FileNotFoundError, or ValueError where it is no such."""
    name, results = study.__name__.rpartition(".")[2], receipt.read(output)
    if results.get("study") != name or not isinstance(results.get("runs"), list):
        raise ValueError(f"{output} holds the study {results.get('study')!r}, not {name!r}")
    return results


def _run(
    study: ModuleType, seeds: Sequence[int], output: Path, jobs: int, results: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    done = {run["seed"] for run in results["runs"]}
    todo = [seed for seed in seeds if seed not in done]
    work = output.with_name(f"{output.name}.unfinished")  # folder of unfinished seeds
    threads = max(1, torch.get_num_threads() // jobs)

    def save(run: dict[str, Any]) -> dict[str, Any]:
        results["runs"] = sorted([*results["runs"], run], key=lambda r: r["seed"])
        receipt.write(output, results, replace=True)
        shutil.rmtree(work / f"seed_{run['seed']}", ignore_errors=True)
        return run

    if jobs == 1:
        for seed in todo:
            yield save(run_one(study.__name__, seed, work, threads))
    else:
        spawn = get_context("spawn")
        with ProcessPoolExecutor(jobs, mp_context=spawn, initializer=end_with_parent) as pool:
            futures = [pool.submit(run_one, study.__name__, s, work, threads) for s in todo]
            try:
                for future in as_completed(futures):
                    yield save(future.result())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)  # or the rest would run all the same
                raise
    if work.exists() and not any(work.iterdir()):  # other seeds may stand there unfinished
        work.rmdir()


def end_with_parent() -> None:
    """Let this worker process end when the one that started it is gone, even killed.

    Else it would train its seed to the end, for a result that nobody takes.
    """

    def wait() -> None:
        parent_process().join()
        os._exit(1)

    Thread(target=wait, daemon=True).start()


def run_one(module: str, seed: int, work: Path, threads: int) -> dict[str, Any]:
    """One seed of the study in `module`, as a worker process runs it."""
    from importlib import import_module

    set_threads(threads)
    result = import_module(module).run(seed, work / f"seed_{seed}")
    return {"seed": seed, "environment": receipt.environment("cpu", "torch.float32")} | result


def run_or_resume(loop: Any, settings: Any, *start: Path, folder: Path) -> dict[str, Any]:
    """Receipt of a run in `folder`: the finished one that is there, or trained on to its end."""
    path = folder / "receipt.json"
    if path.exists() and receipt.read(path)["status"] == "finished":
        return receipt.read(path)
    for _ in loop(settings, *start, output=folder, resume=path.exists(), device="cpu"):
        pass
    return receipt.read(path)
