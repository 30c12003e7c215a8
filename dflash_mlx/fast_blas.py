"""Importing this file loads the fast BLAS, if MLX has not been imported yet."""

from dflash_mlx.machine import BlasChoice, prepare_blas

#: the BLAS that MLX uses in this process, and why
CHOICE: BlasChoice = prepare_blas()
