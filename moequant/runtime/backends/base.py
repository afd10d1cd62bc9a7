"""The interface of backends, which run the experts of a layer.

A `Backend` says what it runs and packs weights; what it returns, `PackedExperts`, runs them. A call
is prepare (quantize activations, route, permute), the two GEMMs of every expert with what lies
between them, and finalize (weight, reduce). A fused backend implements all of it in `run`, by
itself or as a `PlannedExperts` (planned.py), which gives it scratch memory and contiguous inputs.
`StandardExperts` and `BatchedExperts` (routed.py) implement `run` around GEMMs over sorted rows and
over a batch per expert.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from moequant.errors import DoesNotFitError, UnsupportedError
from moequant.runtime.backends.stacked import STACKED
from moequant.units import NEVER_RUN

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from moequant.runtime.backends.layout import Layout
    from moequant.runtime.batched import BatchedTokens
    from moequant.runtime.weights import ExpertWeights
    from moequant.runtime.workload import Workload


TARGETS = ("sm90", "sm100")
"""Generations of GPUs that `moequant prepare` packs for: Hopper and Blackwell."""


class Tuner(Protocol):
    """How kernels run calls of a size in several ways, for `moequant tune`.

    A tiling is a frozen dataclass of numbers and flags. Calls look one up by themselves.
    """

    def tilings(self, tokens: int, topk: int) -> Sequence[Any]:
        """Those worth timing for [tokens, topk] pairs; the first is what calls have now."""

    def compile_tilings(self, tokens: int, topk: int, tilings: Sequence[Any]) -> None:
        """Compile what calls with these tilings will run, several kernels at once."""

    def workspace_bytes(self, tokens: int, topk: int, tiling: Any, /) -> int:
        """Bytes of scratch memory that a call with `tiling` needs."""

    def plan(
        self, tokens: int, topk: int, *, tiling: Any, workspace: Tensor
    ) -> Callable[..., object]:
        """What runs calls of that size: called with hidden states, router weights, ids and out."""

    def table(self, path: Path | None) -> Path:
        """The file in which tilings are kept: `path`, or the user's, which calls look into.

        Raises:
            UnsupportedError: there is something else at `path`.
        """

    def keep(self, tokens: int, topk: int, tiling: Any, time_us: float, path: Path) -> None:
        """Write a tiling into the table at `path`, for calls of about that size."""


class PackedExperts(ABC):
    """The experts of a layer in the layout of a backend, ready to run.

    It keeps `tensors` and writes to none of them. One object may be called from several threads and
    on several streams, each with a workspace of its own.

    Attributes:
        backend: what made it.
        tensors: the weights, as `layout` packs them; on `workload.device`, contiguous.
        workload: what it was made for.
    """

    takes_quantized: ClassVar[bool] = True
    """Whether `run` takes hidden states that are quantized."""
    waits_for_device: ClassVar[bool] = False
    """Whether `run` reads on the host what the device computes, unless a CUDA graph is captured.

    Then `expert_map` is checked on the host too, and `moequant bench` does not time the backend.
    """
    compiles: ClassVar[bool] = True
    """Whether calls compile kernels, as far as they are not cached on disk.

    Then a CUDA graph does not capture the first call, and a warm-up is refused where `kernels_for`
    is None. So False is a promise, which backends of other packages have to make themselves.
    """
    tuner: Tuner | None = None
    """Its tilings, where there is a choice for `moequant tune`."""

    def __init__(
        self, backend: Backend, tensors: Mapping[str, Tensor], *, workload: Workload
    ) -> None:
        self.backend = backend
        self.tensors = dict(tensors)
        self.workload = workload

    @property
    def layout(self) -> Layout:
        """The layout of `tensors`, one of `backend.layouts`."""
        return self.backend.layout_of(self.tensors)

    @abstractmethod
    def run(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        *,
        out: Tensor,
        workspace: Tensor,
        expert_map: Tensor | None,
        hidden_scale: Tensor | None,
    ) -> None:
        """Write every token's output to `out`, on the current stream.

        Shapes, dtypes and devices are checked by the caller, which is `moequant.runtime.call`; it
        also multiplies the input by router weights where that is asked for. M and T may be 0. But
        for `out` and `workspace`, tensors may have any strides.

        Args:
            hidden_states: [M, H] bfloat16, float16 or float32; float8_e4m3fn with a `hidden_scale`.
            topk_weights: [M, T] float32, bfloat16 or float16.
            topk_ids: [M, T] int32 or int64; -1 contributes nothing. An id out of range does not
                either where nothing is read on the host, and is an UnsupportedError where it is.
            out: [M, H] contiguous, bfloat16, float16 or float32.
            workspace: uint8, contiguous, at a multiple of 16 bytes, at least `workspace_bytes`,
                with any contents; the next call on this stream may overwrite it.
            expert_map: [global experts] int32 or int64, index here or -1; None where ids are
                indices.
            hidden_scale: float32 scales of `hidden_states`, quantized by `workload.activations`.
        """

    def run_batches(
        self, tokens: BatchedTokens, *, names: Mapping[str, str] | None = None
    ) -> Tensor:
        """Refuse batches of tokens, which `BatchedExperts` run.

        Raises:
            UnsupportedError: always; says which backends do.
        """
        raise UnsupportedError(
            f"backend {self.backend.name!r} does not run batches of tokens; pack the experts for "
            "one whose name ends with _batched, such as naive_batched on a CPU and triton_batched "
            "on a GPU"
        )

    def workspace_bytes(self, tokens: int, topk: int) -> int:
        """Bytes of `workspace` that `run` needs for [tokens, topk] token-expert pairs.

        0, if it takes scratch memory from torch's allocator.
        """
        return 0

    def kernels_for(self, tokens: int, topk: int) -> Hashable:
        """Names the compiled kernels that `run` launches for [tokens, topk] token-expert pairs.

        Calls of equal names launch the same kernels. None where nothing is compiled, or where that
        depends on more, such as how many tokens each expert gets.
        """
        return None

    def compile_ahead(self, tokens: Iterable[int], topk: int) -> None:
        """Compile what can be compiled at once of the kernels of calls of these tokens.

        Calls compile what is left. Nothing unless a backend overrides this.
        """
        return

    def stages(
        self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> Mapping[str, Callable[[], object]]:
        """Run a call, and return its launches by name, to be timed one by one.

        For `moequant bench experts --stages`, which is refused for experts that do not override
        this. Of more tokens than are run at once, those of a first part.
        """
        raise NotImplementedError

    def weights(self) -> ExpertWeights:
        """Gate, up and down, see `Layout.unpack`."""
        return self.layout.unpack(self.tensors, self.workload)


class Backend(ABC):
    """What it runs, where, and in which layout; one file, and one line in REGISTRY."""

    name: ClassVar[str]
    default_on: ClassVar[tuple[str, ...]] = ()
    """Types of device, "cpu" or "cuda", it is chosen on by default; on others only when named."""
    never_run: ClassVar[bool] = False
    """Whether no GPU has run its kernels, which were compiled only; users are told.

    Until a report in docs/selftest says otherwise.
    """
    formats: ClassVar[tuple[str, ...] | None] = None
    """Formats that it has kernels for; None if it runs all. `supports` refuses the others."""
    layout: ClassVar[Layout] = STACKED
    """How its kernels read weights."""
    experts: ClassVar[type[PackedExperts]]
    """What `load` makes; not needed where `load` is overridden."""
    multiples: ClassVar[tuple[int, int]] = (1, 1)
    """What `supports` wants H and I of gated experts to be multiples of, beside their format."""

    @abstractmethod
    def supports(self, workload: Workload) -> str | None:
        """None if it can run `workload`; otherwise the reason, as a short phrase: "needs SM90".

        It is asked about any workload: every format, scheme and device, also one that is not there.
        """

    @property
    def marked_name(self) -> str:
        """Its name in messages; marked, where no GPU has run its kernels."""
        return f"{self.name} ({NEVER_RUN})" if self.never_run else self.name

    def multiples_with(self, activations: str) -> tuple[int, int]:
        """`multiples`, and those that a scheme of activations adds."""
        return self.multiples

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """All that its kernels read, `layout` first; each holds weights that those before do not.

        The names of their tensors differ.
        """
        return (self.layout,)

    def layout_of(self, tensors: Mapping[str, Tensor]) -> Layout:
        """The one of `layouts` that packed `tensors`, by their names."""
        return self.layout

    def pack(self, weights: ExpertWeights) -> dict[str, Tensor]:
        """The tensors of `weights` in the first of `layouts` that holds them.

        Raises:
            UnsupportedError: none does; see `Layout.pack`.
        """
        *others, last = self.layouts
        for layout in others:
            with suppress(DoesNotFitError):
                return layout.pack(weights)
        return last.pack(weights)

    def serves(self, target: str, activations: str) -> Collection[str]:
        """Formats that `moequant prepare` packs in `layouts`, because this backend runs them.

        The first backend of the registry that names a format is the one it is packed for.

        Args:
            target: one of TARGETS.
            activations: the scheme in which activations will be quantized.
        """
        return ()

    def load(self, tensors: Mapping[str, Tensor], workload: Workload) -> PackedExperts:
        """The experts whose weights are `tensors`, in one of `layouts`; copies none of them.

        Args:
            tensors: as `pack` made them, on `workload.device`.
            workload: one that `supports` accepts.
        """
        return self.experts(self, tensors, workload=workload)
