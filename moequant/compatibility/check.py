"""What every engine makes of a checkpoint: on each GPU, at each number of ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from moequant.compatibility.checkpoint_facts import Examined, examine
from moequant.compatibility.facts import Placement
from moequant.compatibility.gpus import GPUS, find_gpu
from moequant.compatibility.kernels import kernels_on
from moequant.compatibility.kv_cache import kv_cache
from moequant.compatibility.memory import memory_of
from moequant.compatibility.rules import ENGINES, EngineInfo, Said, Verdict, judge

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from moequant.compatibility.facts import Facts
    from moequant.compatibility.memory import Memory
    from moequant.models import Architecture
    from moequant.storage.checkpoint import Checkpoint

_MOST_RANKS = 64
_POWERS = tuple(1 << power for power in range(_MOST_RANKS.bit_length()))


@dataclass(frozen=True, kw_only=True)
class GpuReport:
    """Whether an engine runs a checkpoint on some GPUs of one compute capability.

    Attributes:
        names: the GPUs.
        capability: their compute capability, (major, minor).
        loads: None if unknown.
        kernels: the kernel of each format of routed experts, in words; empty if unknown.
        lacking: sentences about formats without a kernel.
        against: what fails there, or would.
        remarks: differences other than the weights.
        options: options that the engine's server needs there.
    """

    names: tuple[str, ...]
    capability: tuple[int, int]
    loads: bool | None
    kernels: dict[str, str]
    lacking: tuple[str, ...]
    against: tuple[Said, ...]
    remarks: tuple[Said, ...]
    options: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data with stable keys; rules by their ids."""
        return {
            "names": list(self.names),
            "capability": list(self.capability),
            "loads": self.loads,
            "kernels": self.kernels,
            "lacking": list(self.lacking),
            "why": [said.rule for said in self.against],
            "cautions": [said.rule for said in self.remarks],
            "options": list(self.options),
        }


@dataclass(frozen=True, kw_only=True)
class EngineReport:
    """What an engine makes of a checkpoint, at the number of ranks and on the GPU asked for.

    Attributes:
        key: the engine, as options name it.
        verdict: whether it loads the checkpoint on any GPU.
        loads: the same, on some of the GPUs asked for; None if unknown.
        gpus: by compute capability.
        tp: numbers of tensor-parallel ranks at which it loads, up to 64, on some of these GPUs.
        tp_with_ep: numbers of ranks at which it loads with experts divided among all of them.
        memory: weights and KV cache of a rank; None if it does not load there, or if it is not
            known how it divides weights.
        fits_from: by GPU, the least of `tp` and of `tp_with_ep` at which the weights fit; None
            where they fit at none.
    """

    key: str
    verdict: Verdict
    loads: bool | None
    gpus: tuple[GpuReport, ...]
    tp: tuple[int, ...]
    tp_with_ep: tuple[int, ...]
    memory: Memory | None = None
    fits_from: Mapping[str, tuple[int | None, int | None]] = field(default_factory=dict)

    @property
    def against(self) -> tuple[Said, ...]:
        """What fails everywhere, then what fails on some of the GPUs; each rule once."""
        return _once(self.verdict.against, *(gpu.against for gpu in self.gpus))

    @property
    def remarks(self) -> tuple[Said, ...]:
        """What differs, of all GPUs on which it loads; each rule once."""
        loading = [gpu for gpu in self.gpus if gpu.loads is not False]
        return _once(*(gpu.remarks for gpu in loading))

    @property
    def options(self) -> dict[tuple[str, ...], tuple[str, ...]]:
        """The names of the GPUs on which it loads, by the options that its server needs there."""
        found: dict[tuple[str, ...], tuple[str, ...]] = {}
        for gpu in self.gpus:
            if gpu.loads:
                found[gpu.options] = (*found.get(gpu.options, ()), *gpu.names)
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain data with stable keys."""
        return {
            "key": self.key,
            "engine": self.verdict.engine,
            "version": self.verdict.version,
            "loads": self.loads,
            "known": self.verdict.known,
            "tp": list(self.tp),
            "tp_with_ep": list(self.tp_with_ep),
            "why": [_describe(said) for said in self.against],
            "cautions": [_describe(said) for said in self.remarks],
            "gpus": [gpu.to_json() for gpu in self.gpus],
            "started_with": [
                {"options": list(options), "gpus": list(names)}
                for options, names in self.options.items()
            ],
            "memory": self.memory and self.memory.to_json(),
            "fits_from": {
                name: {"tp": tp, "tp_with_ep": both} for name, (tp, both) in self.fits_from.items()
            },
        }


@dataclass(frozen=True, kw_only=True)
class CompatibilityReport:
    """What engines make of a checkpoint.

    Attributes:
        examined: the checkpoint.
        engines: in the order of rules.toml.
        tp: tensor-parallel ranks asked for.
        ep: ranks asked for among which experts are divided.
    """

    examined: Examined
    engines: tuple[EngineReport, ...]
    tp: int
    ep: int

    def to_json(self) -> dict[str, Any]:
        """Plain data with stable keys, fit for a JSON document."""
        examined, facts = self.examined, self.examined.facts
        return {
            "architecture": examined.architecture.name,
            "architecture_by": examined.architecture.origin,
            "expert_layers": list(examined.layers),
            "experts": examined.moe.experts,
            "hidden": examined.moe.hidden,
            "intermediate": examined.moe.intermediate,
            "dialect": facts.dialect,
            "formats": [*facts.experts, *sorted(facts.formats - {*facts.experts})],
            "static_activations": facts.static,
            "scales_read_in_layers": list(examined.layers_read),
            "tp": self.tp,
            "ep": self.ep,
            "defects": [
                {
                    "id": defect.id,
                    "names": list(defect.names),
                    "detail": defect.detail,
                    "engines": sorted(defect.engines),
                }
                for defect in facts.defects
            ],
            "engines": [engine.to_json() for engine in self.engines],
        }


def check_checkpoint(
    checkpoint: Checkpoint,
    own: Sequence[Architecture] = (),
    *,
    engines: Collection[str] | None = None,
    gpu: str | None = None,
    tp: int = 1,
    ep: int = 1,
    layers: int | None = None,
) -> CompatibilityReport:
    """Say which engines load a checkpoint.

    Args:
        checkpoint: an opened checkpoint.
        own: architectures that a user's file or a record describes.
        engines: keys of ENGINES; by default all.
        gpu: a GPU, as `find_gpu` takes it; by default every one.
        tp: ranks of tensor parallelism.
        ep: ranks among which experts are divided; 1 without expert parallelism.
        layers: as for `examine`.

    Raises:
        CheckpointError: a malformed config, an unreadable file, or experts that are not those of
            config.json.
        UnsupportedError: an unknown architecture, dialect, scheme or GPU.
    """
    names = [*GPUS] if gpu is None else [find_gpu(gpu).name]
    examined = examine(checkpoint, own, layers=layers)
    reports = (
        _with_memory(
            _of_engine(examined.facts, key, engine, names, Placement(tp=tp, ep=ep)),
            partial(_memory, checkpoint, examined, engine, names),
            Placement(tp=tp, ep=ep),
        )
        for key, engine in ENGINES.items()
        if engines is None or key in engines
    )
    return CompatibilityReport(examined=examined, engines=tuple(reports), tp=tp, ep=ep)


def _of_engine(
    facts: Facts, key: str, engine: EngineInfo, gpus: Sequence[str], asked: Placement
) -> EngineReport:
    (verdict,) = judge(facts, asked, [key])
    found = tuple(_on_gpus(facts, key, engine, gpus, asked))
    return EngineReport(
        key=key,
        verdict=verdict,
        loads=_any(gpu.loads for gpu in found),
        gpus=found,
        tp=_sizes(facts, key, engine, gpus, divided=False),
        tp_with_ep=_sizes(facts, key, engine, gpus, divided=True),
    )


def _memory(
    checkpoint: Checkpoint,
    examined: Examined,
    engine: EngineInfo,
    gpus: Sequence[str],
    placement: Placement,
) -> Memory | None:
    kv = kv_cache(checkpoint.config, examined.moe.layers, placement.tp)
    chosen = [GPUS[name] for name in gpus]
    return memory_of(examined.sizes, examined.facts, engine, placement, kv, chosen)


def _with_memory(
    report: EngineReport, memory_at: Callable[[Placement], Memory | None], asked: Placement
) -> EngineReport:
    """The report, with the memory of a rank, and the ranks from which on the weights fit."""
    memory = memory_at(asked)
    if memory is None:
        return report
    placements = (
        [Placement(tp=ranks) for ranks in report.tp],
        [Placement(tp=ranks, ep=ranks) for ranks in report.tp_with_ep],
    )
    least: list[dict[str, int]] = []
    for series in placements:
        first: dict[str, int] = {}
        for placement in series:
            found = memory_at(placement)
            assert found is not None
            for gpu in found.gpus:
                if gpu.fits:
                    first.setdefault(gpu.name, placement.tp)
        least.append(first)
    fits_from = {gpu.name: (least[0].get(gpu.name), least[1].get(gpu.name)) for gpu in memory.gpus}
    # Where it does not load, there are no shares of ranks.
    return replace(report, memory=None if report.loads is False else memory, fits_from=fits_from)


def _on_gpus(
    facts: Facts, key: str, engine: EngineInfo, gpus: Sequence[str], asked: Placement
) -> Iterator[GpuReport]:
    for capability in dict.fromkeys(GPUS[name].capability for name in gpus):
        names = tuple(name for name in gpus if GPUS[name].capability == capability)
        placement = Placement(tp=asked.tp, ep=asked.ep, capability=capability)
        (verdict,) = judge(facts, placement, [key])
        kernels = kernels_on(facts, engine, placement)
        running, lacking = kernels or ({}, [])
        yield GpuReport(
            names=names,
            capability=capability,
            loads=False if lacking else verdict.loads,
            kernels={format: kernel.describe(capability) for format, kernel in running.items()},
            lacking=tuple(lacking),
            against=verdict.against,
            remarks=verdict.remarks,
            options=verdict.options,
        )


def _sizes(
    facts: Facts, key: str, engine: EngineInfo, gpus: Sequence[str], *, divided: bool
) -> tuple[int, ...]:
    """The numbers of ranks at which an engine is known to load, on some of the GPUs."""
    most = min(_MOST_RANKS, facts.heads or _MOST_RANKS)
    loading = []
    for ranks in (n for n in _POWERS if n <= most):
        placement = Placement(tp=ranks, ep=ranks if divided else 1)
        reports = _on_gpus(facts, key, engine, gpus, placement)
        if any(report.loads for report in reports):
            loading.append(ranks)
    return tuple(loading)


def _describe(said: Said) -> dict[str, Any]:
    return {**asdict(said), "names": list(said.names)}


def _any(loads: Iterator[bool | None]) -> bool | None:
    """Whether one of several loads; None if none is known to, and not all are known not to."""
    found = {*loads}
    if True in found:
        return True
    return None if None in found else False


def _once(*groups: tuple[Said, ...]) -> tuple[Said, ...]:
    """What was said, each rule once."""
    first: dict[str, Said] = {}
    for group in groups:
        for said in group:
            first.setdefault(said.rule, said)
    return tuple(first.values())
