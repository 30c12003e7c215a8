"""Answers for training are made many at a time because that is cheaper a token."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# One at a time and many at once by turns, so that what else runs here meets both alike. The time
# is CPU time of the process: the ratio asked for is one of work, not of free cores.
MEASURED = """
import statistics, time
import dflash_mlx.fast_blas
import dflash_mlx
from dflash_mlx.train.decoding import Decoder, Job

engine = dflash_mlx.load("SmolLM2-135M", draft=None)
ids = (1, 2)

def cost(count, tokens=6):
    decoder = Decoder(engine.target, count, temp=0.0, seed=0, end_ids=())
    decoder.start([Job(str(i), ids, tokens) for i in range(count)])
    began, before = time.process_time(), decoder.tokens
    while decoder.running:
        decoder.step()
    return (time.process_time() - began) / (decoder.tokens - before)

print(statistics.median(cost(1) / cost(16) for _ in range(3)))
"""


@pytest.mark.smollm2
def test_sixteen_answers_at_once_are_four_times_cheaper_a_token() -> None:
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", MEASURED], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) >= 4
