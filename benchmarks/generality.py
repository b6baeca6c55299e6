"""Which kinds of model are the same training in which layout: every cell trained, and docs/generality.md written anew.

python benchmarks/generality.py

The kinds and the comparison are those of tests/gloo: zoo.py and matrix.py.
"""

import sys
import warnings
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "gloo"))

from matrix import LAYOUTS, Cell, fill  # noqa: E402  # found by the path above
from zoo import ZOO  # noqa: E402

DOCUMENT = ROOT / "docs" / "generality.md"

HEAD = """\
# Which models, in which layouts

What `python benchmarks/generality.py` writes, with torch {torch} and transformers {transformers}.
Of {cells} cells {verified} are verified, {refused} refused, {failed} failed.

**verified**: three steps and an evaluation in float64, in worlds of CPU processes, compared with one process: every
loss, gradient norm, gradient, weight and buffer, on every rank. In brackets the largest relative difference (Frobenius
norm; a tensor below 1e-4 of the whole gradient or model is measured by that); the gate is 1e-10. **refused**: an error
that says why, before the first step.

The models are tiny ([zoo.py](../tests/gloo/zoo.py)), with random weights, ragged last batches, and dropout off. Kernels
of a GPU and lower precision are not covered.

"""


def try_cell(kind: str, layout: str) -> Cell | str:
    """A cell, or what went wrong where neither of the two that are allowed came out."""
    try:
        return fill(kind, layout)
    except Exception as error:  # whatever a model raises: the table must show it, and the exit code
        return f"{type(error).__name__}: {error}"


def words(cell: Cell | str) -> str:
    """A cell of the table."""
    if isinstance(cell, str):
        text = f"**FAILED**: {cell}"
    else:
        text = f"refused: {cell.refusal}" if cell.refusal else f"verified ({cell.error:.0e})"
    return text.partition("\n")[0].replace("|", "\\|")


def main() -> int:
    # torch says so whenever its encoder evaluates a batch with padding.
    warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
    rows: list[list[Cell | str]] = []
    for kind in ZOO:
        rows.append([try_cell(kind, layout) for layout in LAYOUTS])
        print(kind, *map(words, rows[-1]), sep=" | ", flush=True)
    cells = [cell for row in rows for cell in row]
    failed = sum(isinstance(cell, str) for cell in cells)
    refused = sum(isinstance(cell, Cell) and bool(cell.refusal) for cell in cells)
    head = HEAD.format(
        torch=version("torch").partition("+")[0],
        transformers=version("transformers"),
        cells=len(cells),
        verified=len(cells) - failed - refused,
        refused=refused,
        failed=failed,
    )
    table = [["model", *LAYOUTS], ["---"] * (1 + len(LAYOUTS))]
    table += [[kind, *map(words, row)] for kind, row in zip(ZOO, rows, strict=True)]
    DOCUMENT.write_text(head + "".join(f"| {' | '.join(row)} |\n" for row in table))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
