"""What the page says of the error of a layer with its activations, beside the number."""

from __future__ import annotations

import copy

from moequant.reporting.page import render_page


def test_an_error_with_activations_that_was_not_measured_is_said_and_why(report_of, read_page):
    document = copy.deepcopy(report_of.document)
    layer = document["outputs"][0]["verification"]["layers"][0]
    layer |= {"quantized_activations_error": None, "activations_not_measured": "no <scale>"}
    page = read_page(render_page(document))
    row = page.rows("Error of a layer's output, on random inputs")[str(layer["layer"])]
    assert row[-2] == "-"
    text = f"Layer {layer['layer']} with its activations: not measured, because no <scale>."
    assert text in page.text
    assert text not in read_page(report_of.to_html()).text


def test_a_warning_of_activation_scales_is_said(report_of, read_page):
    document = copy.deepcopy(report_of.document)
    layer = document["outputs"][0]["verification"]["layers"][0]
    assert layer["warning"] is None
    layer["warning"] = "layer 0: off by 91 %"
    assert "Warning: layer 0: off by 91 %." in read_page(render_page(document)).text
    del layer["warning"]  # as in results of earlier versions
    assert "Warning:" not in read_page(render_page(document)).text
