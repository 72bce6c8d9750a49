"""Convert terminal colour codes to HTML, or strip them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape

from monarch_kernel.display.controls import SEQUENCE, UNSEEN
from monarch_kernel.display.styles import ANSI_COLOURS

#: Real codes have at most three digits, and sequences only a few codes. Longer ones are dropped, as terminals do.
_COLOUR = re.compile(r"\x1b\[((?:[0-9]{0,3};){0,31}[0-9]{0,3})m")


def strip_ansi(text: str) -> str:
    """Return `text` without terminal control codes."""
    return UNSEEN.sub("", SEQUENCE.sub("", text)) if "\x1b" in text else text


def ansi_to_html(text: str) -> str:
    """Return `text` escaped for HTML, with colours and weights as spans. Other control codes are dropped."""
    if "\x1b" not in text:
        return escape(UNSEEN.sub("", text), quote=False)
    return "".join(_spans(text))


def _spans(text: str) -> Iterator[str]:
    style: dict[str, str] = {}
    at = 0
    for match in SEQUENCE.finditer(text):
        yield _span(text[at : match.start()], style)
        at = match.end()
        if codes := _COLOUR.fullmatch(match.group()):
            _apply([int(code or 0) for code in codes[1].split(";")], style)
    yield _span(text[at:], style)


def _span(text: str, style: dict[str, str]) -> str:
    text = escape(UNSEEN.sub("", text), quote=False)
    if not text or not style:
        return text
    return f'<span style="{";".join(f"{name}:{value}" for name, value in style.items())}">{text}</span>'


_SWITCHES = {
    1: ("font-weight", "bold"),
    2: ("opacity", "0.7"),
    3: ("font-style", "italic"),
    4: ("text-decoration", "underline"),
    9: ("text-decoration", "line-through"),
}
_OFF = {
    22: ("font-weight", "opacity"),
    23: ("font-style",),
    24: ("text-decoration",),
    29: ("text-decoration",),
    39: ("color",),
    49: ("background-color",),
}


def _apply(codes: list[int], style: dict[str, str]) -> None:
    rest = iter(codes)
    for code in rest:
        if code == 0:
            style.clear()
        elif code in _SWITCHES:
            name, value = _SWITCHES[code]
            style[name] = value
        elif code in _OFF:
            for name in _OFF[code]:
                style.pop(name, None)
        elif code in (38, 48):
            colour = _extended(rest)
            if colour:
                style["color" if code == 38 else "background-color"] = colour
        elif 30 <= code <= 37 or 90 <= code <= 97:
            style["color"] = ANSI_COLOURS[code - 30 if code < 90 else code - 82]
        elif 40 <= code <= 47 or 100 <= code <= 107:
            style["background-color"] = ANSI_COLOURS[code - 40 if code < 100 else code - 92]


def _extended(rest: Iterator[int]) -> str:
    """Parse the colour after a 38 or 48: `5;n` or `2;r;g;b`."""
    kind = next(rest, 0)
    if kind == 2:
        red, green, blue = (min(next(rest, 0), 255) for _ in range(3))
        return f"#{red:02x}{green:02x}{blue:02x}"
    if kind != 5:
        return ""
    index = next(rest, 0)
    if index < 16:
        return ANSI_COLOURS[index]
    if index >= 232:
        grey = min(8 + (index - 232) * 10, 255)
        return f"#{grey:02x}{grey:02x}{grey:02x}"
    levels = (0, 95, 135, 175, 215, 255)
    cube = index - 16
    return "#" + "".join(f"{levels[part]:02x}" for part in (cube // 36, cube // 6 % 6, cube % 6))
