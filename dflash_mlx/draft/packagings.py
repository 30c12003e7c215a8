"""Other packagings of DFlash drafters, said in the official one: its keys and its tensor names.

Known are those of speculators (vLLM's trainer) and of Meta's Muse-Glimmer assistant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from dflash_mlx.draft.keys import (
    Config,
    either,
    flag,
    layer_ids,
    malformed,
    optional_int,
    positive_int,
    refuse,
    refuse_active,
    required,
    words,
)
from dflash_mlx.draft.sight import parse_sight
from dflash_mlx.errors import CheckpointError

ARCHITECTURE = "DFlashDraftModel"


@dataclass(frozen=True)
class Packaging:
    """How one kind of checkpoint says what the official one says.

    tensors: beginnings of its tensor names and the official ones. unused: tensors of training.
    states_vocabulary: whether its config.json has a vocab_size of its own.
    """

    official: Callable[[Config], dict[str, Any]]
    tensors: Mapping[str, str] = field(default_factory=dict)
    unused: frozenset[str] = frozenset()
    states_vocabulary: bool = True

    def rename(self, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        return {self._renamed(k): v for k, v in weights.items() if k not in self.unused}

    def _renamed(self, name: str) -> str:
        for beginning, official in self.tensors.items():
            if name.startswith(beginning):
                return official + name.removeprefix(beginning)
        return name


def packaging_of(config: Config) -> Packaging:
    """The packaging that a config.json declares; the official one when it declares none."""
    if config.get("speculators_model_type") is not None:
        return _SPECULATORS
    if config.get("model_type") == "muse_glimmer_assistant":
        return _META
    return _OFFICIAL


#: what the official config.json has in dflash_config
_NESTED_KEYS = (
    "target_layer_ids",
    "mask_token_id",
    "block_size",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
)


def official_config(config: Config, vocab_size: int, num_target_layers: int) -> dict[str, Any]:
    """config.json of the official packaging for a drafter of any known one, of such a target.

    It says the same; what is official already stays as it is. The block size also stands at the
    top level, where some readers look for it.
    """
    packaging = packaging_of(config)
    official = packaging.official(config)
    if packaging is not _OFFICIAL:
        official |= {"model_type": "qwen3"}
        official = {key: value for key, value in official.items() if value is not None}
        if official.get("draft_vocab_size") == vocab_size:
            del official["draft_vocab_size"]
    nested = dict(official.get("dflash_config") or {})
    for key in _NESTED_KEYS:
        outer = official.pop(key, None)
        if nested.get(key) is None and outer is not None:
            nested[key] = outer
    if either(official, nested, "use_swa") or either(official, nested, "swa_window_size"):
        official |= _official_sight(official, nested)
        for key in ("use_swa", "swa_window_size"):
            official.pop(key, None)
            nested.pop(key, None)
    known = {"vocab_size": vocab_size, "num_target_layers": num_target_layers}
    missing = {key: value for key, value in known.items() if official.get(key) is None}
    return {
        **official,
        **missing,
        "architectures": official.get("architectures") or [ARCHITECTURE],
        "block_size": nested.get("block_size"),
        "dflash_config": nested,
    }


def _official_sight(config: Config, nested: Config) -> dict[str, Any]:
    """The keys that say which layers slide, for a config that says so in ModelOpt's way."""
    sight = parse_sight(config, nested, positive_int(config, "num_hidden_layers"))
    kinds = ["sliding_attention" if window else "full_attention" for window in sight.windows]
    window = next((one for one in sight.windows if one), None)
    keys: dict[str, Any] = {"layer_types": kinds}
    if window:
        keys |= {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}
    # Layers of different kinds see their block in different ways only where nothing is stated.
    return keys | ({"is_causal": sight.causal[0]} if len(set(sight.causal)) == 1 else {})


# Keys of speculators' config.json that speak of training and bookkeeping only.
_UNUSED_KEYS = words(
    """
    speculators_model_type speculators_version speculators_config max_anchors
    has_no_defaults_at_init transformer_layer_config aux_hidden_state_layer_ids
    sliding_window_non_causal target_hidden_size projector_type shift_label auf emb_dim
    gru_hidden_dim pure_draft_prefix_len lambda_base_start lambda_base_decay_ratio architectures
    """
)


def _from_speculators(config: Config) -> dict[str, Any]:
    """Layers lie in transformer_layer_config; taps count hidden states, the embedding being 0."""
    if config["speculators_model_type"] != "dflash":
        refuse("speculators_model_type", config["speculators_model_type"])
    refuse_active(config, {"projector_type": (None, "dflash"), "shift_label": (None, False)})
    layers = required(config, "transformer_layer_config")
    if not isinstance(layers, Mapping):
        malformed("transformer_layer_config", layers, "an object")
    outer = {k: v for k, v in config.items() if k not in _UNUSED_KEYS and v is not None}
    official = {**layers, **outer, "architectures": [ARCHITECTURE]}
    ids = required(config, "aux_hidden_state_layer_ids")
    states = layer_ids("aux_hidden_state_layer_ids", ids, 1)
    official["target_layer_ids"] = [state - 1 for state in states]
    width, hidden = optional_int(config, "target_hidden_size"), positive_int(layers, "hidden_size")
    if width not in (None, hidden):
        refuse("target_hidden_size", width)
    official["is_causal"] = _speculators_order(config, official)
    return official


def _speculators_order(config: Config, official: Config) -> bool | None:
    """Full layers always see the whole block, sliding ones if the checkpoint says so."""
    non_causal = flag(config, "sliding_window_non_causal")
    slides = "sliding_attention" in (official.get("layer_types") or ())
    if non_causal is None and slides:
        raise CheckpointError(
            "The drafter has sliding layers but no sliding_window_non_causal; add the value it was "
            "trained with to its config.json."
        )
    return False if non_causal else None


def _from_meta(config: Config) -> dict[str, Any]:
    """All layers see the whole block; all of them slide unless layer_types say otherwise."""
    layers = positive_int(config, "num_hidden_layers")
    sliding = {"layer_types": ["sliding_attention"] * layers}
    stated = {key: value for key, value in config.items() if value is not None}
    return {**sliding, **stated, "architectures": [ARCHITECTURE], "is_causal": False}


_OFFICIAL = Packaging(dict)
_SPECULATORS = Packaging(
    _from_speculators, unused=words("verifier_norm.weight verifier_lm_head.weight")
)
_META = Packaging(
    _from_meta,
    tensors={"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."},
    states_vocabulary=False,
)
