"""Where the screen opens, and where text is printed instead."""

from __future__ import annotations

import io
import sys

import pytest
from rich.style import Style

from vjob.shelf.screen import theme
from vjob.shelf.screen.start import STREAMS, can_show


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("piped", [None, *STREAMS])
def test_a_pipe_anywhere_is_no_terminal(piped: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in STREAMS:
        monkeypatch.setattr(sys, name, io.StringIO() if name == piped else Terminal())
    assert can_show({"TERM": "xterm"}) is (piped is None)
    assert not can_show({"TERM": "dumb"}) and not can_show({})


def test_without_textual_there_is_no_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in STREAMS:
        monkeypatch.setattr(sys, name, Terminal())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not can_show({"TERM": "xterm"})


@pytest.mark.parametrize(
    ("word", "light"),
    [("0;15", True), ("0;default;7", True), ("15;0", False), ("7;8", False), ("", False)],
)
def test_a_terminal_says_that_its_background_is_light(word: str, light: bool) -> None:
    assert theme.is_light({"COLORFGBG": word}) is light
    assert not theme.is_light({})


def find_contrast(one: str, other: str) -> float:
    """As of the Web Content Accessibility Guidelines."""

    def measure(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [
            part / 12.92 if part < 0.04 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    darker, lighter = sorted([measure(one), measure(other)])
    return (lighter + 0.05) / (darker + 0.05)


def test_every_colour_is_readable_on_dark_and_on_light() -> None:
    here = theme.HERE.bgcolor
    assert here is not None and here.triplet is not None
    backgrounds = (theme.BACKGROUND, theme.PANEL, here.triplet.hex)
    inks = [colour for colour in theme.ON_LIGHT if colour not in backgrounds]
    found = {style.color for style in vars(theme).values() if isinstance(style, Style)}
    named = {colour.triplet.hex for colour in found if colour is not None and colour.triplet}
    assert {*named, *theme.HEALTH.values(), *theme.SPEAKERS} <= theme.ON_LIGHT.keys()
    for ink in inks:
        for background in backgrounds:
            pairs = (ink, background), (theme.ON_LIGHT[ink], theme.ON_LIGHT[background])
            for pair in pairs:
                assert find_contrast(*pair) >= 3.5, pair
