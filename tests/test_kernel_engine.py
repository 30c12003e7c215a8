"""Whole generations with every kernel on the CPU harness give the text of MLX's operations."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from conversions import tiny_families
from metal_cpu import Mode
from metal_kernels import kernels_on_cpu, launches
from tiny import tiny_prompt, tiny_target
from tiny_drafter import drafter_config, write_drafter
from tiny_engine import tiny_engine

from dflash_mlx import kernels
from dflash_mlx.cli import doctor
from dflash_mlx.decode.sampling import SamplingParams
from dflash_mlx.decode.session import Session
from dflash_mlx.decode.stats import GenerationStats
from dflash_mlx.draft.base import DraftSampling, Proposal
from dflash_mlx.draft.checkpoint import open_drafter
from dflash_mlx.draft.dflash import DFlashDrafter
from dflash_mlx.kernels import attention, backend, record, try_all

pytestmark = pytest.mark.metal_cpu

TOKENS = 32
DATE = datetime.now().strftime("%Y-%m-%d")
ACCEPTS = (4, 0, 2, 4, 1, 3)  # of the four drafts of a block, cycle by cycle
# Every family with a drafter of another kind; llama's heads of 12 would fit no kernel.
PAIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("full", {"head_dim": 16}),
    "qwen3": ("sliding", {}),
    "qwen3_moe": ("bias", {}),
    "gpt_oss": ("yarn", {}),
    "qwen3_5": ("sliding_bidirectional", {}),
    "qwen3_next": ("mixed", {}),
    "gemma4_shared": ("second", {}),
    "qwen3_5_moe": ("full", {}),
    "gemma4": ("full", {}),
    "gemma4_unified": ("sliding", {}),
    "gemma4_moe": ("full", {}),
}


class Coached:
    """A drafter whose drafts are recorded, and replaced by a known text with planned errors."""

    def __init__(self, drafter: DFlashDrafter, start: int, truth: list[int]) -> None:
        self.drafter, self.start, self.truth = drafter, start, truth
        self.block_size, self.taps = drafter.block_size, drafter.taps
        self.make_cache, self.observe = drafter.make_cache, drafter.observe
        self.drafts: list[list[int]] = []
        self.head_rows = None

    def propose(
        self, anchor: mx.array, n: int, sampling: DraftSampling | None, cache: Any, head: Any = None
    ) -> Proposal:
        proposal = self.drafter.propose(anchor, n, sampling, cache)
        accepted = ACCEPTS[len(self.drafts) % len(ACCEPTS)]
        self.drafts.append(proposal.tokens.tolist())
        at = cache.length - self.start + 1
        tokens = self.truth[at : at + n]
        tokens = [t if i < accepted else (t + 1) % 48 for i, t in enumerate(tokens)]
        return Proposal(mx.array(tokens, dtype=mx.int32), None, proposal.healthy)


def _decode(target: Any, drafter: Any) -> tuple[list[int], GenerationStats]:
    stats, prompt = GenerationStats(), tiny_prompt(target.vocab_size, 21)
    session = Session(target, drafter, nullcontext)
    steps = list(session.run(prompt, SamplingParams(), TOKENS, (), stats))
    return [token for step in steps for token in step], stats


def test_every_family_is_here() -> None:
    assert set(PAIRS) == set(tiny_families())


@pytest.mark.parametrize("family", PAIRS)
def test_text_drafts_and_acceptance_are_those_of_the_operations(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "SPLIT_KEYS", 32)  # so that these short texts take several
    variant, overrides = PAIRS[family]
    target = tiny_target(family, **overrides)
    config = drafter_config(
        variant,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_target_layers=target.num_layers,
    )
    config["dflash_config"] |= {"target_layer_ids": [0, 1, 3]}
    drafter = open_drafter(write_drafter(tmp_path / "drafter", config), target, dtype=mx.float32)
    truth, _ = _decode(target, None)
    by_operations = Coached(drafter, 21, truth)
    text, stats = _decode(target, by_operations)
    assert text == truth
    assert stats.accepted > 10
    with kernels_on_cpu(Mode.FAST) as made:
        by_kernels = Coached(drafter, 21, truth)
        found, kernel_stats = _decode(target, by_kernels)
    assert found == truth
    assert by_kernels.drafts == by_operations.drafts
    assert kernel_stats.accept_histogram == stats.accept_histogram
    ran, cycles, layers = launches(made), stats.cycles, len(drafter.model.layers)
    # The prompt's 21 rows are too many for the two kernels of the injection; of others, all layers
    # are projected at once, also those of several windows.
    assert ran["fuse_taps"] >= cycles - 1
    assert ran["head_projection"] == ran["fuse_taps"] + layers * cycles
    second = 2 if drafter.config.parts else 0  # coefficients of two sublayers
    # Behind attention, and two of an MLP.
    assert ran["rows_matmul"] == (3 + second) * layers * cycles
    assert ran.get("block_convolution", 0) == 2 * second * layers * cycles
    assert ran["block_attention"] > layers * cycles
    assert ran["attention_combine"] > cycles
    if family in ("qwen3_5", "qwen3_5_moe", "qwen3_next"):
        assert ran["gated_delta_advance"] > ran["gated_delta_replay"] > cycles


@pytest.mark.parametrize(
    ("dtype", "bits"), [(mx.float32, 0), (mx.float32, 4), (mx.float16, 8), (mx.bfloat16, 8)]
)
def test_the_trial_runs_every_kernel_and_finds_no_fault(dtype: mx.Dtype, bits: int) -> None:
    with kernels_on_cpu(Mode.CHECK if bits == 4 else Mode.FAST, trusted=False) as made:
        assert try_all([dtype], [bits]) == []
        assert set(launches(made)) == {
            *("rows_matmul", "fuse_taps", "head_projection", "block_attention"),
            *("attention_combine", "block_convolution"),
            *("gated_delta_advance", "gated_delta_replay"),
        }
        names = (
            "block_attention, block_convolution, fuse_taps, gated_delta_advance, gated_delta_replay"
        )
        assert f"{names}, head_projection, rows_matmul" in backend.status()


def test_a_mismatch_is_one_warning_and_shows_in_the_statistics_and_in_doctor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def trial() -> list[str]:
        return try_all([mx.float32], [4])

    monkeypatch.setattr(record, "home_dir", lambda: tmp_path)
    monkeypatch.setattr(kernels, "try_all", trial)
    monkeypatch.setattr("dflash_mlx.kernels.attention.split_keys", lambda total: 64)
    monkeypatch.setattr("dflash_mlx.kernels.attention.tile_keys", lambda dim, dtype: 48)
    reason = "block_attention is not used: it differs"
    with kernels_on_cpu(trusted=False) as made:
        with pytest.warns(RuntimeWarning, match=reason) as caught:
            assert any(reason in sentence for sentence in trial())
        assert len(caught) == 1
        monkeypatch.setattr(backend, "_on_gpu", lambda: False)  # the answer without the harness
        count = len(made)
        stats = tiny_engine(tmp_path).generate("Count.", max_tokens=2).stats
        assert len(made) == count
        assert "block_attention not used, it differs" in stats.kernels
        assert stats.warnings == []
    with warnings.catch_warnings(record=True) as silent, kernels_on_cpu(trusted=False):
        warnings.simplefilter("always")
        status, kept, remarks = doctor._kernels()
    assert silent == []
    assert "block_attention not used, it differs" in status
    assert [reason in remark for remark in remarks] == [True]
    assert [one["operation"] for one in kept] == ["block_attention"]
    # A process whose kernel agrees forgets it; one that has not tried it still tells.
    with kernels_on_cpu(trusted=False):
        _, _, remarks = doctor._kernels(list)
        assert len(remarks) == 1
        assert remarks[0].startswith(f"The Metal kernel block_attention was not used on {DATE}")
    monkeypatch.undo()
    monkeypatch.setattr(record, "home_dir", lambda: tmp_path)
    monkeypatch.setattr(kernels, "try_all", trial)
    with kernels_on_cpu(trusted=False):
        assert doctor._kernels()[1:] == ([], [])


def test_without_kernels_the_trial_does_nothing() -> None:
    assert try_all() == []
