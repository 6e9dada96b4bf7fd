"""Figures and widgets of the book: equal pictures are equal bytes, and every picture has words."""

import base64
import re

import matplotlib
import pytest

matplotlib.use("agg")

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from glm_course.plots import COLOURS, PAPER, use_course_style
from glm_course.widgets import Frames


@pytest.fixture(autouse=True)
def style():
    with matplotlib.rc_context():
        use_course_style()
        yield
    plt.close("all")


def line(slope: float) -> Figure:
    figure, ax = plt.subplots()
    ax.plot([0, slope])
    return figure


def frames(*slopes: float, alt: str = "A line.") -> Frames:
    return Frames(map(line, slopes), slopes, "slope", alt)


def pictures(widget: Frames) -> list[bytes]:
    html = (child.value for child in widget.children[1].children)
    return [base64.b64decode(re.search(r'base64,([^"]+)"', h)[1]) for h in html]


def test_equal_figures_are_equal_bytes_and_others_are_not():
    one, two = pictures(frames(1.0, 2.0)), pictures(frames(1.0, 2.0))
    assert one == two
    assert one[0] != one[1]


def test_pictures_name_no_version_and_no_time():
    (png,) = pictures(frames(1.0))
    assert png.startswith(b"\x89PNG")
    assert not {b"tEXt", b"iTXt", b"zTXt", b"tIME"} & set(re.findall(rb"[a-zA-Z]{4}", png))


def test_all_frames_have_one_size():
    sizes = {png[16:24] for png in pictures(frames(1.0, 1e-9, 1e9))}  # width and height of IHDR
    assert len(sizes) == 1


def test_alt_text_names_the_state_and_is_escaped():
    (first, _) = frames(1.0, 2.0, alt='A "steep" <line>').children[1].children
    assert 'alt="A &quot;steep&quot; &lt;line&gt; (slope: 1.0)"' in first.value


@pytest.mark.parametrize("alt", ["", "  "])
def test_missing_alt_text_is_refused(alt):
    with pytest.raises(ValueError, match="alt"):
        frames(1.0, alt=alt)


def test_as_many_labels_as_figures():
    with pytest.raises(ValueError, match="shorter|longer"):
        Frames([line(1.0)], [1, 2], "slope", "A line.")


def test_one_figure_is_open_at_a_time():
    def watched():
        for slope in (1.0, 2.0, 3.0):
            assert plt.get_fignums() == []
            yield line(slope)

    Frames(watched(), [1, 2, 3], "slope", "A line.")
    assert plt.get_fignums() == []


def test_what_nbval_compares_is_the_same_each_time():
    assert repr(frames(1.0, 2.0)) == repr(frames(3.0, 4.0)) == "Frames(slope: 2 states)"


def test_colours_keep_their_distance_from_the_paper():
    """Contrast of at least 2.5 to 1 (WCAG), enough to see a line by."""

    def luminance(colour: str) -> float:
        rgb = matplotlib.colors.to_rgb(colour)
        linear = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb)
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for colour in COLOURS:
        assert (luminance(PAPER) + 0.05) / (luminance(colour) + 0.05) >= 2.5, colour
