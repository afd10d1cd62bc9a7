"""A checkpoint on the hub is inspected and planned from its headers, and no weights are fetched."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil

import pytest

TOKEN = "hf_of_these_tests"  # noqa: S105
MIDDLE = "model-00002-of-00003.safetensors"


@pytest.fixture(scope="module")
def three_shards(make_checkpoint):
    return make_checkpoint(layers=1, experts=2, vocabulary=64, shard_bytes=600_000)


@pytest.fixture
def small(hub, three_shards):
    """1.2 MB in three shards, of which no two tensors are in the first 128 KiB of one."""
    shutil.copytree(three_shards, hub.folder, dirs_exist_ok=True)
    return hub


def plan(hub, *more, **environment):
    return hub.run(
        "convert", hub.id, hub.home / hub.id / "out", "--format", "nvfp4", "--dry-run", "--json",
        *more, **environment,
    )  # fmt: skip


def weights_sent(hub):
    return [entry for entry in hub.asked() if entry["file"].endswith(".safetensors")]


def test_what_inspect_shows_of_the_hub_is_what_it_shows_of_a_directory(small):
    found = small.run("inspect", small.id, "--tensors", "--json").document
    wanted = small.run("inspect", small.folder, "--tensors", "--json").document
    differing = {key for key in wanted if found[key] != wanted[key]}
    assert differing == {"path", "repository", "commit"}
    assert found["repository"] == small.id
    assert found["commit"] == "0123456789" * 4
    assert wanted["repository"] is None
    shown = small.run("inspect", small.id).out
    assert f"checkpoint    {small.id} on the hub, commit 0123456789" in shown


def test_the_plan_of_the_hub_is_the_plan_of_a_directory(small):
    found = plan(small).document
    out = small.home / "elsewhere"
    wanted = small.run(
        "convert", small.folder, out, "--format", "nvfp4", "--dry-run", "--json"
    ).document
    own = {"output", "seconds", "download", "free_bytes", "next"}
    assert {k: v for k, v in found.items() if k not in own} == {
        k: v for k, v in wanted.items() if k not in own
    }
    assert wanted["download"] is None


def test_the_plan_says_what_is_to_be_downloaded_and_what_the_cache_has(small):
    files = {path.name: path.stat().st_size for path in small.folder.iterdir()}
    before = plan(small).document["download"]
    documents = {"config.json", "model.safetensors.index.json"}
    assert small.cached == documents
    assert before["bytes"] == sum(files.values())
    assert before["cached_bytes"] == sum(files[file] for file in documents)
    sent = weights_sent(small)
    assert all(entry["first"] == 0 and entry["bytes"] <= 1 << 17 for entry in sent)
    assert len(sent) == 3
    done = small.run("convert", small.id, small.home / "planned", "--format", "nvfp4")
    assert done.code == 0, done.err
    small.asked()
    after = plan(small).document["download"]
    assert after["cached_bytes"] == before["bytes"]
    assert weights_sent(small) == []
    shown = small.run("convert", small.id, small.home / "o", "--format", "nvfp4", "--dry-run").out
    assert f"source       {small.id} at {after['commit']}\n" in shown
    assert re.search(
        r"^download     0 B, to where .* are free; 1\.\d MB are in the cache, /.*$", shown, re.M
    )
    assert "free space   " in shown


def test_a_header_longer_than_what_is_fetched_at_first_is_fetched_to_its_end(hub):
    """2000 tensors in one file: a header of 0.2 MB, and 96 bytes of weights each."""
    write_sparse(hub.folder, qwen(layers=5, experts=128, hidden=16, intermediate=16), 1)
    found = hub.run("inspect", hub.id, "--json")
    assert found.code == 0, found.err
    assert found.document["tensors"] > 1900
    assert [entry["first"] for entry in weights_sent(hub)] == [0, 1 << 17]


def test_planning_61_gb_fetches_less_than_50_mb(hub):
    """The names, shapes and number of shards of Qwen3-30B-A3B; its files take no disk."""
    write_sparse(hub.folder, qwen(layers=48, experts=128, hidden=2048, intermediate=768), 16)
    document = plan(hub).document
    # A machine of tests need not have the room.
    assert "bytes free" in document.get("error", {"message": "bytes free"})["message"]
    assert document["source_bytes"] > 61e9
    assert document["download"]["bytes"] > 61e9
    assert sum(group["tensors"] for group in document["groups"]) > 18_000
    sent = sum(entry["bytes"] for entry in hub.asked())
    assert 1e6 < sent < 50e6
    assert sum(entry["bytes"] for entry in hub.asked()) == 0


@pytest.mark.parametrize(
    ("command", "asked"), [("inspect", ()), ("check", ("--engine", "vllm", "--gpu", "h100"))]
)
def test_looking_at_61_gb_fetches_less_than_50_mb(hub, command, asked):
    write_sparse(hub.folder, qwen(layers=48, experts=128, hidden=2048, intermediate=768), 16)
    found = hub.run(command, hub.id, *asked, "--json")
    assert found.code == 0, found.err
    assert found.document["experts"] == 128
    assert 1e6 < sum(entry["bytes"] for entry in hub.asked()) < 50e6
    if command == "check":
        memory = found.document["engines"][0]["memory"]
        assert memory["weight_bytes"] > 61e9
        assert memory["gpus"][0]["fits"] is True


@pytest.mark.parametrize("is_gated", [False, True], ids=["private", "gated"])
def test_a_token_opens_what_is_closed_without(small, is_gated):
    small.set(**{"gated" if is_gated else "token": TOKEN})
    advice = "accept the terms on https://" if is_gated else "`hf auth login` if it is private"
    for environment in ({}, {"HF_TOKEN": "hf_of_another"}):
        refused = small.run("inspect", small.id, **environment)
        assert refused.code == 3
        assert f"Error: {small.id}: " in refused.error
        assert advice in refused.error
    # The CDN refuses requests that carry the token.
    opened = small.run("inspect", small.id, HF_TOKEN=TOKEN)
    assert opened.code == 0, opened.err


def test_a_revision_is_a_branch_a_tag_or_a_commit(small):
    small.set(revisions=["v2"])
    for revision in ("v2", "0123456789" * 4):
        assert small.run("inspect", small.id, "--revision", revision).code == 0
    refused = small.run("inspect", small.id, "--revision", "v3")
    assert refused.code == 3
    assert "no revision 'v3' on the hub; give a branch, a tag or a full" in refused.error


def test_no_such_repository_and_no_such_name_say_so(small):
    refused = small.run("inspect", "owner/absent")
    assert refused.code == 3
    assert "owner/absent: no such directory, and no such model on the hub for" in refused.error
    assert "neither a directory nor a hub repo id" in small.run("inspect", "a b").error


@pytest.mark.parametrize(
    "fault",
    [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}],
    ids=["offline", "unreachable"],
)
def test_without_network_the_cache_is_read_or_the_error_says_so(small, fault):
    message = "is not (completely) in the hub cache. Check the name, connect"
    for refused in (small.run("inspect", small.id, **fault), plan(small, **fault)):
        assert refused.code == 3
        assert message in refused.error
    done = small.run("convert", small.id, small.home / small.id / "out", "--format", "nvfp4")
    assert done.code == 0, done.err
    assert small.run("inspect", small.id, **fault).code == 0
    assert plan(small, "--overwrite", **fault).code == 0


def test_without_access_the_cache_is_read(small):
    done = small.run("convert", small.id, small.home / small.id / "out", "--format", "nvfp4")
    assert done.code == 0, done.err
    small.set(token=TOKEN)
    assert small.run("inspect", small.id).code == 0


def test_a_connection_that_breaks_is_made_again(small):
    small.set(breaks={MIDDLE: 2})
    found = small.run("inspect", small.id)
    assert found.code == 0, found.err
    small.set(breaks={MIDDLE: 100})
    refused = small.run("inspect", small.id)
    assert refused.code == 3
    assert "cannot be fetched: RemoteProtocolError" in refused.error
    assert "run the same command again" in refused.error


def test_a_server_that_fails_is_an_error(small):
    small.set(down=[MIDDLE])
    refused = small.run("inspect", small.id)
    assert refused.code == 3
    assert "503" in refused.error


def test_a_file_that_changes_between_two_requests_is_noticed(small):
    """The list is asked first; here it goes on saying what the file was."""
    path = small.folder / MIDDLE
    was = hashlib.sha256(path.read_bytes()).hexdigest()
    listed = small.folder / f"{MIDDLE}.sha256"
    listed.write_text(was)
    assert small.run("inspect", small.id).code == 0
    small.set(changed={MIDDLE: "0" * 64})
    refused = small.run("inspect", small.id)
    assert refused.code == 3
    wanted = f"{small.id}/{MIDDLE}: changed on the hub between two requests (SHA-256 {was} before"
    assert wanted in refused.error
    assert "run the command again" in refused.error
    small.set(sizes={MIDDLE: path.stat().st_size + 8})
    refused = small.run("inspect", small.id)
    assert f"bytes before, {path.stat().st_size} now" in refused.error


def test_a_shard_that_the_repository_lacks_is_named(small):
    (small.folder / MIDDLE).unlink()
    refused = small.run("inspect", small.id)
    assert refused.code == 3
    assert f"{small.id}/{MIDDLE}: missing, but model.safetensors.index.json says" in refused.error
    assert "The repository lacks it at commit 012345678901; give another --rev" in refused.error
    for path in small.folder.glob("*.safetensors*"):
        path.unlink()
    refused = small.run("inspect", small.id)
    assert f"{small.id}: no *.safetensors file; give the repository of the" in refused.error
    (small.folder / "config.json").unlink()
    refused = small.run("inspect", small.id)
    assert f"{small.id}: no config.json at commit" in refused.error


def test_a_file_that_is_listed_but_not_there_is_an_error(small):
    small.set(lost=[MIDDLE])
    refused = small.run("inspect", small.id)
    assert refused.code == 3
    assert "lacks a file that its list names" in refused.error


def test_a_server_that_ignores_ranges_is_an_error(small):
    small.set(no_ranges=True)
    refused = small.run("inspect", small.id)
    assert refused.code == 3
    assert "asked for bytes 0 to 131072, but the hub, or a proxy or mirror" in refused.error


def test_what_a_server_that_ignores_ranges_sends_is_not_read(hub):
    """Shards of 4 GB: read to their end, eight of them at once would fill the memory."""
    write_sparse(hub.folder, qwen(layers=48, experts=128, hidden=2048, intermediate=768), 16)
    hub.set(no_ranges=True)
    refused = plan(hub)
    assert refused.code == 3
    assert "proxy or mirror before it, sent the whole file" in refused.document["error"]["message"]
    assert sum(entry["bytes"] for entry in hub.asked()) < 1e9


def test_a_damaged_header_is_named_by_the_repository(small):
    path = small.folder / MIDDLE
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])
    refused = small.run("inspect", small.id)
    assert refused.code == 3
    assert f"{small.id}/{MIDDLE}: header of 18446744073709551615 bytes" in refused.error


def test_a_cache_without_room_is_a_refusal_of_the_plan(hub):
    """Ten exabytes, in the list alone."""
    write_sparse(hub.folder, qwen(layers=1, experts=2, hidden=16, intermediate=16), 1)
    (hub.folder / "notes.txt").write_text("x")
    hub.set(sizes={"notes.txt": 10**19})
    refused = plan(hub)
    assert refused.code == 3
    message = refused.document["error"]["message"]
    assert "are still to be downloaded there; free space, set HF_HOME" in message


def qwen(*, layers, experts, hidden, intermediate):
    """Config and shapes of a Qwen3-MoE with 32 heads of 128, in the order of its shards."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_act": "silu",
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": experts,
        "num_experts_per_tok": 2, "moe_intermediate_size": intermediate,
        "intermediate_size": 3 * hidden, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "vocab_size": 151_936, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    }  # fmt: skip
    shapes = {"model.embed_tokens.weight": (151_936, hidden)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        for name, rows in (("q", 4096), ("k", 512), ("v", 512)):
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (rows, hidden)
        shapes[f"{at}.self_attn.o_proj.weight"] = (hidden, 4096)
        shapes |= {f"{at}.self_attn.{name}_norm.weight": (128,) for name in "qk"}
        shapes[f"{at}.mlp.gate.weight"] = (experts, hidden)
        for expert in range(experts):
            expert_at = f"{at}.mlp.experts.{expert}"
            shapes |= {
                f"{expert_at}.{n}_proj.weight": (intermediate, hidden) for n in ("gate", "up")
            }
            shapes[f"{expert_at}.down_proj.weight"] = (hidden, intermediate)
        shapes |= {f"{at}.{n}_layernorm.weight": (hidden,) for n in ("input", "post_attention")}
    return config, {**shapes, "model.norm.weight": (hidden,), "lm_head.weight": (151_936, hidden)}


def write_sparse(folder, model, shards):
    """Write a checkpoint in BF16 of which only the headers are written; the rest are holes."""
    config, shapes = model
    total = sum(2 * math.prod(shape) for shape in shapes.values())
    groups, size = [{}], 0
    for name, shape in shapes.items():
        if size > total / shards:
            groups.append({})
            size = 0
        groups[-1][name] = shape
        size += 2 * math.prod(shape)
    weight_map = {}
    for number, group in enumerate(groups, start=1):
        file = f"model-{number:05}-of-{len(groups):05}.safetensors"
        header, stop = {}, 0
        for name, shape in group.items():
            start, stop = stop, stop + 2 * math.prod(shape)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, stop]}
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as opened:
            opened.write(len(text).to_bytes(8, "little") + text)
            opened.truncate(8 + len(text) + stop)
        (folder / f"{file}.sha256").write_text(hashlib.sha256(text).hexdigest())
        weight_map |= dict.fromkeys(group, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_a_dense_model_is_answered_by_one_sentence(hub, command):
    write_sparse(hub.folder, qwen(layers=1, experts=0, hidden=16, intermediate=16), 1)
    config = json.loads((hub.folder / "config.json").read_text())
    (hub.folder / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    refused = plan(hub) if command == "plan" else hub.run("inspect", hub.id)
    assert refused.code == 4
    where = f"{hub.id}/config.json" if command == "plan" else "config.json"
    assert refused.error == (
        f"Error: {where}: model_type 'llama', and no tensor has 'expert' in its name: this is "
        "a dense model, and moequant converts mixture-of-experts models only; if it has experts "
        "by other names, describe it: --architecture FILE.toml (docs/architectures.md)"
    )
