"""For nbval: the kernels' environment, and seconds by chapter."""

import os
from collections import Counter

from glm_course.book import KERNEL

os.environ.update(KERNEL)


def pytest_terminal_summary(terminalreporter) -> None:
    """Seconds of each chapter; pytest's own list has cells."""
    seconds = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            path, _, _ = getattr(report, "nodeid", "").partition("::")
            if path.endswith(".ipynb") and hasattr(report, "duration"):
                seconds[path] += report.duration
    if seconds:
        terminalreporter.section("seconds by chapter")
        for path, total in seconds.most_common():
            terminalreporter.write_line(f"{total:8.1f}  {path}")
