"""One colour per meaning, on the whole page: told apart by any kind of colour vision, and on white as on black.

The eight colours of Okabe and Ito 2008 (Color Universal Design), but for their black, and two more.
"""

import re
from collections.abc import Mapping

AXES: Mapping[str, str] = {
    "pp": "#009e73",
    "dp": "#d55e00",
    "fsdp": "#e69f00",
    "cp": "#882255",
    "tp": "#cc79a7",
    "ep": "#44aa99",
    "threads": "#56b4e9",
}
_SEVERAL_AXES = "#8c6d31"  # a group over pp and dp, say
_SHARES: Mapping[str, str] = {
    "compute": "#0072b2",
    "update": "#56b4e9",
    "data": "#882255",
    "bubble": "#f0e442",
    "waiting": "#888888",
    "other": "#c4c4c4",
}
_MEMORY: Mapping[str, str] = {
    "parameters": "#0072b2",
    "gathered": "#56b4e9",
    "gradients": "#d55e00",
    "optimizer": "#e69f00",
    "inputs": "#882255",
    "activations": "#009e73",
}
_ALONE = "#0072b2"  # one process
LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#888888")


def of_share(name: str) -> str:
    """Of a part of a step: compute, `comm dp`, bubble, ..."""
    return of_axis(name.removeprefix("comm ")) if name.startswith("comm ") else _SHARES.get(name, _SEVERAL_AXES)


def of_axis(name: str) -> str:
    """Of an axis of the mesh, or of several."""
    return AXES.get(name, _SEVERAL_AXES)


def of_layout(text: str) -> str:
    """Of a layout, wherever it is a line: that of its axis; dashes and marks tell layouts over the same axes apart."""
    axes = [axis for axis in AXES if re.search(rf"(^|\.){axis}[0-9]", text.partition(":")[0])]
    return _ALONE if not axes else of_axis(axes[0]) if len(axes) == 1 else _SEVERAL_AXES


def of_runs(layouts: Mapping[str, str]) -> dict[str, str]:
    """Of runs by name: that of its layout, and another one where an earlier run has that layout too."""
    firsts: dict[str, str] = {}
    for name, text in layouts.items():
        firsts.setdefault(text, name)
    found = {name: of_layout(text) for text, name in firsts.items()}
    for name in layouts:
        left = [colour for colour in LINES if colour not in found.values()] or LINES
        found.setdefault(name, left[0])
    return found


def of_memory(name: str) -> str:
    """Of a category of tensors."""
    return _MEMORY.get(name, _SEVERAL_AXES)


def ink(colour: str) -> str:
    """Black or white, whichever is read more easily on it."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 130 else "#ffffff"
