"""The command line: every experiment of the book, without the book.

Each command says what it will do and about how long, draws a bar on a terminal, and writes JSON.
A wrong value is refused in one line with exit code 2; Ctrl-C leaves a run that --resume continues.
"""

import json
import platform
import sys
from dataclasses import replace
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import click
import torch
import typer

from glm_course import receipt
from glm_course.checkpoint import weights_hash
from glm_course.config import BASE, STUDY_MINI, VISION_MINI
from glm_course.data.tasks import FAMILIES, SPLITS, CodingTask, frozen_tasks
from glm_course.device import describe, pick_device, set_threads
from glm_course.evaluate import evaluate_greedy, evaluate_sampled
from glm_course.generate import encode_prompts
from glm_course.generate import generate as generate_completions
from glm_course.model import parameter_counts
from glm_course.studies.runner import read_results, run_study
from glm_course.train.loop import progress, step_name
from glm_course.train.pretrain import PretrainSettings, load_model, new_model
from glm_course.train.pretrain import pretrain as pretrain_loop
from glm_course.train.rl import RLSettings, rloo
from glm_course.train.vision import MODELS, PILOT, VisionSettings, train_vision
from glm_course.train.vision import pilot as pilot_loop
from glm_course.train.vision import smoke_test as smoke_settings
from glm_course.verifier import verify as judge_completion

app = typer.Typer(
    help="Train, improve and evaluate the course's language model.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Device = StrEnum("Device", ["auto", "cuda", "mps", "cpu"])
DType = StrEnum("DType", ["auto", "fp32", "bf16"])
Preset = StrEnum("Preset", ["base", "study_mini", "vision_mini"])
Split = StrEnum("Split", list(SPLITS))
Eye = StrEnum("Eye", [*MODELS, "both"])
Study = StrEnum(
    "Study",
    {
        "seeds": "seeds",
        "dense_control": "dense-control",
        "rl_choices": "rl-choices",
        "group_size": "group-size",
        "temperature": "temperature",
        "interference": "interference",
        "rl_estimator": "rl-estimator",
        "diversity": "diversity",
        "ordering": "ordering",
    },
)
RL_FAMILIES, ALL_FAMILIES = ",".join(RLSettings.families), ",".join(FAMILIES)
MAX_SEED = 2**32 - 1
PRESETS = {"base": BASE, "study_mini": STUDY_MINI, "vision_mini": VISION_MINI}

DeviceOption = Annotated[
    Device, typer.Option(help="Where to compute; auto: CUDA, else MPS, else CPU.")
]
DTypeOption = Annotated[
    DType, typer.Option(help="How matrices are stored; auto: bf16 on CUDA, else fp32.")
]
ThreadsOption = Annotated[
    int | None, typer.Option(min=1, max=1024, help="CPU threads; all cores unless given.")
]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Go on with the run in --output.")]
Checkpoint = Annotated[
    Path, typer.Argument(help="Checkpoint folder, such as runs/pretrain-42/step_0100.")
]
Temperature = Annotated[
    float, typer.Option(min=0, help="Of sampling, in units of the logits; 0 is greedy.")
]
NewTokens = Annotated[int, typer.Option(min=1, help="Most bytes a completion may have.")]
EvaluationSeed = Annotated[
    int, typer.Option(min=0, max=MAX_SEED, help="Of the random numbers of sampling.")
]
Families = Annotated[
    str, typer.Option(help=f"Families, separated by commas, out of {', '.join(FAMILIES)}.")
]


def say(text: str) -> None:
    """A line for people, on stderr: stdout belongs to results."""
    print(text, file=sys.stderr)


def split_families(names: str) -> tuple[str, ...]:
    """Family names of a comma-separated option; ValueError for one that does not exist."""
    chosen = tuple(name.strip() for name in names.split(",") if name.strip())
    if unknown := [name for name in chosen if name not in FAMILIES]:
        raise ValueError(f"unknown family {unknown[0]!r}; choose from {', '.join(FAMILIES)}")
    if not chosen:
        raise ValueError("name at least one family")
    return chosen


def find_task(name: str) -> CodingTask:
    """The task called `name` among the first 40 of each family in any split."""
    for split in SPLITS:
        for task in frozen_tasks(split, 40):
            if task.entry_point == name:
                return task
    raise ValueError(f"no task is called {name!r}; names look like double_ywkaoot")


def follow(rows: Any, total: int, unit: str, every: int) -> None:
    """Draw a bar on a terminal; elsewhere print a line to stderr every few rows."""
    for row in progress(rows, total, unit):
        if not sys.stderr.isatty() and (row["step"] % every == 0 or row["step"] == total):
            shown = ("loss", "passing", "tokens", "seconds")
            facts = (f"{k} {row[k]:.4g}" for k in shown if row.get(k) is not None)
            say(f"{unit} {row['step']} of {total}: {', '.join(facts)}")


@app.command()
def info(preset: Annotated[Preset, typer.Option(help="Which model.")] = Preset.base) -> None:
    """Print parameters by part, device and versions, as JSON. Takes seconds."""
    config = PRESETS[preset]
    facts = {
        "model": preset.value,
        "parameters": parameter_counts(new_model(config, 0)),
        "devices": {
            "chosen by auto": describe(pick_device()),
            "cuda": torch.cuda.is_available(),
            "mps": torch.backends.mps.is_available(),
            "threads": torch.get_num_threads(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        },
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "commit": receipt.git_commit(),
    }
    print(json.dumps(facts, indent=1))


@app.command()
def pretrain(
    steps: Annotated[int, typer.Option(min=1, help="Updates.")] = 400,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples an update.")] = 32,
    seed: Annotated[
        int, typer.Option(min=0, max=MAX_SEED, help="Of initial weights and data.")
    ] = 42,
    preset: Annotated[Preset, typer.Option(help="Which model.")] = Preset.base,
    balance_loss: Annotated[
        float, typer.Option(min=0, help="Weight of the experts' balance loss; 0: none.")
    ] = 0.0,
    bias_rate: Annotated[
        float, typer.Option(min=0, help="Step of the experts' selection bias; 0: no bias.")
    ] = 0.0,
    milestones: Annotated[
        str, typer.Option(help="Steps after which weights are kept, separated by commas.")
    ] = "100,200,400",
    output: Annotated[
        Path | None, typer.Option(help="Run folder [default: runs/pretrain-SEED].")
    ] = None,
    resume: ResumeOption = False,
    device: DeviceOption = Device.auto,
    dtype: DTypeOption = DType.auto,
    threads: ThreadsOption = None,
) -> None:
    """Pretrain from random weights on synthetic coding tasks.

    400 steps take 12 to 20 minutes on two CPU cores. Writes receipt.json and a checkpoint folder a
    milestone.
    """
    set_threads(threads)
    try:
        marks = {int(mark) for mark in milestones.split(",") if mark.strip()}
    except ValueError:
        raise ValueError(f"milestones must be numbers of steps, got {milestones!r}") from None
    settings = PretrainSettings(
        model=replace(PRESETS[preset], selection_bias=bias_rate > 0),
        steps=steps,
        batch_size=batch_size,
        seed=seed,
        balance_loss=balance_loss,
        bias_rate=bias_rate,
        milestones=tuple(sorted(mark for mark in marks if mark <= steps)),
    )
    output = output or Path("runs") / f"pretrain-{seed}"
    rows = pretrain_loop(settings, output=output, resume=resume, device=device, dtype=dtype)
    say(
        f"Pretraining {preset.value} for {steps} steps of {batch_size} examples on "
        f"{describe(pick_device(device))}, into {output}. On two CPU cores about "
        f"{steps * batch_size / 32 * 2.5 / 60:.0f} minutes for the base model."
    )
    follow(rows, steps, "step", every=10)
    say(f"Done: {output / 'receipt.json'}, last weights {output / step_name(steps)}")


@app.command()
def rl(
    start: Annotated[Path, typer.Option(help="Checkpoint folder to start from.")] = Path(
        "runs/pretrain-42/step_0100"
    ),
    families: Families = RL_FAMILIES,
    groups: Annotated[int, typer.Option(min=1, help="Prompts, each with a group.")] = 96,
    group_size: Annotated[int, typer.Option(min=2, help="Completions a prompt.")] = 16,
    temperature: Annotated[float, typer.Option(help="Of sampling; above 0.")] = 0.35,
    max_new_tokens: NewTokens = 48,
    invalid_reward: Annotated[float, typer.Option(help="Reward of invalid code.")] = -0.1,
    learning_rate: Annotated[float, typer.Option(min=0, help="AdamW's.")] = 5e-5,
    seed: Annotated[
        int, typer.Option(min=0, max=MAX_SEED, help="Of task order and sampling.")
    ] = 31415,
    output: Annotated[Path | None, typer.Option(help="Run folder [default: runs/rl-SEED].")] = None,
    resume: ResumeOption = False,
    device: DeviceOption = Device.auto,
    dtype: DTypeOption = DType.auto,
    threads: ThreadsOption = None,
) -> None:
    """Improve a checkpoint by RLOO with an executable reward.

    The default run, 96 groups of 16, takes 2 to 3 minutes on two CPU cores. Weights are kept every
    24 groups, with a sampled evaluation on dev.
    """
    set_threads(threads)
    base = RLSettings()
    settings = RLSettings(
        families=split_families(families),
        groups=groups,
        group_size=group_size,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        invalid_reward=invalid_reward,
        seed=seed,
        milestones=tuple(range(0, groups + 1, 24)),
        optimizer=type(base.optimizer)(
            learning_rate, base.optimizer.betas, base.optimizer.weight_decay, base.optimizer.clip
        ),
    )
    output = output or Path("runs") / f"rl-{seed}"
    rows = rloo(settings, start, output=output, resume=resume, device=device, dtype=dtype)
    say(
        f"RLOO from {start}: {groups} groups of {group_size} on {describe(pick_device(device))}, "
        f"into {output}. On two CPU cores about {groups * group_size / 1536 * 2.5:.0f} minutes."
    )
    follow(rows, groups, "group", every=8)
    say(f"Done: {output / 'receipt.json'}, last weights {output / step_name(groups)}")


@app.command()
def evaluate(
    checkpoint: Checkpoint,
    split: Annotated[Split, typer.Option(help="Which frozen tasks.")] = Split.dev,
    families: Families = ALL_FAMILIES,
    per_family: Annotated[int, typer.Option(min=1, max=10_000, help="Tasks a family.")] = 8,
    samples: Annotated[
        int, typer.Option(min=0, help="Sampled completions a task; 0: greedy only.")
    ] = 8,
    temperature: Annotated[float, typer.Option(help="Of sampling; above 0.")] = 0.35,
    max_new_tokens: NewTokens = 48,
    seed: EvaluationSeed = 0,
    stop_when_valid: Annotated[
        bool, typer.Option(help="End a completion once it is a valid function (an oracle).")
    ] = True,
    output: Annotated[Path | None, typer.Option(help="JSON file for the full result.")] = None,
    device: DeviceOption = Device.auto,
    threads: ThreadsOption = None,
) -> None:
    """Greedy pass@1 and sampled pass@k on a frozen split, in all and by family.

    All 64 tasks of confirm with 8 samples take about a minute on two CPU cores.
    """
    set_threads(threads)
    if samples and not 0 < temperature < float("inf"):
        raise ValueError(f"temperature must be above 0 to sample, got {temperature}")
    if output is not None and output.exists():
        raise FileExistsError(f"{output} exists already; choose another --output")
    chosen = split_families(families)
    tasks = frozen_tasks(split.value, per_family, chosen)
    model = load_model(checkpoint, device=device)
    encode_prompts(model, [task.prompt for task in tasks], max_new_tokens)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)  # rather fails now than with the result
    say(
        f"{len(tasks)} tasks of {split.value}, greedy and {samples} samples each, on "
        f"{describe(pick_device(device))}. About {0.2 + len(tasks) * (samples + 1) / 600:.1f} "
        "minutes on two CPU cores."
    )
    common = {"max_new_tokens": max_new_tokens, "stop_when_valid": stop_when_valid}
    result: dict[str, Any] = {
        "settings": {
            "split": split.value,
            "families": list(chosen),
            "per_family": per_family,
            "samples": samples,
            "temperature": temperature,
            "seed": seed,
            **common,
        },
        "weights": weights_hash(model.state_dict()),
        "environment": receipt.environment(
            str(model.embedding.weight.device), str(model.embedding.weight.dtype)
        ),
        "greedy": evaluate_greedy(model, tasks, **common),
    }
    if samples:
        result["sampled"] = evaluate_sampled(
            model, tasks, samples=samples, temperature=temperature, seed=seed, **common
        )
    print(evaluation_table(result))
    if output is not None:
        receipt.write(output, result)
        say(f"Written: {output}")


def evaluation_table(result: dict[str, Any]) -> str:
    """Solved tasks and exact completions by family, for a terminal."""
    greedy, sampled = result["greedy"], result.get("sampled")
    lines = [f"{'family':<12} {'greedy':>8}" + (f" {'solved':>8} {'exact':>9}" if sampled else "")]
    for name in [*greedy["by_family"], "total"]:
        g = greedy["total"] if name == "total" else greedy["by_family"][name]
        line = f"{name:<12} {g['solved']:>5}/{g['tasks']}"
        if sampled:
            s = sampled["total"] if name == "total" else sampled["by_family"][name]
            line += f" {s['solved']:>5}/{s['tasks']} {s['exact']:>5}/{s['completions']}"
        lines.append(line)
    if sampled:
        estimates = (f"{k}: {p:.3f}" for k, p in sampled["pass_at_k"].items())
        lines.append(f"pass@k (unbiased)  {'  '.join(estimates)}")
    return "\n".join(lines)


@app.command()
def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    task: Annotated[
        str | None, typer.Option(help="Continue this task's prompt instead: double_ywkaoot, say.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Completions.")] = 1,
    temperature: Temperature = 0.35,
    max_new_tokens: NewTokens = 48,
    seed: EvaluationSeed = 0,
    device: DeviceOption = Device.auto,
) -> None:
    """Continue a prompt, and print the completions as JSON. Takes seconds."""
    if (prompt is None) == (task is None):
        raise ValueError("give either --prompt or --task")
    if task is not None:
        prompt = find_task(task).prompt
    model = load_model(checkpoint, device=device)
    [done] = generate_completions(
        model,
        [prompt],
        samples=samples,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        seed=seed,
    )
    rows = [
        {"text": c.text, "stopped": c.stopped, "log_probability": round(sum(c.log_probs), 4)}
        for c in done
    ]
    print(json.dumps({"prompt": prompt, "completions": rows}, indent=1))


@app.command()
def verify(
    task: Annotated[str, typer.Argument(help="Name of a task, such as double_ywkaoot.")],
    completion: Annotated[
        Path, typer.Argument(help="File that holds the completion; - reads standard input.")
    ] = Path("-"),
) -> None:
    """Judge a completion of a task's prompt; exit code 0 when it passes, 1 when not."""
    found = find_task(task)
    if str(completion) == "-":
        text = sys.stdin.read()
    else:
        try:
            text = completion.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{completion} is not UTF-8 text") from None
    verdict = judge_completion(found, text)
    facts = {"status": verdict.status, "tests_passed": verdict.tests_passed}
    print(json.dumps(facts | {"message": verdict.message}))
    raise typer.Exit(0 if verdict.status == "passed" else 1)


@app.command()
def vision(
    model: Annotated[
        Eye, typer.Option(help="faithful: the tower; baseline: direct patches.")
    ] = Eye.both,
    smoke_test: Annotated[
        bool, typer.Option("--smoke-test", help="At most 40 steps of 20 pictures, 100 held out.")
    ] = False,
    seed: Annotated[
        int, typer.Option(min=0, max=MAX_SEED, help="Of initial weights and pictures.")
    ] = 42,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder with a run folder a model [default: runs/vision-SEED]."),
    ] = None,
    device: DeviceOption = Device.auto,
    threads: ThreadsOption = None,
) -> None:
    """Learn to read digits from pictures, from random weights.

    Each model takes about 10 seconds on two CPU cores. Prints held-out answers before and after,
    and writes a receipt.json a model, no weights.
    """
    set_threads(threads)
    output = output or Path("runs") / f"vision-{seed}"
    chosen = MODELS if model == Eye.both else (model.value,)
    for name in chosen:  # before anything runs
        if (output / name).exists():
            raise FileExistsError(f"{output / name} exists already; choose another --output")
    lines = [vision_line("model", "parameters", "before", "after", "loss before", "loss after")]
    for name in chosen:
        settings = VisionSettings(model=name, seed=seed)
        settings = smoke_settings(settings) if smoke_test else settings
        rows = train_vision(settings, output=output / name, device=device)
        say(
            f"Vision, {name}: {settings.steps} steps of {settings.batch_size} pictures on "
            f"{describe(pick_device(device))}, into {output / name}. About 10 seconds on two CPU "
            "cores."
        )
        follow(rows, settings.steps, "step", every=20)
        lines.append(vision_result(name, output / name))
    print("\n".join(lines))


@app.command()
def vision_pilot(
    start: Annotated[
        Path | None,
        typer.Option(help="Checkpoint folder to start from [default: random weights]."),
    ] = None,
    max_seconds: Annotated[
        float, typer.Option(help="After this time training stops, and is evaluated.")
    ] = PILOT.max_seconds,
    seed: Annotated[
        int, typer.Option(min=0, max=MAX_SEED, help="Of what starts at random, and of pictures.")
    ] = PILOT.seed,
    output: Annotated[
        Path | None, typer.Option(help="Run folder [default: runs/vision-pilot-SEED].")
    ] = None,
    device: DeviceOption = Device.auto,
    threads: ThreadsOption = None,
) -> None:
    """Teach the base model to read digits: tower, last block, final norm and embedding learn.

    40 updates take about 30 seconds on two CPU cores. Prints held-out answers before and after, and
    writes receipt.json, no weights; exit code 2 when no more answers are correct after than before.
    """
    set_threads(threads)
    settings = replace(
        PILOT,
        language=replace(PRESETS["base"], vocab_size=PILOT.language.vocab_size),
        seed=seed,
        max_seconds=max_seconds,
    )
    output = output or Path("runs") / f"vision-pilot-{seed}"
    rows = pilot_loop(settings, start, output=output, device=device)
    say(
        f"Vision pilot from {start or 'random weights'}: {settings.steps} steps of "
        f"{settings.batch_size} pictures, at most {max_seconds:g} seconds, on "
        f"{describe(pick_device(device))}, into {output}. About 30 seconds on two CPU cores."
    )
    follow(rows, settings.steps, "step", every=10)
    print(vision_line("model", "parameters", "before", "after", "loss before", "loss after"))
    print(vision_result("pilot", output))
    if not receipt.read(output / "receipt.json")["summary"]["learned"]:
        say("glm_course: nothing was learned: no more answers are correct than before")
        raise typer.Exit(2)


def vision_line(*cells: str) -> str:
    """One line of the table of vision runs."""
    return f"{cells[0]:<10} {cells[1]:>10}" + "".join(f" {cell:>11}" for cell in cells[2:])


def vision_result(name: str, run: Path) -> str:
    """That line for a finished run: correct held-out answers and their cross-entropy in nats."""
    summary = receipt.read(run / "receipt.json")["summary"]
    before, after = summary["before"], summary["after"]
    correct = (f"{part['correct']}/{part['of']}" for part in (before, after))
    losses = (f"{part['loss']:.4f}" for part in (before, after))
    return vision_line(name, f"{summary['parameters']:,}", *correct, *losses)


@app.command()
def study(
    name: Annotated[Study, typer.Argument(help="Which study.")],
    seeds: Annotated[
        str | None, typer.Option(help="Seeds, separated by commas [default: the study's own].")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, max=64, help="Seeds at a time.")] = 1,
    output: Annotated[
        Path | None, typer.Option(help="Results file [default: runs/study-NAME.json].")
    ] = None,
    analyse: Annotated[
        bool, typer.Option("--analyse", help="Print the table of what is recorded; train nothing.")
    ] = False,
    threads: ThreadsOption = None,
) -> None:
    """Run a study over seeds, or analyse its results file.

    Seeds already in the file are not run again, so an interrupted study goes on where it stopped.
    Writes the results, a table and a figure.
    """
    set_threads(threads)
    module = import_module(f"glm_course.studies.{name.name}")
    output = output or Path("runs") / f"study-{name.value}.json"
    if not analyse:
        try:
            own = seeds is None
            wanted = list(module.SEEDS) if own else [int(seed) for seed in seeds.split(",")]
        except ValueError:
            raise ValueError(f"seeds must be whole numbers with commas, got {seeds!r}") from None
        results = run_study(module, wanted, output, jobs)
        say(
            f"Study {name.value}: {len(wanted)} seeds, {jobs} at a time, into {output}. About "
            f"{module.MINUTES} minutes a seed on two CPU cores."
        )
        for run in results:
            say(f"seed {run['seed']} is done")
    runs = read_results(module, output)["runs"]
    print(module.table(runs))
    if not analyse:
        figure = output.with_suffix(".png")
        module.figure(runs).savefig(figure, dpi=150)
        say(f"Written: {output}, {figure}")


def main() -> None:
    """Run a command; one line and exit code 2 for what a user got wrong."""
    try:
        code = app(standalone_mode=False)
        if code == 130:  # what typer makes of Ctrl-C
            raise KeyboardInterrupt
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message())
        code = 2
    except click.ClickException as error:
        say(f"glm_course: {error.format_message()}")
        code = 2
    except OSError as error:  # ours are sentences; the system's have a number and a file
        known = error.filename is not None and error.strerror is not None
        say(f"glm_course: {error.filename}: {error.strerror}" if known else f"glm_course: {error}")
        code = 2
    except ValueError as error:
        say(f"glm_course: {error}")
        code = 2
    except (KeyboardInterrupt, click.Abort):
        say("glm_course: interrupted; a run with --output goes on with --resume")
        code = 130
    sys.exit(code or 0)
