"""The benchmark: prompts, interleaved measurements, and what may be said of them."""
