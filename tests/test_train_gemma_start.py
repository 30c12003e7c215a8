"""A drafter's layer that starts from Gemma's does what that layer does, against numpy."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_unflatten
from tiny import tiny_config, tiny_target

from dflash_mlx.draft.config import parse_config
from dflash_mlx.segment import Segment
from dflash_mlx.train.shape import Shape, drafter_config
from dflash_mlx.train.start import new_model, target_start


def started(family: str, layers: int = 1, target=None):
    target = target or tiny_target(family)
    stored = drafter_config(target, tiny_config(family), Shape(layers=layers, taps=1), 4, 3)
    config = parse_config(stored)
    start = target_start(config, target, 0)
    model = new_model(config)
    model.update(tree_unflatten(list(start.weights.items())))
    return target, config, start, model


def numpy_of(array: mx.array) -> np.ndarray:
    return np.array(array, np.float64)


def normed(x: np.ndarray, weight: np.ndarray | float, eps: float = 0.02) -> np.ndarray:
    return weight * x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)


def alike(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Cosine of two [N, H], taken as one vector each."""
    return float((ours * theirs).sum() / np.linalg.norm(ours) / np.linalg.norm(theirs))


def layer_of(layer, x: np.ndarray) -> np.ndarray:
    """The drafter's layer on rows [N, H] that each see themselves alone, in numpy."""
    w, attention = layer.mlp, layer.self_attn
    share = attention.heads // attention.kv_heads
    inside = normed(x, numpy_of(layer.input_layernorm.weight))
    v = (inside @ numpy_of(attention.v_proj.weight).T).reshape(len(x), attention.kv_heads, -1)
    v = np.repeat(v, share, axis=1).reshape(len(x), -1)
    x = x + v @ numpy_of(attention.o_proj.weight).T
    inside = normed(x, numpy_of(layer.post_attention_layernorm.weight))
    gate = inside @ numpy_of(w.gate_proj.weight).T
    up = inside @ numpy_of(w.up_proj.weight).T
    return x + (gate / (1 + np.exp(-gate)) * up) @ numpy_of(w.down_proj.weight).T


@pytest.mark.parametrize("family", ["gemma4", "gemma4_untied", "gemma4_unified"])
def test_a_drafters_layer_gives_what_gemmas_gives(family):
    target, _, _, model = started(family)
    source = target.model.layers[-1]
    rows = 3 * np.random.default_rng(1).normal(size=(24, target.hidden_size))
    if family == "gemma4_untied":
        # A drafter made for a target has no biases.
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            source.self_attn[name].bias = mx.zeros_like(source.self_attn[name].bias)
    theirs = []
    for row in rows:  # each alone, so that attention sees the row itself
        segment = Segment(mx.array([0]), target.make_cache())
        out = source(mx.array(row, mx.float32)[None, None], [segment], [source.make_cache()])
        theirs.append(numpy_of(out)[0, 0] / source.layer_scalar.item())
    ours, theirs = layer_of(model.layers[0], rows), np.array(theirs)
    added, expected = ours - rows, theirs - rows
    # Gemma norms every row of a branch by its own size, the drafter by that of rows on average.
    assert alike(added, expected) > 0.93
    assert np.linalg.norm(added) == pytest.approx(np.linalg.norm(expected), rel=0.1)


def test_scores_are_those_of_gemma():
    target, config, _, model = started("gemma4")
    theirs, ours = target.model.layers[-1].self_attn, model.layers[0].self_attn
    rows = np.random.default_rng(2).normal(size=(9, target.hidden_size))
    scores = []
    for part, scale in ((theirs, 1.0), (ours, ours.scale)):
        q = (rows @ numpy_of(part.q_proj.weight).T).reshape(9, config.num_attention_heads, -1)
        k = (rows @ numpy_of(part.k_proj.weight).T).reshape(9, config.num_key_value_heads, -1)
        q, k = (normed(x, numpy_of(n.weight)) for x, n in ((q, part.q_norm), (k, part.k_norm)))
        k = np.repeat(k, config.num_attention_heads // config.num_key_value_heads, axis=1)
        scores.append(scale * np.einsum("qhd,khd->hqk", q, k))
    assert np.allclose(scores[0], scores[1], atol=1e-5)


def test_norms_stand_where_they_do_the_same():
    target, _, start, _ = started("gemma4")
    source = target.model.layers[-1]
    for ours, theirs in (
        ("layers.0.input_layernorm", source.input_layernorm),
        ("layers.0.post_attention_layernorm", source.pre_feedforward_layernorm),
        ("hidden_norm", source.input_layernorm),
        ("norm", target.model.norm),
    ):
        assert mx.array_equal(start.weights[f"{ours}.weight"], theirs.weight), ours


def test_what_later_layers_add_is_as_large_beside_the_stream():
    """Gemma multiplies the stream behind a layer; a drafter's later layers add less by that."""
    target = tiny_target("gemma4")
    target.model.layers[-2].layer_scalar = mx.array([0.25])
    for part in ("mlp.down_proj", "self_attn.o_proj"):
        two = started("gemma4", 2, target)[2].weights[f"layers.1.{part}.weight"]
        one = started("gemma4", 1, target)[2].weights[f"layers.0.{part}.weight"]
        assert np.allclose(two * 0.25, one, rtol=1e-5)


def test_heads_of_other_sizes_and_borrowed_keys_are_left_out():
    taken = started("gemma4", 2)[2].taken  # its second-last layer slides, with smaller heads
    assert "layers.0.mlp.up_proj.weight" in taken
    assert not any(name.startswith("layers.0.self_attn") for name in taken)
    assert "layers.1.self_attn.v_proj.weight" in taken
    borrowed = started("gemma4_shared")[2].taken
    assert not any("self_attn" in name for name in borrowed)


def test_a_layer_with_experts_starts_from_its_dense_part():
    target, _, start, model = started("gemma4_moe")
    source = target.model.layers[-1]
    rows = np.random.default_rng(3).normal(size=(40, target.hidden_size))
    one, both = (numpy_of(source[f"post_feedforward_layernorm_{i}"].weight) for i in (1, 2))
    inside = normed(rows, numpy_of(source.pre_feedforward_layernorm.weight), 0)
    dense = normed(numpy_of(source.mlp(mx.array(inside, mx.float32))), one)
    # The experts' part is another direction of its own size.
    expected = dense * numpy_of(source.post_feedforward_layernorm.weight)
    expected /= np.sqrt((one**2).mean() + (both**2).mean())
    ours = numpy_of(model.layers[0].mlp(mx.array(inside, mx.float32)))
    assert alike(ours, expected) > 0.92
    assert np.linalg.norm(ours) == pytest.approx(np.linalg.norm(expected), rel=0.2)
    assert "layers.0.mlp.down_proj.weight" in start.taken
