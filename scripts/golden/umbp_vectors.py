#!/usr/bin/env python3.11
"""Writes the golden vectors of the UMBP data model from vLLM's own `umbp/data.py`.

    umbp_vectors.py WHEEL [OUTPUT]       or      VLLM_WHEEL=WHEEL umbp_vectors.py

WHEEL is the wheel of vLLM 0.33.0, the version that the vectors are named after. Only `umbp/data.py` is read from it and
run with stand-ins for torch and for the vLLM modules that it imports, so plain Python 3.11 is enough. The seed is fixed:
the same wheel gives the same file. Namespaces of layout version 1 come from a statement of that derivation below,
because no wheel of that version is published.
"""

import hashlib
import json
import os
import pathlib
import random
import sys
import types
import zipfile
from dataclasses import dataclass, field, make_dataclass, replace
from enum import IntEnum
from fractions import Fraction
from types import SimpleNamespace

SEED = 20261201
VERSION = "0.33.0"
MODULE = "vllm/distributed/kv_transfer/kv_connector/v1/umbp/data.py"
REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
OUTPUT = REPOSITORY / "fabric/core/tests/golden/umbp_v033.json"


# ---- stand-ins ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KVCacheSpec:
    block_size: int
    dcp_sharded: bool = field(default=False, kw_only=True)
    block_stride_alignment: object = field(default=None, kw_only=True)
    is_draft: bool = field(default=False, kw_only=True, compare=False)

    @property
    def page_size_bytes(self):
        return self._page()


@dataclass(frozen=True)
class UniformTypeKVCacheSpecs(KVCacheSpec):
    kv_cache_specs: dict = None

    def _page(self):
        return sum(spec.page_size_bytes for spec in self.kv_cache_specs.values())


class QuantMode(IntEnum):
    NONE = 0
    FP8 = 1


class Dtype:
    def __init__(self, name, size):
        self.name, self.size = name, size

    def __str__(self):
        return f"torch.{self.name}"

    __repr__ = __str__


DTYPES = [Dtype("bfloat16", 2), Dtype("float32", 4), Dtype("uint8", 1), Dtype("float8_e4m3fn", 1)]


@dataclass(frozen=True)
class FullAttentionSpec(KVCacheSpec):
    num_kv_heads: int = 8
    head_size: int = 64
    dtype: object = None
    kv_quant_mode: object = QuantMode.NONE
    page_size_padded: object = None
    sliding_window: object = None

    def _page(self):
        return self.page_size_padded or 2 * self.block_size * self.num_kv_heads * self.head_size * self.dtype.size


@dataclass(frozen=True)
class MambaSpec(KVCacheSpec):
    shapes: tuple = ()
    dtypes: tuple = ()
    mamba_type: str = "mamba2"
    ratio: object = Fraction(1, 2)
    scale: float = 0.25

    def _page(self):
        total = 0
        for shape in self.shapes:
            size = 4
            for extent in shape:
                size *= extent
            total += size
        return total


# A field named as the entry that holds the kind of the specification.
ClashingSpec = make_dataclass(
    "ClashingSpec",
    [("kind", str, field(default="inner")), ("label", str, field(default="ü\"\\\u2028\U0001f600"))],
    bases=(KVCacheSpec,),
    frozen=True,
    namespace={"_page": lambda self: 512},
)


def load_data(wheel):
    """Runs the wheel's data.py against the stand-ins and returns it as a module."""
    name = pathlib.Path(wheel).name
    if not name.startswith(f"vllm-{VERSION}-"):
        sys.exit(f"{name} is not a wheel of vLLM {VERSION}")
    source = zipfile.ZipFile(wheel).read(MODULE).decode()
    base = types.ModuleType("base")
    for stub in ("KVConnectorHandshakeMetadata", "KVConnectorMetadata", "KVConnectorWorkerMetadata"):
        setattr(base, stub, type(stub, (), {}))
    interface = types.ModuleType("interface")
    interface.KVCacheConfig = interface.KVCacheGroupSpec = SimpleNamespace
    interface.KVCacheSpec, interface.UniformTypeKVCacheSpecs = KVCacheSpec, UniformTypeKVCacheSpecs
    packages = [
        "vllm", "vllm.distributed", "vllm.distributed.kv_transfer", "vllm.distributed.kv_transfer.kv_connector",
        "vllm.distributed.kv_transfer.kv_connector.v1", "vllm.v1", "torch",
    ]  # fmt: skip
    for package in packages:
        sys.modules[package] = types.ModuleType(package)
    sys.modules["vllm.distributed.kv_transfer.kv_connector.v1.base"] = base
    sys.modules["vllm.v1.kv_cache_interface"] = interface
    module = types.ModuleType("umbp_data")
    sys.modules["umbp_data"] = module
    exec(compile(source, MODULE, "exec"), module.__dict__)
    return module


# ---- helpers --------------------------------------------------------------------------------------------------------


def attempt(action, *args, **kwargs):
    """The result of a call, or the type and text of its exception."""
    try:
        return {"ok": action(*args, **kwargs)}
    except Exception as error:  # Every kind of failure is a vector.
        return {"error": [type(error).__name__, str(error)]}


NAMESPACES = [
    "0123456789abcdef0123456789abcdef", "default", "a:b", "a:tp1:pcp0:dcp0:pp0:g0:ff", ":", "x y", "Ü/模型", "umbp:vllm:v1:",
    "tp0", "line\nbreak", "\U0001f600", "-", "auto2",
]  # fmt: skip


# ---- keys and topologies --------------------------------------------------------------------------------------------


def keys(data, rng):
    vectors = []
    extremes = [0, 1, 7, 9, 10, 99, 100, 4095, 2**31, 2**32 - 1]
    for index in range(90):
        namespace = NAMESPACES[index % len(NAMESPACES)]
        ranks = [rng.choice(extremes) if index % 3 else rng.randrange(64) for _ in range(4)]
        group = rng.choice(extremes) if index % 4 == 0 else rng.randrange(8)
        length = 32 if index % 2 else rng.choice([1, 2, 8, 16, 20, 31, 33, 48, 64])
        digest = rng.randbytes(length)
        tp, pcp, dcp, pp = ranks
        codec = data.BlockIdentityCodec(data.UMBPNamespace(namespace), tp, pp, pcp, dcp)
        key = codec.key(digest, group)
        assert key == codec.key_for_namespace(digest, group, (tp, pcp, dcp, pp))
        vectors.append([namespace, ranks, group, digest.hex(), key])
    return vectors


def key_errors(data):
    codec = data.BlockIdentityCodec(data.UMBPNamespace("n"))
    return [
        {"hash": "", "group": 0, **attempt(codec.key, b"", 0)},
        {"hash": "00", "group": -1, **attempt(codec.key, b"\0", -1)},
        {"hash": "00", "group": 0, **attempt(codec.key, b"\0", 0)},
    ]


def topology_fields(topology):
    names = ("tp_rank", "tp_size", "pp_rank", "pp_size", "pcp_rank", "pcp_size", "dcp_rank", "dcp_size")
    return [getattr(topology, name) for name in names]


def topologies(data, rng):
    def describe(values):
        topology = data.RankTopology(*values)
        listing = attempt(lambda: [list(item) for item in topology.all_namespaces()])
        if len(listing.get("ok", ())) > 40:
            text = json.dumps(listing["ok"], separators=(",", ":"))
            listing = {"ok_sha256": hashlib.sha256(text.encode()).hexdigest()}
        return {
            "local": list(topology.local_namespace),
            "count": attempt(lambda: topology.rank_count),
            "all": listing,
        }

    cases = [[0, 1] * 4]
    for position in range(8):
        for value in (-1, 0, 1, 2, 5):
            case = [0, 2, 0, 3, 0, 2, 0, 2]
            case[position] = value
            cases.append(case)
    for _ in range(60):
        case = []
        for _ in range(4):
            size = rng.choice([1, 1, 2, 3, 4, 8])
            case += [rng.randrange(size), size]
        cases.append(case)
    cases += [[0, 0, 5, 0, 0, -1, 0, 0], [3, 2, 9, 1, 9, 1, 9, 1], [0, 8, 9, 1, 9, 1, 9, 1], [0, 8, 0, 1, 9, 1, 9, 1]]
    cases += [[0, 64, 0, 8, 0, 4, 0, 1], [63, 64, 7, 8, 3, 4, 15, 16], [0, 6, 0, 1, 0, 1, 0, 4], [0, 4, 0, 1, 0, 1, 0, 8]]
    return [{"args": case, **attempt(describe, case)} for case in cases]


def parallel(data, rng):
    def derive(tp, pp, pcp, dcp, rank):
        config = SimpleNamespace(
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            prefill_context_parallel_size=pcp,
            decode_context_parallel_size=dcp,
            rank=rank,
        )
        return topology_fields(data.RankTopology.from_vllm_config(SimpleNamespace(parallel_config=config)))

    cases = [[2, 2, 2, 2, rank] for rank in range(10)] + [[1, 1, 1, 1, 0], [4, 1, 1, 2, -1], [3, 2, 2, 1, -5]]
    cases += [[0, 1, 1, 1, 0], [1, 0, 1, 1, 0], [1, 1, 0, 1, 0], [1, 1, 1, 0, 0], [-2, 1, 1, 1, 0], [1, -1, 1, 1, 3]]
    cases += [[1, 1, -3, 1, 1], [4, 1, 1, -2, 1]]
    for _ in range(60):
        sizes = [rng.choice([1, 2, 3, 4, 8, 16]) for _ in range(4)]
        cases.append([*sizes, rng.randrange(2 * sizes[0] * sizes[1] * sizes[2])])
    return [{"args": case, **attempt(derive, *case)} for case in cases]


def topology_keys(data, rng):
    vectors = []
    for _ in range(14):
        dcp = rng.choice([1, 1, 2, 3])
        tp = rng.choice([1, 2, 3, 4])
        args = [0, tp, 0, rng.choice([1, 2]), 0, rng.choice([1, 2]), 0, dcp]
        groups = rng.choice([[0], [0, 1], [2, 0], []])
        digest = rng.randbytes(4)
        namespace = rng.choice(NAMESPACES)
        codec = data.BlockIdentityCodec(data.UMBPNamespace(namespace))
        result = attempt(lambda: list(codec.keys_for_topology(digest, data.RankTopology(*args), groups)))
        vectors.append({"namespace": namespace, "args": args, "groups": groups, "hash": digest.hex(), **result})
    return vectors


# ---- caches: configurations, namespaces, layouts --------------------------------------------------------------------


def random_spec(rng):
    block = rng.choice([16, 32, 64])
    kind = rng.random()
    if kind < 0.65:
        return FullAttentionSpec(
            block,
            num_kv_heads=rng.choice([1, 2, 8]),
            head_size=rng.choice([32, 64, 128]),
            dtype=rng.choice(DTYPES),
            kv_quant_mode=rng.choice(list(QuantMode)),
            page_size_padded=rng.choice([None, None, 65536]),
            sliding_window=rng.choice([None, 256, 4096]),
            dcp_sharded=rng.random() < 0.3,
            is_draft=rng.random() < 0.2,
        )
    if kind < 0.9:
        return MambaSpec(block, shapes=((rng.randrange(1, 9), 4), (3,)), dtypes=(DTYPES[0],), scale=rng.random())
    return ClashingSpec(block)


def random_config(rng, index):
    layer_number = 0
    groups, tensors = [], []
    for _ in range(rng.choice([1, 1, 2, 3])):
        names = []
        for _ in range(rng.randrange(1, 5)):
            suffix = rng.choice(["self_attn.attn", "mixer", "l'éo\"", "\U0001f600"]) if index % 5 == 0 else "self_attn.attn"
            names.append(f"model.layers.{layer_number}.{suffix}")
            layer_number += 1
        if rng.random() < 0.4:
            specs = {name: random_spec(rng) for name in names}
            first = next(iter(specs.values()))
            specs = {name: replace(spec, block_size=first.block_size) for name, spec in specs.items()}
            spec = UniformTypeKVCacheSpecs(first.block_size, kv_cache_specs=specs)
            largest = max(item.page_size_bytes for item in specs.values())
        else:
            spec = random_spec(rng)
            largest = spec.page_size_bytes
        groups.append(
            SimpleNamespace(layer_names=names, kv_cache_spec=spec, enable_kv_transfer=rng.random() < 0.85)
        )
        layers = names + (["model.extra"] if rng.random() < 0.2 else [])
        if rng.random() < 0.3:
            rng.shuffle(layers)
        half = rng.randrange(len(layers) + 1)
        for part in (layers[:half], layers[half:]):
            factor = rng.choice([1, 1, 2, len(names)])
            stride = largest * factor - (1 if rng.random() < 0.06 else 0)
            tensors.append(SimpleNamespace(layers=part, block_stride=stride))
    layout = rng.choice([None, "LBNHC", "BLHNC"])
    return SimpleNamespace(kv_cache_groups=groups, kv_cache_tensors=tensors, kv_cache_layout=layout)


def spec_json(spec):
    fields = {name: str(getattr(spec, name)) for name in spec.__dataclass_fields__}
    return {
        "kind": type(spec).__name__,
        "fields": fields,
        "page": spec.page_size_bytes,
        "block_size": spec.block_size,
    }


def config_json(config):
    groups = []
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            layers = {name: spec_json(item) for name, item in spec.kv_cache_specs.items()}
            shape = {"per_layer": layers, "kind": type(spec).__name__, "block_size": spec.block_size}
        else:
            shape = {"shared": spec_json(spec)}
        groups.append({"layers": group.layer_names, "transfer": group.enable_kv_transfer, **shape})
    return {"groups": groups, "tensors": [[tensor.layers, tensor.block_stride] for tensor in config.kv_cache_tensors]}


def region_json(region):
    return [
        region.layer_name,
        region.group_id,
        region.block_stride,
        region.block_bytes,
        region.object_offset,
        region.block_size,
    ]


def namespace_v1(inputs, config):
    """The derivation of layout version 1, from its documentation."""
    groups = []
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        groups.append(
            {
                "layers": group.layer_names,
                "block_size": spec.block_size,
                "kind": type(spec).__name__,
                "dtype": str(getattr(spec, "dtype", None)),
            }
        )
    named = {
        "model": inputs["model"], "revision": inputs["revision"], "block_size": inputs["block_size"],
        "cache_layout": config.kv_cache_layout, "groups": groups, "layout_version": 1,
        **{name: inputs[name] for name in ("tp", "pp", "pcp", "dcp")},
    }  # fmt: skip
    if inputs["speculative"] is not None:
        named["speculative"] = inputs["speculative"]
    text = json.dumps(named, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def engine_config(inputs, extra):
    draft = inputs["speculative"]
    speculative = None
    if draft is not None:
        draft_model = SimpleNamespace(model=draft["model"], revision=draft["revision"])
        speculative = SimpleNamespace(method=draft["method"], draft_model_config=draft_model)
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
        model_config=SimpleNamespace(model=inputs["model"], revision=inputs["revision"]),
        cache_config=SimpleNamespace(block_size=inputs["block_size"]),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=inputs["tp"],
            pipeline_parallel_size=inputs["pp"],
            prefill_context_parallel_size=inputs["pcp"],
            decode_context_parallel_size=inputs["dcp"],
        ),
        speculative_config=speculative,
    )


def configs(data, rng):
    models = ["meta-llama/Llama-3.1-8B", "/models/a b", "模型/ü", 'quote"back\\slash', "\x00\x1f\x7f\u2028\U0001f600", ""]
    vectors = []
    for index in range(44):
        config = random_config(rng, index)
        draft = rng.choice([None, None, {"method": "eagle", "model": rng.choice(models), "revision": None}])
        inputs = {
            "model": rng.choice(models),
            "revision": rng.choice([None, "main", "é"]),
            "block_size": rng.choice([16, 32]),
            **{name: rng.choice([1, 2, 4]) for name in ("tp", "pp", "pcp", "dcp")},
            "speculative": draft,
        }
        engine = engine_config(inputs, rng.choice([{}, {"key_namespace": "auto"}]))
        namespace = data.UMBPNamespace.from_vllm_config(engine, config).value
        regions = attempt(lambda: [region_json(item) for item in data.KVLayoutPlanner.from_kv_cache_config(config).regions])
        vectors.append(
            {
                **config_json(config),
                "cache_layout": config.kv_cache_layout,
                "inputs": inputs,
                "v1": namespace_v1(inputs, config),
                "v2": namespace,
                "regions": regions,
            }
        )
    return vectors


def configured(data):
    vectors = []
    for extra in ({}, *({"key_namespace": value} for value in ("auto", "x", "a:b", "", 5, None, ["x"], True))):
        engine = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra))
        result = attempt(lambda: getattr(data.UMBPNamespace.configured(engine), "value", None))
        vectors.append({"extra": extra, **result})
    return vectors


def regions(data):
    cases = [
        ["l", 0, 16, 16, 0, 1], ["l", 0, 0, 0, 0, 1], ["l", 0, 16, 0, 0, 1], ["l", 0, 0, 16, 0, 1], ["l", 0, 16, 16, 0, 0],
        ["l", 0, 16, 17, 0, 1], ["it's", 3, 1, 2, 9, 1], ["l", 1, 2**40, 2**31, 2**50, 32], ["a\\b\n", 0, 4, 5, 0, 1],
        ["l", 0, -1, 16, 0, 1], ["l", 0, 16, -16, 0, 1], ["l", 0, 16, 16, 0, -2], ["l", 0, 0, 16, 0, 0],
    ]  # fmt: skip
    return [{"args": case, **attempt(lambda: region_json(data.KVRegion(*case)))} for case in cases]


def descriptors(data):
    one = data.KVRegion("a", 0, 8, 8, 0)
    two = data.KVRegion("b", 1, 16, 12, 8)
    cases = [((), "rank_local"), ((one,), "rank_local"), ((one, two), "other"), ((one, one), "x"), ((one,), ""), ((one, one), "")]
    vectors = []
    for items, name in cases:
        result = attempt(lambda: data.KVLayoutDescriptor(items, data.RankTopology(), name).object_size)
        vectors.append({"regions": [region_json(item) for item in items], "format": name, **result})
    return vectors


class Tensor:
    def __init__(self, base, stride, element, ndim, blocks):
        self.values = [base, stride, element, ndim, blocks]
        self.ndim = ndim

    def data_ptr(self):
        return self.values[0]

    def stride(self, dimension):
        assert dimension == 0
        return self.values[1]

    def element_size(self):
        return self.values[2]


def plan_json(plan):
    assert plan.block_hash is None and plan.parent_block_hash is None and plan.token_ids == ()
    ranges = [list(item) for item in plan.ranges]
    return {"key": plan.key, "block": plan.block_id, "group": plan.group_id, "request": plan.request_id, "ranges": ranges}


def random_layout(data, rng):
    groups = rng.choice([1, 1, 2, 3])
    items, offset = [], 0
    for index in range(rng.randrange(1, 7)):
        block_bytes = rng.choice([64, 512, 1000, 4096, 12288])
        stride = block_bytes * rng.choice([1, 1, 2, 3])
        group = rng.randrange(groups) * rng.choice([1, 1, 1, 5])
        items.append(data.KVRegion(f"layer{index}", group, stride, block_bytes, offset, rng.choice([16, 32])))
        offset += block_bytes
    return items


def random_tensors(rng, items, fault):
    tensors = {}
    base = rng.choice([0, 4096, 0x7F00_0000_0000, 2**60])
    for region in items:
        element = rng.choice([1, 2, 4])
        choices = [region.block_stride]
        for divisor in (2, 3, 4, 8):
            stride = region.block_stride // divisor
            fits = region.block_stride % divisor == 0 and stride % element == 0
            if fits and (region.block_bytes <= stride or region.block_bytes % stride == 0):
                choices.append(stride)
        stride = rng.choice(choices)
        if stride % element:
            element = 1
        tensors[region.layer_name] = Tensor(base, stride // element, element, rng.choice([2, 4, 5]), 4096)
        base += 4096 * region.block_stride
    # One fault at most: the reference looks at layers in no fixed order.
    name = items[-1].layer_name
    region = items[-1]
    if fault == "missing":
        for item in items[:: rng.choice([1, 2])]:
            del tensors[item.layer_name]
    elif fault == "scalar":
        tensors[name] = Tensor(0, 0, 1, 0, 0)
    elif fault == "zero":
        tensors[name] = Tensor(0, 0, 1, 2, 16)
    elif fault == "larger":
        tensors[name] = Tensor(0, region.block_stride * 2, 1, 2, 16)
    elif fault == "odd":
        tensors[name] = Tensor(0, region.block_stride - 1, 1, 2, 16)
    elif fault == "extra":
        tensors["unused"] = Tensor(5, 1, 1, 0, 0)
    return tensors


def planner_steps(data, rng, planner, items):
    groups = sorted({item.group_id for item in items})
    steps = []
    for number in range(4):
        block = rng.choice([0, 1, 2, rng.randrange(400), -1 if number == 3 else 3])
        group = rng.choice([None, *groups, 77 if number == 2 else groups[0]])
        request = rng.choice([None, "req"])
        operation = rng.choice(["registered", "at", "materialize"])
        step = {"op": operation, "block": block, "group": group, "request": request}
        if operation == "registered":
            result = attempt(
                lambda: plan_json(planner.plan_registered_block("k", block, group_id=group, request_id=request))
            )
        elif operation == "at":
            addresses = {item.layer_name: 1000 * index for index, item in enumerate(items)}
            if rng.random() < 0.15:
                del addresses[items[0].layer_name]
            step["addresses"] = addresses
            result = attempt(
                lambda: plan_json(planner.plan_for_block("k", block, addresses, group_id=group, request_id=request))
            )
        else:
            plan = data.BlockTransferPlan("k", block, request_id=request, group_id=group)
            result = attempt(lambda: plan_json(planner.materialize(plan)))
        steps.append({**step, **result})
    return steps


def planners(data, rng):
    faults = [None] * 8 + ["extra", "missing", "scalar", "larger", "odd", "zero", "unregistered"]
    vectors = []
    for index in range(75):
        fault = faults[index % len(faults)]
        items = random_layout(data, rng) if index else []
        planner = data.KVLayoutPlanner(items)
        vector = {"regions": [region_json(item) for item in items], "object_size": planner.object_size}
        if fault != "unregistered":
            tensors = random_tensors(rng, items, fault) if items else {}
            vector["tensors"] = {name: tensor.values for name, tensor in tensors.items()}
            vector["register"] = attempt(planner.register_kv_caches, tensors)
            if "error" in vector["register"]:
                # A refused registration leaves half of the strides behind in the reference: plan with a fresh planner.
                planner = data.KVLayoutPlanner(items)
        vector["steps"] = planner_steps(data, rng, planner, items) if items else []
        if not items:
            vector["steps"] = [{"op": "registered", "block": 0, "group": None, "request": None,
                                **attempt(planner.plan_registered_block, "k", 0)}]  # fmt: skip
        vectors.append(vector)
    return vectors


# ---- requests and jobs ----------------------------------------------------------------------------------------------


def trackers(data, rng):
    vectors = []
    for _ in range(50):
        tracker = data.RequestTracker()
        groups = rng.choice([1, 1, 2, 3])
        steps = []
        for _ in range(rng.randrange(3, 9)):
            kind = rng.random()
            if kind < 0.6:
                count = groups if rng.random() < 0.93 else groups + 1
                tables = []
                for group in range(count):
                    known = list(tracker.block_ids[group]) if group < len(tracker.block_ids) else []
                    fresh = [rng.randrange(9) for _ in range(rng.randrange(4))]
                    shape = rng.randrange(5)
                    tables.append([known + fresh, fresh, known[-2:], [], known[:1] + fresh][shape])
                step = ["update", tables]
                result = attempt(tracker.update_blocks, tuple(tables))
            elif kind < 0.7:
                tables = [[rng.randrange(9) for _ in range(rng.randrange(4))] for _ in range(groups)]
                step = ["replace", tables]
                result = attempt(tracker.replace_blocks, tuple(tables))
            elif kind < 0.95:
                step = ["mark", rng.randrange(200), rng.choice([1, 16, 32, 32, 0])]
                result = attempt(tracker.mark_saved, step[1], step[2])
            else:
                step = ["reset"]
                tracker.load_spec = data.LoadSpec(1, 2)
                result = attempt(tracker.reset)
            state = [tracker.saved_tokens, [list(table) for table in tracker.block_ids]]
            steps.append({"step": step, **result, "state": state})
        vectors.append(steps)
    return vectors


def load_specs(data):
    pairs = [(0, 0), (0, 96), (32, 96), (96, 32), (2**40, 2**41)]
    return [[local, external, data.LoadSpec(local, external).num_tokens_to_load] for local, external in pairs]


def random_job(data, rng):
    count = rng.randrange(5)
    names = [f"k{rng.randrange(5)}" if rng.random() < 0.2 else f"k{index}" for index in range(count)]
    blocks = [rng.randrange(100) for _ in range(count)]
    groups = [rng.randrange(2) for _ in range(count)]
    lengths = [[rng.randrange(1, 5000) for _ in range(rng.randrange(3))] for _ in range(count)]
    kind = rng.choice(["plans", "load", "store"])
    if kind == "plans":
        plans = tuple(
            data.BlockTransferPlan(
                name, block, tuple(data.KVRange("l", 0, block, 0, 1, length, 0) for length in sizes), group_id=group
            )
            for name, block, group, sizes in zip(names, blocks, groups, lengths)
        )
    elif kind == "load":
        plans = data.BlockLoadBatch(names, blocks, groups, "r")
    else:
        hashes = [bytes([index + 1]) for index in range(count)]
        plans = data.BlockStoreBatch(names, blocks, groups, hashes, [None] * count, [()] * count, [16] * count, "r")
    sizes = [rng.randrange(1, 1 << 40) for _ in range(count)] if rng.random() < 0.6 else None
    if sizes is not None and rng.random() < 0.1:
        sizes = sizes + [1]
    job = data.TransferJobState(plans, plan_bytes=None if sizes is None else tuple(sizes))
    described = {"kind": kind, "keys": names, "blocks": blocks, "groups": groups, "lengths": lengths, "plan_bytes": sizes}
    return job, described


def jobs(data, rng):
    vectors = []
    for _ in range(80):
        job, vector = random_job(data, rng)
        pool = [*vector["keys"], *vector["keys"], "foreign"] if rng.random() < 0.3 else vector["keys"] or ["foreign"]
        steps = []
        for _ in range(rng.randrange(2, 7)):
            chosen = [rng.choice(pool) for _ in range(rng.randrange(4))]
            kind = rng.random()
            if kind < 0.25:
                step, result = ["start"], attempt(job.start)
            elif kind < 0.6:
                step, result = ["complete", chosen], attempt(job.complete, chosen)
            elif kind < 0.85:
                error = rng.choice([None, "broken"])
                step, result = ["fail", chosen, error], attempt(job.fail, chosen, error)
            else:
                step, result = ["cancel", "stop"], attempt(job.cancel, "stop")
            state = {
                "status": job.status.value,
                "completed": sorted(job.completed_keys),
                "failed": sorted(job.failed_keys),
                "error": job.error,
                "bytes": attempt(lambda: job.completed_bytes),
                "failed_blocks": sorted(job.failed_block_ids),
            }
            steps.append({"step": step, **result, "state": state})
        vectors.append({**vector, "steps": steps})
    return vectors


def batches(data):
    def load(keys_, blocks, groups):
        return [
            [plan.key, plan.block_id, plan.group_id, plan.request_id, plan.medium, plan.block_size]
            for plan in data.BlockLoadBatch(keys_, blocks, groups, "r")
        ]

    def store(*columns):
        hashes, parents = ([None if item is None else bytes.fromhex(item) for item in columns[index]] for index in (3, 4))
        batch = data.BlockStoreBatch(*columns[:3], hashes, parents, [tuple(item) for item in columns[5]], columns[6], "r")
        return [
            [
                plan.key, plan.block_id, plan.group_id, plan.request_id, plan.medium, plan.block_size, plan.block_hash.hex(),
                plan.parent_block_hash and plan.parent_block_hash.hex(), list(plan.token_ids),
            ]
            for plan in batch
        ]  # fmt: skip

    loads = [
        [["a", "b"], [1, 2], [0, 1]], [[], [], []], [["a"], [], [0]], [["a"], [1], [0, 0]], [[], [1], []],
    ]  # fmt: skip
    good = [["a", "b"], [1, 2], [0, 1], ["01", "02"], [None, "01"], [[1, 2], []], [16, 32]]
    stores = [good] + [[*good[:index], good[index][:1], *good[index + 1 :]] for index in range(7)]
    return {
        "load": [{"columns": item, **attempt(load, *item)} for item in loads],
        "store": [{"columns": item, **attempt(store, *item)} for item in stores],
    }


def aggregation(data, rng):
    vectors = []
    for _ in range(12):
        reports, total = [], data.UMBPConnectorWorkerMetadata()
        for _ in range(rng.randrange(1, 5)):
            events = {}
            for event in rng.sample(range(5), rng.randrange(4)):
                failed = {(rng.randrange(2), bytes([rng.randrange(3)])) for _ in range(rng.randrange(3))}
                events[event] = data.StoreEventResult(rng.randrange(3), failed)
            reports.append(events_json(events))
            total = total.aggregate(data.UMBPConnectorWorkerMetadata(events))
        vectors.append({"reports": reports, "total": events_json(total.store_events)})
    return vectors


def events_json(events):
    return [
        [event, result.completed_workers, sorted([group, digest.hex()] for group, digest in result.failed_objects)]
        for event, result in sorted(events.items())
    ]


def main():
    wheel = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("VLLM_WHEEL")
    if not wheel:
        sys.exit(__doc__)
    output = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else OUTPUT
    data = load_data(wheel)
    rng = random.Random(SEED)
    sections = {
        "vllm": VERSION,
        "seed": SEED,
        "keys": keys(data, rng),
        "key_errors": key_errors(data),
        "topologies": topologies(data, rng),
        "parallel": parallel(data, rng),
        "topology_keys": topology_keys(data, rng),
        "configs": configs(data, rng),
        "configured": configured(data),
        "regions": regions(data),
        "descriptors": descriptors(data),
        "planners": planners(data, rng),
        "trackers": trackers(data, rng),
        "load_specs": load_specs(data),
        "jobs": jobs(data, rng),
        "batches": batches(data),
        "aggregation": aggregation(data, rng),
    }
    lines = [f"{json.dumps(name)}:{json.dumps(value, separators=(',', ':'))}" for name, value in sections.items()]
    output.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    for name, value in sections.items():
        if isinstance(value, (list, dict)):
            print(f"{name}: {len(value)} vectors, {len(json.dumps(value, separators=(',', ':')))} bytes")
    print(f"{output}: {output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
