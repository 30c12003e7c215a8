"""Numbers and settings in sentences."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """ "1 layer", "2 layers": for nouns that take an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shown_bytes(count: float) -> str:
    """Bytes in the unit that leaves a person something to read, MB or GB."""
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"


#: settings of a run by the option of `dflash-mlx train` that sets them; config is config.json
_OPTIONS = {
    "learning_rate": "--lr",
    "dtype": "--train-dtype",
    "features": "--cache-dtype",
    "config num_hidden_layers": "--layers",
    "config block_size": "--block-size",
    "config dflash_config block_size": "--block-size",
    "config dflash_config target_layer_ids": "--taps",
    "config dflash_config mask_token_id": "--mask-token",
    "config dflash_config selector_rank": "--selector-rank",
    "config layer_types": "--windows",
    "config sliding_window": "--windows",
    "config is_causal": "--causal",
    "init_revision": "commit of --init",
    "trained": "hash of the texts to train on",
    "held_out": "hash of the texts held out",
}
_NAMED_LIKE_OPTIONS = {
    *("anchors", "block_size", "epochs", "gamma", "init", "max_length", "measure_every", "seed"),
    *("soft", "step_blocks", "steps"),
}


def as_option(setting: str) -> str:
    """What sets a setting of a run on the command line; its own name where nothing does."""
    if setting in _NAMED_LIKE_OPTIONS:
        return "--" + setting.replace("_", "-")
    return _OPTIONS.get(setting, setting)
