"""Operations with a Metal kernel each and a twin in MLX's operations; see metal/README.md.

backend decides between the two. The callers see one function an operation.
"""

from dflash_mlx.kernels.attention import Rows, Sight, Surroundings, block_attention, block_mask
from dflash_mlx.kernels.backend import (
    kernels_active,
    rejected_operations,
    rejections,
    status,
)
from dflash_mlx.kernels.convolution import Coefficients, block_convolution
from dflash_mlx.kernels.fusion import Fused, fuse_taps
from dflash_mlx.kernels.gated_delta import Advance, DeltaRows, advance, replay
from dflash_mlx.kernels.matmul import gated_matmul, rows_matmul, swiglu
from dflash_mlx.kernels.projection import HeadProjection, block_projection, context_projection
from dflash_mlx.kernels.record import Rejection, kept
from dflash_mlx.kernels.trial import try_all

__all__ = [
    "Advance",
    "Coefficients",
    "DeltaRows",
    "Fused",
    "HeadProjection",
    "Rejection",
    "Rows",
    "Sight",
    "Surroundings",
    "advance",
    "block_attention",
    "block_convolution",
    "block_mask",
    "block_projection",
    "context_projection",
    "fuse_taps",
    "gated_matmul",
    "kept",
    "kernels_active",
    "rejected_operations",
    "rejections",
    "replay",
    "rows_matmul",
    "status",
    "swiglu",
    "try_all",
]
