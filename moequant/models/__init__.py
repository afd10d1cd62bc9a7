"""The role of every tensor in a checkpoint, from data about architectures; no model code."""

from moequant.models.architecture import (
    CONVERTIBLE_ROLES,
    EXPERT_BIAS,
    ROUTED_EXPERTS,
    SHARED_EXPERTS,
    Architecture,
    TensorRole,
)
from moequant.models.config_values import dtype_in, language_section, sections_of
from moequant.models.model import (
    Model,
    biases_of,
    check_experts,
    read_model,
)
from moequant.models.moe_config import PROJECTIONS, MoeConfig
from moequant.models.orientation import orientation
from moequant.models.stacked import Place, StackedExperts
from moequant.models.table import (
    architectures,
    find_architecture,
    read_architectures,
    recorded_architectures,
)

__all__ = [
    "CONVERTIBLE_ROLES",
    "EXPERT_BIAS",
    "PROJECTIONS",
    "ROUTED_EXPERTS",
    "SHARED_EXPERTS",
    "Architecture",
    "Model",
    "MoeConfig",
    "Place",
    "StackedExperts",
    "TensorRole",
    "architectures",
    "biases_of",
    "check_experts",
    "dtype_in",
    "find_architecture",
    "language_section",
    "orientation",
    "read_architectures",
    "read_model",
    "recorded_architectures",
    "sections_of",
]
