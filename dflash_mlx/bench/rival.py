"""`mlx_lm.stream_generate` on the very weights of an engine, timed as the engine times itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
from mlx_lm.generate import generation_stream, stream_generate
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    NaiveStreamingDetokenizer,
    TokenizerWrapper,
)

from dflash_mlx.bench.measure import Run
from dflash_mlx.bench.spans import TimedRun, timed
from dflash_mlx.engine import Engine
from dflash_mlx.errors import UsageError


def mlx_lm_model(config: Mapping[str, Any], target: nn.Module) -> nn.Module:
    """mlx-lm's own model of this config around the very weights of `target`.

    UsageError when it has none, or one that such weights do not fit.
    """
    try:
        build, arguments = mlx_lm.utils._get_classes(dict(config))
        model = build(arguments.from_dict(dict(config)))
        model.update_modules(target.leaf_modules())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UsageError(
            f"mlx-lm cannot run these weights as they lie here ({error}). Leave --against out."
        ) from None
    return model


def mlx_lm_tokenizer(engine: Engine) -> TokenizerWrapper:
    """The engine's tokenizer and end ids as mlx-lm wants them, with its own detokenizer."""
    hf = engine.tokenizer._hf
    decoder = json.loads(hf.backend_tokenizer.to_str())["decoder"] or {}
    byte_level = decoder.get("type") == "ByteLevel"
    kind = BPEStreamingDetokenizer if byte_level else NaiveStreamingDetokenizer
    return TokenizerWrapper(hf, kind, eos_token_ids=set(engine.tokenizer.end_ids))


class MlxLm:
    """mlx-lm's own model of a config, holding the weights of the engine's target."""

    def __init__(self, engine: Engine, config: Mapping[str, Any]) -> None:
        if engine.exact:
            raise UsageError(
                "mlx-lm is compared with ordinary operations. Leave --exact or --against out."
            )
        assert isinstance(engine.target, nn.Module)
        self._model = mlx_lm_model(config, engine.target)
        self._tokenizer = mlx_lm_tokenizer(engine)

    def stream(
        self, prompt: Sequence[int], max_tokens: int, temperature: float = 0.0
    ) -> Iterator[list[int]]:
        """Its tokens, one at a time."""
        for response in stream_generate(
            self._model,
            self._tokenizer,
            list(prompt),
            max_tokens=max_tokens,
            sampler=make_sampler(temp=temperature),
        ):
            yield [response.token]

    def timed(self, prompt: Sequence[int], max_tokens: int, temperature: float = 0.0) -> TimedRun:
        """One generation, read to its end."""
        run = timed(lambda: self.stream(prompt, max_tokens, temperature))
        mx.synchronize(generation_stream)  # it launches one step more than it yields
        return run

    def run(self, prompt: Sequence[int], max_tokens: int, temperature: float, seed: int) -> Run:
        """One generation; rates cover the tokens behind the first one, as everywhere here."""
        mx.random.seed(seed)
        run = self.timed(prompt, max_tokens, temperature)
        return Run(
            run.tokens,
            {
                "generation_tps": run.rate("wall"),
                "prefill_tps": len(prompt) / run.prefill.wall,
                "prefill_seconds": run.prefill.wall,
                "total_seconds": run.prefill.wall + run.decode.wall,
            },
        )
