"""Speed and memory of the library as ratios to the plain code, measured side by side in one run.

`python -m tests.benchmarks [--quick] [--output FILE]` from the project's root. Not collected by
pytest: a ratio is only worth reading on an otherwise idle machine.
"""
