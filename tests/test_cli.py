"""The command line: help, one line for what a user got wrong, and every command to its end."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import click
import pytest
import torch
import typer
from matplotlib.figure import Figure

from glm_course import checkpoint, cli, receipt
from glm_course.data.tasks import make_task
from glm_course.train import rl as rl_module
from glm_course.train import vision as vision_module
from glm_course.verifier import Verdict

COMMANDS = typer.main.get_command(cli.app).commands
INCREMENT = "increment_qrdadnk"  # a task of confirm
RIGHT = "\n    return x + 1\n"


@pytest.fixture
def call(monkeypatch, capsys, tmp_path, tiny):
    """Run a command in an empty folder, `base` being a tiny model: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(cli.PRESETS, "base", tiny)
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", ""))
    monkeypatch.setenv("GLM_COURSE_PROGRESS", "off")
    threads = torch.get_num_threads()

    def call(line: str, *more: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["glm_course", *line.split(), *map(str, more)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return stopped.value.code, *capsys.readouterr()

    yield call
    torch.set_num_threads(threads)


def succeed(call, line: str, *more: object) -> str:
    code, out, err = call(line, *more)
    assert code == 0, err
    return out


def unspaced(text: str) -> str:
    """Text whose lines may have been broken anywhere."""
    return "".join(text.split())


def files(folder: Path) -> set[str]:
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*")}


# --- help ----------------------------------------------------------------------------------------


def test_the_program_lists_its_commands(call):
    out = succeed(call, "--help")
    for name, command in COMMANDS.items():
        assert name in out and command.help.split()[0] in out


def test_without_a_command_it_prints_the_help(call):
    code, out, err = call("")
    assert code == 2
    assert all(name in out + err for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_lists_every_option_with_what_it_is_and_what_it_is_by_default(call, name):
    out = unspaced(succeed(call, f"{name} --help"))
    assert unspaced(COMMANDS[name].help.split("\n")[0]) in out
    context = click.Context(COMMANDS[name])
    for parameter in COMMANDS[name].params:
        if parameter.name == "help":
            continue
        assert parameter.help and parameter.help.endswith("."), parameter.name
        for spelling in parameter.opts if isinstance(parameter, click.Option) else ():
            assert spelling in out
        record = unspaced(parameter.get_help_record(context)[1])
        assert unspaced(parameter.help) in record and record in out
        default = parameter.default
        if isinstance(default, Path | str | int | float) and not isinstance(default, bool):
            assert unspaced(f"default: {default}") in record, parameter.name


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_how_long_a_command_takes_or_what_it_prints(name):
    text = COMMANDS[name].help
    assert "seconds" in text or "minute" in text or "exit code" in text or "goes on" in text


# --- what a user gets wrong ----------------------------------------------------------------------

WRONG = {
    "no such command": ["trian"],
    "no such option": ["info", "--verbose"],
    "info preset": ["info", "--preset", "huge"],
    "steps 0": ["pretrain", "--steps", "0"],
    "steps word": ["pretrain", "--steps", "many"],
    "batch 0": ["pretrain", "--batch-size", "0"],
    "pretrain seed -1": ["pretrain", "--seed", "-1"],
    "pretrain seed too large": ["pretrain", "--steps", "1", "--seed", str(2**70)],
    "pretrain preset": ["pretrain", "--preset", "huge"],
    "preset too short for the examples": ["pretrain", "--preset", "vision_mini", "--steps", "1"],
    "milestones words": ["pretrain", "--milestones", "half,all"],
    "milestone -5": ["pretrain", "--milestones", "-5", "--steps", "1"],
    "unknown device": ["pretrain", "--device", "tpu"],
    "absent cuda": ["pretrain", "--device", "cuda"],
    "absent mps": ["pretrain", "--device", "mps"],
    "unknown dtype": ["pretrain", "--dtype", "fp8"],
    "threads 0": ["pretrain", "--threads", "0"],
    "threads 5000": ["pretrain", "--threads", "5000"],
    "pretrain onto a folder": ["pretrain", "--steps", "1", "--output", "there"],
    "pretrain onto a file": ["pretrain", "--steps", "1", "--output", "there/notes.txt"],
    "pretrain below a file": ["pretrain", "--steps", "1", "--output", "there/notes.txt/run"],
    "resume nothing": ["pretrain", "--resume", "--output", "nothing"],
    "resume a foreign folder": ["pretrain", "--resume", "--output", "there"],
    "resume a foreign receipt": ["pretrain", "--resume", "--output", "foreign"],
    "rl start": ["rl", "--start", "nothing"],
    "rl default start": ["rl"],
    "rl start is a file": ["rl", "--start", "there/notes.txt"],
    "rl start is a folder": ["rl", "--start", "there"],
    "rl family": ["rl", "--start", "CHECKPOINT", "--families", "double,triple"],
    "rl no family": ["rl", "--start", "CHECKPOINT", "--families", ","],
    "groups 0": ["rl", "--start", "CHECKPOINT", "--groups", "0"],
    "group size 1": ["rl", "--start", "CHECKPOINT", "--group-size", "1"],
    "rl temperature 0": ["rl", "--start", "CHECKPOINT", "--temperature", "0"],
    "rl temperature nan": ["rl", "--start", "CHECKPOINT", "--temperature", "nan"],
    "rl temperature inf": ["rl", "--start", "CHECKPOINT", "--temperature", "inf"],
    "rl tokens 0": ["rl", "--start", "CHECKPOINT", "--max-new-tokens", "0"],
    "rl tokens 500": ["rl", "--start", "CHECKPOINT", "--max-new-tokens", "500"],
    "rl rate -1": ["rl", "--start", "CHECKPOINT", "--learning-rate", "-1"],
    "rl rate nan": ["rl", "--start", "CHECKPOINT", "--learning-rate", "nan"],
    "rl reward nan": ["rl", "--start", "CHECKPOINT", "--invalid-reward", "nan"],
    "rl seed too large": ["rl", "--start", "CHECKPOINT", "--groups", "1", "--seed", str(2**70)],
    "rl absent cuda": ["rl", "--start", "CHECKPOINT", "--device", "cuda"],
    "rl onto a folder": ["rl", "--start", "CHECKPOINT", "--output", "there"],
    "evaluate nothing": ["evaluate"],
    "evaluate checkpoint": ["evaluate", "nothing"],
    "evaluate split": ["evaluate", "CHECKPOINT", "--split", "train"],
    "evaluate family": ["evaluate", "CHECKPOINT", "--families", "triple"],
    "per family 0": ["evaluate", "CHECKPOINT", "--per-family", "0"],
    "samples -1": ["evaluate", "CHECKPOINT", "--samples", "-1"],
    "evaluate temperature 0": ["evaluate", "CHECKPOINT", "--temperature", "0"],
    "evaluate temperature nan": ["evaluate", "CHECKPOINT", "--temperature", "nan"],
    "evaluate temperature inf": ["evaluate", "CHECKPOINT", "--temperature", "inf"],
    "evaluate tokens 500": ["evaluate", "CHECKPOINT", "--max-new-tokens", "500"],
    "evaluate seed too large": ["evaluate", "CHECKPOINT", "--seed", str(2**70)],
    "evaluate onto a file": ["evaluate", "CHECKPOINT", "--output", "there/notes.txt"],
    "evaluate below a file": ["evaluate", "CHECKPOINT", "--output", "there/notes.txt/x.json"],
    "generate nothing": ["generate", "CHECKPOINT"],
    "prompt and task": ["generate", "CHECKPOINT", "--prompt", "a", "--task", INCREMENT],
    "generate task": ["generate", "CHECKPOINT", "--task", "triple_abcdefg"],
    "generate checkpoint": ["generate", "nothing", "--prompt", "a"],
    "generate samples 0": ["generate", "CHECKPOINT", "--prompt", "a", "--samples", "0"],
    "generate temperature -1": ["generate", "CHECKPOINT", "--prompt", "a", "--temperature", "-1"],
    "generate temperature nan": ["generate", "CHECKPOINT", "--prompt", "a", "--temperature", "nan"],
    "generate temperature inf": ["generate", "CHECKPOINT", "--prompt", "a", "--temperature", "inf"],
    "prompt too long": ["generate", "CHECKPOINT", "--prompt", "a" * 190],
    "prompt no text": ["generate", "CHECKPOINT", "--prompt", "\udcff"],
    "generate seed too large": ["generate", "CHECKPOINT", "--prompt", "a", "--seed", str(2**70)],
    "verify nothing": ["verify"],
    "verify task": ["verify", "triple_abcdefg", "there/notes.txt"],
    "verify file": ["verify", INCREMENT, "nothing.py"],
    "verify folder": ["verify", INCREMENT, "there"],
    "verify bytes": ["verify", INCREMENT, "bytes.py"],
    "vision model": ["vision", "--model", "blind"],
    "vision seed -1": ["vision", "--seed", "-1"],
    "vision absent cuda": ["vision", "--device", "cuda"],
    "vision onto a run": ["vision", "--output", "seen"],
    "vision below a file": ["vision", "--output", "there/notes.txt"],
    "pilot start": ["vision-pilot", "--start", "nothing"],
    "pilot start is a folder": ["vision-pilot", "--start", "there"],
    "pilot seconds 0": ["vision-pilot", "--max-seconds", "0"],
    "pilot seconds nan": ["vision-pilot", "--max-seconds", "nan"],
    "pilot absent mps": ["vision-pilot", "--start", "CHECKPOINT", "--device", "mps"],
    "pilot onto a folder": ["vision-pilot", "--start", "CHECKPOINT", "--output", "there"],
    "study name": ["study", "sizes"],
    "study seeds words": ["study", "seeds", "--seeds", "one"],
    "study no seeds": ["study", "seeds", "--seeds", ""],
    "study seeds twice": ["study", "seeds", "--seeds", "1,1"],
    "study seed -1": ["study", "seeds", "--seeds", "-1"],
    "study jobs 0": ["study", "seeds", "--jobs", "0"],
    "study of nothing": ["study", "seeds", "--analyse", "--output", "nothing.json"],
    "study of a run": ["study", "seeds", "--analyse", "--output", "foreign/receipt.json"],
    "study of a text": ["study", "seeds", "--analyse", "--output", "there/notes.txt"],
    "study onto a run": ["study", "seeds", "--seeds", "1", "--output", "foreign/receipt.json"],
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_a_user_got_wrong_is_one_line_and_exit_code_2(
    call, trained, tmp_path, monkeypatch, wrong
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes.txt").write_text("mine")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "receipt.json").write_text('{"kind": "vision", "settings": {}}')
    (tmp_path / "seen" / "baseline").mkdir(parents=True)
    (tmp_path / "bytes.py").write_bytes(b"\xff\xfe\x00")
    before = files(tmp_path)
    arguments = [str(trained) if a == "CHECKPOINT" else a for a in WRONG[wrong]]
    code, out, err = call("", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("glm_course: ") and err.count("\n") == 1, err
    assert len(err) > 25, err
    assert files(tmp_path) == before


# --- every command to its end --------------------------------------------------------------------


def test_info_counts_the_parameters_of_each_preset(call):
    for preset, total in (("study_mini", 248_412), ("vision_mini", None)):
        facts = json.loads(succeed(call, "info", "--preset", preset))
        assert total in (None, facts["parameters"]["total"])
        assert facts["devices"]["threads"] == torch.get_num_threads()
        assert facts["versions"]["torch"] == torch.__version__


def test_pretrain_writes_a_receipt_and_weights_a_milestone(call, tmp_path):
    code, out, err = call(
        "pretrain --preset study_mini --steps 3 --batch-size 2 --seed 7 --milestones 2,100 "
        "--device cpu --dtype fp32 --threads 1"
    )
    assert (code, out) == (0, "")
    assert "minutes" in err and "step 3 of 3: loss 5." in err and "Done: " in err
    run = tmp_path / "runs" / "pretrain-7"
    assert {child.name for child in run.iterdir()} == {"receipt.json", "step_0002", "step_0003"}
    report = receipt.read(run / "receipt.json")
    assert (report["status"], report["steps"]) == ("finished", 3)
    settings = report["settings"]
    assert (settings["seed"], settings["batch_size"], settings["milestones"]) == (7, 2, [2])
    assert settings["model"]["width"] == 48
    assert report["environment"]["threads"] == 1
    assert checkpoint.load(run / "step_0003").hash == report["weights"]
    assert call("pretrain --seed 7")[0] == 2, "a finished run is not trained over"


def test_pretrain_balances_the_experts_as_asked(call, tmp_path):
    code, _, _ = call(
        "pretrain --preset study_mini --steps 2 --batch-size 2 --seed 7 --milestones 2 "
        "--device cpu --threads 1 --balance-loss 0.1 --bias-rate 0.01"
    )
    assert code == 0
    settings = receipt.read(tmp_path / "runs" / "pretrain-7" / "receipt.json")["settings"]
    assert (settings["balance_loss"], settings["bias_rate"]) == (0.1, 0.01)
    assert settings["model"]["selection_bias"]
    saved = checkpoint.load(tmp_path / "runs" / "pretrain-7" / "step_0002")
    assert "blocks.0.moe.bias" in saved.weights


def test_rl_goes_on_from_a_checkpoint_and_resumes(call, trained, tmp_path, monkeypatch):
    def by_text(_, text: str) -> Verdict:
        return Verdict("passed" if sum(map(ord, text)) % 2 else "failed", 0, "")

    monkeypatch.setattr(rl_module, "verify", by_text)
    line = f"rl --start {trained} --output run --device cpu --families increment --groups 3 "
    line += "--group-size 4 --max-new-tokens 16 --temperature 1.5 --invalid-reward -0.5 "
    line += "--learning-rate 0.001 --seed 2"
    complete, calls = rl_module.complete_tasks, []

    def interrupt(*tasks, **options):
        calls.append(None)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return complete(*tasks, **options)

    with monkeypatch.context() as patch:
        patch.setattr(rl_module, "complete_tasks", interrupt)
        code, out, err = call(line)
    assert (code, out) == (130, "") and "--resume" in err.splitlines()[-1]
    report = receipt.read(Path("run/receipt.json"))
    assert (report["status"], report["steps"]) == ("interrupted", 2)
    assert succeed(call, line, "--resume") == ""
    report = receipt.read(Path("run/receipt.json"))
    assert (report["status"], report["steps"]) == ("finished", 3)
    assert [m["step"] for m in report["milestones"]] == [0, 3]
    assert report["weights"] == checkpoint.load("run/step_0003").hash
    assert report["weights"] != checkpoint.load(trained).hash and report["summary"]["updates"]
    settings = {name: report["settings"][name] for name in ("families", "seed", "temperature")}
    assert settings == {"families": ["increment"], "seed": 2, "temperature": 1.5}
    assert report["settings"]["invalid_reward"] == -0.5
    assert report["settings"]["optimizer"]["learning_rate"] == 0.001
    assert report["settings"]["optimizer"]["weight_decay"] == 0.0
    code, _, err = call(line, "--resume")
    assert code == 2 and "finished" in err


def test_an_interrupt_between_rows_leaves_a_run_to_resume(call, tmp_path, monkeypatch):
    def stop(rows, *_, **__):
        for row in rows:
            if row["step"] == 2:
                raise KeyboardInterrupt

    line = "pretrain --steps 4 --batch-size 2 --output run --device cpu"
    with monkeypatch.context() as patch:
        patch.setattr(cli, "follow", stop)
        code, _, err = call(line)
    assert code == 130 and "--resume" in err
    report = receipt.read(tmp_path / "run" / "receipt.json")
    assert (report["status"], report["steps"]) == ("interrupted", 2)
    code, _, err = call(line, "--seed", 1, "--resume")
    assert code == 2 and "the run has seed 42, so it cannot go on with 1" in err
    succeed(call, line, "--resume")
    assert receipt.read(tmp_path / "run" / "receipt.json")["steps"] == 4


def test_evaluate_prints_a_table_and_writes_all_of_it(call, trained, tmp_path):
    out = succeed(
        call,
        f"evaluate {trained} --split confirm --per-family 2 --samples 3 --seed 1 --device cpu "
        "--families increment,reverse,list_sum --output out/result.json",
    )
    result = receipt.read(tmp_path / "out" / "result.json")
    assert result["settings"]["families"] == ["increment", "reverse", "list_sum"]
    assert result["settings"]["split"] == "confirm" and result["settings"]["samples"] == 3
    greedy, sampled = result["greedy"], result["sampled"]
    head, *rows, last = out.splitlines()
    assert head.split() == ["family", "greedy", "solved", "exact"]
    names = ["increment", "reverse", "list_sum", "total"]
    for name, row in zip(names, rows, strict=True):
        g, s = (
            part["total"] if name == "total" else part["by_family"][name]
            for part in (greedy, sampled)
        )
        wanted = [name, f"{g['solved']}/{g['tasks']}", f"{s['solved']}/{s['tasks']}"]
        assert row.split() == [*wanted, f"{s['exact']}/{s['completions']}"]
    assert f"3: {sampled['total']['solved'] / 6:.3f}" in last
    assert [row["task"] for row in greedy["tasks"]][:2] == ["increment_jgsmuqb", INCREMENT]


def test_an_evaluation_says_which_weights_it_is_of(call, trained, tmp_path):
    succeed(call, f"evaluate {trained} --per-family 1 --samples 0 --output result.json")
    assert checkpoint.load(trained).hash in (tmp_path / "result.json").read_text()


def test_evaluate_without_samples_is_greedy_only(call, trained, tmp_path):
    line = f"evaluate {trained} --per-family 1 --samples 0 --temperature 0 --output result.json"
    out = succeed(call, line, "--no-stop-when-valid")
    assert out.splitlines()[0].split() == ["family", "greedy"] and "pass@k" not in out
    result = receipt.read(tmp_path / "result.json")
    assert "sampled" not in result and result["greedy"]["stopped"]["complete"] == 0


def test_generate_continues_a_prompt_or_a_task_as_json(call, trained):
    line = f"generate {trained} --samples 2 --max-new-tokens 12 --seed 3"
    first = json.loads(succeed(call, line, "--task", INCREMENT))
    assert first["prompt"].endswith(f"def {INCREMENT}(x):")
    assert len(first["completions"]) == 2
    for completion in first["completions"]:
        assert set(completion) == {"text", "stopped", "log_probability"}
        assert completion["log_probability"] <= 0
    again = json.loads(succeed(call, line, "--prompt", first["prompt"]))
    assert again == first
    other = json.loads(succeed(call, f"generate {trained} --temperature 0 --prompt", ""))
    assert other["prompt"] == "" and len(other["completions"]) == 1


@pytest.mark.parametrize(
    ("completion", "code", "status", "passed"),
    [
        (RIGHT, 0, "passed", 3),
        ("\n    return x + 2\n", 1, "failed", 0),
        ("\n    import os\n", 1, "invalid", 0),
    ],
)
def test_verify_judges_a_file_or_standard_input(
    call, tmp_path, monkeypatch, completion, code, status, passed
):
    (tmp_path / "completion.py").write_text(completion)
    found, out, err = call(f"verify {INCREMENT} completion.py")
    assert (found, err) == (code, "")
    verdict = json.loads(out)
    assert (verdict["status"], verdict["tests_passed"]) == (status, passed)
    with (tmp_path / "completion.py").open() as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        assert call(f"verify {INCREMENT}") == (found, out, "")


def test_vision_trains_both_models_and_prints_what_they_learned(call, tmp_path, monkeypatch):
    caps = {"steps": 2, "batch_size": 10, "held_out": 20}
    monkeypatch.setattr(vision_module, "SMOKE", caps)
    code, out, err = call("vision --smoke-test --seed 3 --device cpu --threads 1")
    assert code == 0
    assert "seconds" in err and "step 2 of 2: loss 5." in err
    run = tmp_path / "runs" / "vision-3"
    assert files(run) == {f"{n}{f}" for n in vision_module.MODELS for f in ("", "/receipt.json")}
    head, *rows = out.splitlines()
    assert head.split()[:4] == ["model", "parameters", "before", "after"]
    for name, count, row in zip(vision_module.MODELS, ("60,924", "42,500"), rows, strict=True):
        report = receipt.read(run / name / "receipt.json")
        assert (report["status"], report["settings"]["seed"]) == ("finished", 3)
        assert {k: report["settings"][k] for k in caps} == caps
        before, after = report["summary"]["before"], report["summary"]["after"]
        wanted = [f"{before['correct']}/20", f"{after['correct']}/20"]
        assert row.split()[:4] == [name, count, *wanted]
    code, out, err = call("vision --smoke-test --seed 3 --model baseline")
    assert (code, out) == (2, "") and "exists already" in err


def test_vision_trains_one_model_when_asked(call, monkeypatch):
    monkeypatch.setattr(vision_module, "SMOKE", {"steps": 1, "batch_size": 1, "held_out": 1})
    out = succeed(call, "vision --model baseline --smoke-test --device cpu --output eyes")
    assert out.splitlines()[1].split()[0] == "baseline" and len(out.splitlines()) == 2
    assert files(Path("eyes")) == {"baseline", "baseline/receipt.json"}


@pytest.mark.parametrize(("correct", "wanted"), [((3, 4), 0), ((3, 3), 2), ((4, 3), 2)])
def test_the_pilot_fails_when_no_more_answers_are_right_than_before(
    call, trained, monkeypatch, correct, wanted
):
    results = iter([(0, 1), (correct[0], 20), (correct[1], 20)])  # the first only tries the model

    def evaluated(*_):
        right, of = next(results)
        return {"correct": right, "of": of, "loss": 1.0}

    monkeypatch.setattr(vision_module, "evaluate", evaluated)
    line = "vision-pilot --device cpu --threads 1 --max-seconds 0.001 --seed 5 --output run"
    code, out, err = call(f"{line} --start {trained}")
    assert code == wanted and ("nothing was learned" in err) == (wanted == 2)
    assert out.splitlines()[1].split()[2:4] == [f"{n}/20" for n in correct]
    report = receipt.read(Path("run/receipt.json"))
    assert report["status"] == "finished" and files(Path("run")) == {"receipt.json"}
    settings = report["settings"]
    assert (settings["seed"], settings["max_seconds"], settings["steps"]) == (5, 0.001, 40)
    assert settings["start"] == f"checkpoint {checkpoint.load(trained).hash}"
    assert report["summary"]["stopped_by_time"]


def test_the_pilot_starts_at_random_unless_given_a_checkpoint(call):
    code, _, err = call("vision-pilot --device cpu --max-seconds 0.001")
    assert code in (0, 2) and "from random weights" in err
    settings = receipt.read(Path("runs/vision-pilot-73/receipt.json"))["settings"]
    assert (settings["start"], settings["language"]["vocab_size"]) == ("random weights", 263)


def test_a_task_is_found_by_name_in_any_split():
    for split_seed in (1701, 2909, 3907, 8123):
        task = make_task("increment", 39, split_seed)
        assert cli.find_task(task.entry_point) == task


def test_a_study_runs_and_is_analysed_again_without_training(call, tmp_path, monkeypatch):
    from glm_course.studies import seeds

    monkeypatch.setattr(seeds, "run", lambda seed, folder: {"value": seed * 2})
    monkeypatch.setattr(seeds, "table", lambda runs: f"values {[run['value'] for run in runs]}")
    monkeypatch.setattr(seeds, "figure", lambda runs: Figure())
    code, out, err = call("study seeds --seeds 3,1 --output out/seeds.json")
    assert (code, out) == (0, "values [2, 6]\n")
    assert "2 seeds" in err and "minutes a seed" in err and "seed 3 is done" in err
    assert files(tmp_path / "out") == {"seeds.json", "seeds.png"}
    monkeypatch.setattr(seeds, "run", None)
    assert succeed(call, "study seeds --analyse --output out/seeds.json") == out


# --- as a process --------------------------------------------------------------------------------

PROGRAM = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
PROGRAM += "from glm_course.cli import main; main()"


def test_ctrl_c_ends_a_run_with_a_checkpoint_that_resume_takes_to_the_end(call, tmp_path):
    line = "pretrain --preset study_mini --steps 60 --batch-size 2 --device cpu --threads 1"
    line += " --output run"
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *line.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with child:
        guard = threading.Timer(300, child.kill)
        guard.start()
        while not child.stderr.readline().startswith("step 10 of 60"):
            assert child.poll() is None
        child.send_signal(signal.SIGINT)
        out, err = child.stdout.read(), child.stderr.read()
        guard.cancel()
    assert (child.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert (
        err.splitlines()[-1] == "glm_course: interrupted; a run with --output goes on with --resume"
    )
    report = receipt.read(tmp_path / "run" / "receipt.json")
    steps = report["steps"]
    assert report["status"] == "interrupted" and 10 <= steps < 60
    assert len(checkpoint.load(tmp_path / "run" / "latest").progress["rows"]) == steps
    succeed(call, line, "--resume")
    report = receipt.read(tmp_path / "run" / "receipt.json")
    assert report["status"] == "finished"
    assert [row["step"] for row in report["rows"]] == list(range(1, 61))
    assert not (tmp_path / "run" / "latest").exists()


def test_the_package_runs_as_a_module(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "glm_course", "verify", INCREMENT],
        input=RIGHT,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["status"] == "passed"
