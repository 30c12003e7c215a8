"""Any supported checkpoint -> one folder with a quantized MLX target and its drafter."""

from dflash_mlx.convert.order import convert
from dflash_mlx.convert.plan import Order, Report
from dflash_mlx.convert.quantize import Recipe

__all__ = ["Order", "Recipe", "Report", "convert"]
