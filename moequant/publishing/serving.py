"""How engines serve a published checkpoint, by the rules of `moequant check`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moequant.compatibility import check_checkpoint
from moequant.weights.converted import described_architectures

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from moequant.compatibility import EngineReport
    from moequant.storage.checkpoint import Checkpoint


@dataclass(frozen=True, kw_only=True)
class ServedBy:
    """What one engine makes of a checkpoint.

    Attributes:
        engine: its name and version.
        loads: None where no rule is about it.
        known: "tested", "read" or "seen"; None where nothing is known.
        language: of the command, as Markdown names it.
        commands: what serves it, by the GPUs on which it does so; one for "" where all GPUs have
            the same, and none where it does not load it.
        tp: numbers of tensor-parallel ranks at which it loads on some GPU.
        remarks: why not, or what differs.
    """

    engine: str
    loads: bool | None
    known: str | None
    language: str
    commands: Mapping[str, str]
    tp: tuple[int, ...]
    remarks: tuple[str, ...]


def serving_of(checkpoint: Checkpoint, repo_id: str, revision: str | None) -> list[ServedBy]:
    """What every engine makes of a checkpoint that is published as a revision of `repo_id`.

    Raises:
        CheckpointError: a malformed config, or an unreadable file.
        UnsupportedError: an unknown architecture, dialect or scheme.
    """
    report = check_checkpoint(checkpoint, described_architectures(checkpoint.path))
    return [_of_engine(engine, repo_id, revision) for engine in report.engines]


def _of_engine(report: EngineReport, repo_id: str, revision: str | None) -> ServedBy:
    verdict = report.verdict
    said = report.remarks if report.loads else report.against
    language, command = _COMMANDS[report.key]
    ways = report.options if report.loads else {}
    return ServedBy(
        engine=f"{verdict.engine} {verdict.version}",
        loads=report.loads,
        known=verdict.known,
        language=language,
        commands={
            ", ".join(gpus) if len(ways) > 1 else "": command(repo_id, revision, options)
            for options, gpus in ways.items()
        },
        tp=report.tp,
        remarks=tuple(one.message for one in said),
    )


def _vllm(repo_id: str, revision: str | None, options: Sequence[str]) -> str:
    return " ".join(("vllm serve", repo_id, *_revision(revision), *options))


def _sglang(repo_id: str, revision: str | None, options: Sequence[str]) -> str:
    server = "python -m sglang.launch_server --model-path"
    return " ".join((server, repo_id, *_revision(revision), *options))


def _transformers(repo_id: str, revision: str | None, options: Sequence[str]) -> str:
    given = "" if revision is None else f', revision="{revision}"'
    return (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{repo_id}"{given}, device_map="auto")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{repo_id}"{given})'
    )


def _moequant(repo_id: str, revision: str | None, options: Sequence[str]) -> str:
    folder = repo_id.partition("/")[2]
    download = " ".join(("hf download", repo_id, *_revision(revision), "--local-dir", folder))
    return f'{download}\nmoequant generate {folder} --prompt "Mixture of experts means"'


def _revision(revision: str | None) -> tuple[str, ...]:
    return () if revision is None else (f"--revision {revision}",)


_COMMANDS: Mapping[str, tuple[str, Callable[[str, str | None, Sequence[str]], str]]] = {
    "vllm": ("shell", _vllm),
    "sglang": ("shell", _sglang),
    "transformers": ("python", _transformers),
    "moequant": ("shell", _moequant),
}
"""By the key of the engine in rules.toml."""
