"""A program: SmolLM2's greedy texts for the prompts of a golden file, engine plain or dflash.

It runs by itself because it needs the fast BLAS, which has to be loaded before MLX. The last line
of its output is a JSON document.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from dflash_mlx.machine import prepare_blas

#: of every text; tests with few are quick
TOKENS = 7
#: of the kind of prompts that the embedded drafter has learned
QUESTION = "Natalia sold clips to 48 friends in April and half as many in May. How many altogether?"


def texts(goldens: list[dict[str, Any]], draft: str | None) -> dict[str, Any]:
    from dflash_mlx.engine import load
    from dflash_mlx.machine import blas_in_use

    engine = load("SmolLM2-135M", draft=draft, dtype="float32", block_size=None, progress=False)
    out: dict[str, Any] = {"blas_is_fast": blas_in_use().fast, "texts": []}
    for golden in goldens:
        question = [{"role": "user", "content": golden["prompt"]}]
        answer = engine.generate(question, max_tokens=TOKENS)
        out["texts"].append({"ids": answer.token_ids, **answer.stats.to_json()})
    if draft:
        question = [{"role": "user", "content": QUESTION}]
        out["learned"] = engine.generate(question, max_tokens=32).stats.to_json()
    return out


if __name__ == "__main__":
    prepare_blas()
    file, engine = sys.argv[1:]
    goldens = json.loads(Path(file).read_text("utf-8"))
    print(json.dumps(texts(goldens, "auto" if engine == "dflash" else None)))
