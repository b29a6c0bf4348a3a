"""A kind of linear layer as one value: what it multiplies, how it is packed and called, and where it has run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import CAPABILITIES, Target
from terrazzo.ops.products.codes import Codes
from terrazzo.ops.products.planes import Plane, Shape, Size
from terrazzo.ops.products.ways import DIRECT, WAYS, Input, Way, numerics_of


@dataclass(frozen=True)
class Programs:
    """Builders of kernels for targets of a family, each "module:function".

    Attributes:
        needs: capability of a target; the first of a product's that a target has counts.
        few: of small batches. wide: of others. experts: of grouped products; none: each expert is a launch.
        own: way -> wide ones in the place of these.
        layout: of the packed weight, other than the product's.
    """

    needs: str
    few: tuple[str, ...]
    wide: tuple[str, ...]
    experts: tuple[str, ...] = ()
    own: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    layout: str = ""

    @property
    def all(self) -> tuple[str, ...]:
        """Those of one weight."""
        return (*self.few, *self.wide, *(one for ones in self.own.values() for one in ones))


@dataclass(frozen=True, kw_only=True)
class Product:
    """A kind of linear layer.

    Attributes:
        record: key of tuned records, "w4a8_fp8". Other names are the same where they are left out:
        word: what formats of terrazzo.nn begin with, "w4a8-e4m3".
        module: public, under terrazzo.ops, "w4a8.fp8".
        kernels: what names of its kernels begin with, "w4a8".
        codes: of the weight.
        x: form of the activations.
        layout: instance of `terrazzo.layouts` that packs codes.
        programs: by family of targets.
        planes: tensors of a packed weight.
        facts: plain fields of a packed weight besides n, k, layout and target.
        version: of files with a packed weight.
        conventions: of checkpoints -> bits of their codes.
        stated: activations that configs of these checkpoints may say.
        on_request: whether no checkpoint means it by itself.
        calibration: what its quantizer takes from a text: "importance" of channels for the search of ranges, with it a
            "smooth" vector or a "plan" of blocks; "" for nothing.
        named: whether parameters of its kernels name the codes; those of some are older than that parameter.
        shaped: warpgroups whose tiles of more than 16 tokens have kernels for one [n, k], as smaller tiles have; None:
            all.
        ran: architecture -> status in the registry; "compiled" of others that have a program.
        wheel: why published wheels lack its kernels, "" where they have them.
        instead: remedy where a target lacks its instructions.
    """

    record: str
    word: str = ""
    module: str = ""
    kernels: str = ""
    codes: Codes
    x: Input
    layout: str
    programs: tuple[Programs, ...]
    planes: tuple[Plane, ...] = field(hash=False)
    facts: tuple[str, ...]
    version: str
    conventions: Mapping[str, int] = field(default_factory=dict, hash=False)
    stated: tuple[str, ...] = ("",)
    on_request: bool = False
    calibration: str = ""
    named: bool = True
    shaped: tuple[int, ...] | None = None
    ran: Mapping[str, str] = field(default_factory=dict, hash=False)
    wheel: str = ""
    instead: str = "pack it for one of these"

    def __post_init__(self) -> None:
        for name in ("word", "module", "kernels"):
            object.__setattr__(self, name, getattr(self, name) or self.record)

    @property
    def root(self) -> str:
        """The public module's first part, "w4a8" of "w4a8.fp8"."""
        return self.module.partition(".")[0]

    @property
    def ways(self) -> tuple[Way, ...]:
        """Its numerics, the usual one first."""
        return WAYS[self.codes.name]

    @property
    def numerics(self) -> tuple[str, ...]:
        """What a caller may choose besides "auto"."""
        return numerics_of(self.codes)

    @property
    def wide(self) -> bool:
        """Whether activations keep 16 bits."""
        return self.x.wide

    @property
    def direct(self) -> bool:
        """Whether codes are operands as they are."""
        return self.ways[0].rule == DIRECT

    @property
    def converted(self) -> bool:
        """Whether 4-bit codes become bytes, and norms and gates may make those of the activations."""
        return self.x.quant is not None and not self.direct

    @property
    def planned(self) -> bool:
        """Whether a weight is packed by a plan of its own, of blocks of x in 4 and in 8 bits."""
        return not self.wide and self.x.quant is None

    @property
    def targets(self) -> dict[str, str]:
        """Architecture that has a program -> status in the registry."""
        return {arch: self.ran.get(arch, "compiled") for arch in CAPABILITIES if self.on(arch)}

    def on(self, arch: str) -> Programs | None:
        """The builders that serve an architecture."""
        return next((one for one in self.programs if one.needs in CAPABILITIES[arch]), None)

    def check(self, target: Target) -> None:
        """Raise ArgumentError unless a target has the instructions of one of its programs."""
        if any(target.supports(one.needs) for one in self.programs):
            return
        *others, last = self.targets
        constraint = f"has no {self.x.rate} tensor-core instruction ({', '.join(others)} and {last} do)"
        raise ArgumentError("target", target.arch, constraint, self.instead)

    def shapes(self, size: Size) -> dict[str, Shape]:
        """Shapes of the planes that every packed weight of these sizes has."""
        return {plane.name: plane.shape(self.codes, size) for plane in self.planes if plane.shape is not None}


EVERYWHERE = {"sm_80": "ptx-tested", "sm_90a": "tested"}
"""What ran: programs on mma.sync through PTX, those on wgmma on an H100."""
ON_HOPPER = {"sm_90a": "tested"}


def programs(
    room: str, x: Input, few: tuple[str, str], own: Mapping[str, tuple[str, ...]] | None = None
) -> tuple[Programs, Programs]:
    """Builders of a room of terrazzo.ops that has `stream_k` on wgmma and `multistage` on mma.sync, with experts too.

    Args:
        few: those of small batches on wgmma and on mma.sync, "" for none. own: way -> wide ones on wgmma.
    """

    def entries(*names: str) -> tuple[str, ...]:
        return tuple(f"terrazzo.ops.{room}.{name}:build" for name in names if name)

    ways = {way: entries(*names) for way, names in (own or {}).items()}
    stream_k, multistage = entries("stream_k"), entries("multistage")
    return (
        Programs(f"wgmma.{x.rate}", entries(few[0]), stream_k, stream_k, ways),
        Programs(f"mma.{x.rate}", entries(few[1]), multistage, multistage),
    )
