"""Codecs: round trips, error feedback, payloads as bytes, and sums over real processes."""

from __future__ import annotations

import datetime
import math
import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.codecs.base import (
    BLOCK,
    SAMPLE,
    NonFiniteGradient,
    Payload,
    pack_payload,
    unpack_payload,
)
from paceline.codecs.compressor import Compressor, make_coder, reference_sum
from paceline.codecs.powersgd import deterministic_matmul
from paceline.codecs.registry import CODECS, parse_codec, read_codec
from paceline.codecs.sparse import topk_indices
from paceline.codecs.spec import Bf16, Codec, Fp16, Int8, OneBit, PowerSgd, Threshold, TopK
from paceline.comm.compressed_allreduce import CompressedAllReduce
from paceline.comm.process_group import CollectiveGroup
from paceline.errors import PacelineError, SpecError, StateError, UsageError, WireError
from paceline.specs.expression import parse_expression

SPECS: list[Codec] = [
    Fp16(),
    Bf16(),
    Int8(chunk=16),
    OneBit(chunk=16),
    TopK(0.1),
    TopK(0.9),
    Threshold(1.5),
    PowerSgd(2),
]
FEEDBACK = [spec for spec in SPECS if spec.uses_error_feedback]
DTYPES = [torch.float32, torch.float64]
SHAPES = [(12, 20), (7,), (3,), (9, 4, 5), (2, 2), (5,)]
NUMEL = sum(math.prod(shape) for shape in SHAPES)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors gain nothing from threads, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


ids = pytest.mark.parametrize("spec", SPECS, ids=str)
both = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def noise(numel: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def through(spec: Codec, flat: Tensor, shapes: list[tuple[int, ...]] | None = None) -> Tensor:
    coder = make_coder(spec, flat.dtype, shapes or [tuple(flat.shape)])
    out = torch.full_like(flat, math.nan)
    coder.decode(coder.encode(flat), out)
    return out


def nbytes(payload: Payload) -> int:
    return sum(t.numel() * t.element_size() for t in payload)


number = st.one_of(
    st.just(0.0), st.floats(-1e4, 1e4, width=32), st.floats(-(2**-10), 2**-10, width=32)
)
vectors = st.lists(number, max_size=150).map(lambda v: torch.tensor(v, dtype=torch.float64))
properties = settings(max_examples=60, deadline=None)


# ---- specs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "spec", "canonical"),
    [
        ("fp16", Fp16(), "fp16"),
        ("bf16", Bf16(), "bf16"),
        ("int8", Int8(1024), "int8"),
        ("int8(chunk=64)", Int8(64), "int8(64)"),
        ("onebit", OneBit(), "onebit"),
        ("topk", TopK(0.01), "topk"),
        ("topk(0.02)", TopK(0.02), "topk(0.02)"),
        ("topk(2%)", TopK(0.02), "topk(0.02)"),
        ("topk(1)", TopK(1.0), "topk(1)"),
        ("threshold(0.001)", Threshold(0.001), "threshold(0.001)"),
        ("powersgd(rank=2)", PowerSgd(2), "powersgd(2)"),
        ("powersgd", PowerSgd(4), "powersgd"),
    ],
)
def test_spec_text(text: str, spec: Codec, canonical: str) -> None:
    assert parse_codec(text) == spec == read_codec(parse_expression(text), "codec")
    assert str(spec) == canonical
    assert parse_codec(canonical) == spec


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("topk(0)", "greater than 0"),
        ("topk(2)", "at most 1"),
        ("topk(200%)", "at most 1"),
        ("topk(-1%)", "greater than 0"),
        ("topk(many)", "must be a number, got many"),
        ("threshold", "threshold(0.001)"),
        ("threshold(0)", "greater than 0"),
        ("threshold(-1)", "greater than 0"),
        ("threshold(inf)", "must be finite"),
        ("powersgd(rank=0)", "at least 1"),
        ("powersgd(1.5)", "a whole number"),
        ("int8(chunk=12)", "multiple of 8"),
        ("onebit(chunk=0)", "at least 1"),
        ("int8(size=8)", "no option 'size'"),
        ("fp16(3)", "accepts no values"),
        ("fp8", "did you mean"),
        ("3", "codec"),
    ],
)
def test_spec_refusals_are_one_line(text: str, part: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_codec(text)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_codecs_say_of_themselves() -> None:
    words = {"uses_error_feedback": set(), "needs_whole_tensors": set(), "suits_weights": set()}
    for word, record in CODECS.items():
        for fact, those in words.items():
            if getattr(record.spec, fact):
                those.add(word)
    assert words["uses_error_feedback"] == set(CODECS) - {"fp16", "bf16"}
    assert words["needs_whole_tensors"] == {"powersgd"}
    assert words["suits_weights"] == {"fp16", "bf16"}


# ---- round trips -----------------------------------------------------------------------------


@ids
@both
@pytest.mark.parametrize("numel", [0, 1, 7, 16, 17, 1000])
def test_zero_stays_zero_and_sizes_hold(spec: Codec, dtype: torch.dtype, numel: int) -> None:
    coder = make_coder(spec, dtype, [(numel,)])
    for flat in (torch.zeros(numel, dtype=dtype), noise(numel, 1, dtype)):
        payload = coder.encode(flat)
        assert nbytes(payload) <= coder.max_payload_bytes(numel) <= numel * 16 + 8
        assert all(t.is_contiguous() for t in payload)
        out = torch.full_like(flat, math.nan)
        coder.decode(payload, out)
        assert torch.isfinite(out).all()
        if not flat.count_nonzero():
            assert not out.count_nonzero()
        start = noise(numel, 2, dtype)
        total = start.clone()
        coder.add(payload, total)
        assert torch.equal(total, start + out)


@ids
def test_payload_owns_its_memory(spec: Codec) -> None:
    coder = make_coder(spec, torch.float32, SHAPES)
    flat = noise(NUMEL)
    before = flat.clone()
    payload = coder.encode(flat)
    assert torch.equal(flat, before)
    kept = [t.clone() for t in payload]
    flat.zero_()
    coder.encode(noise(NUMEL, 5))
    assert all(torch.equal(a, b) for a, b in zip(payload, kept, strict=True))


@properties
@given(vectors, st.sampled_from(DTYPES))
def test_rounded(values: Tensor, dtype: torch.dtype) -> None:
    flat = values.to(dtype)
    assert torch.equal(through(Fp16(), flat), flat.half().to(dtype))
    assert torch.equal(through(Bf16(), flat), flat.bfloat16().to(dtype))


@properties
@given(vectors, st.sampled_from(DTYPES))
def test_int8_is_within_half_a_step(values: Tensor, dtype: torch.dtype) -> None:
    flat = values.to(dtype)
    out = through(Int8(chunk=16), flat)
    for start in range(0, flat.numel(), 16):
        chunk, got = flat[start : start + 16], out[start : start + 16]
        step = float(chunk.abs().max()) / 127
        rounding = 1e-5 * step + torch.finfo(dtype).tiny * 128
        assert float((chunk - got).abs().max()) <= step / 2 + rounding
        assert not got[chunk == 0].count_nonzero()


@properties
@given(vectors, st.sampled_from(DTYPES))
def test_onebit_keeps_sums_and_signs(values: Tensor, dtype: torch.dtype) -> None:
    flat = values.to(dtype)
    out = through(OneBit(chunk=16), flat)
    for start in range(0, flat.numel(), 16):
        chunk, got = flat[start : start + 16].double(), out[start : start + 16].double()
        size = float(chunk.abs().sum())
        assert abs(float(got.sum() - chunk.sum())) <= 1e-5 * size
        above = chunk > 0
        assert float(got[~above].clamp(min=0).sum()) <= 1e-6 * size
        assert float(got[above].clamp(max=0).sum()) >= -1e-6 * size
        if bool(above.any()):
            mean = chunk[above].mean()
            assert torch.allclose(got[above], mean, rtol=1e-5, atol=1e-6 * size)


@properties
@given(vectors, st.sampled_from(DTYPES), st.sampled_from([0.001, 0.1, 0.5, 0.8, 1.0]))
def test_topk_keeps_exactly_the_largest(values: Tensor, dtype: torch.dtype, ratio: float) -> None:
    flat = values.to(dtype)
    count = min(flat.numel(), max(1, round(ratio * flat.numel())))
    chosen = topk_indices(flat, count)
    assert chosen.numel() == count
    # Magnitude first, then place: that order has no ties.
    magnitude = flat.abs().tolist()
    order = sorted(range(flat.numel()), key=lambda i: (-magnitude[i], i))
    assert chosen.tolist() == sorted(order[:count])
    expected = torch.zeros_like(flat)
    expected[chosen] = flat[chosen]
    assert torch.equal(through(TopK(ratio), flat), expected)


@pytest.mark.parametrize("kind", ["noise", "sparse", "equal", "misleading"])
def test_topk_of_many_is_the_topk_of_torch(kind: str) -> None:
    numel = 5 * SAMPLE + 3
    flat = noise(numel)
    if kind == "sparse":
        flat[flat.abs() < 2.5] = 0
    elif kind == "equal":
        flat = flat.sign()
    elif kind == "misleading":
        flat[:: numel // SAMPLE | 1] = 100.0  # Just what the sample looks at.
    for count in (1, 100, numel // 100, numel // 2, numel):
        chosen = topk_indices(flat, count)
        assert chosen.numel() == count
        assert bool((chosen.diff() > 0).all())
        expected = flat.abs().topk(count).values
        assert torch.equal(flat[chosen].abs().sort(descending=True).values, expected)


@properties
@given(vectors, st.sampled_from(DTYPES), st.sampled_from([1e-9, 1e-3, 1.0, 1e5]))
def test_threshold_sends_what_reaches_it(values: Tensor, dtype: torch.dtype, x: float) -> None:
    flat = values.to(dtype)
    out = through(Threshold(x), flat)
    limit = torch.tensor(x, dtype=dtype)
    assert torch.equal(out, torch.where(flat.abs() >= limit, flat, torch.zeros_like(flat)))


@both
def test_threshold_none_and_all(dtype: torch.dtype) -> None:
    flat = noise(200, dtype=dtype).add_(10)
    none, every = make_coder(Threshold(100.0), dtype), make_coder(Threshold(0.1), dtype)
    assert nbytes(none.encode(flat)) == 0
    assert nbytes(every.encode(flat)) == flat.numel() * dtype.itemsize
    assert torch.equal(through(Threshold(0.1), flat), flat)
    assert not through(Threshold(100.0), flat).count_nonzero()


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(9, 30),
    st.integers(9, 30),
    st.integers(0, 99),
    st.sampled_from(DTYPES),
)
def test_powersgd_is_exact_up_to_its_rank(
    rank: int, rows: int, columns: int, seed: int, dtype: torch.dtype
) -> None:
    p = noise(rows * rank, seed, dtype).view(rows, rank)
    q = noise(rank * columns, seed + 1, dtype).view(rank, columns)
    flat = torch.cat([(p @ q).view(-1), noise(5, seed + 2, dtype)])
    out = through(PowerSgd(rank), flat, [(rows, columns), (5,)])
    tolerance = 1e-3 if dtype == torch.float32 else 1e-9
    assert torch.allclose(out, flat, rtol=0, atol=tolerance * float(flat.abs().max()))
    assert torch.equal(out[-5:], flat[-5:])
    payload = make_coder(PowerSgd(rank), dtype, [(rows, columns), (5,)]).encode(flat)
    assert nbytes(payload) == (rank * (rows + columns) + 5) * dtype.itemsize


def test_powersgd_sends_small_matrices_as_they_are() -> None:
    shapes = [(3, 4), (), (0, 5), (2, 2)]
    coder = make_coder(PowerSgd(4), torch.float32, shapes)
    flat = noise(17)
    payload = coder.encode(flat)
    assert len(payload) == 1
    assert torch.equal(payload[0], flat)
    with pytest.raises(UsageError, match="17 elements"):
        coder.encode(noise(18))


def test_powersgd_leaves_zero_again() -> None:
    coder = make_coder(PowerSgd(2), torch.float32, [(12, 20)])
    coder.encode(torch.zeros(240))
    matrix = torch.outer(noise(12), noise(20, 1)).view(-1)
    out = torch.empty_like(matrix)
    for _ in range(3):
        coder.decode(coder.encode(matrix), out)
    assert torch.allclose(out, matrix, atol=1e-4)


def test_powersgd_improves_with_a_warm_start() -> None:
    flat = noise(40 * 60)
    coder = make_coder(PowerSgd(4), torch.float32, [(40, 60)])
    errors = []
    for _ in range(10):
        out = torch.empty_like(flat)
        coder.decode(coder.encode(flat), out)
        errors.append(float((out - flat).norm()))
    singular = torch.linalg.svdvals(flat.view(40, 60))
    best = float(singular[4:].norm())
    assert best * 0.999 <= errors[-1] <= min(errors[0], best * 1.03)


def test_product_of_factors_ignores_threads() -> None:
    p, q = noise(700 * 3).view(700, 3), noise(3 * 300).view(3, 300)
    outs = []
    for threads in (1, 4):
        torch.set_num_threads(threads)
        out = torch.empty(700, 300)
        deterministic_matmul(p, q, out)
        outs.append(out)
    assert torch.equal(*outs)
    assert torch.allclose(outs[0], p @ q, atol=1e-4)


@pytest.mark.parametrize("spec", [Int8(), OneBit(), Int8(chunk=1 << 17)], ids=str)
def test_pieces_join_seamlessly(spec: Codec) -> None:
    flat = noise(3 * BLOCK + 1029)
    whole = through(spec, flat)
    chunk = spec.chunk  # type: ignore[attr-defined]
    for start in (0, 2 * BLOCK, 3 * BLOCK // chunk * chunk):
        part = flat[start : start + chunk].clone()
        assert torch.equal(through(spec, part), whole[start : start + chunk])


# ---- NaN, infinity, range --------------------------------------------------------------------


@ids
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_refused(spec: Codec, bad: float) -> None:
    compressor = Compressor(spec, SHAPES, torch.float32)
    compressor.encode(noise(NUMEL))
    before = compressor.state()
    flat = noise(NUMEL, 1)
    flat[NUMEL // 2] = bad
    with pytest.raises(NonFiniteGradient, match="NaN or infinity") as caught:
        compressor.encode(flat)
    assert isinstance(caught.value, PacelineError)
    assert all(torch.equal(v, before[k]) for k, v in compressor.state().items())
    with pytest.raises(NonFiniteGradient):
        all_reduce(CompressedAllReduce(spec, SHAPES, torch.float32, CollectiveGroup(0, 1)), flat)


def test_beyond_fp16_is_refused() -> None:
    flat = torch.tensor([1.0, -65504.0])
    assert torch.equal(through(Fp16(), flat), flat)
    with pytest.raises(NonFiniteGradient, match="use bf16"):
        through(Fp16(), torch.tensor([1.0, -70000.0]))
    assert float(through(Bf16(), torch.tensor([70000.0]))) == pytest.approx(70000, rel=0.01)
    with pytest.raises(NonFiniteGradient):
        through(OneBit(), torch.full((1024,), 3e38))


def test_only_plain_gradients() -> None:
    with pytest.raises(UsageError, match="float16 gradients cannot be compressed"):
        make_coder(Int8(), torch.float16)
    with pytest.raises(UsageError):
        make_coder(Int8(), torch.float32).encode(torch.zeros(3, dtype=torch.float64))


# ---- error feedback --------------------------------------------------------------------------


@pytest.mark.parametrize("spec", FEEDBACK, ids=str)
@both
def test_sent_and_residual_make_up_the_gradients(spec: Codec, dtype: torch.dtype) -> None:
    compressor = Compressor(spec, SHAPES, dtype)
    meant = torch.zeros(NUMEL, dtype=torch.float64)
    sent = torch.zeros(NUMEL, dtype=torch.float64)
    out = torch.empty(NUMEL, dtype=dtype)
    for step in range(30):
        gradient = noise(NUMEL, step, dtype)
        meant += gradient
        compressor.coder.decode(compressor.encode(gradient), out)
        sent += out
    residual = compressor.state()["residual"]
    tolerance = 1e-4 if dtype == torch.float32 else 1e-12
    assert torch.allclose(sent + residual, meant, rtol=0, atol=tolerance)
    if isinstance(spec, Threshold):
        assert float(residual.abs().max()) < spec.x


@pytest.mark.parametrize("spec", FEEDBACK, ids=str)
def test_mean_sent_tends_to_the_mean_gradient(spec: Codec) -> None:
    gradient = noise(NUMEL, 3, torch.float64)
    errors = []
    for steps in (40, 400):
        compressor = Compressor(spec, SHAPES, torch.float64)
        sent, out = torch.zeros_like(gradient), torch.empty_like(gradient)
        for _ in range(steps):
            compressor.coder.decode(compressor.encode(gradient.clone()), out)
            sent += out
        errors.append(float((sent / steps - gradient).norm() / gradient.norm()))
    assert errors[1] <= max(errors[0] / 4, 1e-12)
    assert errors[1] < 0.05


def test_feedback_export_and_load() -> None:
    compressor = Compressor(Threshold(2.5), [(3,)], torch.float32)
    compressor.encode(torch.tensor([0.0, 1.0, 2.0]))
    kept = compressor.state()["residual"]
    assert kept.tolist() == [0, 1, 2]
    other = Compressor(Threshold(2.5), [(3,)], torch.float32)
    other.load_residual(kept)
    flat = torch.zeros(3)
    other.encode(flat)
    assert torch.equal(flat, kept)
    for wrong in (torch.zeros(4), torch.zeros(3, dtype=torch.float64)):
        with pytest.raises(StateError, match="residual"):
            other.load_residual(wrong)


@ids
def test_compressor_state_goes_on_bit_for_bit(spec: Codec) -> None:
    first, second = (Compressor(spec, SHAPES, torch.float32) for _ in range(2))
    for step in range(3):
        first.encode(noise(NUMEL, step))
    second.load_state(first.state())
    for step in range(3, 5):
        a, b = (c.encode(noise(NUMEL, step)) for c in (first, second))
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_state_of_another_model_is_refused() -> None:
    low_rank = Compressor(PowerSgd(2), SHAPES, torch.float32)
    good = low_rank.state()
    assert set(good) == {"residual", "q/0", "q/1"}
    for state in (
        {},
        {"residual": good["residual"]},
        {**good, "q/2": good["q/0"]},
        {**good, "q/0": good["q/0"][:1]},
        {**good, "residual": good["residual"][1:]},
    ):
        with pytest.raises(StateError):
            low_rank.load_state(state)
    with pytest.raises(StateError, match="another codec"):
        Compressor(TopK(0.1), SHAPES, torch.float32).load_state(good)
    assert Compressor(Fp16(), SHAPES, torch.float32).state() == {}


# ---- payloads as bytes -----------------------------------------------------------------------


def packed(payload: Payload) -> tuple[list[list[Any]], Tensor]:
    table, parts = pack_payload(payload)
    return table, torch.frombuffer(bytearray(b"".join(parts) or b"-"), dtype=torch.uint8)[
        : nbytes(payload)
    ]


@ids
@both
@pytest.mark.parametrize("numel", [0, 1, 37, NUMEL])
def test_payload_through_bytes(spec: Codec, dtype: torch.dtype, numel: int) -> None:
    shapes = SHAPES if numel == NUMEL else [(numel,)]
    flat = noise(numel, dtype=dtype)
    payload = make_coder(spec, dtype, shapes).encode(flat)
    table, body = packed(payload)
    again = unpack_payload(table, body)
    assert all(torch.equal(a, b) for a, b in zip(payload, again, strict=True))
    # The receiver knows codec and size, not the shapes.
    sent, got = torch.empty_like(flat), torch.empty_like(flat)
    make_coder(spec, dtype, shapes).decode(payload, sent)
    make_coder(spec, dtype).decode(again, got)
    assert torch.equal(sent, got)


def test_payload_that_does_not_lie_evenly() -> None:
    payload = [torch.arange(3, dtype=torch.uint8), noise(4), noise(2, dtype=torch.float64)]
    table, body = packed(payload)
    assert all(torch.equal(a, b) for a, b in zip(payload, unpack_payload(table, body), strict=True))


@pytest.mark.parametrize(
    "table",
    [
        None,
        {},
        "float32",
        [["float32", [2]]],
        [["float32", [2], 8, 0]],
        [["float32", [2], 7]],
        [["float32", [3], 8]],
        [["float32", [-2], -8]],
        [["float32", [-2, -1], 8]],
        [["float32", [2], 8], ["float32", [-1], -4], ["int8", [4], 4]],
        [["float32", [2], 8], ["float32", [1], 4]],
        [["float32", [1], 4]],
        [["float32", 2, 8]],
        [["float32", [2.0], 8]],
        [["float32", [True, 2], 8]],
        [["float32", [2, 1, 1], 8]],
        [["float32", [1 << 62, 1 << 62], 8]],
        [["int64", [1], 8]],
        [["complex64", [1], 8]],
        [["load", [1], 8]],
        [[["float32"], [2], 8]],
        [],
    ],
)
def test_hostile_tables_are_refused(table: Any) -> None:
    with pytest.raises(WireError):
        unpack_payload(table, torch.zeros(8, dtype=torch.uint8))


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("spec", "payload"),
    [
        (Fp16(), [torch.zeros(32)]),
        (Fp16(), [torch.zeros(31, dtype=torch.float16)]),
        (Fp16(), []),
        (Int8(16), [torch.zeros(3), torch.zeros(32, dtype=torch.int8)]),
        (Int8(16), [torch.zeros(2), torch.zeros(32, dtype=torch.uint8)]),
        (Int8(16), [torch.zeros(2)]),
        (OneBit(16), [torch.zeros(2, 2), torch.zeros(5, dtype=torch.uint8)]),
        (OneBit(16), [torch.zeros(4), torch.zeros(4, dtype=torch.uint8)]),
        (TopK(0.1), [torch.zeros(3), int32(0, 1, 32)]),
        (TopK(0.1), [torch.zeros(3), int32(0, 1, -1)]),
        (TopK(0.1), [torch.zeros(2), int32(0, 1)]),
        (TopK(0.1), [torch.zeros(32), int32()]),
        (TopK(0.1), [torch.zeros(3), int32(0, 1)]),
        (Threshold(1.0), [torch.zeros(3), int32(0, 1)]),
        (Threshold(1.0), [torch.zeros(1), int32(1 << 30)]),
        (Threshold(1.0), [torch.zeros(33), int32()]),
        (Threshold(1.0), [torch.zeros(1), torch.zeros(1)]),
        (Threshold(1.0), []),
        (PowerSgd(), [torch.zeros(31)]),
        (PowerSgd(), [torch.zeros(8, 1)]),
        (PowerSgd(), [torch.zeros(8, 1), torch.zeros(2, 4)]),
        (PowerSgd(), [torch.zeros(8, 1), torch.zeros(4)]),
        (PowerSgd(), [torch.zeros(8, 1), torch.zeros(1, 5)]),
        (PowerSgd(), [torch.zeros(8, 1, dtype=torch.float64), torch.zeros(1, 4)]),
        (PowerSgd(), [torch.zeros(())]),
    ],
)
def test_payloads_that_do_not_fit_are_refused(spec: Codec, payload: Payload) -> None:
    coder = make_coder(spec, torch.float32)
    out = torch.zeros(32)
    for use in (coder.decode, coder.add):
        with pytest.raises(WireError):
            use(payload, out)
    assert not out.count_nonzero()


# ---- sums over workers -----------------------------------------------------------------------


def all_reduce(exchange: CompressedAllReduce, flat: Tensor) -> None:
    exchange.begin(flat)
    exchange.finish()


def simulated(rank: int, workers: int, flats: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """PowerSGD's sums of all workers in one process, and their residuals."""
    compressors = [Compressor(PowerSgd(rank), SHAPES, flats[0].dtype) for _ in range(workers)]
    outs = [flat.clone() for flat in flats]
    reference_sum(list(zip(compressors, outs, strict=True)))
    return outs, [c.state()["residual"] for c in compressors]


def test_powersgd_sum_and_residuals_make_up_the_sum() -> None:
    flats = [noise(NUMEL, seed, torch.float64) for seed in range(3)]
    outs, residuals = simulated(2, 3, flats)
    assert torch.equal(outs[0], outs[1])
    assert torch.allclose(outs[0] + sum(residuals), sum(flats), atol=1e-12)


@ids
@both
def test_group_of_one_shows_the_codec(spec: Codec, dtype: torch.dtype) -> None:
    one = CompressedAllReduce(spec, SHAPES, dtype, CollectiveGroup(0, 1))
    reference = Compressor(spec, SHAPES, dtype)
    for step in range(3):
        flat, again = noise(NUMEL, step, dtype), noise(NUMEL, step, dtype)
        all_reduce(one, flat)
        out = torch.empty_like(again)
        reference.coder.decode(reference.encode(again), out)
        if isinstance(spec, PowerSgd):
            assert torch.allclose(flat, out, atol=1e-4)
        else:
            assert torch.equal(flat, out)
    before = 3 * NUMEL * dtype.itemsize
    assert 0 < one.bytes_sent <= before + 3 * 16
    if not isinstance(spec, TopK) or spec.ratio < 0.5:
        assert one.bytes_sent < before


def test_misuse_of_a_sum() -> None:
    one = CompressedAllReduce(Int8(), [(4,)], torch.float32, CollectiveGroup(0, 1))
    with pytest.raises(UsageError, match=r"finish\(\) was called before begin\(\)"):
        one.finish()
    with pytest.raises(UsageError, match="4 elements"):
        all_reduce(one, torch.zeros(5))
    one.begin(torch.zeros(4))
    with pytest.raises(UsageError, match="twice"):
        one.begin(torch.zeros(4))


@ids
def test_empty_bucket(spec: Codec) -> None:
    for shapes in ([(0,)], []):
        one = CompressedAllReduce(spec, shapes, torch.float32, CollectiveGroup(0, 1))
        all_reduce(one, torch.zeros(0))


STEPS, RESUME_AT = 4, 2
LARGE = [(300, 400), (1000,)]
"""Enough elements for torch to use its threads."""
DEADLINE_S = 60.0


def share(rank: int, step: int, dtype: torch.dtype, numel: int = NUMEL) -> Tensor:
    """A worker's gradient, times its share; worker 1 has nothing to do in the second step."""
    weight = 0.0 if (rank, step) == (1, 1) else (rank + 1) / 4
    return noise(numel, 1000 * step + rank, dtype).mul_(weight)


def worker_main(rank: int, size: int, folder: Path) -> None:
    """One process of the group: every codec for a few steps, gone on with from a state."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # Unequal workers: results may not depend on the number of threads.
    torch.set_num_threads(2 if rank == size - 1 else 1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=DEADLINE_S / 2),
    )
    group = CollectiveGroup(rank, size)
    results: dict[str, np.ndarray[Any, Any]] = {}
    for dtype in DTYPES:
        for spec in SPECS:
            for name, tensor in train(spec, dtype, group).items():
                results[f"{spec}/{dtype}/{name}"] = tensor.numpy()
    for spec in SPECS:
        all_reduce(CompressedAllReduce(spec, [(0,)], torch.float32, group), torch.zeros(0))
        small, large = overlap(spec, group)
        results.update({f"small/{spec}": small.numpy(), f"large/{spec}": large.numpy()})
    half = CompressedAllReduce(Fp16(), [(1,)], torch.float32, group)
    with pytest.raises(NonFiniteGradient):  # Each part is in fp16's range, the sum is not.
        all_reduce(half, torch.tensor([40000.0]))
    np.savez(folder / f"{rank}.npz", **results)
    group.destroy()


def train(spec: Codec, dtype: torch.dtype, group: CollectiveGroup) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    exchange = CompressedAllReduce(spec, SHAPES, dtype, group)
    resumed = CompressedAllReduce(spec, SHAPES, dtype, group)
    for step in range(STEPS):
        if step == RESUME_AT:
            resumed.compressor.load_state(exchange.compressor.state())
        flat = share(group.rank, step, dtype)
        all_reduce(exchange, flat)
        found[f"sum{step}"] = flat
        if step >= RESUME_AT:
            again = share(group.rank, step, dtype)
            all_reduce(resumed, again)
            found[f"resumed{step}"] = again
    state, other = exchange.compressor.state(), resumed.compressor.state()
    assert all(torch.equal(value, other[name]) for name, value in state.items())
    found["residual"] = state.get("residual", torch.zeros(NUMEL, dtype=dtype))
    found["bytes"] = torch.tensor(exchange.bytes_sent)
    return found


def overlap(spec: Codec, group: CollectiveGroup) -> tuple[Tensor, Tensor]:
    """Two buckets under way at the same time."""
    exchanges = [
        CompressedAllReduce(spec, shapes, torch.float32, group) for shapes in (SHAPES, LARGE)
    ]
    small = share(group.rank, 0, torch.float32)
    large = share(group.rank, 0, torch.float32, 121_000)
    for exchange, flat in zip(exchanges, (small, large), strict=True):
        exchange.begin(flat)
    for exchange in exchanges:
        exchange.finish()
    return small, large


def run_workers(size: int, folder: Path) -> list[dict[str, Tensor]]:
    # Processes that share one import of torch, begun before any thread was.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["paceline.comm.compressed_allreduce", "hypothesis", "pytest"])
    workers = [
        context.Process(target=worker_main, args=(rank, size, folder), daemon=True)
        for rank in range(size)
    ]
    deadline = time.monotonic() + DEADLINE_S
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(max(0.1, deadline - time.monotonic()))
            assert worker.exitcode == 0
    finally:
        for worker in workers:
            if worker.pid is not None:
                worker.kill()
                worker.join()
    found = []
    for rank in range(size):
        with np.load(folder / f"{rank}.npz") as arrays:
            found.append({name: torch.from_numpy(arrays[name]) for name in arrays.files})
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_sums_over_processes(size: int, tmp_path: Path) -> None:
    found = run_workers(size, tmp_path)
    for name, value in found[0].items():
        if not name.endswith(("/residual", "/bytes")):
            for other in found[1:]:
                assert torch.equal(value, other[name]), name
    for spec in SPECS:
        assert torch.equal(found[0][f"small/{spec}"], found[0][f"{spec}/torch.float32/sum0"])
        for dtype in DTYPES:
            check_sums(spec, dtype, [_under(f"{spec}/{dtype}/", one) for one in found])


def _under(prefix: str, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k[len(prefix) :]: v for k, v in arrays.items() if k.startswith(prefix)}


def check_sums(spec: Codec, dtype: torch.dtype, found: list[dict[str, Tensor]]) -> None:
    sums = [found[0][f"sum{step}"].double() for step in range(STEPS)]
    exact = [
        torch.stack([share(rank, step, dtype).double() for rank in range(len(found))]).sum(0)
        for step in range(STEPS)
    ]
    for step in range(RESUME_AT, STEPS):
        assert torch.equal(found[0][f"sum{step}"], found[0][f"resumed{step}"])
    if spec.uses_error_feedback:
        left = sum(one["residual"].double() for one in found)
        tolerance = 2e-5 if dtype == torch.float32 else 1e-12
        assert torch.allclose(sum(sums) + left, sum(exact), rtol=0, atol=tolerance)
    close = {"fp16": 0.004, "bf16": 0.04, "int8": 0.02, "topk": 3.0, "threshold": 4.0}
    for got, wanted in zip(sums, exact, strict=True):
        error = float((got - wanted).abs().max())
        assert error < close.get(spec.name, 4.0)
    compressors = [Compressor(spec, SHAPES, dtype) for _ in found]
    for step, got in enumerate(sums):
        shares = [share(rank, step, dtype) for rank in range(len(found))]
        expected = reference_sum(list(zip(compressors, shares, strict=True))).double()
        if compressors[0].coder.reduction == "gather":
            assert torch.equal(got, expected)
        else:  # Sums of half precision round differently; factorizations in the last bits.
            assert float((got - expected).abs().max()) < close.get(spec.name, 1e-3)
    sent = int(found[0]["bytes"])
    assert sent < STEPS * NUMEL * dtype.itemsize or isinstance(spec, TopK)
