"""What the rules about engines ask of a checkpoint, written or about to be."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from math import inf
from typing import TYPE_CHECKING, Any

from moequant.compatibility.model_classes import name_another_model, name_another_task
from moequant.compatibility.tables import read_table
from moequant.models import sections_of

if TYPE_CHECKING:
    from collections.abc import Mapping

_ROWS_OF_VOCABULARY = 64
"""Engines make a vocabulary a multiple of it: vLLM's and SGLang's DEFAULT_VOCAB_PADDING_SIZE."""
UNQUANTIZED = "none"
"""What rules call the dialect of a checkpoint without quantized weights."""


@dataclass(frozen=True, kw_only=True)
class Defect:
    """Something wrong in a checkpoint, as other converters are known to produce it.

    Attributes:
        id: its name in rules.toml.
        names: the tensors or modules, in natural order.
        engines: the engines that it concerns; empty for all that have a rule about it.
        detail: more about the first of them; empty if there is nothing to say.
    """

    id: str
    names: tuple[str, ...]
    engines: frozenset[str] = frozenset()
    detail: str = ""

    @property
    def found(self) -> str:
        """The modules or tensors in words: the first, and how many more there are."""
        first = f"{self.names[0]}{f' ({self.detail})' if self.detail else ''}"
        return first if len(self.names) == 1 else f"{first} and {len(self.names) - 1} more"

    def concerns(self, engine: str) -> bool:
        """Whether a rule about `engine` applies to it."""
        return not self.engines or engine in self.engines


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The properties of a checkpoint that rules depend on.

    Attributes:
        dialect: name of its dialect; UNQUANTIZED without one.
        model_type: `model_type` in config.json.
        formats: formats of quantized modules other than routed experts.
        experts: formats of the routed experts, in layer order.
        some_kept: whether the experts of some layers are kept and others converted.
        ragged: whether the rows of a linear layer do not fill the blocks of its format.
        dtype: dtype in config.json, in which engines compute; None if it has none.
        not_loaded: why transformers does not load this model from compressed-tensors; None if it
            does.
        static: whether the inputs of some routed experts have static scales.
        fp4_activations: whether config.json says that the inputs of some routed experts are
            quantized to FP4; False of a checkpoint that is about to be written.
        shared_apart: whether some shared experts are stored in another form than routed ones.
        described: whether a user's file or a record describes the model, so that it is unknown
            which engines support it.
        hidden: hidden size.
        intermediate: intermediate size of one expert.
        expert_count: routed experts per layer.
        heads: attention heads; None if unknown.
        kv_heads: heads of keys and values; None if unknown.
        vocabulary: tokens in the vocabulary; None if unknown.
        linears: last name component, rows and columns of quantized layers other than routed
            experts.
        defects: what is wrong in the files.
        config_keys: keys of config.json that have a value; None if they are not known.
        classes: `architectures` of config.json, empty without; None if it is not known.
        model_classes: the classes of such a model, the usual one first; empty if not known.
        foreign_act_fn: the activation function of its experts, if moequant has none of this name.
        not_finite: `non_finite_text` of config.json; empty of a checkpoint that is about to be
            written.
    """

    dialect: str
    model_type: str
    formats: frozenset[str]
    experts: tuple[str, ...]
    some_kept: bool
    ragged: bool = False
    dtype: str | None = None
    not_loaded: str | None = None
    static: bool = False
    fp4_activations: bool = False
    shared_apart: bool = False
    described: bool = False
    hidden: int | None = None
    intermediate: int | None = None
    expert_count: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    vocabulary: int | None = None
    linears: frozenset[tuple[str, int, int]] = frozenset()
    defects: tuple[Defect, ...] = ()
    config_keys: frozenset[str] | None = None
    classes: tuple[str, ...] | None = None
    model_classes: tuple[str, ...] = ()
    foreign_act_fn: str | None = None
    not_finite: str = ""

    # Kept, because every rule about classes asks again for each GPU and number of ranks.
    @cached_property
    def names_another_model(self) -> bool:
        """Whether `classes` are those of another model."""
        return name_another_model(self.classes or (), self.model_classes)

    @cached_property
    def names_another_task(self) -> bool:
        """Whether none of `classes`, which are those of this model, generates text."""
        return name_another_task(self.classes or (), self.model_classes)

    @property
    def unknown_act_fn(self) -> bool:
        """Whether no engine has an activation function of the name in config.json."""
        return self.foreign_act_fn is not None and self.foreign_act_fn not in other_act_fns()


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where an engine is to run a checkpoint.

    Attributes:
        tp: ranks of tensor parallelism.
        ep: ranks among which experts are divided; 1 without expert parallelism.
        capability: compute capability of the GPU, (major, minor); None for any.
    """

    tp: int = 1
    ep: int = 1
    capability: tuple[int, int] | None = None

    def is_within(self, low: tuple[int, int] | None, high: tuple[int, int] | None) -> bool:
        """Whether the capability is in a range; False if it is not known and there is one."""
        if low is None and high is None:
            return True
        if self.capability is None:
            return False
        return (low or (0, 0)) <= self.capability <= (high or (inf, inf))


def padded_vocabulary(rows: int, ranks: int = 1, *, grows: bool = False) -> int:
    """The rows of embeddings and head with those that an engine adds.

    Args:
        rows: those of the files.
        ranks: of tensor parallelism.
        grows: whether it adds until the ranks divide them, as SGLang does.
    """
    multiple = _ROWS_OF_VOCABULARY
    if grows and -(-rows // multiple) * multiple % ranks:
        multiple *= ranks
    return -(-rows // multiple) * multiple


@cache
def other_act_fns() -> frozenset[str]:
    """Names of activation functions that some engine has and moequant has not."""
    engines = read_table("act_fns.toml")["engine"]
    return frozenset(name for engine in engines for name in engine["act_fns"])


def heads_in(config: Mapping[str, Any]) -> int | None:
    """Attention heads of the language model by config.json; None if not there."""
    return _number_in(config, "num_attention_heads")


def kv_heads_in(config: Mapping[str, Any]) -> int | None:
    """Heads of keys and values by config.json; None if not there, and of MLA, which has none."""
    if any("kv_lora_rank" in section for section in sections_of(config)):
        return None
    return _number_in(config, "num_key_value_heads")


def vocabulary_in(config: Mapping[str, Any]) -> int | None:
    """Tokens in the vocabulary by config.json; None if not there."""
    return _number_in(config, "vocab_size")


def positions_in(config: Mapping[str, Any]) -> int | None:
    """Tokens that the language model is made for by config.json; None if it does not say.

    Scaled rotary embeddings reach farther, each kind by a rule of its own.
    """
    for section in sections_of(config):
        rope = section.get("rope_scaling") or section.get("rope_parameters")
        if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) != "default":
            return None
    return _number_in(config, "max_position_embeddings")


def keys_in(config: Mapping[str, Any]) -> frozenset[str]:
    """Keys of config.json, and of the part about the language model, whose value is not null."""
    found = (section.items() for section in sections_of(config))
    return frozenset(key for items in found for key, value in items if value is not None)


def _number_in(config: Mapping[str, Any], key: str) -> int | None:
    found = (section.get(key) for section in sections_of(config))
    return next((number for number in found if type(number) is int and number > 0), None)
