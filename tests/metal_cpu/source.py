"""The Metal source and launch of a kernel call as MLX itself makes them, and that source as C++."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx

_SCALARS = [
    "float",
    "half",
    "bfloat",
    "int",
    "uint",
    "short",
    "ushort",
    "char",
    "uchar",
    "long",
    "ulong",
]
_NAMED = "int8_t uint8_t int16_t uint16_t int32_t uint32_t int64_t uint64_t bfloat16_t float16_t"
_VECTOR = re.compile(rf"\b((?:{'|'.join(_SCALARS)})[234])\s*\(")
_VEC = re.compile(r"\b(?:metal::)?(vec<[^<>;]*>)\s*\(")
_THREADGROUP = re.compile(
    r"^([ \t]*)threadgroup[ \t]+([\w:]+(?:<[^;]*?>)?)[ \t]+((?:[^;*&()\[]|\[[^\]]*\])+);", re.M
)
_KERNEL = re.compile(r"(template <(?P<template>[^>]*)>\s*)?\[\[kernel\]\] void (\w+)\(([^{]*)\) \{")
_INSTANCE = re.compile(
    r"template \[\[host_name\(\"(\w+)\"\)\]\] \[\[kernel\]\] decltype\(([^)]*)\)[^;]*;"
)
_FORBIDDEN = re.compile(
    r"\b(goto|new|delete|try|throw|catch|virtual|thread_local|typeid|dynamic_cast|asm|std)\b"
)


class SourceError(Exception):
    """The source breaks a rule of MSL that a C++ compiler does not know."""


@dataclass(frozen=True)
class Capture:
    """What MLX would send to the GPU for one call."""

    name: str
    source: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    parameters: tuple[tuple[str, str], ...]  # (type, name) of every buffer, in binding order
    math_mode: int


def capture(call: Callable[..., list[mx.array]], inputs: Sequence[mx.array]) -> Capture:
    """Trace `call(*inputs)`, which calls one metal_kernel on mx.gpu, through MLX's export."""
    events: list[dict] = []
    mx.export_function(events.append, lambda *arrays: call(*arrays), *inputs)
    kernels = [e["arguments"] for e in events if e.get("name") == "CustomKernel"]
    if len(kernels) != 1:
        raise AssertionError(f"{len(kernels)} kernels in one call")
    name, source, *launch = kernels[0]
    parameters = tuple(p for p in parse_parameters(source) if not p[2])
    return Capture(
        name,
        source,
        tuple(launch[:3]),
        tuple(launch[3:6]),
        tuple((kind, word) for kind, word, _ in parameters),
        launch[-1],
    )


def parse_parameters(source: str) -> list[tuple[str, str, bool]]:
    """(type, name, is an attribute) of the kernel's parameters."""
    match = _KERNEL.search(source)
    assert match is not None
    found = []
    for line in match[4].split(",\n"):
        words = re.fullmatch(r"\s*(.*?)\s*(\w+) \[\[(\w+)(?:\(\d+\))?\]\]\s*", line)
        assert words is not None, line
        found.append((words[1], words[2], words[3] != "buffer"))
    return found


@cache
def to_cpp(source: str) -> str:
    """C++ with the same lines, and an entry point `msl_entry(buffers, thread)`."""
    check_rules(source)
    instance = _INSTANCE.search(source)
    kernel = _KERNEL.search(source)
    assert kernel is not None
    called = instance[2] if instance else kernel[3]
    text = _INSTANCE.sub("", source)
    text = text.replace("[[kernel]] ", "")
    text = _VEC.sub(r"make_vector<\1>(", _VECTOR.sub(r"make_vector<\1>(", text))
    text = _threadgroup_variables(text)
    text = re.sub(r" \[\[\w+(\(\d+\))?\]\]", "", text)
    return f'#include "metal_stdlib.h"\n#line 1 "kernel"\n{text}\n{_entry(source, called)}'


def _threadgroup_variables(text: str) -> str:
    count = -1

    def declare(match: re.Match[str]) -> str:
        nonlocal count
        indent, kind, declared = match.groups()
        out = []
        for item in re.split(r",(?![^\[]*\])", declared):
            parts = re.fullmatch(r"\s*(\w+)\s*((?:\[[^\]]+\]\s*)*)", item)
            if parts is None:
                raise SourceError(f"threadgroup declaration {match[0].strip()!r} is not understood")
            name, sizes = parts.groups()
            count += 1
            out.append(
                f"typedef threadgroup {kind} {name}__type {sizes}; {name}__type& {name} = "
                f"*({name}__type*)(uintptr_t)msl_threadgroup_variable("
                f'{count}, "{name}", sizeof({name}__type), sizeof({kind}));'
            )
        return indent + " ".join(out)

    return _THREADGROUP.sub(declare, text)


_ATTRIBUTES = {
    "thread_position_in_grid": "position_in_grid",
    "threadgroup_position_in_grid": "group",
    "thread_position_in_threadgroup": "position_in_group",
    "threads_per_threadgroup": "group_size",
    "threads_per_grid": "grid",
    "threadgroups_per_grid": "groups",
    "thread_index_in_threadgroup": "index",
    "thread_index_in_simdgroup": "lane",
    "simdgroup_index_in_threadgroup": "simd",
    "simdgroups_per_threadgroup": "simds",
}


def _entry(source: str, called: str) -> str:
    """Calls the instantiation with what each parameter binds to."""
    given, buffer = [], 0
    for kind, name, attribute in parse_parameters(source):
        if attribute and name == "threads_per_simdgroup":
            given.append("32")
        elif attribute:
            value = f"t->{_ATTRIBUTES[name]}"
            given.append(f"uint3{{{value}[0], {value}[1], {value}[2]}}" if "3" in kind else value)
        else:
            pointer = kind.replace("&", "*")
            cast = f"({pointer})(uintptr_t)b[{buffer}]"
            given.append(f"*{cast}" if kind.endswith("&") else cast)
            buffer += 1
    return (
        'extern "C" void msl_entry(void* const* b, const msl_thread* t) {\n'
        f"{called}({', '.join(given)}); }}\n"
    )


def check_rules(source: str) -> None:
    """SourceError for words that MSL lacks and for pointers without an address space."""
    plain = re.sub(r"//[^\n]*", "", re.sub(r'"[^"\n]*"', '""', source))
    if word := _FORBIDDEN.search(plain):
        raise SourceError(f"{word[0]!r} does not exist in MSL")
    includes = re.findall(r"#include\s*([<\"]\S+)", plain)
    if any(name.strip('<>"') != "metal_stdlib" and "metal_" not in name for name in includes):
        raise SourceError(f"MLX compiles without an include path: {includes}")
    names = [*_SCALARS, *_NAMED.split(), "bool", *(f"{s}{n}" for s in _SCALARS for n in "234")]
    names += re.findall(r"(?:typename|class)\s+(\w+)", plain)
    kinds = rf"\b({'|'.join(names)}|vec<[^<>]*>)"
    pattern = rf"([^;{{}}(),<>]*){kinds}\s*(?:const\s*)?[*&](?![&=])\s*\w+\s*[,;=)\[]"
    for match in re.finditer(pattern, plain):
        before = match[1].split()
        if not {"device", "threadgroup", "constant", "thread"} & set(before):
            raise SourceError(f"pointer without an address space: {match[0].strip()!r}")
