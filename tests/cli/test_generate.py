from __future__ import annotations

import json
import math
import shutil
import sys

import pytest
import torch

from moequant.compatibility.facts import positions_in


@pytest.fixture
def with_tokenizer(converted, tmp_path):
    """A converted checkpoint that knows three words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = {"one": 5, "two": 6, "three": 7, **{f"w{i}": i for i in range(8, 128)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w8"))  # noqa: S106 - no password
    tokenizer.pre_tokenizer = Whitespace()
    path = shutil.copytree(converted, tmp_path / "converted")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    return path


def test_ids_are_continued_and_timed(run, converted):
    result = run("generate", converted, "--prompt-ids", "5, 6,7", "--max-new-tokens", 4)
    assert result.exit_code == 0
    ids, _, summary, decoded = result.stdout.splitlines()
    assert decoded == "decoded with a static cache"
    document = run(
        "generate", converted, "--prompt-ids", "5,6,7", "--max-new-tokens", 4, "--json"
    ).document
    assert [*map(int, ids.split(","))] == document["ids"]
    assert len(document["ids"]) == 4
    assert "4 tokens: the first in " in summary
    assert "cpu, bfloat16, experts by torch_reference" in summary
    assert document["prompt_ids"] == [5, 6, 7]
    assert document["text"] is None
    assert document["backends"] == ["torch_reference"]
    assert document["tokens_per_s"] > 0
    assert (document["decoding"], document["not_static"]) == ("static_cache", None)
    # On a CPU nothing is compiled or captured, and no bandwidth is measured.
    assert (document["warm_up_s"], document["floor"]) == (None, None)


def test_a_config_that_makes_nan_of_everything_is_an_error_at_the_first_token(
    run, converted, tmp_path
):
    broken = shutil.copytree(converted, tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text()) | {"rms_norm_eps": math.nan}
    (broken / "config.json").write_text(json.dumps(config))
    result = run("generate", broken, "--prompt-ids", "5,6,7", "--json")
    assert result.exit_code == 5
    message = result.document["error"]["message"]
    assert message.startswith(f"{broken}: the logits of new token 1 have NaN or Inf")


def test_more_tokens_than_positions_are_a_warning(run, converted, tmp_path):
    few = shutil.copytree(converted, tmp_path / "few")
    config = json.loads((few / "config.json").read_text()) | {"max_position_embeddings": 8}
    (few / "config.json").write_text(json.dumps(config))
    options = ("generate", few, "--prompt-ids", "5,6,7", "--max-new-tokens")
    assert "max_position_embeddings" not in run(*options, 5).stderr
    more = run(*options, 6)
    assert more.exit_code == 0
    assert "3 tokens of the prompt and 6 new ones may be 9, but max_position_embe" in more.stderr


@pytest.mark.parametrize(
    ("entry", "is_known"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, False),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, False),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, True),
        ({"rope_scaling": None}, True),
    ],
)
def test_positions_of_scaled_rotary_embeddings_are_not_known(entry, is_known):
    config = {"max_position_embeddings": 40960, **entry}
    assert positions_in(config) == (40960 if is_known else None)


def test_transformers_own_decoding_gives_the_same(run, converted):
    options = ("generate", converted, "--prompt-ids", "5,6,7", "--max-new-tokens", 6)
    eager = run(*options, "--enforce-eager", "--json").document
    assert eager["decoding"] == "dynamic_cache"
    assert eager["ids"] == run(*options, "--json").document["ids"]
    shown = run(*options, "--enforce-eager").stdout.splitlines()
    assert shown[-1] == "decoded as transformers does"


def test_a_model_without_a_static_cache_says_why(run, converted, monkeypatch):
    from moequant.integrations import static_cache, transformers

    monkeypatch.setattr(static_cache, "why_not_static", lambda model: "its layers have none")
    monkeypatch.setattr(transformers, "why_not_static", static_cache.why_not_static)
    result = run("generate", converted, "--prompt-ids", "5", "--max-new-tokens", 2)
    assert result.stdout.splitlines()[-1] == "decoded as transformers does: its layers have none"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_says_how_near_its_floor_it_decodes(run, converted):
    options = ("generate", converted, "--prompt-ids", "5,6,7", "--device", "cuda")
    document = run(*options, "--json").document
    assert document["decoding"] == "cuda_graphs"
    assert document["warm_up_s"] > 0
    floor = document["floor"]
    assert 0 < floor["share_of_floor"] < 1
    assert floor["read_tb_per_s"] > 0.1
    shown = run(*options).stdout.splitlines()
    assert shown[3].startswith("decoded with a static cache and CUDA graphs, after a warm-up of ")
    assert " of the floor, " in shown[4]


def test_text_is_continued_where_there_is_a_tokenizer(run, with_tokenizer):
    options = ("--max-new-tokens", 3, "--json")
    by_text = run("generate", with_tokenizer, "--prompt", "one two three", *options).document
    by_ids = run("generate", with_tokenizer, "--prompt-ids", "5,6,7", *options).document
    assert by_text["prompt_ids"] == [5, 6, 7]
    assert by_text["ids"] == by_ids["ids"]
    shown = run("generate", with_tokenizer, "--prompt", "one two three", *options[:2])
    assert shown.stdout.splitlines()[0] == by_text["text"]


def test_a_seed_draws_the_same_again(run, converted):
    options = ("--prompt-ids", "5", "--temperature", "3", "--max-new-tokens", 6, "--json")
    first, again, other = (
        run("generate", converted, *options, "--seed", seed).document["ids"] for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_wrong_usage_exits_2(run, converted):
    for wrong in (
        (),
        ("--prompt", "a", "--prompt-ids", "1"),
        ("--prompt-ids", "1,x"),
        ("--prompt-ids", ""),
        ("--prompt-ids", "-1"),
        ("--prompt-ids", "9" * 5000),
        ("--prompt-ids", "1", "--max-new-tokens", 0),
        ("--prompt-ids", "1", "--temperature", -1),
        ("--prompt-ids", "1", "--temperature", "nan"),
        ("--prompt-ids", "1", "--temperature", "inf"),
        ("--prompt-ids", "1", "--temperature", "1e-30"),
        ("--prompt-ids", "1", "--seed", 1 << 64),
        ("--prompt-ids", "1", "--activations", "int8"),
        ("--prompt-ids", "1", "--compile", "--enforce-eager"),
    ):
        assert run("generate", converted, *wrong, "--json").exit_code == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--prompt-ids", "5,128"), "prompt id 128"),
        (("--prompt", "one"), "tokenizer"),
        (("--prompt-ids", "5", "--device", "bogus"), "device 'bogus' cannot be used"),
    ],
)
def test_what_cannot_run_exits_4_and_says_why(run, converted, options, message):
    result = run("generate", converted, *options, "--json")
    assert result.exit_code == 4
    assert message in result.document["error"]["message"]


def test_without_transformers_it_says_how_to_install_it(run, converted, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = run("generate", converted, "--prompt-ids", "5", "--json")
    assert result.exit_code == 4
    assert "pip install 'moequant[transformers]'" in result.document["error"]["message"]


def test_a_source_checkpoint_exits_3(run, source):
    assert run("generate", source, "--prompt-ids", "5", "--json").exit_code == 3


def test_a_prompt_that_is_no_text_is_refused(run, with_tokenizer):
    done = run("generate", with_tokenizer, "--prompt", "one \udcff")
    assert done.exit_code == 4
    assert "the prompt is not valid UTF-8; give text in UTF-8, or its tokens by" in done.stderr


def test_settings_that_are_not_used_are_said(run, with_tokenizer):
    (with_tokenizer / "generation_config.json").write_text('{"num_beams": 4, "top_k": 5}')
    done = run("generate", with_tokenizer, "--prompt", "one", "--max-new-tokens", 2)
    assert done.exit_code == 0
    said = "generation_config.json: not used, as one sequence is decoded whose tokens are the "
    assert f"{said}likeliest: num_beams" in " ".join(done.stderr.split())


def test_a_checkpoint_without_a_file_of_settings_has_none_that_are_not_used(run, with_tokenizer):
    (with_tokenizer / "generation_config.json").unlink(missing_ok=True)
    done = run("generate", with_tokenizer, "--prompt", "one", "--max-new-tokens", 2)
    assert done.exit_code == 0
    assert "not used" not in done.stderr
