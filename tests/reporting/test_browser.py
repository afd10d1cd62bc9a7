"""The page in a real browser: it renders in light, dark and print, and the console says nothing."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import zlib

import pytest

from moequant.reporting import make_report

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="needs Chromium: apt-get install --no-install-recommends chromium"
)


@pytest.fixture(scope="module")
def page(faulty, outputs, reported_source, tmp_path_factory):
    """A page with everything but quality: of a faulty output and one in another format."""
    path = tmp_path_factory.mktemp("browser") / "report.html"
    path.write_text(make_report([faulty, outputs("w4a8")], against=reported_source).to_html())
    return path


@pytest.fixture
def browse(page, tmp_path):
    """browse(*options): open the page; returns its DOM, and fails on what the console says."""

    def browse(*options):
        command = [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--disable-dev-shm-usage", f"--user-data-dir={tmp_path / 'profile'}",
            "--enable-logging=stderr", "--window-size=1200,1600", *options, page.as_uri(),
        ]  # fmt: skip
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, check=False,
            env=dict(os.environ, HOME=str(tmp_path)),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert re.findall(r".*CONSOLE.*", done.stderr) == []
        return done.stdout

    return browse


def rows_of(path):
    """Rows of RGB(A) pixels of a PNG without interlacing."""
    data, at, chunks = path.read_bytes(), 8, {}
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind = data[at + 4 : at + 8]
        chunks[kind] = chunks.get(kind, b"") + data[at + 8 : at + 8 + length]
        at += 12 + length
    width, height, depth, color, *_, interlaced = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert (depth, interlaced) == (8, 0)
    size = {2: 3, 6: 4}[color]
    raw, before = zlib.decompress(chunks[b"IDAT"]), bytearray(width * size)
    for y in range(height):
        start = y * (width * size + 1)
        row = bytearray(raw[start + 1 : start + 1 + width * size])
        _unfilter(row, before, raw[start], size)
        yield [bytes(row[x : x + 3]) for x in range(0, len(row), size)]
        before = row


def _unfilter(row, above, kind, size):
    """Undo a filter of PNG (W3C PNG specification, section 9) in place."""
    for x in range(len(row)):
        a = row[x - size] if x >= size else 0
        b, c = above[x], above[x - size] if x >= size else 0
        if kind == 1:
            row[x] = (row[x] + a) & 255
        elif kind == 2:
            row[x] = (row[x] + b) & 255
        elif kind == 3:
            row[x] = (row[x] + (a + b) // 2) & 255
        elif kind == 4:
            p = a + b - c
            nearest = min((abs(p - a), 0, a), (abs(p - b), 1, b), (abs(p - c), 2, c))[2]
            row[x] = (row[x] + nearest) & 255


@pytest.mark.parametrize(
    ("scheme", "background"), [("1", (255, 255, 255)), ("0", (18, 23, 29))], ids=["light", "dark"]
)
def test_it_is_drawn_in_the_colors_of_the_scheme(browse, tmp_path, scheme, background):
    picture = tmp_path / "picture.png"
    browse(
        f"--blink-settings=preferredColorScheme={scheme}", "--window-size=900,1100",
        f"--screenshot={picture}",
    )  # fmt: skip
    seen = set()
    for y, row in enumerate(rows_of(picture)):
        seen.update(row)
        if y == 0:
            assert tuple(row[0]) == background
    assert bytes((213, 43, 107)) in seen or len(seen) > 50  # text, banners, bars
    assert len(seen) > 50


def test_it_is_laid_out_with_every_section(browse):
    dom = browse("--dump-dom")
    for heading in ("Side by side", "Bytes by role", "Error of weights", "Engines and GPUs"):
        assert f"<h2>{heading}</h2>" in dom
    assert dom.count('class="cells"') == 6  # two maps and a key of each output


def test_it_prints(browse, tmp_path):
    printed = tmp_path / "report.pdf"
    browse("--no-pdf-header-footer", f"--print-to-pdf={printed}")
    data = printed.read_bytes()
    assert data.startswith(b"%PDF-")
    pages = len(re.findall(rb"/Type\s*/Page\b", data))
    assert 2 <= pages <= 12
