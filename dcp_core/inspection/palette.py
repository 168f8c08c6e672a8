"""Colours that tell holders apart, on a terminal and in a picture."""

from __future__ import annotations

import colorsys

# Eight that people with any kind of colour vision tell apart. Source: M. Okabe and K. Ito, "Color Universal Design".
_BASE = ("#56b4e9", "#e69f00", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7", "#999999")
_GOLDEN_TURN = 0.61803398875
_LIGHTNESS = (0.55, 0.38, 0.74)


def colour_of(holder: int) -> str:
    """The colour of a holder, as #rrggbb; never the same for two of the first few hundred.

    >>> colour_of(0)
    '#56b4e9'
    """
    if holder < len(_BASE):
        return _BASE[holder]
    hue, lightness = holder * _GOLDEN_TURN % 1.0, _LIGHTNESS[holder % len(_LIGHTNESS)]
    channels = colorsys.hls_to_rgb(hue, lightness, 0.62)
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)


def text_colour_on(colour: str) -> str:
    """Black or white, whichever stands out more on a colour.

    >>> text_colour_on("#f0e442"), text_colour_on("#0072b2")
    ('#000000', '#ffffff')
    """
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    luminance = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2
    return "#000000" if luminance > 0.18 else "#ffffff"
