"""Which tensor is what: data about architectures, no model code."""

from moequant.models.architecture import (
    CONVERTIBLE_ROLES,
    EXPERT_BIAS,
    PROJECTIONS,
    ROUTED_EXPERTS,
    ActivationConfig,
    Architecture,
    MoeConfig,
    TensorRole,
    architectures,
    find_architecture,
    fused_sets,
)
from moequant.models.experts import (
    Model,
    check_complete,
    check_shapes,
    classify_all,
    read_model,
)
from moequant.models.stacked import Place, StackedExperts

__all__ = [
    "CONVERTIBLE_ROLES",
    "EXPERT_BIAS",
    "PROJECTIONS",
    "ROUTED_EXPERTS",
    "ActivationConfig",
    "Architecture",
    "Model",
    "MoeConfig",
    "Place",
    "StackedExperts",
    "TensorRole",
    "architectures",
    "check_complete",
    "check_shapes",
    "classify_all",
    "find_architecture",
    "fused_sets",
    "read_model",
]
