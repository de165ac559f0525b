"""The generated Metal source as C++: parameters of the kernel, threadgroup definitions, attributes.

The rewrite is by token and keeps every line where it was, so that a reported line is a line of the Metal text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

ATTRIBUTE = re.compile(r"\[\[(?:[^\[\]]|\[[^\]]*\])*\]\]")
_HOST_NAME = re.compile(r"^template\s*\[\[host_name.*?$", re.M)
_DECLARATOR = r"\w+\s*(?:\[[^;{}=]*?\])*"
_THREADGROUP = re.compile(
    rf"(?<![\w*&,(])\bthreadgroup\s+((?:const\s+)?[\w:]+(?:<[^;{{}}()]*?>)?)\s+({_DECLARATOR}(?:\s*,\s*{_DECLARATOR})*)\s*;"
)
VECTOR_ATTRIBUTES = {
    "thread_position_in_grid": "position_in_grid",
    "thread_position_in_threadgroup": "position_in_group",
    "threadgroup_position_in_grid": "group_position",
    "threads_per_grid": "threads_per_grid",
    "grid_size": "threads_per_grid",
    "threadgroups_per_grid": "groups_per_grid",
    "threads_per_threadgroup": "threads_per_group",
    "dispatch_threads_per_threadgroup": "dispatch_threads_per_group",
}
SCALAR_ATTRIBUTES = {
    "thread_index_in_threadgroup": "t->index",
    "thread_index_in_simdgroup": "t->lane",
    "simdgroup_index_in_threadgroup": "t->simdgroup",
    "simdgroups_per_threadgroup": "t->simdgroups",
    "dispatch_simdgroups_per_threadgroup": "t->simdgroups",
    "threads_per_simdgroup": "32u",
    "thread_execution_width": "32u",
}


@dataclass(frozen=True)
class Parameter:
    """One kernel parameter: `buffer` index, or `attribute` name of a position argument."""

    type: str
    name: str
    buffer: int | None
    attribute: str | None

    @property
    def constant(self) -> bool:
        """True when MLX put the input into the constant address space."""
        return "constant" in self.type

    def argument(self) -> str:
        """The C++ expression that passes this parameter in the emulator."""
        if self.buffer is not None:
            plain = re.sub(r"\b(device|constant|threadgroup)\b", "", self.type).strip()
            if plain.endswith("&"):
                return f"*static_cast<{plain[:-1].strip()}*>(b[{self.buffer}])"
            return f"EmuPointer{{b[{self.buffer}]}}"  # becomes a pointer to whatever the kernel wants
        if self.attribute in SCALAR_ATTRIBUTES:
            return SCALAR_ATTRIBUTES[self.attribute]
        field = VECTOR_ATTRIBUTES.get(self.attribute or "")
        if field is None:
            raise ValueError(f"kernel attribute: expected one of the supported positions, got {self.attribute!r}")
        if self.type.endswith(("2", "3")):
            return f"{self.type}({', '.join(f't->{field}[{i}]' for i in range(int(self.type[-1])))})"
        return f"t->{field}[0]"


def kernel_parameters(source: str, function: str) -> list[Parameter]:
    """Parameters of `[[kernel]] void function(...)`; ValueError when the source has no such kernel."""
    start = re.search(rf"\[\[\s*kernel\s*\]\]\s*void\s+{re.escape(function)}\s*\(", source)
    if not start:
        raise ValueError(f"kernel: expected a [[kernel]] named {function!r} in the source, got none")
    depth, i = 1, start.end()
    while depth:
        depth += {"(": 1, ")": -1}.get(source[i], 0)
        i += 1
    parameters = []
    for text in _split(source[start.end() : i - 1]):
        attributes = " ".join(ATTRIBUTE.findall(text))
        declaration = " ".join(ATTRIBUTE.sub("", text).split())
        kind, name = re.fullmatch(r"(.*?[\s*&])(\w+)", declaration).groups()
        buffer = re.search(r"buffer\((\d+)\)", attributes)
        attribute = re.search(r"\[\[\s*(\w+)\s*\]\]", attributes)
        parameters.append(
            Parameter(
                kind.strip(), name, int(buffer[1]) if buffer else None, None if buffer else attribute and attribute[1]
            )
        )
    return parameters


def _split(text: str) -> list[str]:
    parts, depth, last = [], 0, 0
    for i, c in enumerate(text):
        depth += {"(": 1, "[": 1, "<": 1, ")": -1, "]": -1, ">": -1}.get(c, 0)
        if c == "," and depth == 0:
            parts.append(text[last:i])
            last = i + 1
    return [p for p in [*parts, text[last:]] if p.strip()]


def strip_comments(source: str) -> str:
    """Comments become spaces; newlines stay."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m[0]), source, flags=re.S)


def to_cpp(source: str, threadgroup: str = "emu_threadgroup") -> str:
    """Metal text with attributes and the explicit instantiation removed and threadgroup definitions rewritten.

    `threadgroup` names the allocator: "emu_threadgroup" (arena), "shared" (CUDA) or "extern" (lint).
    """
    source = _HOST_NAME.sub("", strip_comments(source))
    source = ATTRIBUTE.sub("", source)
    count = 0

    def define(match: re.Match[str]) -> str:
        nonlocal count
        out = []
        for item in _split(match[2]):
            name, dims = re.fullmatch(r"\s*(\w+)\s*((?:\[.*\])?)\s*", item, re.S).groups()
            count += 1
            if threadgroup == "emu_threadgroup":
                kind = f"emu_array_{name}"
                out.append(
                    f"typedef {match[1]} {kind}{dims}; {kind}& {name} = "
                    f"*static_cast<{kind}*>(emu_threadgroup({count}, sizeof({kind}), alignof({kind}), __LINE__));"
                )
            elif threadgroup == "shared":
                out.append(f"__shared__ {match[1]} {name}{dims};")
            else:
                out.append(f"extern threadgroup {match[1]} {name}{dims};")
        return " ".join(out) + "\n" * match[0].count("\n")

    return _THREADGROUP.sub(define, source)


def template_arguments(source: str, function: str) -> str:
    """`<half, 128>` of the instantiated kernel, or an empty string."""
    match = re.search(rf"decltype\({re.escape(function)}(<.*?>)?\)\s*{re.escape(function)}", source)
    return (match[1] or "") if match else ""
