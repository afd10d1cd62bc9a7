"""A verified checkpoint is published by the hub's own client, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from signal import SIGINT, SIGKILL

import pytest

from moequant.conversion import convert
from moequant.preparation import prepare
from moequant.storage.hub import HubFile
from moequant.verification import check_integrity, note_verified, verify

TOKEN = "hf_of_these_tests"  # noqa: S105
OTHER_TOKEN = "hf_of_another"  # noqa: S105
CARD = "---\nlicense: mit\n---\n# The source\n\nIt speaks.\n"


@pytest.fixture(scope="module")
def source(make_checkpoint, tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "model"
    make_checkpoint(path=path, layers=1, experts=2, vocabulary=64)
    (path / "README.md").write_text(CARD)
    (path / "LICENSE").write_text("Do as you please.\n")
    return path


@pytest.fixture(scope="module")
def verified(source, tmp_path_factory):
    """Converted into several shards, prepared and verified; not to be changed."""
    out = tmp_path_factory.mktemp("verified") / "out"
    convert(source, out, format="nvfp4", max_shard_size="200KB")
    prepare(out, target="sm100")
    note_verified(verify(out, against=source, layers=1))
    return out


@pytest.fixture
def copy(verified, tmp_path):
    return Path(shutil.copytree(verified, tmp_path / "copy"))


@pytest.fixture
def empty(hub):
    """No repository yet; only its name."""
    hub.folder.rmdir()
    hub.asked()
    return hub


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def document_lines(card):
    return card.decode().split("\n---\n")[0].splitlines()


def shards(folder):
    return sorted(folder.glob("*.safetensors"))


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def push(hub, out, *more, **fault):
    return hub.run("push", out, hub.id, "--base-model", "them/source", *more, **fault)


def test_a_verified_checkpoint_is_published_and_verifies_where_it_is_downloaded(
    empty, source, verified, tmp_path
):
    before = contents(verified)
    done = push(empty, verified, "--json")
    assert done.code == 0, done.err
    assert contents(verified) == before
    there = contents(empty.folder)
    ours = {k: v for k, v in before.items() if not k.startswith((".", "moequant-prepared/"))}
    card = there.pop("README.md")
    ours.pop("README.md")
    assert there == ours
    assert card.decode() == done.document["card"]
    assert card.decode().endswith("\n# The source\n\nIt speaks.\n")
    assert {"base_model: them/source", "base_model_relation: quantized"} <= {*document_lines(card)}
    sent, made = empty.uploaded()
    assert sorted(sent) == sorted(digest(path) for path in shards(verified))
    assert [made[0].get("created", "?"), *(one.get("branch") for one in made[1:])] == [
        None, "main", "main",
    ]  # fmt: skip
    assert "config.json" not in made[1]["added"]
    assert made[2]["added"] == ["config.json"]
    assert done.document["left_out"] == ["moequant-prepared/sm100"]
    downloaded = Path(shutil.copytree(empty.folder, tmp_path / "downloaded"))
    assert check_integrity(downloaded).problems == ()
    assert verify(downloaded, against=source, layers=0).problems == ()


def test_what_is_there_already_is_not_sent_again(empty, verified):
    assert push(empty, verified).code == 0
    empty.asked()
    again = push(empty, verified)
    assert again.code == 0, again.err
    assert f"/{empty.id}: already there, " in again.out
    assert empty.uploaded() == ([], [])


@pytest.mark.parametrize("signal", [SIGKILL, SIGINT], ids=["killed", "interrupted"])
def test_an_interrupted_upload_continues_where_it_was(empty, verified, signal):
    paths = shards(verified)
    assert len(paths) > 3
    struck = digest(paths[-1])
    stopped = push(empty, verified, kill=f"sha256:{struck}", signal=signal)
    assert stopped.code == (-9 if signal == SIGKILL else 130)
    if signal == SIGINT:
        assert "finished work is kept. To continue: moequant push" in stopped.err
    assert not (empty.folder / "config.json").exists()
    before = [e for e in empty.asked() if "sent" in e]
    assert f"sha256:{struck}" in [e["sent"] for e in before]
    done = push(empty, verified)
    assert done.code == 0, done.err
    after, _ = empty.uploaded()
    kept = {e["sent"].removeprefix("sha256:") for e in before if "whole" in e}
    assert kept
    assert not kept & {*after}
    # What was on its way when the process ended may have arrived since, and is not sent again.
    sent = {e["sent"].removeprefix("sha256:") for e in before}
    assert sent | {*after} == {digest(path) for path in paths}
    assert {p.name: digest(p) for p in shards(empty.folder)} == {p.name: digest(p) for p in paths}
    assert (empty.folder / "config.json").exists()


def test_a_file_that_changed_after_it_was_verified_is_not_published(empty, copy):
    path = shards(copy)[1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    refused = push(empty, copy)
    assert refused.code == 5
    assert f"{copy}: not the files that were written: {path.name}: SHA-256 is " in refused.error
    assert empty.asked() == []


def test_by_force_a_changed_file_is_published_and_the_card_does_not_call_it_verified(empty, copy):
    (copy / "tokenizer.json").write_text("{}")
    forced = push(empty, copy, "--force", "--json")
    assert forced.code == 0, forced.err
    assert "Warning: published unverified: " in forced.err
    assert not forced.document["verified"]
    card = (empty.folder / "README.md").read_text()
    assert "**Not verified:**" in card
    assert "Every byte was verified" not in card
    assert (empty.folder / "tokenizer.json").read_text() == "{}"


def test_a_checkpoint_that_was_not_verified_is_refused_with_the_command_that_does(empty, copy):
    (copy / ".moequant-verified.json").unlink()
    refused = push(empty, copy)
    assert refused.code == 1
    assert refused.error == (
        f"Error: {copy}: was not verified; run moequant verify {copy} --against SOURCE, or publish "
        "it unverified with --force (force=True)"
    )
    assert empty.asked() == []


def test_a_checkpoint_that_was_converted_again_is_not_the_verified_one(empty, source, copy):
    shutil.rmtree(copy / "moequant-prepared")
    convert(source, copy, format="mxfp4", overwrite=True)
    refused = push(empty, copy)
    assert refused.code == 1
    assert f"{copy}: was converted again since it was verified; run moequant" in refused.error


def test_prepared_folders_are_published_if_asked_and_only_as_verified(empty, copy):
    done = push(empty, copy, "--include-prepared")
    assert done.code == 0, done.err
    folder = "moequant-prepared/sm100"
    assert contents(empty.folder / folder) == contents(copy / folder)
    # Without them, those that are there stay.
    assert push(empty, copy).code == 0
    assert (empty.folder / folder / "manifest.json").exists()
    manifest = copy / folder / "manifest.json"
    manifest.write_text(manifest.read_text() + "\n")
    refused = push(empty, copy, "--include-prepared")
    assert refused.code == 1
    assert "was prepared for sm100 since it was verified" in refused.error


def test_another_checkpoint_stays_unless_it_may_be_overwritten(hub, verified):
    for name in ("config.json", "model.safetensors", "vocab.txt", "NOTES.md", ".gitattributes"):
        (hub.folder / name).write_text("of another")
    before = contents(hub.folder)
    hub.asked()
    refused = push(hub, verified)
    assert refused.code == 1
    assert refused.error == (
        f"Error: {hub.id}: holds other files: config.json, model.safetensors, vocab.txt; give "
        "another REPO_ID or --revision, or remove them with --overwrite (overwrite=True)"
    )
    assert contents(hub.folder) == before
    replaced = push(hub, verified, "--overwrite", "--json")
    assert replaced.code == 0, replaced.err
    there = contents(hub.folder)
    assert {"NOTES.md", ".gitattributes", "config.json"} <= there.keys()
    assert there.keys().isdisjoint({"model.safetensors", "vocab.txt"})
    assert there["config.json"] == (verified / "config.json").read_bytes()
    _, (first, *_) = hub.uploaded()
    # Its config.json goes away with the first commit, so that no engine loads a mixture.
    assert first["deleted"] == ["config.json", "model.safetensors", "vocab.txt"]
    assert replaced.document["removed"] == first["deleted"]


def test_a_branch_is_created_and_named_in_commands(empty, verified):
    done = push(empty, verified, "--revision", "nvfp4", "--private")
    assert done.code == 0, done.err
    assert f"/{empty.id}/tree/nvfp4: " in done.out
    _, made = empty.uploaded()
    assert made[0]["created"] == "private"
    assert {one["branch"] for one in made[1:]} == {"nvfp4"}
    card = (empty.folder / "README.md").read_text()
    assert f"vllm serve {empty.id} --revision nvfp4\n" in card


@pytest.mark.parametrize(
    ("token", "exists", "message"),
    [
        (None, False, "the hub takes no token, or another one, for this; run `hf auth login`"),
        (OTHER_TOKEN, False, "the token may not write there; use a token with write access"),
        (OTHER_TOKEN, True, "the token may not write there; use a token with write access"),
    ],
    ids=["no-token", "new", "old"],
)
def test_who_may_not_write_is_told_in_one_sentence(hub, verified, token, exists, message):
    if not exists:
        hub.folder.rmdir()
    hub.set(writer=TOKEN)
    refused = push(hub, verified, **({} if token is None else {"HF_TOKEN": token}))
    assert refused.code == 1
    assert f"Error: {hub.id}: {message}" in refused.error
    assert push(hub, verified, HF_TOKEN=TOKEN).code == 0


def test_a_repository_that_is_closed_is_told_so(hub, verified):
    hub.set(writer=TOKEN, token=TOKEN)
    refused = push(hub, verified, HF_TOKEN=OTHER_TOKEN)
    assert refused.code == 1
    assert f"Error: {hub.id}: the token may not write there; " in refused.error


def test_a_public_repository_is_not_taken_for_a_private_one(hub, verified):
    refused = push(hub, verified, "--private")
    assert refused.code == 1
    assert f"Error: {hub.id}: it exists and is public, and --private is only for" in refused.error
    assert contents(hub.folder) == {}
    hub.set(private=True)
    assert push(hub, verified, "--private").code == 0


@pytest.mark.parametrize("offline", [False, True])
def test_without_a_network_it_is_told_in_one_sentence(empty, verified, offline):
    how = {"HF_HUB_OFFLINE": "1"} if offline else {"HF_ENDPOINT": "http://127.0.0.1:9"}
    refused = push(empty, verified, **how)
    assert refused.code == 3
    message = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached; check the conn"
    assert f"Error: {empty.id}: {message}" in refused.error


def test_a_connection_that_breaks_is_told_so_and_the_same_command_continues(empty, verified):
    first, *_, last = map(digest, shards(verified))
    empty.set(cut=[f"sha256:{last}"])
    lost = push(empty, verified)
    assert lost.code == 3
    assert f"Error: {empty.id}: the hub cannot be reached; check the connection" in lost.error
    empty.set()
    sent, _ = empty.uploaded()
    assert {first, last} <= {*sent}
    done = push(empty, verified)
    assert done.code == 0, done.err
    assert empty.uploaded()[0] == [last]


def test_front_matter_that_the_hub_refuses_ends_it_before_anything_is_sent(empty, source, tmp_path):
    own = Path(shutil.copytree(source, tmp_path / "own"))
    (own / "README.md").write_text("---\nlicense: no-such-license\n---\n")
    convert(own, tmp_path / "out", format="nvfp4")
    note_verified(verify(tmp_path / "out", against=own, layers=0))
    refused = push(empty, tmp_path / "out")
    assert refused.code == 1
    assert '"license" must be one of mit, other' in refused.error
    assert empty.uploaded()[0] == []


def test_a_file_that_arrived_with_other_bytes_is_found_before_config_is_added(hub, verified):
    name = shards(verified)[0].name
    hub.set(spoiled=[name])
    refused = push(hub, verified)
    assert refused.code == 1
    assert f"{hub.id}: {name}: sent, but the hub has no such file or another" in refused.error
    assert not (hub.folder / "config.json").exists()
    hub.set()
    # Its content is not ours, and no other checkpoint's either.
    assert push(hub, verified, "--overwrite").code == 0
    assert digest(hub.folder / name) == digest(verified / name)


def test_a_dry_run_asks_no_hub_and_prints_files_and_card(empty, verified):
    done = push(empty, verified, "--dry-run", HF_ENDPOINT="http://127.0.0.1:9")
    assert done.code == 0, done.err
    assert empty.asked() == []
    for path in (*shards(verified), verified / "LICENSE", verified / "config.json"):
        assert f"\n{path.name} " in done.out
    assert "\nverified    yes; a push first compares every file with moequant.json\n" in done.out
    assert f"\n# {empty.id.partition('/')[2]}\n" in done.out
    assert done.out.endswith("# The source\n\nIt speaks.\n")


def test_report_and_pictures_lie_beside_the_card_that_shows_them(empty, source, copy, tmp_path):
    (tmp_path / "report.html").write_text("<!doctype html>")
    (tmp_path / "errors.svg").write_text("<svg/>")
    done = push(
        empty, copy, "--report", tmp_path / "report.html", "--picture", tmp_path / "errors.svg"
    )
    assert done.code == 0, done.err
    card = (empty.folder / "README.md").read_text()
    assert "[moequant-report/report.html](moequant-report/report.html)" in card
    assert "![errors](moequant-report/errors.svg)" in card
    assert (empty.folder / "moequant-report" / "errors.svg").read_text() == "<svg/>"
    downloaded = Path(shutil.copytree(empty.folder, tmp_path / "downloaded"))
    assert check_integrity(downloaded).problems == ()
    # A published checkpoint can be published again, with the same card below.
    note_verified(verify(downloaded, against=source, layers=1))
    again = push(empty, downloaded, "--dry-run", "--json").document["card"]
    assert again.endswith("\n# The source\n\nIt speaks.\n")
    assert again.count("## The source's model card") == 1
    assert "license: mit" in again


def test_of_a_published_source_the_card_is_kept_whole_and_the_download_verifies(
    empty, copy, tmp_path
):
    """The source is a checkpoint of ours, so its README.md is a card that `push` wrote."""
    first = push(empty, copy, "--dry-run", "--json").document["card"]
    (copy / "README.md").write_text(first)
    out = tmp_path / "again"
    convert(copy, out, format="fp8_block")
    note_verified(verify(out, against=copy, layers=0))
    done = empty.run("push", out, empty.id)
    assert done.code == 0, done.err
    assert "the card names no base model" in done.err
    card = (empty.folder / "README.md").read_text()
    assert card.endswith(first.split("\n---\n", 1)[1].lstrip("\n"))
    assert "base_model: them/source" not in document_lines(card.encode())
    downloaded = Path(shutil.copytree(empty.folder, tmp_path / "downloaded"))
    assert check_integrity(downloaded).problems == ()
    # Published once more, it has the same card.
    note_verified(verify(downloaded, against=copy, layers=0))
    again = push(empty, downloaded, "--dry-run", "--json").document["card"]
    assert again.count("<!-- moequant push wrote") == 2


def test_names_of_reports_and_pictures_are_names_that_links_and_verify_take(empty, copy, tmp_path):
    page, picture = tmp_path / "my report (1).HTM", tmp_path / "a [b].JPEG"
    page.write_text("<!doctype html>")
    picture.write_bytes(b"")
    done = push(empty, copy, "--report", page, "--picture", picture)
    assert done.code == 0, done.err
    card = (empty.folder / "README.md").read_text()
    assert (
        "[moequant-report/my report (1).html](moequant-report/my%20report%20%281%29.html)" in card
    )
    assert "![a \\[b\\]](moequant-report/a%20%5Bb%5D.jpg)" in card
    downloaded = Path(shutil.copytree(empty.folder, tmp_path / "downloaded"))
    assert check_integrity(downloaded).problems == ()
    (tmp_path / "report.pdf").write_bytes(b"")
    refused = push(empty, copy, "--report", tmp_path / "report.pdf")
    assert refused.code == 2
    assert "report.pdf: not a page; give files .html, .htm" in refused.error


def test_a_large_upload_is_committed_in_parts(empty, verified, monkeypatch):
    """In this process, because the sizes of a commit are no options."""
    from moequant.publishing import hub, push, run

    monkeypatch.setattr(run, "_COMMIT_BYTES", 400_000)
    commits, there = [], {}

    def commit(self, message, add=(), delete=()):
        commits.append([file.name for file in add])
        for file in add:
            there[file.name] = HubFile(
                size_bytes=file.size_bytes, sha256=file.sha256, blob_id=file.sha256
            )

    monkeypatch.setattr(hub.Destination, "create", lambda self, private: None)
    monkeypatch.setattr(hub.Destination, "files", lambda self: dict(there))
    monkeypatch.setattr(hub.Destination, "commit", commit)
    result = push(verified, "owner/name")
    assert [name for names in commits for name in names] == list(
        dict.fromkeys([*(n for n in result.sent if n != "config.json"), "config.json"])
    )
    assert len(commits) > 3
    sizes = {f.name: f.size_bytes for f in result.plan.files + result.plan.extras}
    assert all(
        sum(sizes[name] for name in names) <= 400_000 or len(names) == 1 for names in commits
    )
    assert commits[-1] == ["config.json"]
    assert json.loads((verified / ".moequant-verified.json").read_text())["report"]["ok"]
