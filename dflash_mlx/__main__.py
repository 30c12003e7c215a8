"""`python -m dflash_mlx` is the command `dflash-mlx`."""

from dflash_mlx.cli import main

if __name__ == "__main__":
    main()
