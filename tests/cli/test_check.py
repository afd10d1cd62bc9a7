"""moequant check: what it prints, and with which exit code."""

from __future__ import annotations

import json

import pytest

from moequant import convert


@pytest.fixture(scope="module")
def fp8(make_checkpoint, tmp_path_factory):
    path = tmp_path_factory.mktemp("checked") / "fp8"
    convert(make_checkpoint(), path, format="fp8_block")
    return path


def engine(document, key):
    (one,) = [e for e in document["engines"] if e["key"] == key]
    return one


def test_every_engine_gpu_and_rule_is_in_the_document(run, converted):
    result = run("check", converted, "--json")
    assert result.exit_code == 0
    document = result.document
    assert (document["dialect"], document["formats"]) == ("compressed-tensors", ["nvfp4"])
    assert document["scales_read_in_layers"] == document["expert_layers"] == [0, 1]
    keys = ["transformers", "vllm", "sglang", "moequant"]
    assert [e["key"] for e in document["engines"]] == keys
    (why,) = engine(document, "transformers")["why"]
    assert why["rule"] == "ct-nvfp4-transformers"
    assert "48371" in why["source"]
    assert why["next"]
    vllm = engine(document, "vllm")
    assert vllm["tp"] == vllm["tp_with_ep"] == [1, 2, 4]
    (h100,) = [gpu for gpu in vllm["gpus"] if "h100" in gpu["names"]]
    assert h100["capability"] == [9, 0]
    assert h100["kernels"] == {"nvfp4": "Humming (16-bit activations)"}


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ((), 0),
        (("--engine", "vllm"), 0),
        (("--engine", "vllm,sglang"), 0),
        (("--engine", "transformers"), 4),
        (("--engine", "vllm,transformers"), 4),
        (("--engine", "vllm", "--tp", "4"), 0),
        (("--engine", "vllm", "--tp", "3"), 4),
        (("--engine", "sglang", "--tp", "4", "--ep", "8"), 4),
        (("--tp", "3"), 4),
        (("--engine", "vllm", "--gpu", "rtx4090"), 0),
        (("--engine", "nobody"), 2),
        (("--engine", "vllm", "--gpu", "RTX PRO 6000"), 0),
        (("--gpu", "voodoo"), 2),
        (("--gpu", "mi300x"), 2),
        (("--tp", "0"), 2),
    ],
)
def test_the_exit_code_is_4_where_an_engine_that_was_asked_for_does_not_load_it(
    run, converted, asked, code
):
    assert run("check", converted, *asked).exit_code == code


def test_a_refusal_names_engine_place_and_reason_behind_the_report(run, fp8):
    asked = ("--engine", "sglang", "--tp", "4", "--gpu", "h100")
    result = run("check", fp8, *asked)
    assert result.exit_code == 4
    assert result.stderr.startswith(
        f"Error: {fp8}: not every engine asked for loads it on h100 with tp 4 and ep 1\n"
        "  SGLang 0.5.23 stops unless the intermediate size of a rank is a multiple"
    )
    assert "why not [fp8-blocks-of-a-rank-sglang]" in result.stdout
    document = run("check", fp8, *asked, "--json").document
    assert document["error"]["exit_code"] == 4
    assert engine(document, "sglang")["loads"] is False
    assert engine(document, "sglang")["tp"] == [1, 2]


def test_what_nobody_knows_is_no_yes(run, fp8):
    result = run("check", fp8, "--engine", "transformers", "--tp", "2")
    assert result.exit_code == 4
    assert "transformers 5.24: not known, no rule is about this" in result.stderr


def test_no_layers_are_refused(run, fp8):
    refused = run("check", fp8, "--layers", "0")
    assert refused.exit_code == 2
    assert "name at least 1, or all" in refused.stderr


def test_a_gpu_without_a_kernel_is_said_with_those_that_have_one(run, fp8):
    result = run("check", fp8, "--engine", "sglang", "--gpu", "a100")
    assert result.exit_code == 4
    assert (
        "no kernel for fp8_block experts on compute capability 8.0, only on 8.9 and newer."
        in result.stderr
    )


def test_lines_have_at_most_80_columns_and_split_no_name(run, make_checkpoint, tmp_path):
    path = tmp_path / "w4a8"
    convert(make_checkpoint(), path, format="w4a8")
    config = json.loads((path / "config.json").read_text())
    kept = config["quantization_config"]["ignore"]
    lost = "model.layers.1.self_attn.o_proj"
    kept.remove(lost)
    (path / "config.json").write_text(json.dumps(config))
    shown = run("check", path).stdout
    # The name of the folder may be as long as it is.
    lines = [line for line in shown.splitlines() if not line.startswith("checkpoint ")]
    assert max(map(len, lines)) <= 80
    for name in (lost, "[plain-linears-vllm]", "[plain-linears-transformers]", "rtxpro6000"):
        assert name in shown


def test_checkpoints_that_cannot_be_read_have_the_codes_of_other_commands(
    run, make_checkpoint, tmp_path
):
    unknown = make_checkpoint(tmp_path / "unknown", config={"model_type": "gpt2"})
    assert run("check", unknown, "--json").exit_code == 4
    damaged = make_checkpoint(tmp_path / "damaged")
    shard = next(damaged.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert run("check", damaged, "--json").exit_code == 3
    assert run("check", tmp_path / "missing", "--json").exit_code == 3


def test_a_regular_expression_that_could_match_for_hours_is_refused(run, converted, tmp_path):
    import shutil

    path = tmp_path / "hostile"
    shutil.copytree(converted, path)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["ignore"].append("re:(.*.*)*X")
    (path / "config.json").write_text(json.dumps(config))
    result = run("check", path)
    assert result.exit_code == 3
    assert "takes hours" in result.stderr


def test_the_options_that_an_engine_needs_are_printed_for_the_gpus_that_need_them(
    run, make_checkpoint, tmp_path
):
    for size, name in ((256, "whole"), (192, "odd")):
        source = make_checkpoint(intermediate=size)
        convert(source, tmp_path / name, format="mxfp4", dialect="fp8-ue8m0")
    asked = ("--engine", "sglang")
    flashinfer, marlin = "--moe-runner-backend flashinfer_mxfp4", "--moe-runner-backend marlin"
    whole = run("check", tmp_path / "whole", *asked)
    assert f"\n  start it with {flashinfer}\n" in whole.stdout
    odd = " ".join(run("check", tmp_path / "odd", *asked).stdout.split())
    others = "h100, h200, gh200, gh200-144gb, rtx5090, rtxpro6000, gb10"
    assert f" start it on {others} with {marlin} " in odd
    assert f" start it on b200, gb200, b300, gb300 with {flashinfer} " in odd
    document = run("check", tmp_path / "odd", *asked, "--gpu", "h100", "--json").document
    assert [gpu["options"] for gpu in engine(document, "sglang")["gpus"]] == [[marlin]]


@pytest.fixture
def small_gpu(monkeypatch):
    """small_gpu(bytes): h100 has so many."""

    def shrink(memory_bytes):
        for unit in ("_GB", "_GIB"):
            monkeypatch.setattr(f"moequant.compatibility.gpus.{unit}", memory_bytes / 80)

    return shrink


def test_weights_without_room_have_exit_code_4_and_say_from_which_number_of_ranks_they_fit(
    run, converted, small_gpu
):
    asked = ("--engine", "vllm,sglang", "--gpu", "h100")
    before = run("check", converted, *asked)
    assert before.exit_code == 0
    assert "1 GPU of 80.0 GB; " in before.stdout
    weights = engine(run("check", converted, *asked, "--json").document, "vllm")["memory"]
    small_gpu(weights["weight_bytes"] * 3 // 4)
    refused = run("check", converted, *asked)
    assert refused.exit_code == 4
    assert "not every engine asked for loads it on h100\n  vLLM 0.33: " in refused.stderr
    assert refused.stderr.rstrip().endswith(" do not fit")
    assert "they fit from tp 2 or tp 2 and ep 2 on" in " ".join(refused.stdout.split())
    document = run("check", converted, *asked, "--json").document
    found = engine(document, "sglang")
    assert found["loads"] is True
    assert found["memory"]["gpus"][0]["fits"] is False
    assert found["fits_from"] == {"h100": {"tp": 2, "tp_with_ep": 2}}
    assert run("check", converted, *asked, "--tp", "2").exit_code == 0
    # Without a GPU, and for an engine that divides weights in an unknown way, none is refused.
    assert run("check", converted, "--engine", "vllm").exit_code == 0
    assert run("check", converted, "--engine", "moequant", "--gpu", "h100").exit_code == 0


@pytest.mark.parametrize(
    ("place", "refused"),
    [(("--tp", "3"), "attention-heads-of-a-rank"), (("--tp", "4", "--ep", "3"), "expert-ranks")],
)
def test_no_memory_is_said_of_ranks_at_which_an_engine_does_not_load(
    run, converted, place, refused
):
    asked = ("--engine", "vllm,sglang", "--gpu", "h100", *place)
    shown = " ".join(run("check", converted, *asked).stdout.split())
    ep = place[3] if len(place) > 2 else "1"
    said = f"memory: with tp {place[1]} and ep {ep} it does not load; the weights fit from tp 1 on"
    assert shown.count(said) == 2
    assert shown.count(f"why not [{refused}") == 2
    assert "of weights on" not in shown
    for key in ("vllm", "sglang"):
        found = engine(run("check", converted, *asked, "--json").document, key)
        assert found["memory"] is None
        assert found["fits_from"] == {"h100": {"tp": 1, "tp_with_ep": 1}}
    without_gpu = run("check", converted, "--engine", "vllm", *place).stdout
    assert "memory:" not in without_gpu


def test_no_memory_is_said_of_engines_that_do_not_divide_weights(run, converted):
    for place in ((), ("--tp", "2")):
        shown = run(
            "check", converted, "--engine", "transformers,moequant", "--gpu", "h100", *place
        ).stdout
        assert "moequant" in shown
        assert "memory:" not in shown


def test_the_document_has_every_gpu_and_the_kv_cache_of_a_token(run, converted):
    memory = engine(run("check", converted, "--json").document, "vllm")["memory"]
    # Two layers, four heads of 64 numbers of two bytes, keys and values.
    assert memory["kv"] == {"token_bytes": 2 * 4 * 64 * 2 * 2, "window_token_bytes": 0, "window": 0}
    gpus = {gpu["name"]: gpu for gpu in memory["gpus"]}
    left = 180 * 10**9 - memory["weight_bytes"]
    assert gpus["b200"] == {
        "name": "b200", "memory_bytes": 180 * 10**9, "left_bytes": left, "fits": True,
        "tokens": left // 2048,
    }  # fmt: skip


def test_a_gpu_of_another_maker_is_refused_with_the_reason(run, converted):
    refused = run("check", converted, "--gpu", "MI300X")
    assert refused.exit_code == 2
    assert "a GPU of AMD; the kernels that kernels.toml knows are those for CUDA" in refused.stderr
