"""The registry is plain data whose sources exist."""

from __future__ import annotations

import importlib
import json

import pytest
from terrazzo import ops
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import CAPABILITIES, Target
from terrazzo.ops import quantized, registry
from terrazzo.ops.checkpoints.conventions.table import CONVENTIONS
from terrazzo.ops.grouped_codes import GROUPS, SCALE_DTYPES
from terrazzo.ops.linear.bytes import fp8_problem as w4a8_fp8_problem
from terrazzo.ops.products import kv
from terrazzo.ops.products.wide import W4A16
from terrazzo.ops.w4a8 import activations as w4a8_activations
from terrazzo.ops.w4a8 import format as w4a8_format
from terrazzo.ops.w4a8 import mxfp4_format
from terrazzo.ops.w4a8 import reference as w4a8_reference
from terrazzo.ops.w4ax import fmpq as w4ax_fmpq
from terrazzo.ops.w4ax import format as w4ax_format
from terrazzo.ops.w4ax import reference as w4ax_reference
from terrazzo.ops.weight_only.decoding import ACTIVATION_DTYPES, NUMERICS


def test_rows_are_plain_and_complete():
    rows = registry.rows()
    assert json.loads(json.dumps(rows)) == rows
    keys = [(row["operator"], row["format"], row["target"]) for row in rows]
    assert len(set(keys)) == len(keys) == sum(len(entry.targets) for entry in registry.REGISTRY)
    assert {row["target"] for row in registry.rows("w4a16")} == set(CAPABILITIES)
    assert all(row["status"] in registry.STATUS and Target.parse(row["target"]) for row in rows)


@pytest.mark.parametrize("entry", registry.REGISTRY, ids=lambda e: f"{e.operator}-{e.format}")
def test_an_entry_names_what_exists(entry):
    module, _, name = entry.source.rpartition(".")
    assert callable(getattr(importlib.import_module(module), name))


def test_every_operator_is_a_public_name_of_ops():
    """As documents write it: terrazzo.ops.mxfp4_fp8.quantize."""
    operators = {entry.operator for entry in registry.REGISTRY}
    assert operators <= set(ops.__all__)
    assert all(getattr(ops, name).__name__ == f"terrazzo.ops.{name}" for name in ops.__all__)


def test_w4a16_entries_agree_with_the_code():
    entries = [entry for entry in registry.REGISTRY if entry.operator == "w4a16"]
    formats = {name for one in W4A16.conventions for name in CONVENTIONS[one].formats}
    assert {entry.format for entry in entries} == {*formats, "rtn"}
    for entry in entries:
        assert entry.groups == (*GROUPS, "K") and entry.scales == SCALE_DTYPES
        assert entry.activations == ACTIVATION_DTYPES and ("auto", *entry.numerics) == NUMERICS


def test_w4a8_entries_agree_with_the_code():
    entries = [entry for entry in registry.REGISTRY if entry.operator == "w4a8"]
    integer, e4m3 = ([e for e in entries if e.format.endswith("_e4m3") == kind] for kind in (False, True))
    assert {entry.format for entry in integer} == {"qserve", "compressed_tensors", "rtn"}
    assert {entry.format for entry in e4m3} == {"compressed_tensors_e4m3", "rtn_e4m3"}
    for entry in e4m3:
        assert entry.groups == (*w4a8_format.GROUPS, "K") and entry.numerics == (w4a8_fp8_problem.E4M3,)
        assert entry.activations == (w4a8_activations.CODES["e4m3"], *w4a8_activations.DTYPES)
        for arch in CAPABILITIES:
            native = any(Target.parse(arch).supports(name) for name in quantized.E4M3_INSTRUCTIONS)
            assert native == (arch in entry.targets)
    for entry in integer:
        assert entry.groups == w4a8_format.GROUPS and ("auto", *entry.numerics) == w4a8_reference.DEQUANTIZATIONS
        assert entry.activations == ("int8", *w4a8_activations.DTYPES)


@pytest.mark.parametrize(
    ("operator", "form"), [("mxfp4_fp8", w4a8_fp8_problem.E2M1), ("mxfp4_mxfp8", w4a8_fp8_problem.E2M1_MX)]
)
def test_mxfp4_on_e4m3_agrees_with_the_code(operator, form):
    entries = [entry for entry in registry.REGISTRY if entry.operator == operator]
    assert {entry.format for entry in entries} == {"gpt_oss", "compressed_tensors", "rtn"}
    for entry in entries:
        assert entry.groups == mxfp4_format.PackedWeight.GROUPS and entry.numerics == (form,)
        native = {a for a in CAPABILITIES if any(map(Target.parse(a).supports, quantized.E4M3_INSTRUCTIONS))}
        assert set(entry.targets) == native


def test_the_w4ax_entry_agrees_with_the_code():
    (entry,) = [entry for entry in registry.REGISTRY if entry.operator == "w4ax"]
    assert entry.groups == (w4ax_fmpq.BLOCK,) and entry.numerics == w4ax_reference.GRANULARITIES
    for arch in entry.targets:  # no tensor core of s4: said so
        assert w4ax_format.native(Target.parse(arch)) or f"{arch}: emulated on int8" in entry.notes


def test_attention_entries_agree_with_the_code():
    entries = {entry.format: entry for entry in registry.REGISTRY if entry.operator == "attention"}
    assert list(entries) == list(kv.FORMATS)
    for name, fmt in kv.FORMATS.items():
        entry = entries[name]
        assert entry.groups == (fmt.group or fmt.scaling,)
        assert ("values" in entry.notes) == fmt.for_values


def test_filters():
    assert {row["target"] for row in registry.rows(target="sm_89")} == {"sm_89"}
    with pytest.raises(ArgumentError, match="w4a16"):
        registry.rows("w9")
    with pytest.raises(ArgumentError, match="sm_90a"):
        registry.rows(target="sm_70")
