"""One record per codec: its spec, and where its coder is; coders are imported on first use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from paceline.codecs.spec import Bf16, Codec, Fp16, Int8, OneBit, PowerSgd, Threshold, TopK
from paceline.errors import SpecError
from paceline.specs.base import parse_spec, spec_from_call
from paceline.specs.expression import Value


@dataclass(frozen=True, kw_only=True)
class CodecRecord:
    """Properties of a codec that are available without importing torch."""

    spec: type[Codec]
    coder: str
    """`module:attribute` of a `Coder` class; made by its `from_spec(spec, dtype, shapes)`."""

    @property
    def name(self) -> str:
        return self.spec.name


_BUILT_IN = {
    record.name: record
    for record in (
        CodecRecord(spec=Fp16, coder="paceline.codecs.dense:CastCoder"),
        CodecRecord(spec=Bf16, coder="paceline.codecs.dense:CastCoder"),
        CodecRecord(spec=Int8, coder="paceline.codecs.dense:Int8Coder"),
        CodecRecord(spec=OneBit, coder="paceline.codecs.dense:OneBitCoder"),
        CodecRecord(spec=TopK, coder="paceline.codecs.sparse:TopKCoder"),
        CodecRecord(spec=Threshold, coder="paceline.codecs.sparse:ThresholdCoder"),
        CodecRecord(spec=PowerSgd, coder="paceline.codecs.powersgd:PowerSgdCoder"),
    )
}
_registered: dict[str, CodecRecord] = {}


class _CodecTypes(Mapping[str, type[Codec]]):
    """Spec classes by name, for the parser."""

    def __getitem__(self, name: str) -> type[Codec]:
        return codec_record(name).spec

    def __iter__(self) -> Iterator[str]:
        yield from _BUILT_IN
        yield from _registered

    def __len__(self) -> int:
        return len(_BUILT_IN) + len(_registered)


CODECS: Mapping[str, type[Codec]] = _CodecTypes()
"""All codecs by name, those of the package first."""


def codec_record(name: str) -> CodecRecord:
    """The record of a codec; raises KeyError for a name that is not registered."""
    return _BUILT_IN[name] if name in _BUILT_IN else _registered[name]


def register_codec(record: CodecRecord) -> None:
    """Make a codec known by its name; raises SpecError when the name is taken.

    Call it in the module that defines the spec: the processes of a run import that module. The
    same module may register its codec again, as it does when it is imported twice.
    """
    name = record.name
    taken = _registered.get(name)
    if name in _BUILT_IN or (taken is not None and taken.spec.__module__ != record.spec.__module__):
        raise SpecError(f"a codec named {name!r} already exists; choose another name")
    _registered[name] = record


def read_codec(value: Value, where: str) -> Codec:
    """The codec that a parsed name or call describes; raises SpecError of one line."""
    return spec_from_call(value, CODECS, "codec")


def parse_codec(text: str) -> Codec:
    """The codec that a text names; raises SpecError of one line."""
    return parse_spec(text, CODECS, "codec")
