"""The flat buffer, its views, and the plan of buckets over it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.arrays import CACHE_LINE, aligned_empty, aligned_zeros
from mpitrain.config.schema import ExchangeConfig, RuleConfig
from mpitrain.errors import ConfigError
from mpitrain.params import ALIGN, SMALL_SIZE, Layout, Params, ParamSpec
from mpitrain.partition import ShardSpec
from mpitrain.train.buckets import codec_of, group_of, plan_buckets

SPECS = [
    ParamSpec("embed.weight", (33, 40), std=0.5, decay=True),
    ParamSpec("norm.gain", (40,), mean=1.0),
    ParamSpec("norm.bias", (40,)),
    ParamSpec("mix.weight", (5, 7), std=0.1),
    ParamSpec("long.bias", (2000,), std=1.0),
    ParamSpec("empty.weight", (0, 9), std=1.0),
    ParamSpec("scalar", (), mean=2.0),
    ParamSpec("head.weight", (40, 30), std=0.2, decay=True),
    ParamSpec("head.bias", (30,)),
]
BY_SIZE = group_of(ExchangeConfig())
GROUPINGS = {"one": lambda spec: "all", "by size": BY_SIZE, "each": lambda spec: spec.name}
SHAPES = st.sampled_from([(), (0,), (3,), (130,), (2000,), (5, 5), (32, 32), (33, 40), (64, 64), (0, 8), (7, 11, 13)])


def specs_of(shapes):
    return [ParamSpec(f"t{i}", shape, std=1.0) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("lead", [0, 16, 24])
@pytest.mark.parametrize("dtype", ["u1", "f4", "f8"])
@pytest.mark.parametrize("size", [0, 1, 1000])
def test_allocation_is_aligned(size, dtype, lead):
    out = aligned_empty(size, dtype, lead_bytes=lead)
    assert (out.size, out.dtype) == (size, dtype)
    assert (out.ctypes.data + lead) % CACHE_LINE == 0 or size == 0
    assert not aligned_zeros(size, dtype).any()


def test_what_counts_as_small():
    small = [(), (5000,), (31, 33), (1, 1023), (0, 9)]
    large = [(32, 32), (2, 512), (16, 8, 8)]
    assert all(ParamSpec("x", shape).small for shape in small)
    assert not any(ParamSpec("x", shape).small for shape in large)
    assert SMALL_SIZE == 1024


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(shapes=st.lists(SHAPES, max_size=12), grouping=st.sampled_from(sorted(GROUPINGS)))
def test_layout_places_every_tensor_once(shapes, grouping):
    specs = specs_of(shapes)
    layout = Layout(specs, GROUPINGS[grouping])
    assert {s.spec.name for s in layout.segments.values()} == {spec.name for spec in specs}
    segments = sorted(layout.segments.values(), key=lambda s: (s.start, s.stop))
    assert all(left.stop <= right.start for left, right in zip(segments, segments[1:], strict=False))
    assert layout.size == max((s.stop for s in segments), default=0)
    assert layout.num_parameters == sum(spec.size for spec in specs)
    for segment in segments:
        assert segment.spec.small or segment.start % ALIGN == 0
        assert segment.stop - segment.start == segment.spec.size
    covered = [segment for group in layout.groups for segment in layout.members(group)]
    assert len(covered) == len(specs)
    for group, (start, stop) in layout.groups.items():
        members = layout.members(group)
        assert start % ALIGN == 0
        assert [m.spec.name for m in members] == [s.name for s in specs if GROUPINGS[grouping](s) == group]
        assert members[0].start == start
        assert members[-1].stop == stop


def test_small_tensors_are_packed_and_groups_follow_their_first_tensor():
    layout = Layout(SPECS, BY_SIZE)
    assert list(layout.groups) == ["int8", "fp16"]
    small = layout.members("fp16")
    assert [s.spec.name for s in small] == [s.name for s in SPECS if s.small]
    assert all(left.stop == right.start for left, right in zip(small, small[1:], strict=False))
    assert layout.segments["embed.weight"].start == 0
    assert layout.segments["head.weight"].start == 1408  # 33 · 40 = 1,320, rounded up
    assert layout.groups["fp16"][0] == 1408 + 1280  # 1,200 rounded up


def test_two_parameters_of_one_name_are_refused():
    with pytest.raises(ConfigError, match=r"two parameters share a name: \['a', 'a'\]"):
        Layout([ParamSpec("a", (1,)), ParamSpec("b", (1,)), ParamSpec("a", (2,))])


def test_empty_layout():
    params = Params(Layout([]))
    assert (len(params), params.flat.size, plan_buckets(params.layout, None)) == (0, 0, [])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_views_share_the_buffer(dtype):
    params = Params(Layout(SPECS, BY_SIZE), dtype)
    assert list(params) == [s.spec.name for s in params.layout.segments.values()]
    assert params.flat.dtype == dtype
    assert params.flat.ctypes.data % CACHE_LINE == 0
    assert not params.flat.any()
    for number, spec in enumerate(SPECS, 1):
        assert params[spec.name].shape == spec.shape
        assert params[spec.name].base is not None
        params[spec.name][...] = number
    for number, spec in enumerate(SPECS, 1):
        segment = params.layout.segments[spec.name]
        assert (params.flat[segment.start : segment.stop] == number).all()
    assert np.count_nonzero(params.flat) == params.layout.num_parameters
    other = params.zeros_like()
    assert (other.layout, other.flat.dtype, other.flat.any()) == (params.layout, dtype, False)
    assert not np.shares_memory(other.flat, params.flat)


def test_initial_values_depend_on_seed_and_name_alone():
    drawn = {}
    for name, grouping in GROUPINGS.items():
        for specs in (SPECS, SPECS[::-1], SPECS[:1] + SPECS[3:]):
            params = Params(Layout(specs, grouping))
            params.initialize(7)
            for key in params:
                assert drawn.setdefault(key, params[key].tobytes()) == params[key].tobytes(), name
    renamed = Params(Layout([ParamSpec("other", (33, 40), std=0.5), SPECS[0]]))
    renamed.initialize(7)
    assert not np.array_equal(renamed["other"], renamed["embed.weight"])
    renamed.initialize(8)
    assert renamed["embed.weight"].tobytes() != drawn["embed.weight"]


def test_initial_values_have_the_declared_moments():
    params = Params(Layout(SPECS), np.float64)
    params.initialize(0)
    assert params["embed.weight"].std() == pytest.approx(0.5, rel=0.1)
    assert params["long.bias"].mean() == pytest.approx(0, abs=0.1)
    assert (params["norm.gain"] == 1).all()
    assert not params["norm.bias"].any()
    assert params["scalar"] == 2
    single = Params(Layout(SPECS))
    single.initialize(0)
    assert all(np.array_equal(single[name], params[name].astype(np.float32)) for name in single)


def test_padding_stays_zero():
    params = Params(Layout(SPECS, BY_SIZE))
    params.initialize(1)
    padding = np.ones(params.flat.size, bool)
    for segment in params.layout.segments.values():
        padding[segment.start : segment.stop] = False
    assert padding.any()
    assert not params.flat[padding].any()


def test_a_shard_gets_its_part_of_the_whole_tensor():
    whole = Params(Layout([ParamSpec("w", (64, 48), std=1.0)]))
    whole.initialize(3)
    shard = ShardSpec((64, 48), (16, 0), (48, 48))
    part = Params(Layout([ParamSpec("w", (32, 48), std=1.0, shard=shard)]))
    part.initialize(3)
    assert np.array_equal(part["w"], whole["w"][16:48])


# Buckets.


def test_codec_of_a_tensor():
    rules = [RuleConfig(match="*.norm*", codec="raw"), RuleConfig(match="blocks.?.w", codec="fp16")]
    config = ExchangeConfig(codec="int8", rule=rules)
    names = {"a.norm.w": "raw", "blocks.1.w": "fp16", "blocks.12.w": "int8", "Blocks.1.w": "int8"}
    assert {name: codec_of(ParamSpec(name, (64, 64)), config) for name in names} == names
    assert codec_of(ParamSpec("a.bias", (4000,)), config) == "fp16"
    assert codec_of(ParamSpec("a.norm.bias", (4,)), config) == "raw"
    raw = ExchangeConfig(codec="raw", memory="none")
    assert {codec_of(spec, raw) for spec in SPECS} == {"raw"}
    first = ExchangeConfig(rule=[RuleConfig(match="*", codec="fp16"), RuleConfig(match="w", codec="raw")])
    assert codec_of(ParamSpec("w", (64, 64)), first) == "fp16"


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(
    shapes=st.lists(SHAPES, max_size=14),
    grouping=st.sampled_from(sorted(GROUPINGS)),
    bucket_mb=st.sampled_from([None, 1e-6, 0.004, 0.01, 100.0]),
)
def test_buckets_cover_every_tensor_once(shapes, grouping, bucket_mb):
    layout = Layout(specs_of(shapes), GROUPINGS[grouping])
    buckets = plan_buckets(layout, bucket_mb)
    planned = [segment.spec.name for bucket in buckets for segment in bucket]
    assert sorted(planned) == sorted(layout.segments)
    target = bucket_mb * 1e6 / 4 if bucket_mb else layout.size / 6
    for group, (group_start, group_stop) in layout.groups.items():
        mine = [bucket for bucket in buckets if bucket[0].group == group]
        assert all(segment.group == group for bucket in mine for segment in bucket)
        names = [[segment.spec.name for segment in bucket] for bucket in reversed(mine)]
        assert sum(names, []) == [segment.spec.name for segment in layout.members(group)]
        assert mine[-1][0].start == group_start
        assert mine[0][-1].stop == group_stop
        for bucket in mine:
            assert bucket[0].start % ALIGN == 0
        for bucket in mine[:-1]:  # the last takes what remains
            assert bucket[-1].stop - bucket[0].start >= target
            full = [s for s in bucket[1:] if s.start % ALIGN == 0 and bucket[-1].stop - s.start >= target]
            assert not full, "the bucket could have started later"


def test_buckets_come_in_the_order_of_backward():
    layout = Layout(specs_of([(64, 64)] * 12))
    buckets = plan_buckets(layout, None)
    assert [[s.spec.name for s in bucket] for bucket in buckets] == [
        [f"t{i}", f"t{i + 1}"] for i in (10, 8, 6, 4, 2, 0)
    ]
    assert len(plan_buckets(layout, 64 * 64 * 4 / 1e6)) == 12
    assert len(plan_buckets(layout, 1000.0)) == 1
