"""The document of a report: what was measured, and what it says was not."""

from __future__ import annotations

import json
import shutil

import pytest

from moequant.errors import ArgumentError, CheckpointError, MoequantError
from moequant.reporting import make_report
from moequant.verification import verify


def saved(path, document):
    path.write_text(json.dumps(document))
    return path


def only(report):
    (output,) = report.document["outputs"]
    return output


def whats(report):
    return " ".join(gap["what"] for gap in report.document["not_measured"])


def test_a_verified_output_has_every_part(report_of, outputs):
    output = only(report_of)
    assert json.dumps(report_of.to_json(), allow_nan=False)
    assert (output["name"], output["path"]) == ("nvfp4", str(outputs()))
    assert (output["verdict"], output["problem_count"]) == ("verified", 0)
    assert report_of.problem_count == 0
    assert output["not_read"] == {}
    assert output["integrity"] is None  # verify reads every byte itself
    assert output["compatibility"]["formats"] == ["nvfp4"]
    assert output["origin"]["command"].endswith("--format nvfp4")
    assert report_of.document["made"]["peak_bytes"] > 1e8


def test_errors_are_of_every_layer_projection_and_expert(report_of):
    groups = only(report_of)["verification"]["errors"]
    places = [(g["layer"], g["projection"], len(g["experts"])) for g in groups]
    wanted = [(layer, p, 4) for layer in (0, 1) for p in ("gate", "up", "down")]
    assert sorted(places) == sorted(wanted)
    errors = [error for group in groups for error in group["experts"]]
    # Gaussian weights with large columns: within a tenth of what docs/formats.md says, 9.52 %.
    assert all(0.085 < error < 0.105 for error in errors)
    worst = only(report_of)["verification"]["worst_weights"][0]
    assert max(errors) == pytest.approx(worst["relative_error"], rel=1e-3)


def test_bytes_before_and_after_are_those_of_all_tensors(report_of, reported_source, outputs):
    output = only(report_of)
    for groups, folder in ((output["before"], reported_source), (output["after"], outputs())):
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert sum(group["bytes"] for group in groups) == index["metadata"]["total_size"]
    experts = [g for g in output["after"] if g["role"] == "routed_experts"]
    assert [(g["format"], g["tensors"]) for g in experts] == [("nvfp4", 24 * 3)]


def test_without_a_source_it_is_compared_with_its_record_and_says_what_is_missing(outputs):
    report = make_report([outputs()])
    output = only(report)
    assert (output["verdict"], output["verification"], output["before"]) == (
        "unchanged",
        None,
        None,
    )
    assert output["integrity"]["ok"]
    assert output["codes"][0]["weights"] == 24
    assert "not compared with its source" in whats(report)
    hows = [gap["how"] for gap in report.document["not_measured"]]
    assert f"moequant report {outputs()} --against SOURCE" in hows


def test_a_planted_fault_is_in_the_verdict_and_its_place_is_known(faulty, reported_source):
    report = make_report([faulty], against=reported_source)
    output = only(report)
    assert output["verdict"] == "faulty"
    assert report.problem_count == output["problem_count"] > 2
    named = {problem["name"] for problem in output["problems"]}
    assert {
        "model.layers.1.mlp.experts.2.up_proj.weight_packed",
        "model.layers.0.mlp.experts.3.down_proj.weight_packed",
    } <= named
    places = {(f["layer"], f["expert"], f["projection"]) for f in output["faulty_weights"]}
    assert places == {(1, 2, "up"), (0, 3, "down")}
    # Codes of other weights are about as far off as no codes at all.
    (down,) = [
        g for g in output["verification"]["errors"] if (g["layer"], g["projection"]) == (0, "down")
    ]
    assert down["experts"][3] > 1
    assert max(down["experts"][:3]) < 0.11


def test_a_changed_file_is_found_without_a_source(faulty):
    output = only(make_report([faulty]))
    assert output["verdict"] == "faulty"
    assert [problem["check"] for problem in output["problems"]] == ["record"]


def test_what_damage_makes_unreadable_is_named_and_the_rest_is_there(
    outputs, reported_source, tmp_path
):
    folder = shutil.copytree(outputs(), tmp_path / "damaged")
    (shard,) = folder.glob("*.safetensors")
    shard.unlink()
    report = make_report([folder], against=reported_source)
    output = only(report)
    assert output["verdict"] == "faulty"
    assert set(output["not_read"]) == {"compatibility", "after", "codes", "faulty_weights"}
    assert output["origin"] is not None
    assert f"{shard.name}" in whats(report)


def test_an_output_of_another_tool_is_within_bounds_or_not_checked(
    outputs, reported_source, tmp_path
):
    folder = shutil.copytree(outputs(), tmp_path / "foreign")
    (folder / "moequant.json").unlink()
    alone = only(make_report([folder]))
    assert (alone["verdict"], alone["origin"]) == ("unchecked", None)
    assert alone["compatibility"]["scales_read_in_layers"] == [0, 1]
    verified = only(make_report([folder], against=reported_source))
    assert verified["verdict"] == "verified"
    assert verified["verification"]["method"] == "bounds"
    assert verified["verification"]["formats"][0]["lost_db"] == pytest.approx(0, abs=0.01)


def test_several_outputs_are_told_apart(outputs, reported_source, tmp_path):
    twin = shutil.copytree(outputs("mxfp4"), tmp_path / "nvfp4")
    report = make_report([outputs(), twin], against=reported_source)
    names = [output["name"] for output in report.document["outputs"]]
    assert names == [str(outputs()), str(twin)]
    formats = [output["compatibility"]["formats"] for output in report.document["outputs"]]
    assert formats == [["nvfp4"], ["mxfp4"]]


@pytest.mark.parametrize("format", ["fp8_block", "w4a8"])
def test_effective_errors_are_those_of_w4a8(outputs, reported_source, format):
    (total,) = only(make_report([outputs(format)], against=reported_source))["verification"][
        "formats"
    ]
    effective = total["effective_relative_error"]
    assert (effective is not None) == (format == "w4a8")
    assert effective is None or effective > total["relative_error"]


def test_a_saved_result_is_of_the_same_bytes_or_refused(outputs, reported_source, tmp_path):
    result = verify(outputs(), against=reported_source, layers=0).to_json()
    file = saved(tmp_path / "verified.json", result)
    output = only(make_report([outputs()], verified=[file]))
    assert (output["verdict"], output["verified_earlier"]) == ("verified", True)
    assert output["integrity"]["ok"]
    assert output["verification"]["errors"][0]["experts"]
    with pytest.raises(MoequantError, match=r"verified\.json: a result of .*nvfp4, as it was then"):
        make_report([outputs("mxfp4")], verified=[file])
    with pytest.raises(MoequantError, match="another result of"):
        make_report([outputs()], verified=[file, file])


def test_files_that_changed_after_they_were_verified_are_faulty(
    faulty, outputs, reported_source, tmp_path
):
    result = verify(outputs(), against=reported_source, layers=0).to_json()
    file = saved(tmp_path / "verified.json", result)
    # The record is the same, so it is a result of this conversion.
    output = only(make_report([faulty], verified=[file]))
    assert output["verdict"] == "faulty"
    assert output["verification"]["ok"]


def test_an_earlier_result_of_another_tool_does_not_say_that_nothing_changed(
    outputs, reported_source, tmp_path
):
    folder = shutil.copytree(outputs(), tmp_path / "foreign")
    (folder / "moequant.json").unlink()
    result = verify(folder, against=reported_source, layers=0).to_json()
    output = only(make_report([folder], verified=[saved(tmp_path / "v.json", result)]))
    assert output["verdict"] == "verified_earlier"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("{}", "ok: Field required"),
        ('{"ok": true, "converted": 3}', "converted: Input should be a valid string"),
    ],
)
def test_a_file_that_is_no_result_is_an_error_that_names_file_field_and_command(
    outputs, tmp_path, content, message
):
    file = tmp_path / "other.json"
    file.write_text(content)
    with pytest.raises(MoequantError) as caught:
        make_report([outputs()], verified=[file])
    assert str(file) in str(caught.value)
    assert message in str(caught.value)
    assert "moequant verify CONVERTED --against SOURCE --json" in str(caught.value)


def test_numbers_that_are_none_are_refused(outputs, reported_source, tmp_path):
    result = verify(outputs(), against=reported_source, layers=0).to_json()
    result["formats"][0]["relative_error"] = float("inf")
    with pytest.raises(MoequantError, match=r"formats\[0\].relative_error"):
        make_report([outputs()], verified=[saved(tmp_path / "v.json", result)])


def test_statistics_are_shown_with_experts_that_fell_back(
    reported_source, outputs, measure, tmp_path
):
    stats = measure(reported_source, tmp_path / "stats", prior_tokens=64)
    found = make_report([outputs()], statistics=stats).document["calibration"]
    assert [layer["tokens"] for layer in found["layers"]] == [[0, 30, 60, 90]] * 2
    assert [layer["unrouted"] for layer in found["layers"]] == [[0]] * 2
    assert [layer["mostly_pooled"] for layer in found["layers"]] == [[1, 2]] * 2


def test_what_was_made_with_statistics_is_verified_with_them(
    reported_source, outputs, measure, tmp_path
):
    from moequant import convert

    stats = measure(reported_source, tmp_path / "stats")
    options = {"search": "weighted"}
    convert(
        reported_source, tmp_path / "weighted", format="mxfp4", options=options, statistics=stats
    )
    report = make_report(
        [tmp_path / "weighted", outputs()], against=reported_source, statistics=stats
    )
    verdicts = [output["verdict"] for output in report.document["outputs"]]
    assert verdicts == ["verified", "verified"]
    alone = make_report([tmp_path / "weighted"])
    assert "It was made with statistics, whose file was not given" in whats(alone)


def test_no_output_twice_one_and_a_missing_one_are_errors(outputs, tmp_path):
    with pytest.raises(MoequantError, match="no checkpoint to report on"):
        make_report([])
    with pytest.raises(ArgumentError, match="named twice"):
        make_report([outputs(), outputs() / "."])
    with pytest.raises(CheckpointError, match="no such directory"):
        make_report([tmp_path / "missing"])
