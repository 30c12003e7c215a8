"""Reasoning levels reach a template under the name it reads them by."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_engine import write_tokenizer

from dflash_mlx.errors import UsageError
from dflash_mlx.tokenizer import load_tokenizer

USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("[{{ reasoning_effort }}]", "[low]"),
        ("[{{ reasoning_strength }}]", "[low]"),
        ("[{{ reasoning_effort }}|{{ reasoning_strength }}]", "[low|low]"),
        ("{% if enable_thinking is defined %}on{% endif %}[{{ reasoning_strength }}]", "[low]"),
    ],
)
def test_a_level_reaches_the_template(tmp_path: Path, template: str, text: str) -> None:
    assert load_tokenizer(write_tokenizer(tmp_path, template)).render([USER], "low") == text


def test_a_level_that_no_name_takes_is_refused(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    with pytest.raises(UsageError, match=r"has no reasoning levels to set to low"):
        tokenizer.render([USER], "low")
