"""Which tensor is what: data about architectures, no model code."""

from moequant.models.architecture import (
    CONVERTIBLE_ROLES,
    PROJECTIONS,
    ROUTED_EXPERTS,
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

__all__ = [
    "CONVERTIBLE_ROLES",
    "PROJECTIONS",
    "ROUTED_EXPERTS",
    "Architecture",
    "Model",
    "MoeConfig",
    "TensorRole",
    "architectures",
    "check_complete",
    "check_shapes",
    "classify_all",
    "find_architecture",
    "fused_sets",
    "read_model",
]
