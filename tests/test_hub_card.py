"""The base models that a model's card and config state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_mlx.hub import base_models


@pytest.mark.parametrize(
    ("card", "names"),
    [
        ("---\nlicense: mit\nbase_model: org/One\ntags:\n- a\n---\n# x\n", ("org/One",)),
        ("---\nbase_model:\n- org/One\n  - 'org/Two'\nlicense: mit\n---\n", ("org/One", "org/Two")),
        ('---\r\nbase_model: "org/One"\r\n---\r\n', ("org/One",)),
        ("---\nlicense: mit\n---\nbase_model: org/One\n", ()),
        ("base_model: org/One\n", ()),
        ("---\nbase_model:\n---\n", ()),
        ("", ()),
    ],
)
def test_the_card(tmp_path: Path, card: str, names: tuple[str, ...]) -> None:
    (tmp_path / "README.md").write_bytes(card.encode())
    assert base_models(tmp_path) == names
    assert base_models(tmp_path / "model.gguf") == names


def test_the_config_comes_first_and_names_are_told_once(tmp_path: Path) -> None:
    assert base_models(tmp_path) == ()
    (tmp_path / "README.md").write_text("---\nbase_model: [org/Odd]\n---\n")
    config = {"base_model": "org/One", "_name_or_path": "org/One"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert base_models(tmp_path) == ("org/One", "[org/Odd]")
    for broken in ("{", "[]", '{"base_model": 3}'):
        (tmp_path / "config.json").write_text(broken)
        assert base_models(tmp_path) == ("[org/Odd]",)
