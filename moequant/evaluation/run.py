"""Run a reference and tests over the same windows, layer by layer, and compare predictions."""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from moequant.conversion import copied_sidecars
from moequant.conversion.source_identity import source_digests
from moequant.device import usable_device
from moequant.errors import ArgumentError, DataError, MoequantError, UnsupportedError
from moequant.evaluation.figures import figures_of
from moequant.evaluation.kept import KeptReference, write_kept
from moequant.evaluation.memory import memory_of
from moequant.evaluation.models import EvaluatedModel
from moequant.evaluation.predictions import Predictions, compare
from moequant.evaluation.same_tokenizer import check_same_tokenizer
from moequant.evaluation.windows import read_windows
from moequant.integrations.runtime_experts import RuntimeExperts
from moequant.progress import SilentProgress
from moequant.storage.disk import explained
from moequant.storage.given_path import given_path
from moequant.storage.locate import locate
from moequant.streaming.activations import read_activations, remove_activations
from moequant.streaming.compute import DTYPES, dtype_name_for, facts_of_run
from moequant.streaming.deterministic import deterministic
from moequant.streaming.layers import DEFAULT_BATCH_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch
    from torch import Tensor

    from moequant.evaluation.figures import Figures
    from moequant.evaluation.memory import EvaluationMemory
    from moequant.evaluation.windows import Windows
    from moequant.integrations.layerwise import Activations
    from moequant.progress import Progress
    from moequant.runtime.activations import ActivationsChoice

RunAs = Literal["weights", "runtime"]
DEFAULT_WINDOWS = 16
DEFAULT_WINDOW_TOKENS = 512
KL_DEFINITION = (
    "KL(reference || test) in nats over the whole vocabulary, in float64 from the logits, at every "
    "position of every window"
)
NOISE_FLOOR = "noise floor"
"""Name of the reference in another dtype."""


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """What an evaluation will do.

    Attributes:
        reference: its directory.
        tests: names of the models that are compared with it, the noise floor last.
        run_as: whether tests run as dequantized weights, or on moequant's runtime.
        data: what identifies the windows; see `Windows.record`.
        computed: dtype, device, versions.
        kept: "read" or "written" where the reference's predictions are kept; None elsewhere.
        memory: what it takes, in addition to the interpreter and libraries.
        disk_bytes: of activations, and of what is kept.
    """

    reference: Path
    tests: tuple[str, ...]
    run_as: RunAs
    data: dict[str, Any]
    computed: dict[str, str]
    kept: Literal["read", "written"] | None
    memory: EvaluationMemory
    disk_bytes: int


@dataclass(frozen=True, kw_only=True)
class ModelResult:
    """What was found of one test.

    Attributes:
        name: as in the plan.
        dtype: that it was computed in.
        run_as: "weights" or "runtime".
        backends: of the runtime; empty for weights.
        figures: against the reference.
    """

    name: str
    dtype: str
    run_as: RunAs
    backends: tuple[str, ...]
    figures: Figures


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """What an evaluation found.

    Attributes:
        plan: what was to be done.
        tests: of each test; empty after a dry run.
        noise_floor: of the reference in the other dtype; None where it was not asked for.
        seconds: how long it took.
    """

    plan: EvaluationPlan
    tests: tuple[ModelResult, ...]
    noise_floor: ModelResult | None
    seconds: float


def evaluate(
    reference: str | Path,
    tests: Sequence[str | Path],
    data: str | Path,
    *,
    windows: int = DEFAULT_WINDOWS,
    window_tokens: int = DEFAULT_WINDOW_TOKENS,
    batch_tokens: int = DEFAULT_BATCH_TOKENS,
    run_as: RunAs = "weights",
    backend: str | None = None,
    activations: ActivationsChoice = "format",
    device: str = "cpu",
    dtype: str | None = None,
    noise_floor: bool = False,
    keep: str | Path | None = None,
    folder: str | Path | None = None,
    architecture: str | Path | None = None,
    revision: str | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    on_plan: Callable[[EvaluationPlan], None] | None = None,
) -> EvaluationResult:
    """Measure how far the predictions of tests are from those of a reference, over text.

    One layer is in memory at a time. What layers return is kept on the disk until the end.

    Args:
        reference: a directory, or the id of a repository on the hub; quantized or not.
        tests: directories of checkpoints with the same tokenizer; quantized or not.
        data: text whose sections form feeds separate, or a dataset: see
            `moequant.evaluation.windows`.
        windows: number of windows, evenly from all sections.
        window_tokens: length of each.
        batch_tokens: tokens that run through a layer at once, in whole windows.
        run_as: "weights" runs tests on what their weights decode to; "runtime" runs their converted
            experts with `FusedExperts`, which quantizes activations as it does when it serves.
        backend: of the runtime; by default the best for the device.
        activations: of the runtime, as for `FusedExperts`.
        device: to compute on.
        dtype: to compute in: float32 or bfloat16; by default float32 on a CPU, else bfloat16.
        noise_floor: also compare the reference with itself in the other dtype, which takes one more
            pass.
        keep: a file with the reference's predictions, which is written, or read if it is there.
        folder: where activations are kept meanwhile; by default the system's temporary folder.
        architecture: a file that describes the models, instead of the built-in table.
        revision: of a reference on the hub.
        dry_run: only plan.
        progress: receives the progress, in tokens.
        on_plan: called with the plan before the work starts.

    Raises:
        ArgumentError: a test is given twice; or a revision of a directory.
        MoequantError: `keep` is of another reference, data, windows or dtype; or a file cannot be
            written.
        CheckpointError: a checkpoint is damaged, incomplete, or computes NaN; or, to run on the
            runtime, is not converted.
        UnsupportedError: tokenizers or vocabularies differ; transformers has no class for the
            model, or one that cannot be run layer by layer; the runtime cannot run it; or a path is
            neither a text nor a path.
        DataError: the data cannot be used.
    """
    started = time.monotonic()
    place = usable_device(device)
    run = _Evaluation.prepare(
        reference=locate(reference, revision, argument="reference"),
        tests=_located(tests),
        data=given_path("data", data, what="text or a dataset", error=DataError),
        windows=windows,
        window_tokens=window_tokens,
        batch_tokens=batch_tokens,
        run_as=run_as,
        runtime=partial(
            RuntimeExperts,
            device=place,
            backend=backend,
            activations=activations,
            architecture=architecture,
        ),
        device=place,
        dtype=dtype_name_for(dtype, place),
        noise_floor=noise_floor,
        keep=None if keep is None else given_path("keep", keep, what="a file", error=MoequantError),
        architecture=architecture,
    )
    if on_plan is not None:
        on_plan(run.plan)
    found: list[ModelResult] = []
    floor = None
    if not dry_run:
        with (
            deterministic(place),
            _temporary_folder(folder) as work,
        ):
            found = list(run.run(Path(work), progress or SilentProgress()))
        floor = found.pop() if noise_floor else None
    return EvaluationResult(
        plan=run.plan,
        tests=tuple(found),
        noise_floor=floor,
        seconds=time.monotonic() - started,
    )


def _located(tests: Sequence[str | Path]) -> list[tuple[str, Path]]:
    """Each test's name and folder; raises ArgumentError if two are the same."""
    found: list[tuple[str, Path]] = []
    for test in tests:
        path = locate(test, argument="a test")
        if any(path.resolve() == other.resolve() for _, other in found):
            raise ArgumentError(f"{test}: given twice; give each checkpoint once")
        found.append((str(test), path))
    return found


@dataclass(frozen=True, kw_only=True)
class _Evaluation:
    """One evaluation: a reference, tests, windows, and a plan."""

    reference: EvaluatedModel
    tests: Sequence[EvaluatedModel]
    windows: Windows
    batches: Sequence[Tensor]
    plan: EvaluationPlan
    keep: Path | None
    kept_record: dict[str, Any]
    kept: KeptReference | None

    @classmethod
    def prepare(
        cls,
        *,
        reference: Path,
        tests: Sequence[tuple[str, Path]],
        data: Path,
        windows: int,
        window_tokens: int,
        batch_tokens: int,
        run_as: RunAs,
        runtime: Callable[[Path], RuntimeExperts],
        device: torch.device,
        dtype: str,
        noise_floor: bool,
        keep: Path | None,
        architecture: str | Path | None,
    ) -> _Evaluation:
        """Read headers, config.json, tokenizers and data, and plan."""
        opened = partial(EvaluatedModel.open, device=device, architecture=architecture)
        first = opened(reference, str(reference), dtype=DTYPES[dtype])
        read = partial(read_windows, data, windows=windows, tokens=window_tokens)
        own = read(folder=reference, vocabulary=first.model.vocabulary)
        others = []
        for name, path in tests:
            experts = runtime(path) if run_as == "runtime" else None
            test = opened(path, name, dtype=DTYPES[dtype], experts=experts)
            _check_same_vocabulary(first, test)
            check_same_tokenizer(
                reference, path, own, read(folder=path, vocabulary=test.model.vocabulary)
            )
            others.append(test)
        if noise_floor:
            others.append(opened(reference, NOISE_FLOOR, dtype=DTYPES[_other_dtype(dtype)]))
        batches = own.batches(batch_tokens)
        computed = facts_of_run(device, dtype)
        record = {
            "source": source_digests(first.checkpoint, copied_sidecars(first.checkpoint)),
            "data": own.record,
            "batch_tokens": batch_tokens,
            "run": {name: computed[name] for name in ("dtype", "device", "torch", "transformers")},
        }
        kept = None
        if keep is not None and keep.exists():
            kept = KeptReference(keep, record)
        state: Literal["read", "written"] | None
        state = None if keep is None else "written" if kept is None else "read"
        hidden = own.ids.numel() * first.model.source.model.moe.hidden * 4
        plan = EvaluationPlan(
            reference=reference,
            tests=tuple(test.name for test in others),
            run_as=run_as,
            data=own.record,
            computed=computed,
            kept=state,
            memory=memory_of([one.model for one in (first, *others)], batches),
            # The reference's last layer, and of a test the embedding and two layers.
            disk_bytes=hidden * (5 if state == "written" else 4),
        )
        return cls(
            reference=first,
            tests=others,
            windows=own,
            batches=batches,
            plan=plan,
            keep=keep,
            kept_record=record,
            kept=kept,
        )

    def run(self, work: Path, progress: Progress) -> Iterator[ModelResult]:
        """Run the reference, unless it was kept, then each test against it."""
        reference = self._reference_activations(work, progress)
        for number, test in enumerate(self.tests):
            folder = work / str(number)
            folder.mkdir()
            returned = test.run(self.batches, folder, progress)
            found = self._compare(test, reference(), read_activations(returned))
            remove_activations(returned)
            on_runtime = test.experts is not None
            yield ModelResult(
                name=test.name,
                dtype=str(test.model.dtype).removeprefix("torch."),
                run_as="runtime" if on_runtime else "weights",
                backends=tuple(sorted(test.experts.backends)) if test.experts else (),
                figures=figures_of(found, self.windows.sections),
            )

    def _reference_activations(
        self, work: Path, progress: Progress
    ) -> Callable[[], Iterator[Activations]]:
        """Reads what the reference's last layer returned for each batch."""
        if self.kept is not None:
            self.reference.model.load_rest()
            return self.kept.read
        folder = work / "reference"
        folder.mkdir()
        read = partial(read_activations, self.reference.run(self.batches, folder, progress))
        if self.keep is not None:
            write_kept(self.keep, self.kept_record, read)
        return read

    def _compare(
        self,
        test: EvaluatedModel,
        reference: Iterator[Activations],
        returned: Iterator[Activations],
    ) -> Predictions:
        parts = []
        with ExitStack() as stack:
            stack.enter_context(self.reference.model.head())
            stack.enter_context(test.model.head())
            for ids, ours, others in zip(self.batches, reference, returned, strict=True):
                for window, p, q in zip(
                    ids,
                    self.reference.logits(ids, ours),
                    test.logits(ids, others),
                    strict=True,
                ):
                    parts.append(compare(p, q, window))
        return Predictions.join(parts)


def _temporary_folder(parent: str | Path | None) -> tempfile.TemporaryDirectory[str]:
    """A new folder that is removed at the end; raises MoequantError if it cannot be made."""
    within = Path(tempfile.gettempdir())
    if parent is not None:
        within = given_path("folder", parent, what="a folder", error=MoequantError)
    with explained(within, "written"):
        return tempfile.TemporaryDirectory(prefix="moequant-evaluate-", dir=within)


def _other_dtype(dtype: str) -> str:
    return "bfloat16" if dtype == "float32" else "float32"


def _check_same_vocabulary(reference: EvaluatedModel, test: EvaluatedModel) -> None:
    ours, others = reference.model.vocabulary, test.model.vocabulary
    if ours != others:
        raise UnsupportedError(
            f"{test.name}: {others} tokens in its vocabulary, but {ours} in that of "
            f"{reference.name}; evaluate a checkpoint made of this reference"
        )
