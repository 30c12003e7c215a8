"""A whole engine in small: a random target over bytes, a chat template, an oracle drafter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from oracle import OracleDrafter
from tiny import tiny_target
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dflash_mlx.engine import Engine
from dflash_mlx.tokenizer import load_tokenizer

SPECIALS = ["<|im_start|>", "<|im_end|>"]
VOCAB = 256 + len(SPECIALS)
END = VOCAB - 1
TAPS = (0, 2)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING_TEMPLATE = TEMPLATE + (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}"
)


def write_tokenizer(
    folder: Path, template: str | None = TEMPLATE, specials: Sequence[str] = SPECIALS
) -> Path:
    """A tokenizer folder whose tokens are single bytes and special tokens; <|im_end|> ends."""
    folder.mkdir(exist_ok=True, parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(s, special=True) for s in specials])
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def tiny_engine(
    folder: Path, *, drafter=None, template: str | None = TEMPLATE, family: str = "llama", **kwargs
) -> Engine:
    """An engine over `tiny_target`, plain without a drafter."""
    target = kwargs.pop("target", None) or tiny_target(family, vocab_size=VOCAB)
    tokenizer = load_tokenizer(write_tokenizer(folder, template))
    return Engine(target, tokenizer, drafter, reason="a test", model="tiny", **kwargs)


def oracle_for(target, prompt_ids: Sequence[int], truth: Sequence[int], block: int, plan):
    """A drafter that accepts by plan for one prompt (see OracleDrafter)."""
    return OracleDrafter(
        len(prompt_ids),
        truth,
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        block_size=block,
        taps=TAPS,
        plan=plan,
        check_growth=False,
    )
