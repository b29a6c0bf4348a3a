"""Kinds of linear layers as values: what is derived from them is what the code does."""

from __future__ import annotations

import pickle
import re
from dataclasses import fields
from importlib import import_module
from itertools import product as every

import pytest
import torch
from terrazzo.layouts.converters import CONVERTERS
from terrazzo.layouts.instances import INSTANCES
from terrazzo.layouts.units import derive_unit
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import CAPABILITIES, Target
from terrazzo.ops import ready, registry, stored_layers, w8a8
from terrazzo.ops.kinds.table import KINDS
from terrazzo.ops.linear.operand import Operand
from terrazzo.ops.products.codes import HALVES
from terrazzo.ops.products.planes import Size
from terrazzo.ops.products.product import Product
from terrazzo.ops.products.table import PRODUCTS, of_codes
from terrazzo.ops.products.ways import choose_way
from terrazzo.schedules.forms import FORMS

products = pytest.mark.parametrize("product", PRODUCTS, ids=lambda it: it.record)


@products
def test_a_product_is_one_value(product: Product):
    assert pickle.loads(pickle.dumps(product)) == product and hash(product) == hash(pickle.loads(pickle.dumps(product)))
    assert of_codes(product.codes) is product
    assert len(product.codes.values) in (0, 1 << product.codes.bits)


@products
def test_what_it_names_exists(product: Product):
    for way in product.ways:
        for name in (*way.converters.values(), *way.plain.values()):
            assert CONVERTERS[name].storage_bits == product.codes.bits
    assert {product.layout, *(it.layout for it in product.programs if it.layout)} <= set(INSTANCES)
    made = import_module(f"terrazzo.ops.{product.module}").PackedWeight
    names = {plane.name for plane in product.planes} | set(product.facts) | {"n", "k", "layout", "target"}
    assert {field.name for field in fields(made)} == names and made.VERSION == product.version
    for way in product.ways:
        assert f"{(way.x or product.x).operand} {way.cost or way.rule}" in FORMS


@products
@pytest.mark.parametrize("experts", (0, 8))
@pytest.mark.parametrize("arch", CAPABILITIES)
def test_its_programs_are_those_of_plans(product: Product, experts: int, arch: str):
    """Those of many M, all groups and both kinds of scales, and no others."""
    kind, one = KINDS[product.record], product.on(arch)
    groups = (None, *product.codes.groups)
    facts = [kind.facts(4096, 4096, experts, dtype="bfloat16", group=it, symmetric=False) for it in groups]
    if product.planned and not experts:
        facts.append({name: it for name, it in facts[0].items() if name != "scales"})
    found = set()
    for fact, m in every(facts, (1, 16, 64, 512, 4096)):
        try:
            request = kind.plan(m, fact, Target.parse(arch)).request
        except ArgumentError:
            continue  # a target that has none
        found.add((request.name.partition(".")[0], request.entry))
    own = () if one is None else one.experts if experts else one.all
    assert found == {(product.kernels, entry) for entry in own}


@products
def test_its_planes_have_the_shapes_of_packed_weights(product: Product):
    own, zeros = product.codes, (False, True) if product.codes.symmetric else (False,)
    for n, k, has in every((64, 1000), (256, 1000, 4096), zeros):
        for group, scale in every((*own.groups, *[k] * own.one_group), own.scales):
            block = product.direct and group < k
            found = tuple(product.shapes(Size(n, k, group, scale, has, block)).values())
            if product.wide:
                dtype, whole = scale if scale in HALVES else HALVES[0], group >= k and own.one_group
                numerics = choose_way(own, scale, dtype, False).name
                read = Operand(0 if whole else group, not has, scale, dtype, numerics, own.name)
                assert found[0] == (-(-k // 128) * 128 // own.block_k, -(-n // 64), 512)
                assert found[1] == (read.records(-(-k // 128) * 128), -(-n // 64), read.record_bytes)
            elif product.direct:
                codes = torch.zeros(n, k, dtype=torch.int8).view(getattr(torch, product.x.code))
                scales = torch.ones(-(-n // 128), -(-k // 128)) if block else torch.ones(n)
                packed = w8a8.QuantizedWeight.canonical(codes, scales).pack()
                assert found == (tuple(packed.words.shape), tuple(packed.scales.shape))
            elif product.planned:
                assert found == ((-(-k // 128), -(-n // 64), 1056),)
            else:
                unit = derive_unit(product.layout, 2, 128 // min(group, 128), 2)
                assert found == (unit.shape(n, k), unit.padded(n, k)[:1])


@products
def test_a_target_without_its_instructions_is_refused_with_what_serves_there(product: Product):
    for arch in CAPABILITIES:
        if arch in product.targets:
            product.check(Target.parse(arch))
            continue
        with pytest.raises(ArgumentError) as error:
            product.check(Target.parse(arch))
        assert (error.value.argument, error.value.value) == ("target", arch)
        assert all(known in str(error.value) for known in product.targets) and error.value.remedy == product.instead
    for name in re.findall(r"terrazzo\.ops\.(\w+)", product.instead):
        other = next(it for it in PRODUCTS if it.module == name)
        assert set(CAPABILITIES) == set(other.targets) and other.codes.bits == product.codes.bits


def test_what_the_wheel_lacks_has_a_reason():
    assert {one.record for one in PRODUCTS if not one.wheel} == {it.operator for it in ready.PARTS} - {"attention"}


def test_readers_and_rows_of_the_registry_are_derived():
    for record, family in stored_layers.FAMILIES.items():
        alike = [one for one in PRODUCTS if one.conventions and one.module == of_record(record).module]
        assert family.operator == of_record(record).module
        assert set(family.readers) == {name for one in alike for name in one.conventions}
        assert set(family.activations) == {it for one in alike for it in one.stated}
    found = {}
    for row in registry.REGISTRY:
        key = (row.operator, frozenset(row.activations), frozenset(row.scales), row.groups)
        found[key] = tuple(row.numerics), row.targets
    for one in PRODUCTS:
        groups = (*one.codes.groups, *["K"] * one.codes.one_group)
        key = one.root, frozenset({"float16", "bfloat16", one.x.code} - {""}), frozenset(one.codes.scales), groups
        numerics, targets = found[key]
        assert numerics[: len(one.numerics)] == one.numerics and targets == one.targets


def of_record(record: str) -> Product:
    return next(one for one in PRODUCTS if one.record == record)
