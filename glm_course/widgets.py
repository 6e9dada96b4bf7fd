"""Widgets that also move in the rendered page, where no Python runs.

Every state is drawn beforehand; the browser only picks one. Left out: `interact` and `observe`,
whose sliders move in the rendered page while nothing behind them recomputes.
"""

import base64
import io
from collections.abc import Iterable, Sequence
from html import escape

import ipywidgets as widgets
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from PIL import Image

from glm_course.plots import PNG


class Frames(widgets.VBox):
    """A slider over figures drawn beforehand; the link between them runs in the browser.

    figures: one for each label, all of one size in inches; a generator keeps only one open.
    labels: what the slider shows, a number or a word for each figure.
    description: what the slider moves, one or two words.
    alt: a sentence for readers who do not see the pictures; the state is added to it.

    Raises ValueError when figures and labels differ in number, or when `alt` is empty.
    """

    def __init__(
        self, figures: Iterable[Figure], labels: Sequence[object], description: str, alt: str
    ):
        if not alt.strip():
            raise ValueError("alt must say what the pictures show")
        pictures = []
        for figure, label in zip(figures, labels, strict=True):
            text = escape(f"{alt} ({description}: {label})")
            # An HTML widget and not an Image, which has no alt text.
            pictures.append(widgets.HTML(f'<img alt="{text}" src="{_data_url(figure)}">'))
        slider = widgets.SelectionSlider(
            options=[(str(label), i) for i, label in enumerate(labels)],
            description=description,
            style={"description_width": "initial"},
            layout={"width": "auto", "max_width": "480px"},
        )
        stack = widgets.Stack(pictures, selected_index=0)
        widgets.jslink((slider, "index"), (stack, "selected_index"))
        super().__init__([slider, stack], layout={"overflow": "hidden"})
        self.add_class("course-frames")

    def __repr__(self) -> str:
        slider, stack = self.children
        return f"Frames({slider.description}: {len(stack.children)} states)"


def _data_url(figure: Figure) -> str:
    """`figure` as a PNG of at most 256 colours in a data URL; the figure is closed.

    Plots need no more, and a widget has dozens of states: a third of the bytes.
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata=PNG)
    plt.close(figure)
    picture = Image.open(buffer).convert("RGB")
    picture = picture.quantize(256, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    buffer = io.BytesIO()
    picture.save(buffer, format="png", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
