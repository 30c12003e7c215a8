"""The known pairs of target and drafter (models.toml), and what a name given by the user means.

Looks nothing up on the network or in a cache: specs go to `hub.fetch` as they are.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from dflash_mlx import paths
from dflash_mlx.errors import SourceError

STATUSES = ("real weights", "reference", "planned")

# Keys of [pair.config] and [pair.draft]: those of config.json that decide how large a model is.
_SIZE_NAMES = """
    model_type hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim vocab_size tie_word_embeddings attention_bias quantization
    quantization_config
    sliding_window sliding_window_pattern global_head_dim num_global_key_value_heads
    attention_k_eq_v num_experts num_local_experts num_experts_per_tok top_k_experts
    moe_intermediate_size shared_expert_intermediate_size full_attention_interval
    linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim
    linear_conv_kernel_dim
    """
_DRAFT_NAMES = """
    hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
    head_dim attention_bias sliding_window num_sliding_layers conv_kernel_size conv_group_size
    selector_rank
    """
_TABLES = {"config": frozenset(_SIZE_NAMES.split()), "draft": frozenset(_DRAFT_NAMES.split())}


@dataclass(frozen=True)
class Pair:
    """One [[pair]] of models.toml; None marks a fact that is not known."""

    name: str
    aliases: tuple[str, ...]
    target: str  # a spec of hub.fetch
    drafter: str  # a spec of hub.fetch
    family: str  # the target's file in models/
    status: str  # one of STATUSES
    note: str
    target_4bit: str | None = None  # ready MLX conversions of this target, hub ids
    target_8bit: str | None = None
    target_revision: str | None = None
    drafter_revision: str | None = None
    block_size: int | None = None  # tokens
    taps: tuple[int, ...] | None = None  # target layers the drafter reads
    context: int | None = None  # tokens
    licence: str | None = None
    gated: bool | None = None
    config: Mapping[str, Any] | None = None  # sizes of the target, by config.json's keys
    draft: Mapping[str, Any] | None = None  # sizes of the drafter

    @property
    def names(self) -> tuple[str, ...]:
        """What only this pair is called."""
        return (self.name, *self.aliases)

    @property
    def keys(self) -> tuple[str, ...]:
        """Every text that means this pair, case aside: its names, its target's specs."""
        return (*self.names, self.target, *self.conversions)

    @property
    def conversions(self) -> tuple[str, ...]:
        """Hub ids of the same weights, quantized for MLX."""
        return tuple(spec for spec in (self.target_4bit, self.target_8bit) if spec)

    def disagreements(self, taps: Sequence[int], block_size: int) -> list[str]:
        """A sentence for every fact that a drafter's own config states otherwise."""
        stated: dict[str, tuple[object, object]] = {
            "target_layer_ids": (tuple(taps), self.taps),
            "block_size": (block_size, self.block_size),
        }
        return [
            f"The config of the drafter {self.drafter} has {key} {own}, models.toml expects "
            f"{known} for {self.name}: its config is used. The drafter may have been replaced."
            for key, (own, known) in stated.items()
            if known is not None and own != known
        ]


@dataclass(frozen=True)
class Resolved:
    """What a name means: specs for hub.fetch; `pair` only when the target is the stock one."""

    target_spec: str
    target_revision: str | None
    drafter_spec: str | None
    drafter_revision: str | None
    pair: Pair | None

    @property
    def label(self) -> str:
        """The model's name on screens: the pair's for its own target, else what was asked for."""
        is_stock = self.pair is not None and self.target_spec == self.pair.target
        return self.pair.name if self.pair and is_stock else self.target_spec


@dataclass(frozen=True)
class Registry:
    """All pairs, in the order of the file."""

    pairs: tuple[Pair, ...]

    def find(self, name: str) -> Pair | None:
        """The pair whose name, alias or target spec equals `name`, case aside.

        Only equality counts: a fine-tune or another quantization is never taken for the stock
        target its drafter was trained on.
        """
        wanted = name.casefold()
        for pair in self.pairs:
            if any(wanted == key.casefold() for key in pair.keys):
                return pair
        return None

    def suggest(self, name: str, n: int = 3) -> list[str]:
        """Up to `n` names of pairs that look like `name`, best first."""
        short = {
            key.rsplit("/", 1)[-1].casefold(): pair.name
            for pair in self.pairs
            for key in pair.keys
            if not key.startswith("pypi:")
        }
        wanted = name.rsplit("/", 1)[-1].casefold()
        near = difflib.get_close_matches(wanted, short, n=3 * n, cutoff=0.55)
        return list(dict.fromkeys(short[key] for key in near))[:n]

    def resolve(self, name: str, *, drafter: str | None = None) -> Resolved:
        """What `name` (alias, hub id, folder, GGUF file, pypi: or asset: spec) means.

        Without `drafter` the pair's own is taken; a target of no pair has none. Raises SourceError
        for a bare word that is nothing known, a drafter given as the model, a planned family.
        """
        # A folder of that very path is the user's own model, whatever it is called.
        is_local = "/" in name and os.path.exists(os.path.expanduser(name))
        pair = None if is_local else self.find(name)
        if pair is None:
            if not is_local:
                self._refuse_drafter(name)
            if not _is_spec(name):
                raise SourceError(self._unknown(name))
            return Resolved(name, None, drafter, self._pinned(drafter), None)
        if pair.status == "planned":
            raise SourceError(
                f"{pair.name} does not run yet: its family {pair.family} or its kind of drafter is "
                "not implemented. See `dflash-mlx models` for the models that run."
            )
        spec = drafter or pair.drafter
        for conversion in pair.conversions:
            if name.casefold() == conversion.casefold():
                return Resolved(conversion, None, spec, self._pinned(spec), pair)
        return Resolved(pair.target, pair.target_revision, spec, self._pinned(spec), pair)

    def relative(self, name: str, base_models: Sequence[str] = ()) -> Pair | None:
        """The pair whose target `name` seems to be derived from; None when none is recognised.

        base_models: what the model's card or config calls its base. A target's name counts where
        it stands whole inside a name, so Qwen3-8B-ft is a relative of Qwen3-8B and not of Qwen3-8.
        """
        for candidate in (*base_models, name):
            if pair := self.find(candidate):
                return pair
            last = candidate.rstrip("/").rsplit("/", 1)[-1].casefold()
            within = [
                (len(key), pair)
                for pair in self.pairs
                for key in pair.names
                if re.search(rf"(?<![a-z0-9]){re.escape(key.casefold())}(?![a-z0-9]|\.[0-9])", last)
            ]
            if within:
                return max(within, key=lambda found: found[0])[1]
        return None

    def offer(self, name: str, base_models: Sequence[str] = ()) -> str | None:
        """A sentence part about a drafter that may serve `name`, a model of no pair; else None.

        It is offered, never taken: a drafter made for the base need not agree with a fine-tune.
        """
        pair = self.relative(name, base_models)
        if pair is None:
            return None
        return f"{pair.drafter} was trained for {pair.name}, try --draft {pair.drafter}"

    def _pinned(self, drafter: str | None) -> str | None:
        """The revision the registry pins for this drafter, if any."""
        return next((p.drafter_revision for p in self.pairs if p.drafter == drafter), None)

    def _refuse_drafter(self, name: str) -> None:
        for pair in self.pairs:
            if name.casefold() == pair.drafter.casefold():
                raise SourceError(
                    f"{name} is a drafter, which cannot answer on its own. "
                    f"Give its target as the model: {pair.name}."
                )

    def _unknown(self, name: str) -> str:
        near = self.suggest(name)
        hint = f"Did you mean {' or '.join(near)}? " if near else ""
        return (
            f"{name!r} is no known model, and no file or folder of that name exists here. {hint}"
            "`dflash-mlx models` lists the known names; a hub repo is written ORG/NAME."
        )


def _is_spec(name: str) -> bool:
    """Whether `name` can only be a path, hub id or prefixed spec, not a mistyped alias."""
    return (
        name.startswith(("pypi:", "asset:", ".", "~"))
        or "/" in name
        or name.endswith(".gguf")
        or os.path.exists(name)
    )


@cache
def load_registry(file: Path | None = None) -> Registry:
    """The registry of models.toml (or `file`), read strictly.

    Raises SourceError naming file and pair for an unknown or missing key, a value of the wrong
    type, an unknown status, or a name that two pairs share.
    """
    file = file or paths.registry_file()
    try:
        table = tomllib.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        raise SourceError(f"The registry {file} is missing. Install the package again.") from None
    except ValueError as error:  # bad TOML or bad UTF-8
        raise SourceError(f"The registry {file} is not valid TOML: {error}. Correct it.") from None
    if set(table) != {"pair"} or not isinstance(table["pair"], list):
        found = ", ".join(sorted(table)) or "nothing"
        raise SourceError(f"The registry {file} holds {found}. Write only [[pair]] tables.")
    pairs = tuple(_read_pair(entry, i, file) for i, entry in enumerate(table["pair"], 1))
    _refuse_shared_names(pairs, file)
    return Registry(pairs)


def _read_pair(entry: dict[str, Any], index: int, file: Path) -> Pair:
    place = f"{file}, pair {index} ({entry.get('name', 'no name')})"
    types = {f.name: str(f.type) for f in fields(Pair)}
    if unknown := sorted(set(entry) - set(types)):
        raise SourceError(
            f"{place}: unknown key {unknown[0]!r}. The keys of a pair are {', '.join(types)}."
        )
    required = [name for name, kind in types.items() if "None" not in kind]
    if missing := [name for name in required if name not in entry]:
        raise SourceError(f"{place}: the key {missing[0]!r} is missing. Add it.")
    for key, value in entry.items():
        if not _has_type(value, types[key]):
            raise SourceError(
                f"{place}: {key} = {value!r} is not of type {types[key]}. Correct the value."
            )
    if entry["status"] not in STATUSES:
        raise SourceError(
            f"{place}: unknown status {entry['status']!r}. Write one of {', '.join(STATUSES)}."
        )
    for table, known in _TABLES.items():
        if unknown := sorted(set(entry.get(table, ())) - known):
            raise SourceError(f"{place}: unknown key {unknown[0]!r} in {table}. Correct it.")
    tuples = {key: tuple(value) for key, value in entry.items() if isinstance(value, list)}
    return Pair(**{**entry, **tuples})


def _has_type(value: object, kind: str) -> bool:
    if kind.startswith("tuple[int"):
        return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)
    if kind.startswith("tuple"):
        return isinstance(value, list) and all(isinstance(v, str) and v for v in value)
    if kind.startswith("Mapping"):
        return isinstance(value, dict)
    if kind.startswith("str"):
        return isinstance(value, str)
    if kind.startswith("bool"):
        return isinstance(value, bool)
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _refuse_shared_names(pairs: tuple[Pair, ...], file: Path) -> None:
    """A target may have several drafters; its spec means the first pair that has it."""
    owner: dict[str, Pair] = {}
    for pair in pairs:
        for key in dict.fromkeys((*pair.names, *pair.keys)):
            other = owner.get(key.casefold())
            if other is None:
                owner[key.casefold()] = pair
            elif other is pair or key in pair.names or key in other.names:
                raise SourceError(
                    f"{file}: the name {key!r} is used twice, by {other.name} and {pair.name}. "
                    "Keep it once."
                )


def find(name: str) -> Pair | None:
    """`Registry.find` of the packaged registry."""
    return load_registry().find(name)


def suggest(name: str) -> list[str]:
    """`Registry.suggest` of the packaged registry."""
    return load_registry().suggest(name)


def resolve(name: str, *, drafter: str | None = None) -> Resolved:
    """`Registry.resolve` of the packaged registry."""
    return load_registry().resolve(name, drafter=drafter)


def offer(name: str, base_models: Sequence[str] = ()) -> str | None:
    """`Registry.offer` of the packaged registry."""
    return load_registry().offer(name, base_models)
