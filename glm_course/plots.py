"""One look for every figure of the book.

A figure is a sheet of light paper with dark ink: it reads the same on the light and on the dark
page, where transparent figures lose either their labels or their lines. The colours follow Okabe
and Ito, which stay apart for colour-blind readers.
"""

import matplotlib
from cycler import cycler
from IPython.core.getipython import get_ipython
from matplotlib_inline.backend_inline import set_matplotlib_formats

PAPER = "#f6f4ee"
INK = "#22262b"
QUIET = "#6b7178"  # axes, ticks, reference lines
# Okabe and Ito (2008) without yellow, which is too pale for lines on paper.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b8568c", "#8a6100", "#4b9fd1", "#22262b")
PNG = {"Software": None}  # metadata: no version text, so equal pictures are equal files


def use_course_style() -> None:
    """Make figures of this process look like the book's, and equal figures equal PNG bytes.

    In a notebook it also keeps the version text out of inline figures. Nothing here draws anything.
    """
    matplotlib.rcParams.update(
        {
            "figure.figsize": (6.4, 2.8),  # inches
            "figure.dpi": 120,
            "savefig.dpi": "figure",
            "figure.constrained_layout.use": True,
            "figure.facecolor": PAPER,
            "savefig.facecolor": PAPER,
            "axes.facecolor": PAPER,
            "axes.edgecolor": QUIET,
            "axes.labelcolor": INK,
            "axes.titlecolor": INK,
            "axes.titlesize": "medium",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.prop_cycle": cycler(color=COLOURS),
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": "#dcd8cc",
            "grid.linewidth": 0.6,
            "text.color": INK,
            "xtick.color": QUIET,
            "xtick.labelcolor": INK,
            "ytick.color": QUIET,
            "ytick.labelcolor": INK,
            "font.family": "DejaVu Sans",  # comes with matplotlib, so it is the same everywhere
            "font.size": 9.5,
            "lines.linewidth": 1.7,
            "legend.frameon": False,
            "image.cmap": "cividis",  # even in lightness and safe for colour-blind readers
        }
    )
    if get_ipython() is not None:
        set_matplotlib_formats("png", metadata=PNG)
