"""`mlx_lm.stream_generate` on the very weights of an engine, timed as the engine times itself."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx import hub, registry
from dflash_mlx.bench.measure import Run
from dflash_mlx.engine import Engine
from dflash_mlx.errors import UsageError
from dflash_mlx.weights import read_config


def config_of(name: str, revision: str | None = None) -> dict[str, Any]:
    """The config of a model that is on disk already."""
    found = registry.load_registry().resolve(name)
    wanted = revision or found.target_revision
    path: Path = hub.fetch(found.target_spec, revision=wanted, progress=False).path
    if path.is_dir():
        return read_config(path)
    from dflash_mlx.gguf import open_gguf

    return open_gguf(path).config()


class MlxLm:
    """mlx-lm's own model of a config, holding the weights of the engine's target."""

    def __init__(self, engine: Engine, config: Mapping[str, Any]) -> None:
        import mlx_lm.utils
        from mlx_lm.tokenizer_utils import (
            BPEStreamingDetokenizer,
            NaiveStreamingDetokenizer,
            TokenizerWrapper,
        )

        assert isinstance(engine.target, nn.Module)
        if engine.exact:
            raise UsageError("--against mlx-lm compares ordinary operations. Leave --exact out.")
        try:
            build, arguments = mlx_lm.utils._get_classes(dict(config))
            self._model = build(arguments.from_dict(dict(config)))
            self._model.update_modules(engine.target.leaf_modules())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise UsageError(
                f"mlx-lm cannot run the weights of {engine.model} as they lie here ({error}). "
                "Leave --against out."
            ) from None
        hf = engine.tokenizer._hf
        decoder = json.loads(hf.backend_tokenizer.to_str())["decoder"] or {}
        byte_level = decoder.get("type") == "ByteLevel"
        kind = BPEStreamingDetokenizer if byte_level else NaiveStreamingDetokenizer
        self._tokenizer = TokenizerWrapper(hf, kind, eos_token_ids=set(engine.tokenizer.end_ids))

    def run(self, prompt: Sequence[int], max_tokens: int, temperature: float, seed: int) -> Run:
        """One generation; rates cover the tokens behind the first one, as everywhere here."""
        from mlx_lm.generate import generation_stream, stream_generate
        from mlx_lm.sample_utils import make_sampler

        mx.random.seed(seed)
        tokens, moments = [], [time.perf_counter()]
        for response in stream_generate(
            self._model,
            self._tokenizer,
            list(prompt),
            max_tokens=max_tokens,
            sampler=make_sampler(temp=temperature),
        ):
            moments.append(time.perf_counter())
            tokens.append(response.token)
        mx.synchronize(generation_stream)  # it launches one step more than it yields
        start, first, last = moments[0], moments[1], moments[-1]
        rate = (len(tokens) - 1) / (last - first) if len(tokens) > 1 else None
        return Run(
            tokens,
            {
                "generation_tps": rate,
                "prefill_tps": len(prompt) / (first - start),
                "prefill_seconds": first - start,
                "total_seconds": last - start,
            },
        )
