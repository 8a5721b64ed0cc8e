"""One record per codec: its spec, and where its coder is; coders are imported on first use."""

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


CODECS: dict[str, CodecRecord] = {}
"""All codecs by name, those of the package first."""


def codec_record(name: str) -> CodecRecord:
    """The record of a codec; raises KeyError for a name that is not registered."""
    return CODECS[name]


def register_codec(record: CodecRecord) -> None:
    """Make a codec known by its name; raises SpecError when the name is taken.

    Call it in the module that defines the spec: the processes of a run import that module. The
    same module may register its codec again, as it does when it is imported twice.
    """
    name = record.name
    taken = CODECS.get(name)
    if taken is not None and taken.spec.__module__ != record.spec.__module__:
        raise SpecError(f"a codec named {name!r} already exists; choose another name")
    CODECS[name] = record


for _spec, _coder in (
    (Fp16, "dense:CastCoder"),
    (Bf16, "dense:CastCoder"),
    (Int8, "dense:Int8Coder"),
    (OneBit, "dense:OneBitCoder"),
    (TopK, "sparse:TopKCoder"),
    (Threshold, "sparse:ThresholdCoder"),
    (PowerSgd, "powersgd:PowerSgdCoder"),
):
    register_codec(CodecRecord(spec=_spec, coder=f"paceline.codecs.{_coder}"))


def _specs() -> dict[str, type[Codec]]:
    return {name: record.spec for name, record in CODECS.items()}


def read_codec(value: Value, where: str) -> Codec:
    """The codec that a parsed name or call describes; raises SpecError of one line."""
    return spec_from_call(value, _specs(), "codec")


def parse_codec(text: str) -> Codec:
    """The codec that a text names; raises SpecError of one line."""
    return parse_spec(text, _specs(), "codec")
