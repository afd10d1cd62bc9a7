"""Heat maps are PNG pictures with one pixel an expert."""

from __future__ import annotations

import base64
import re
import struct
import zlib

from moequant.reporting.heat_map import Scale, color_key, heat_map
from moequant.reporting.png import png_uri


def pixels(uri):
    """Rows of palette indices of a PNG, checked chunk by chunk."""
    data = base64.b64decode(uri.removeprefix("data:image/png;base64,"), validate=True)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, content = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        (checksum,) = struct.unpack(">I", data[at + 8 + length : at + 12 + length])
        assert checksum == zlib.crc32(kind + content)
        chunks[kind] = content
        at += 12 + length
    width, height, depth, color, *_ = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert (depth, color) == (8, 3)
    raw = zlib.decompress(chunks[b"IDAT"])
    rows = [raw[y * (width + 1) : (y + 1) * (width + 1)] for y in range(height)]
    assert {row[0] for row in rows} == {0}
    return [list(row[1:]) for row in rows]


def uri_of(svg):
    return re.search(r'href="(data:[^"]+)"', svg)[1]


def test_a_picture_has_the_pixels_it_was_given():
    uri = png_uri([bytes([1, 2, 3]), bytes([4, 5, 0])], [(n, n, n) for n in range(6)])
    assert pixels(uri) == [[1, 2, 3], [4, 5, 0]]


def test_a_row_is_a_layer_and_a_column_an_expert():
    scale = Scale(low=0.0, high=1.0, show=str)
    svg = heat_map("t", {5: [0.0, 1.0, None], 2: [0.5, 2.0]}, scale)
    # Color 1 is the lowest, 250 the highest, 251 above the scale, 0 transparent.
    assert pixels(uri_of(svg)) == [[125, 251, 0], [1, 250, 0]]


def test_one_expert_far_off_does_not_hide_the_others():
    values = [0.08, 0.09, 0.1, 0.095, 1.4, None]
    scale = Scale.of(values, str)
    assert (scale.low, scale.high) == (0.08, 0.1)
    assert [scale.index(v) for v in values] == [1, 125, 250, 188, 251, 0]
    assert "above 0.1" in color_key(scale, values)
    assert "above" not in color_key(scale, values[:4])


def test_values_that_hardly_differ_have_similar_colors():
    scale = Scale.of([0.1, 0.1001], str)
    assert scale.index(0.1001) - scale.index(0.1) <= 3


def test_no_errors_at_all_have_one_color():
    scale = Scale.of([0.0, 0.0], str)
    assert [scale.index(v) for v in (0.0, 0.0)] == [1, 1]


def test_marked_experts_have_a_frame_and_missing_ones_none():
    scale = Scale(low=0.0, high=1.0, show=str)
    svg = heat_map("t", {0: [0.1, 0.2]}, scale, marked={(0, 1), (7, 0)})
    assert svg.count('class="mark"') == 1
    assert heat_map("t", {}, scale) == ""
