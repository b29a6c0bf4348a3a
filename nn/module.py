"""What every module with a packed weight is: buffers from which forward reads, and a state that names its format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from terrazzo.lowering.errors import ArgumentError
from terrazzo.nn import cpu, formats, products
from terrazzo.nn.formats import VECTORS, Format
from terrazzo.ops import grouped, launching, weights
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.products.table import BY_WORD
from terrazzo.ops.weight import files
from torch import nn

if TYPE_CHECKING:
    from terrazzo.ops.weight.base import AnyPacked as Packed


class PackedModule(nn.Module):
    """Holds one packed weight, or one for each expert, as buffers without gradients.

    The buffer `weight_format` says in the state what the others are: family, sizes, layout identity, scale dtype. A
    state of another kind is refused when it is loaded, or, where other code puts tensors in place
    (`set_module_tensor_to_device`), when forward first reads them. Only the bias follows `.half()` and `.to(dtype)`.

    Args:
        packed: a PackedWeight of w4a16, w4a8, w4a8.fp8 or w4ax, or a GroupedWeight. Its tensors become the buffers.

    Attributes:
        wide: whether products read 16-bit activations.
    """

    def __init__(self, packed: Packed | GroupedWeight) -> None:
        super().__init__()
        grouped = isinstance(packed, GroupedWeight)
        one = packed.stacked if grouped else packed
        self._facts = formats.facts_of(one) | ({"experts": len(packed)} if grouped else {})
        self.kind = formats.product_of(one)
        self.wide = self.kind.wide
        buffers = {"weight_format": formats.encoded(self._facts).to(one.words.device)}
        buffers |= {name: getattr(one, name) for name in formats.tensors_of(self.kind)}
        for name in sorted(buffers, key=lambda name: buffers[name] is None):  # torch.export counts buffers up to None
            self.register_buffer(name, buffers[name])
        self._type, self._plain = type(one), {name: getattr(one, name) for name in formats.plain_fields(self.kind)}
        self._kept: tuple[tuple, Any] | None = None
        self._dense: tuple[Any, tuple, dict] | None = None

    # -- what forward reads --------------------------------------------------------------------------------------------
    @property
    def packed(self) -> Packed | GroupedWeight:
        """The weight over the buffers of now; the same object until one of them is another tensor.

        Raises:
            ArgumentError, LayoutMismatchError: buffers that are not the module's weight.
        """
        if torch.compiler.is_compiling():
            return self._make()
        buffers, kept = self._buffers, self._kept
        if kept is not None:
            for name, tensor in kept[0]:
                if buffers[name] is not tensor:
                    break
            else:
                return kept[1]
        made = self._make()
        self._check(made)
        self._kept = (tuple(buffers.items()), made)
        return made

    def on_cpu(
        self, x: products.Activations, out_dtype: torch.dtype | None, offsets: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """The product with x by torch's own, where x lies on a CPU and nothing is traced; else None. See `nn.cpu`."""
        if products.on_kernels(x) or cpu.asked_for_oracle():
            return None
        w, float_x = self.packed, isinstance(x, torch.Tensor)
        products.check_activations(x, w.k)
        dtype = out_dtype or (x.dtype if float_x else torch.float16)
        if dtype not in (torch.float16, torch.bfloat16):
            return None
        if offsets is not None:
            return self._experts_on_cpu(x, w, dtype, offsets)
        rows = x.reshape(-1, w.k) if float_x else x
        with torch.autocast("cpu", enabled=False):
            made = products.quantize(rows, w) if float_x else rows
            y = self._held(w, made, dtype)(made, w.bias, dtype)
        return y.view(*x.shape[:-1], w.n)

    def _held(
        self, w: Packed, x: products.Activations, dtype: torch.dtype, expert: int = 0
    ) -> cpu.Floats | cpu.Integers:
        """The dequantized weight, of an expert `w`, for x; made once, until a buffer is written to or moves."""
        dtype = x.dtype if isinstance(x, torch.Tensor) else dtype
        whole, kept = self.packed, self._dense
        state = (dtype, *(launching.writes(t) for t in self._buffers.values() if t is not None))
        if kept is None or kept[0] is not whole or kept[1] != state:
            kept = self._dense = (whole, state, {})
        found = kept[2].get(expert)
        if found is None:
            found = kept[2].setdefault(expert, cpu.dense(w, dtype))
        return found

    def _experts_on_cpu(
        self, x: products.Activations, w: GroupedWeight, dtype: torch.dtype, offsets: torch.Tensor
    ) -> torch.Tensor:
        grouped.check_rows(x.shape, w.k)
        grouped.check_offsets(offsets, len(w), w.device)
        with torch.autocast("cpu", enabled=False):
            x = products.quantize(x, w) if isinstance(x, torch.Tensor) else x
        numbers = count()

        def product(rows: torch.Tensor, one: Packed, bias: torch.Tensor | None) -> torch.Tensor:
            expert = next(numbers)
            if not len(rows):
                return torch.zeros(0, w.n, dtype=dtype)
            part = x[rows] if isinstance(x, torch.Tensor) else x.of_tokens(rows)
            return self._held(one, part, dtype, expert)(part, bias, dtype)

        with torch.autocast("cpu", enabled=False):
            return w.reference(product, torch.arange(x.shape[0]), offsets, w.stacked.bias)

    def _make(self) -> Packed | GroupedWeight:
        """The weight over the buffers."""
        weight = self._type(**{name: self._buffers[name] for name in formats.tensors_of(self.kind)}, **self._plain)
        return GroupedWeight(weight) if "experts" in self._facts else weight

    def _check(self, made: Packed | GroupedWeight) -> None:
        """Raise an error unless kernels of this version can read the buffers as what the module is."""
        words, noted = self.words, self.weight_format
        if words.is_meta:
            remedy = "load a state with assign=True, or call to_empty() first"
            raise ArgumentError("words", "on meta", "holds no data", remedy)
        if type(noted) is torch.Tensor and not noted.is_meta:
            formats.check_same(self._facts, formats.decoded(noted, "weight_format"), "weight_format")
        if isinstance(made, GroupedWeight):
            made.check()
            return
        made.check_layout(made.expected_layout(), "words")
        made.check_sizes()
        weights.check_vectors(made)

    # -- moving and copying --------------------------------------------------------------------------------------------
    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PackedModule:
        held, self._dense = dict(self._buffers), None
        super()._apply(fn, recurse)
        for name, before in held.items():  # .half() and .to(dtype) change no weight
            after = self._buffers[name]
            if before is None or after.dtype == before.dtype:
                continue
            if name not in VECTORS or weights.dtype_name(after) not in weights.FLOATS:
                self._buffers[name] = before.to(after.device)
        return self

    def __getstate__(self) -> dict[str, Any]:
        held = {name: value for name, value in self.__dict__.items() if name != "kind"}  # whose fields may change
        return {**held, "_kept": None, "_dense": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({name: value for name, value in state.items() if name != "_family"})
        self.kind = BY_WORD[self._facts["family"]]
        self.wide = self.kind.wide

    # -- states --------------------------------------------------------------------------------------------------------
    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        noted = state_dict.get(f"{prefix}weight_format")
        given = [name for name in formats.tensors_of(self.kind) if f"{prefix}{name}" in state_dict]
        if noted is None and given:
            constraint = f"must name the format of {', '.join(given)}"
            raise ArgumentError(f"{prefix}weight_format", None, constraint, "save the state of a terrazzo module")
        if noted is not None and not noted.is_meta:
            name = f"{prefix}weight_format"
            formats.check_same(self._facts, formats.decoded(noted, name), name)
        for name in given:
            own, new = self._buffers[name], state_dict[f"{prefix}{name}"]
            if own is not None and name not in VECTORS and new.dtype != own.dtype:
                constraint = f"must be {weights.dtype_name(own)}: bytes of a weight have no other dtype"
                raise ArgumentError(f"{prefix}{name}", weights.dtype_name(new), constraint, "save the state again")
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    @property
    def takes_norm(self) -> bool:
        """Whether activations are quantized for the weight, in a kernel that can take RMSNorm in."""
        return not self.wide

    @property
    def format(self) -> Format:
        """Of the weight."""
        return formats.format_of(self._facts)

    @property
    def in_features(self) -> int:
        return self._facts["k"]

    @property
    def out_features(self) -> int:
        return self._facts["n"]

    def extra_repr(self) -> str:
        has = [name for name in self._facts["tensors"] if name in ("perm", "smooth", "permutation", "bias")]
        parts = [f"in_features={self.in_features}", f"out_features={self.out_features}", f"format={self.format}"]
        if "experts" in self._facts:
            parts.insert(0, f"experts={self._facts['experts']}")
        return ", ".join(parts + has)


def stored_weight(state: Mapping[str, torch.Tensor], prefix: str = "") -> Packed | GroupedWeight:
    """The weight that a `PackedModule` left in a state, over the state's tensors; a GroupedWeight for experts.

    Raises:
        ArgumentError: no such weight, or one with scales or a bias that are not finite.
        LayoutMismatchError: it was packed with another layout than this version's.
    """
    if not isinstance(state, Mapping):
        raise ArgumentError("state", type(state).__name__, "must be tensors by name", "pass module.state_dict()")
    if not isinstance(prefix, str):
        raise ArgumentError("prefix", type(prefix).__name__, "must be text", "pass 'model.layers.0.mlp.down_proj.'")
    name = f"{prefix}weight_format"
    if name not in state:
        found = sorted(key for key in state if key.startswith(prefix))[:6]
        raise ArgumentError(name, None, "must be in the state", f"pass the prefix of a module; it has {found}")
    facts = formats.decoded(state[name], name)
    product = BY_WORD[facts["family"]]
    plain = {field: facts[field] for field in formats.plain_fields(product) if field in facts}
    tensors, held = {}, facts["tensors"]
    for field in formats.tensors_of(product):
        tensors[field] = state.get(f"{prefix}{field}")
        if (tensors[field] is None) == (field in held):
            seen = None if tensors[field] is None else "given"
            raise ArgumentError(f"{prefix}{field}", seen, f"its format names {held}", "save it again")
    weight = files.made_of(formats.module_of(product).PackedWeight, tensors, lambda: plain, name, "other bytes")
    made = GroupedWeight(weight) if "experts" in facts else weight
    if not weight.words.is_meta:
        try:
            made.check_stored()
        except ArgumentError as error:
            raise type(error)(f"{prefix}{error.argument}", error.value, error.constraint, error.remedy) from None
        if len(made) != facts["experts"] if "experts" in facts else False:
            raise ArgumentError(name, facts["experts"], f"has {len(made)} experts", "save the module's state again")
    return made
