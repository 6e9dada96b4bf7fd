"""Run every benchmark and print a table: `python -m tests.benchmarks [--quick] [--output FILE]`."""

import argparse
import time
from dataclasses import asdict
from pathlib import Path

import torch

from glm_course import receipt
from tests.benchmarks import (
    bench_decoding,
    bench_memory,
    bench_scaling,
    bench_training,
    bench_verifier,
)
from tests.benchmarks.measure import Result

BENCHMARKS = {
    "training": bench_training,
    "decoding": bench_decoding,
    "memory": bench_memory,
    "scaling": bench_scaling,
    "verifier": bench_verifier,
}


def line(result: Result, quick: bool) -> str:
    """One row of the table; quick sizes earn no verdict."""
    verdict = "" if quick or result.met is None else "met" if result.met else "NOT MET"
    spread = f"{result.low:.4g} to {result.high:.4g}"
    value = f"{result.value:.4g} {result.unit}"
    return f"{result.name:<72} {value:>16} {spread:>20}  {result.wanted:>7} {verdict}"


def main() -> None:
    """Measure on two threads; write JSON where asked, never over a file that exists."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does each piece run?")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    parser.add_argument("--output", type=Path, help="write results and environment as JSON")
    arguments = parser.parse_args()
    if arguments.output is not None and arguments.output.exists():
        parser.error(f"{arguments.output} exists already")
    torch.set_num_threads(2)
    began, results = time.perf_counter(), []
    print(f"{'':<72} {'median':>16} {'range':>20}   wanted")
    for name in arguments.only:
        for result in BENCHMARKS[name].run(arguments.quick):
            results.append(result)
            print(line(result, arguments.quick), flush=True)
    seconds = round(time.perf_counter() - began, 1)
    print(f"{seconds} s in all" + (", quick sizes: no figure to quote" * arguments.quick))
    if arguments.output is not None:
        report = {
            "quick": arguments.quick,
            "seconds": seconds,
            "environment": receipt.environment("cpu", "float32 and bfloat16, as named"),
            "results": [asdict(result) for result in results],
        }
        receipt.write(arguments.output, report)


if __name__ == "__main__":
    main()
