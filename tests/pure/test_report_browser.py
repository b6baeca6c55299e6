"""The page of `shoal report` in a browser: on a phone and on a screen, in light and dark.

A copy of the page gets a script that measures it; what it finds stands in an attribute of the DOM that comes back.
"""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from report_samples import bench_folder, collectives_folder, measured, run_folder

from shoal.verbs.report import write_page

PHONE, SCREEN = 390, 1280
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--enable-logging=stderr"),
    *("--virtual-time-budget=2000", "--dump-dom"),
)

# A window is never less than 500 wide, a frame may be.
FRAME = """<!DOCTYPE html>
<meta name="color-scheme" content="light dark">
<iframe src="page.html" style="width: {width}px; height: 900px; border: 0"></iframe>
<script>
addEventListener("message", ({{data}}) => document.documentElement.dataset.found = data);
</script>
"""

# Of each drawing: its size, marks that have a colour of their own and a size, texts that reach beyond it.
PROBE = """
<script>
addEventListener("load", () => {
  document.querySelectorAll("details").forEach(box => box.open = true);
  const own = getComputedStyle(document.body);
  const is_mark = mark => {
    const look = getComputedStyle(mark), box = mark.getBoundingClientRect();
    const colours = [look.fill, look.stroke].filter(colour => colour != "none" && colour != own.color);
    return colours.length > 0 && (box.width > 0 || box.height > 0);
  };
  const drawings = [...document.querySelectorAll("svg")].map(svg => {
    const box = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll("text")].map(text => [text.textContent, text.getBoundingClientRect()]);
    const apart = ([, a], [, b]) => Math.min(a.right, b.right) - Math.max(a.left, b.left) < 2
      || Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) < Math.min(a.height, b.height) * 0.4;
    return {
      label: svg.getAttribute("aria-label"), width: box.width, height: box.height,
      marks: [...svg.querySelectorAll("path, rect, use, circle, line")].filter(is_mark).length,
      clipped: texts.filter(([, at]) => at.left < box.left - 1 || at.right > box.right + 1
        || at.top < box.top - 1 || at.bottom > box.bottom + 1).map(([text]) => text),
      overlapping: texts.flatMap((a, i) => texts.slice(i + 1).filter(b => !apart(a, b)).map(b => [a[0], b[0]])),
    };
  });
  parent.postMessage(JSON.stringify({
    width: innerWidth, scrolls: document.documentElement.scrollWidth, drawings,
    dark: matchMedia("(prefers-color-scheme: dark)").matches, ink: own.color, paper: own.backgroundColor,
  }), "*");
});
</script>
"""


@pytest.fixture(scope="session")
def browser() -> str:
    """One that starts."""
    for name in ("chromium", "google-chrome"):
        path = shutil.which(name)
        if path and subprocess.run([path, "--version"], capture_output=True, timeout=60).returncode == 0:
            return path
    pytest.skip("there is no chromium or google-chrome here that starts; `make browser` installs one")


@pytest.fixture(scope="session")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All sections, and some odd input."""
    folder = tmp_path_factory.mktemp("pages")
    rows = [measured(text) for text in ("lone", "threads2", "dp2", "dp4", "pp2.dp2.tp2:micro=4,schedule=1f1b")]
    return write_page(
        [
            bench_folder(folder / "bench", rows=[*rows, measured("cp2", error="is not available yet")]),
            collectives_folder(folder / "links"),
            run_folder(folder / "gpt"),
            run_folder(folder / "gpt-with-a-name-that-is-rather-long", "pp2:micro=2", odd={5: float("nan")}),
        ]
    )


@pytest.mark.parametrize("look", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, SCREEN])
def test_a_page_fits_its_window_and_draws_all_its_charts(
    browser: str, page: Path, tmp_path: Path, width: int, look: str
) -> None:
    found, console = looked_at(browser, page.read_text("utf-8"), tmp_path, width=width, look=look)
    assert console == []
    assert (found["width"], found["dark"]) == (width, look == "dark")
    assert found["scrolls"] <= width
    assert contrast(found["ink"], found["paper"]) > 7
    assert len(found["drawings"]) > 15
    for drawing in found["drawings"]:
        assert drawing["marks"] > 0, drawing["label"]
        assert min(drawing["width"], drawing["height"]) > 40, drawing["label"]
        assert drawing["clipped"] == [], drawing["label"]
        assert drawing["overlapping"] == [], drawing["label"]


def test_what_would_be_wrong_is_found(browser: str, page: Path, tmp_path: Path) -> None:
    text = page.read_text("utf-8")
    wide = '<div style="width: 500px">wide</div><script>console.error("broken")</script>'
    texts = '<text x="90" y="20">clipped</text><text x="92" y="21">too</text>'
    empty = f'<svg viewBox="0 0 100 50"><path d="M0 0h9" fill="none" stroke="currentColor"/>{texts}</svg>'
    found, console = looked_at(browser, text.replace("<main>", f"<main>{wide}{empty}"), tmp_path, width=PHONE)
    assert found["scrolls"] > PHONE
    assert len(console) == 1
    assert "broken" in console[0]
    drawing = found["drawings"][0]
    assert (drawing["marks"], drawing["clipped"], drawing["overlapping"]) == (
        0,
        ["clipped", "too"],
        [["clipped", "too"]],
    )


def looked_at(
    browser: str, text: str, folder: Path, *, width: int, look: str = "light"
) -> tuple[dict[str, Any], list[str]]:
    """What the probe found, and what the browser said on its console."""
    (folder / "page.html").write_text(text.replace("</head>", f"{PROBE}</head>"), "utf-8")
    (folder / "frame.html").write_text(FRAME.format(width=width), "utf-8")
    scheme = f"--blink-settings=preferredColorScheme={0 if look == 'dark' else 1}"
    own = (scheme, "--window-size=1400,1000", f"--user-data-dir={folder / 'profile'}")
    address = (folder / "frame.html").as_uri()
    done = subprocess.run([browser, *FLAGS, *own, address], capture_output=True, text=True, timeout=90, check=True)
    seen = re.search(r'data-found="([^"]*)"', done.stdout)
    assert seen, done.stderr
    return json.loads(unescape(seen[1])), [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def contrast(one: str, other: str) -> float:
    """Of two colours `rgb(r, g, b)`, from 1 to 21, as the Web Content Accessibility Guidelines have it."""

    def luminance(colour: str) -> float:
        channels = [int(channel) / 255 for channel in re.findall(r"\d+", colour)[:3]]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
