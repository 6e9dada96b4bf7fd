"""Stopping and going on: whatever ends a run, and when, it resumes to the same weights."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_course import checkpoint, receipt
from glm_course.train import pretrain as pretrain_module
from glm_course.train import rl as rl_module
from glm_course.train.loop import interrupts_held, progress, step_name, to_json
from glm_course.train.optimizer import AdamWSettings
from glm_course.train.pretrain import PretrainSettings, pretrain
from glm_course.train.rl import RLSettings, rloo
from glm_course.verifier import Verdict

STEPS = 6
RATE = AdamWSettings(learning_rate=1e-3)
pytestmark = pytest.mark.usefixtures("one_thread")


def by_text(_, text: str) -> Verdict:
    """Stands in for the verifier where rewards must differ whatever the model has learned."""
    return Verdict("passed" if sum(map(ord, text)) % 2 else "failed", 0, "")


@dataclass(frozen=True)
class Loop:
    """A training loop of six steps, to be started, stopped and resumed."""

    kind: str
    settings: Any
    start: tuple[Path, ...]
    inside: tuple[Any, str]  # what is called once in the middle of every step

    def begin(self, output: Path | None, **how: Any) -> Iterator[dict[str, Any]]:
        change = how.pop("change", {})
        loop = {"pretrain": pretrain, "rl": rloo}[self.kind]
        now = replace(self.settings, **change)
        return loop(now, *self.start, output=output, device="cpu", **how)

    def meddle(self, patch: pytest.MonkeyPatch, at: int, action: Callable[[], None]) -> None:
        """Have `action` happen in the middle of the at-th step from now, before its update."""
        module, name = self.inside
        function, calls = getattr(module, name), []

        def meddled(*arguments, **options):
            calls.append(None)
            if len(calls) == at:
                action()
            return function(*arguments, **options)

        patch.setattr(module, name, meddled)


@pytest.fixture(scope="module", params=["pretrain", "rl"])
def loop(request, tiny, trained) -> Iterator[Loop]:
    if request.param == "pretrain":
        run = PretrainSettings(
            model=tiny, steps=STEPS, batch_size=2, seed=5, milestones=(0, 3), optimizer=RATE
        )
        yield Loop("pretrain", run, (), (pretrain_module, "next_byte_loss"))
        return
    run = RLSettings(
        families=("increment", "reverse"),
        tasks_per_family=2,
        groups=STEPS,
        group_size=4,
        temperature=1.5,
        max_new_tokens=16,
        seed=2,
        milestones=(0, 3),
        dev_tasks=1,
        dev_samples=2,
        optimizer=RATE,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rl_module, "verify", by_text)
        yield Loop("rl", run, (trained,), (rl_module, "complete_tasks"))


def report(output: Path) -> dict[str, Any]:
    return receipt.read(output / "receipt.json")


def timeless(run: dict[str, Any]) -> dict[str, Any]:
    """What two runs of the same settings must have in common."""
    kept = {key: run[key] for key in ("kind", "status", "settings", "milestones", "weights")}
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in run["rows"]]
    return kept | {"rows": rows, "steps": run["steps"], "summary": run["summary"]}


def content(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, or the one file."""
    files = [folder] if folder.is_file() else [f for f in folder.rglob("*") if f.is_file()]
    return {str(file.relative_to(folder.parent)): file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def whole(loop, tmp_path_factory) -> dict[str, Any]:
    """The receipt of the run that nothing interrupted."""
    output = tmp_path_factory.mktemp("whole") / "run"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert [row["step"] for row in loop.begin(output)] == [1, 2, 3, 4, 5, 6]
    torch.set_num_threads(threads)
    return report(output)


def assert_same_run(output: Path, whole: dict[str, Any]) -> None:
    """The run in `output` is finished, and is the whole one in all but its times."""
    assert timeless(report(output)) == timeless(whole)
    left = {child.name for child in output.iterdir() if not child.name.endswith(".new")}
    assert left == {"receipt.json", "step_0003", "step_0006"}
    assert checkpoint.load(output / "step_0006").hash == whole["weights"]


@pytest.fixture
def unfinished(loop, tmp_path) -> Path:
    """The folder of a run that was stopped after two steps."""
    rows = loop.begin(tmp_path / "run")
    assert [next(rows)["step"], next(rows)["step"]] == [1, 2]
    rows.close()
    return tmp_path / "run"


# --- to the bit ----------------------------------------------------------------------------------


def test_the_runs_of_these_tests_learn(whole):
    """Else everything below would hold of weights that never move."""
    hashes = [m["weights"] for m in whole["milestones"] if m["step"]]
    assert len(set(hashes)) == 2
    assert all(row.get("updated", True) for row in whole["rows"][:2])


@given(st.sets(st.integers(1, STEPS - 1), max_size=3), st.integers(1, 7))
@settings(max_examples=6)
def test_a_run_closed_at_any_steps_resumes_to_the_same_weights(
    loop, whole, tmp_path_factory, stops, save_every
):
    output = tmp_path_factory.mktemp("closed") / "run"
    for number, stop in enumerate(sorted(stops)):
        rows = loop.begin(output, resume=number > 0, save_every=save_every)
        while next(rows)["step"] < stop:
            pass
        rows.close()
        assert (report(output)["status"], report(output)["steps"]) == ("interrupted", stop)
        assert len(checkpoint.load(output / "latest").progress["rows"]) == stop
    seen = [r["step"] for r in loop.begin(output, resume=bool(stops), save_every=save_every)]
    assert seen == list(range(max(stops, default=0) + 1, STEPS + 1))
    assert_same_run(output, whole)


def test_a_bf16_run_resumes_to_the_same_weights(loop, tmp_path):
    list(loop.begin(tmp_path / "whole", dtype="bf16"))
    rows = loop.begin(tmp_path / "closed", dtype="bf16")
    assert next(rows)["step"] == 1
    rows.close()
    list(loop.begin(tmp_path / "closed", dtype="bf16", resume=True))
    assert timeless(report(tmp_path / "closed")) == timeless(report(tmp_path / "whole"))


@pytest.mark.parametrize("step", [1, 3, 5])
def test_an_interrupt_within_a_step_is_held_until_the_step_ends(
    loop, whole, tmp_path, monkeypatch, step
):
    output = tmp_path / "run"
    with monkeypatch.context() as patch:
        loop.meddle(patch, step, lambda: signal.raise_signal(signal.SIGINT))
        seen = []
        with pytest.raises(KeyboardInterrupt):
            seen.extend(row["step"] for row in loop.begin(output))
    stopped = report(output)
    assert (stopped["status"], stopped["steps"]) == ("interrupted", step)
    assert [row["step"] for row in stopped["rows"]] == list(range(1, step + 1))
    assert [m["step"] for m in stopped["milestones"]] == [m for m in (0, 3) if m <= step]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert [row["step"] for row in loop.begin(output, resume=True)] == list(range(step + 1, 7))
    assert_same_run(output, whole)


def test_an_interrupt_within_the_last_step_leaves_a_finished_run(
    loop, whole, tmp_path, monkeypatch
):
    loop.meddle(monkeypatch, STEPS, lambda: signal.raise_signal(signal.SIGINT))
    with suppress(KeyboardInterrupt):
        list(loop.begin(tmp_path / "run"))
    assert_same_run(tmp_path / "run", whole)


def test_an_interrupt_within_the_last_step_still_reaches_the_caller(loop, tmp_path, monkeypatch):
    """Who trains one run after another must not go on with the next."""
    loop.meddle(monkeypatch, STEPS, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        list(loop.begin(tmp_path / "run"))


def test_an_interrupt_between_steps_is_one_too(loop, whole, tmp_path):
    """Where the caller is at work: the loop is closed as its last reference goes."""

    def consume() -> None:
        for row in progress(loop.begin(tmp_path / "run"), STEPS):
            if row["step"] == 4:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        consume()
    assert (report(tmp_path / "run")["status"], report(tmp_path / "run")["steps"]) == (
        "interrupted",
        4,
    )
    list(loop.begin(tmp_path / "run", resume=True))
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.parametrize("step", [1, 2, 5])
def test_a_run_that_failed_goes_on_from_its_last_save(loop, whole, tmp_path, monkeypatch, step):
    def fail() -> None:
        raise OSError("no space left")

    output = tmp_path / "run"
    with monkeypatch.context() as patch:
        loop.meddle(patch, step, fail)
        with pytest.raises(OSError, match="no space left"):
            list(loop.begin(output, save_every=1))
    assert (report(output)["status"], report(output)["steps"]) == ("failed", step - 1)
    list(loop.begin(output, resume=True))
    assert_same_run(output, whole)


def test_an_interrupt_while_the_first_milestone_is_evaluated_loses_nothing(
    loop, whole, tmp_path, monkeypatch
):
    if loop.kind == "pretrain":
        target = (receipt, "peak_memory_bytes")  # nothing is evaluated: interrupt the first write
    else:
        target = (rl_module, "evaluate_sampled")
    with monkeypatch.context() as patch:
        replace_self = Loop("any", None, (), target)
        replace_self.meddle(patch, 1, lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            list(loop.begin(tmp_path / "run", save_every=1))
    list(loop.begin(tmp_path / "run", resume=True))
    assert_same_run(tmp_path / "run", whole)


def test_a_run_killed_before_its_first_save_starts_anew(loop, whole, unfinished):
    checkpoint.remove(unfinished / "latest")
    assert [row["step"] for row in loop.begin(unfinished, resume=True)] == [1, 2, 3, 4, 5, 6]
    assert_same_run(unfinished, whole)


def test_a_save_that_was_cut_in_half_is_not_what_a_run_goes_on_from(loop, whole, unfinished):
    """Killed between the two renames of a save, and again while writing the next."""
    (unfinished / "latest").rename(unfinished / "latest.old")
    (unfinished / "latest.new").mkdir()
    (unfinished / "latest.new" / "model.safetensors").write_bytes(b"half")
    assert [row["step"] for row in loop.begin(unfinished, resume=True)] == [3, 4, 5, 6]
    assert_same_run(unfinished, whole)
    assert sorted(child.name for child in unfinished.iterdir()) == [
        "receipt.json",
        "step_0003",
        "step_0006",
    ]


CHILD = """
import json, sys, time
from pathlib import Path
import torch
from glm_course.config import ModelConfig
from glm_course.train import pretrain, rl
from glm_course.train.optimizer import AdamWSettings
from glm_course.verifier import Verdict

torch.set_num_threads(1)
told = json.loads(sys.argv[1])
s, how = told["settings"], {"output": Path(told["output"]), "save_every": 1, "device": "cpu"}
s["optimizer"] = AdamWSettings(**s["optimizer"])
for name in ("milestones", "families"):
    s[name] = tuple(s.get(name, ()))
how["resume"] = (how["output"] / "receipt.json").exists()
if told["kind"] == "pretrain":
    s["model"] = ModelConfig(**s["model"])
    del s["families"]
    rows = pretrain.pretrain(pretrain.PretrainSettings(**s), **how)
else:
    rl.verify = lambda _, text: Verdict("passed" if sum(map(ord, text)) % 2 else "failed", 0, "")
    rows = rl.rloo(rl.RLSettings(**s), Path(told["start"]), **how)
for row in rows:
    time.sleep(0.1)  # so that it cannot be through before it is killed
    print(row["step"], flush=True)
"""


def test_a_process_that_is_killed_resumes_to_the_same_weights(loop, whole, tmp_path):
    """SIGKILL, which nothing can hold or handle, moments after a step; it saves all the time."""
    output = tmp_path / "run"
    told = {
        "kind": loop.kind,
        "settings": {k: v for k, v in whole["settings"].items() if k != "start"},
        "start": str(loop.start[0]) if loop.start else None,
        "output": str(output),
    }
    kills = {"pretrain": ((1, 0.013), (3, 0.031)), "rl": ((2, 0.05),)}[loop.kind]
    seen = 0
    for step, moment in kills:
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, json.dumps(told)], stdout=subprocess.PIPE, text=True
        )
        with child:
            for line in child.stdout:
                if int(line) >= step:
                    break
            time.sleep(moment)
            child.kill()
        assert child.returncode == -signal.SIGKILL, "it was through before it was killed"
        stopped = report(output)
        assert stopped["status"] == "running" and stopped["steps"] >= seen
        seen = stopped["steps"]
    first = next(loop.begin(output, resume=True))["step"]
    assert 1 < first <= STEPS, "nothing was saved before the kills"
    list(loop.begin(output, resume=True))
    assert_same_run(output, whole)


# --- receipts of runs that went on ---------------------------------------------------------------


def test_time_adds_up_over_the_parts_of_a_run_and_its_start_is_the_first(loop, unfinished):
    first = report(unfinished)
    path = unfinished / "latest"
    saved = checkpoint.load(path)
    checkpoint.save(
        path,
        saved.weights,
        saved.config,
        optimizer=saved.optimizer,
        progress=saved.progress | {"seconds": 1000.0},
        replace=True,
    )
    list(loop.begin(unfinished, resume=True))
    assert 1000 < report(unfinished)["seconds"] < 1600
    assert report(unfinished)["started"] == first["started"]


def test_an_unfinished_run_has_rows_and_a_save_and_no_result(loop, unfinished):
    stopped = report(unfinished)
    assert (stopped["status"], stopped["steps"]) == ("interrupted", 2)
    assert "weights" not in stopped and "summary" not in stopped
    saved = checkpoint.load(unfinished / "latest")
    assert saved.optimizer is not None
    assert saved.progress["rows"] == stopped["rows"]
    assert {child.name for child in unfinished.iterdir()} == {"receipt.json", "latest"}


# --- refusals ------------------------------------------------------------------------------------


def refusal(loop: Loop, output: Path, error: type[Exception], **how: Any) -> str:
    """The one line with which going on is refused; everything there stays as it was."""
    before = content(output)
    with pytest.raises(error) as caught:
        next(loop.begin(output, resume=True, **how))
    assert content(output) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["seed", "steps", "batch_size", "groups", "group_size", "model"])
def test_a_run_does_not_go_on_with_other_settings(loop, unfinished, name):
    if not hasattr(loop.settings, name):
        return
    was = getattr(loop.settings, name)
    now = replace(was, window=16) if name == "model" else was + 1
    message = refusal(loop, unfinished, ValueError, change={name: now})
    assert f"the run has {name} " in message and "cannot go on" in message


def test_a_run_does_not_go_on_with_other_milestones_or_another_optimizer(loop, unfinished):
    change = {"milestones": (0, 2)}
    assert "has milestones [0, 3]" in refusal(loop, unfinished, ValueError, change=change)
    change = {"optimizer": AdamWSettings(learning_rate=2e-3)}
    assert "has optimizer " in refusal(loop, unfinished, ValueError, change=change)


def test_a_run_does_not_go_on_in_another_dtype(loop, unfinished):
    """Its receipt would then say of all rows what is true of the last ones only."""
    assert "float32" in refusal(loop, unfinished, ValueError, dtype="bf16")


def test_rl_does_not_go_on_from_another_start(loop, unfinished, tmp_path):
    if loop.kind != "rl":
        return
    saved = checkpoint.load(loop.start[0])
    weights = saved.weights | {"norm.weight": saved.weights["norm.weight"] * 1.01}
    checkpoint.save(tmp_path / "other", weights, saved.config)
    other = replace(loop, start=(tmp_path / "other",))
    assert "the run has start " in refusal(other, unfinished, ValueError)


def test_a_finished_run_does_not_go_on(loop, unfinished):
    list(loop.begin(unfinished, resume=True))
    assert "finished" in refusal(loop, unfinished, ValueError)


def test_a_folder_without_a_run_does_not_go_on(loop, tmp_path):
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("mine")
    assert "receipt.json" in refusal(loop, tmp_path / "foreign", FileNotFoundError)
    assert "receipt.json" in refusal(loop, tmp_path / "nothing", FileNotFoundError)


@pytest.mark.parametrize(
    "foreign",
    ["{}", '{"kind": "vision", "settings": {}}', '{"kind": "KIND"}', "[1]", "not JSON"],
)
def test_a_receipt_of_something_else_does_not_go_on(loop, tmp_path, foreign):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "receipt.json").write_text(foreign.replace("KIND", loop.kind))
    assert "receipt.json" in refusal(loop, tmp_path / "run", ValueError)


def test_a_damaged_save_does_not_go_on(loop, unfinished):
    with (unfinished / "latest" / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    with pytest.raises(checkpoint.CheckpointError, match="was changed since it was saved"):
        next(loop.begin(unfinished, resume=True))


@pytest.mark.parametrize("there", ["unfinished", "finished", "foreign folder", "file"])
def test_what_is_there_is_never_overwritten(loop, unfinished, tmp_path, there):
    output = unfinished
    if there == "finished":
        list(loop.begin(output, resume=True))
    elif there == "foreign folder":
        output = tmp_path / "foreign"
        output.mkdir()
        (output / "notes.txt").write_text("mine")
    elif there == "file":
        output = tmp_path / "file"
        output.write_text("mine")
    before = content(output)
    with pytest.raises(FileExistsError, match="exists already"):
        next(loop.begin(output))
    assert content(output) == before


def test_an_empty_folder_may_be_filled(loop, tmp_path):
    (tmp_path / "run").mkdir()
    rows = loop.begin(tmp_path / "run")
    next(rows)
    rows.close()
    assert report(tmp_path / "run")["steps"] == 1


# --- holding interrupts --------------------------------------------------------------------------


def test_interrupts_are_held_to_the_end_of_the_block_and_then_raised_once():
    reached = []
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
            reached.append(1)
    assert len(reached) == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_an_interrupt_nothing_is_raised_and_errors_pass():
    with interrupts_held():
        pass
    with pytest.raises(ZeroDivisionError), interrupts_held():
        1 / 0  # noqa: B018
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_that_was_there_gets_what_was_held():
    """A process that was started with interrupts ignored, in the background say, goes on."""
    got = []
    try:
        for handler in (lambda *_: got.append("handled"), signal.SIG_IGN):
            signal.signal(signal.SIGINT, handler)
            with interrupts_held():
                signal.raise_signal(signal.SIGINT)
            assert got == ["handled"]
    except KeyboardInterrupt:
        pytest.fail("raised KeyboardInterrupt, which the handler does not")
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_run_without_holding():
    done = []

    def work() -> None:
        with interrupts_held():
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]


def test_training_runs_in_another_thread(loop, whole, tmp_path):
    def work() -> None:
        torch.set_num_threads(1)
        list(loop.begin(tmp_path / "run"))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert_same_run(tmp_path / "run", whole)


# --- small parts ---------------------------------------------------------------------------------


def test_rows_pass_through_the_bar_unchanged(capsys):
    rows = [{"step": i, "loss": 1.0, "tokens": 5, "seconds": 0.0} for i in (1, 2, 3)]
    rows += [{"step": 4, "loss": None, "seconds": 0.0}]
    assert list(progress(iter(rows), 4)) == rows
    assert capsys.readouterr() == ("", ""), "no bar where stderr is no terminal"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda v: st.lists(v) | st.tuples(v, v) | st.dictionaries(st.text(), v),
    max_leaves=8,
)


@given(json_values)
def test_settings_become_what_json_gives_back(value):
    assert to_json(value) == json.loads(json.dumps(value))
    assert to_json(to_json(value)) == to_json(value)


def test_folders_of_milestones_sort_by_step():
    names = [step_name(step) for step in (24, 100, 9999)]
    assert names == sorted(names) == ["step_0024", "step_0100", "step_9999"]
