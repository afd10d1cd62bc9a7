"""Whether the weights of a checkpoint fit into the memory of GPUs, by its headers.

The shares were read in vLLM 0.33.0 (under model_executor/layers: fused_moe/config.py,
FusedMoEParallelConfig.make; fused_moe/expert_map_manager.py, determine_expert_map; linear.py;
vocab_parallel_embedding.py; and in the models of attention.toml) and in SGLang 0.5.23 (under
srt/layers: moe/fused_moe_triton/layer.py, linear.py: QKVParallelLinear,
vocab_parallel_embedding.py), whose models were not read. Routed experts are divided by whole
experts, by rows, or both; embeddings and the linear layers of attention and MLPs by tensor
parallelism; norms, routers and the projections to the latent space of MLA are on every rank.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from moequant.compatibility.facts import padded_vocabulary
from moequant.dialects.names import ACTIVATION_SCALES
from moequant.errors import UnsupportedError
from moequant.models import ROUTED_EXPERTS, SHARED_EXPERTS
from moequant.models.architecture import EXPERT_BIAS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moequant.compatibility.facts import Facts, Placement
    from moequant.compatibility.gpus import Gpu
    from moequant.compatibility.kv_cache import KvCache
    from moequant.compatibility.rules import EngineInfo
    from moequant.dialects import Dialect
    from moequant.models import Architecture, MoeConfig, TensorRole
    from moequant.storage.headers import TensorInfo

_VOCABULARY = ("embedding", "lm_head")
_LINEARS = ("attention", "dense_mlp", SHARED_EXPERTS)
_DIVIDED = (
    "q_proj", "q_b_proj", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2",
    "w3",
)  # fmt: skip
_DIVIDED_HEADS = ("k_proj", "v_proj")
_SINKS = ("sinks", "attention_sink_bias")
"""A number for each attention head, of which a rank has those of its heads."""
_WHOLE = ("norm", "router", "router_bias", "shared_expert_gate")
_WHOLE_LEAVES = ("q_a_proj", "kv_a_proj_with_mqa")
_MTP = "mtp"


@dataclass(frozen=True, kw_only=True)
class WeightSizes:
    """Bytes of a checkpoint by how engines divide them.

    Attributes:
        experts: routed experts, with their scales and biases.
        vocabulary: embeddings and head, which tensor parallelism divides with the rows that engines
            add to a vocabulary.
        divided: what else tensor parallelism divides.
        divided_heads: of which tensor parallelism divides heads of keys and values, if it can.
        whole: what every rank has.
        other: of which it is not known here, such as recurrences and vision; counted as whole.
        mtp: multi-token prediction, which engines load only for speculative decoding.
    """

    experts: int = 0
    vocabulary: int = 0
    divided: int = 0
    divided_heads: int = 0
    whole: int = 0
    other: int = 0
    mtp: int = 0


def weight_sizes(
    tensors: Mapping[str, TensorInfo],
    architecture: Architecture,
    moe: MoeConfig,
    dialect: Dialect | None,
    roles: Mapping[str, TensorRole],
) -> WeightSizes:
    """Bytes of all tensors by how engines divide them.

    Args:
        tensors: every tensor of the checkpoint.
        architecture: its architecture.
        moe: sizes of its expert layers.
        dialect: that of its quantized weights; None without any.
        roles: those of weights that are known already: looking for one takes the time.
    """
    suffixes = frozenset() if dialect is None else _suffixes(dialect)
    stacks = dialect is not None and dialect.stacks
    totals = dict.fromkeys(WeightSizes.__dataclass_fields__, 0)
    # Most weights have several tensors.
    shares: dict[str, str] = {}
    for name, info in tensors.items():
        weight = _weight_of(name, suffixes, stacks=stacks)
        if weight not in shares:
            shares[weight] = _share_of(weight, roles.get(weight), architecture, moe)
        totals[shares[weight]] += info.size_bytes
    return WeightSizes(**totals)


def _suffixes(dialect: Dialect) -> frozenset[str]:
    """The last components of names of tensors that are parts of weights."""
    own = (suffix for e in dialect.encodings.values() for suffix in e.suffixes)
    return frozenset(own) | {*ACTIVATION_SCALES}


def _weight_of(name: str, suffixes: frozenset[str], *, stacks: bool) -> str:
    """The name of the weight that a tensor is a part of."""
    if stacks:  # an underscore joins them to the name of the plain stack
        stem, _, suffix = name.rpartition("_")
        return stem if suffix in suffixes else name
    stem, _, leaf = name.rpartition(".")
    return f"{stem}.weight" if leaf in suffixes else name


def _share_of(
    name: str, role: TensorRole | None, architecture: Architecture, moe: MoeConfig
) -> str:
    """The field of WeightSizes that a weight belongs to; `role` is None if it is not known yet."""
    try:
        role = role or architecture.classify(name)
    except UnsupportedError:  # an expert's by its name, though of no known projection
        return "experts"
    if role.role == _MTP or (role.layer is not None and role.layer >= moe.layers):
        return "mtp"
    if role.role in (ROUTED_EXPERTS, EXPERT_BIAS):
        return "experts"
    if role.role in _VOCABULARY:
        return "vocabulary"
    leaf = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    if leaf in _SINKS:
        return "divided"
    if role.role in _LINEARS and leaf in (*_DIVIDED, *_DIVIDED_HEADS):
        return "divided" if leaf in _DIVIDED else "divided_heads"
    if role.role in _WHOLE or leaf in _WHOLE_LEAVES or leaf.endswith("norm"):
        return "whole"
    return "other"


@dataclass(frozen=True, kw_only=True)
class GpuMemory:
    """Whether the weights of a rank fit into a GPU.

    Attributes:
        name: the GPU.
        memory_bytes: its memory, at least.
        left_bytes: what the weights leave for the KV cache, activations and the engine; 0 if they
            do not fit.
        fits: whether they fit; None between what the GPU has at least and at most.
        tokens: tokens whose keys and values fit into what is left; None if it is not known how
            large they are.
    """

    name: str
    memory_bytes: int
    left_bytes: int
    fits: bool | None
    tokens: int | None


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The weights and KV cache of one rank.

    Attributes:
        ranks: number of GPUs.
        weight_bytes: weights on each, without multi-token prediction; what is divided in a way
            that is not known here counts whole.
        least_bytes: weights on each, if that was divided among all ranks.
        expert_bytes: routed experts among them.
        mtp_bytes: weights for multi-token prediction in the files.
        kv: what the KV cache holds of a token on each; None if it is not known.
        gpus: the GPUs asked for.
    """

    ranks: int
    weight_bytes: int
    least_bytes: int
    expert_bytes: int
    mtp_bytes: int
    kv: KvCache | None
    gpus: tuple[GpuMemory, ...]

    @property
    def fits(self) -> bool | None:
        """Whether the weights fit into one of the GPUs; None if that is not sure."""
        found = {gpu.fits for gpu in self.gpus}
        return True if True in found else None if None in found or not found else False

    def to_json(self) -> dict[str, Any]:
        """Plain data with stable keys."""
        return asdict(self)


def memory_of(
    sizes: WeightSizes,
    facts: Facts,
    engine: EngineInfo,
    asked: Placement,
    kv: KvCache | None,
    gpus: Sequence[Gpu],
) -> Memory | None:
    """The memory of one rank of an engine.

    Returns:
        None for an engine of which it is not known how it divides weights.
    """
    if engine.parallel not in ("whole", "divided"):
        return None
    tp = asked.tp
    experts = _of_experts(sizes.experts, facts.expert_count, engine, asked)
    copies = min(tp, facts.kv_heads or tp)
    divided = -(-sizes.divided // tp) - (-sizes.divided_heads // copies)
    divided += _of_vocabulary(sizes.vocabulary, facts.vocabulary, engine, tp)
    weights = experts + divided + sizes.whole + sizes.other
    least = experts + divided + sizes.whole + sizes.other // tp
    return Memory(
        ranks=max(tp, asked.ep) if engine.parallel == "whole" else tp,
        weight_bytes=weights,
        least_bytes=least,
        expert_bytes=experts,
        mtp_bytes=sizes.mtp,
        kv=kv,
        gpus=tuple(_on(gpu, weights, least, kv) for gpu in gpus),
    )


def _of_experts(size_bytes: int, count: int | None, engine: EngineInfo, asked: Placement) -> int:
    """Bytes of routed experts on the rank that has the most of them."""
    if asked.ep == 1 or not count:
        return -(-size_bytes // asked.tp)
    own = -(-count // asked.ep)
    return -(-size_bytes * own // (count * engine.ranks_of_an_expert(asked)))


def _of_vocabulary(size_bytes: int, rows: int | None, engine: EngineInfo, tp: int) -> int:
    """Bytes of embeddings and head on a rank."""
    if not rows:
        return -(-size_bytes // tp)
    padded = padded_vocabulary(rows, tp, grows=engine.parallel == "divided")
    return -(-size_bytes * padded // (rows * tp))


def _on(gpu: Gpu, weights: int, least: int, kv: KvCache | None) -> GpuMemory:
    left = max(gpu.memory_bytes - weights, 0)
    fits = True if weights < gpu.memory_bytes else None
    if least >= gpu.most_memory_bytes:
        fits = False
    return GpuMemory(
        name=gpu.name,
        memory_bytes=gpu.memory_bytes,
        left_bytes=left,
        fits=fits,
        tokens=_tokens(left, kv),
    )


def _tokens(left_bytes: int, kv: KvCache | None) -> int | None:
    """The tokens of one sequence for which there is room."""
    if kv is None or not kv.token_bytes:
        return None
    return max(left_bytes - kv.window_token_bytes * kv.window, 0) // kv.token_bytes


def least_ranks(fits_from: Mapping[str, int | None]) -> str:
    """The least numbers of ranks at which weights fit, such as "tp 2 or tp 4 and ep 4".

    Args:
        fits_from: of a GPU, as `EngineReport.to_dict` has it: `tp` and `tp_with_ep`.

    Returns:
        "" where they fit at no number.
    """
    ways = {"tp": "tp {0}", "tp_with_ep": "tp {0} and ep {0}"}
    # On one rank both are the same.
    least = {key: None if key != "tp" and fits_from[key] == 1 else fits_from[key] for key in ways}
    return " or ".join(way.format(least[key]) for key, way in ways.items() if least[key])
