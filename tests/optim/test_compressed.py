"""Compressed moments: every pattern comes back, updates give the plain format's bits, whatever goes to the tail."""

import ctypes
import mmap
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.common.quantities import round_up
from outcore.optim import FP24_M8, FP32, SPLIT, SPLIT8, ChunkJob, ChunkState, JobBatch, OptimizerPool, StateFormat
from outcore.optim.formats.compressed import tail_of
from outcore.optim.formats.state_format import BLOCK_NUMEL
from tests.optim.cases import SIZES, all_variants, awkward, extension, from_bits, hyper, raw, torch_backend

PLAIN = (FP32, SPLIT)
KINDS = ("zeros", "normal", "some escapes", "anything")


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(raw(a), raw(b))


def moments_of(kind: str, numel: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(exp_avg, exp_avg_sq), fp32 [numel]."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "anything":
        patterns = [torch.randint(bound, (numel,), generator=generator) for bound in (2**32, 2**31)]
        return from_bits(patterns[0]), from_bits(patterns[1])
    x = torch.randn(2, numel, generator=generator) * (0.0 if kind == "zeros" else 1e-3)
    if kind == "some escapes":
        x *= torch.exp(2.5 * torch.randn(2, numel, generator=generator))
        x[0, ::97] = 0.0
        x[0, 5::101] = 1e-40
    return x[0].clone(), x[1] ** 2


def compressed_by(backend, form: StateFormat, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> torch.Tensor:
    state = torch.zeros(form.chunk_bytes(exp_avg.numel()), dtype=torch.uint8)
    backend.compress(form, state, exp_avg, exp_avg_sq)
    return state


def expanded_by(backend, form: StateFormat, state: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    exp_avg, exp_avg_sq = torch.full((2, numel), 7.0).unbind()
    backend.expand(form, state, exp_avg, exp_avg_sq)
    return exp_avg, exp_avg_sq


@pytest.mark.parametrize("plain", PLAIN, ids=lambda f: f.name)
@pytest.mark.parametrize("kind", KINDS)
def test_every_variant_and_torch_make_the_same_bytes_and_bring_all_back(kind, plain):
    form = plain.on_drive
    for numel in (*SIZES, 70_000):
        exp_avg, exp_avg_sq = moments_of(kind, numel)
        expected = compressed_by(torch_backend(), form, exp_avg, exp_avg_sq)
        for backend in (torch_backend(), *all_variants()):
            assert torch.equal(compressed_by(backend, form, exp_avg, exp_avg_sq), expected), backend.name
            for found, given_ in zip(expanded_by(backend, form, expected, numel), (exp_avg, exp_avg_sq), strict=True):
                assert same_bytes(found, given_), backend.name
            one = torch.empty(numel)
            backend.expand(form, expected, exp_avg_sq=one)
            assert same_bytes(one, exp_avg_sq)


@given(data=st.data())
@settings(max_examples=60)
def test_any_pattern_comes_back(data):
    """Exponents drawn from few or many, so that blocks have no escapes, some, and more than codes can say."""
    numel = data.draw(st.integers(1, 700))
    lists = []
    for top_bit in (2, 1):
        exponents = data.draw(st.lists(st.integers(0, 255), min_size=1, max_size=12))
        seed = data.draw(st.integers(0, 2**32))
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.tensor(exponents)[torch.randint(len(exponents), (numel,), generator=generator)]
        rest = torch.randint(2**23, (numel,), generator=generator)
        sign = torch.randint(top_bit, (numel,), generator=generator)
        lists.append(from_bits(sign << 31 | chosen << 23 | rest))
    form = SPLIT.on_drive
    states = [compressed_by(backend, form, *lists) for backend in (torch_backend(), extension())]
    assert torch.equal(*states)
    assert tail_of(form, states[0], numel).size_bytes <= form.tail_bytes(numel)
    for backend in (torch_backend(), extension()):
        assert all(map(same_bytes, expanded_by(backend, form, states[0], numel), lists))


def test_a_tail_is_next_to_nothing_for_ordinary_moments_and_never_more_than_its_room():
    numel = 256 * 500
    form = FP32.on_drive
    sizes = {}
    for kind in KINDS:
        state = compressed_by(extension(), form, *moments_of(kind, numel))
        sizes[kind] = tail_of(form, state, numel).size_bytes / numel
    assert sizes["zeros"] == 0 and 0 < sizes["normal"] < 0.002
    assert 0.1 < sizes["some escapes"] < 0.6
    assert sizes["anything"] == 1.0  # half a byte of either moment


@pytest.mark.parametrize("plain", PLAIN, ids=lambda f: f.name)
def test_updates_give_the_bits_of_the_plain_format(plain):
    numel, form = 3000, plain.on_drive
    for backend in (torch_backend(), *all_variants()):
        generator = torch.Generator().manual_seed(1)
        start = awkward(numel, generator)
        params = [start.to(torch.bfloat16) for _ in range(2)]
        states = [torch.zeros(f.chunk_bytes(numel), dtype=torch.uint8) for f in (plain, form)]
        chunks = [ChunkState(f, s, numel, p) for f, s, p in zip((plain, form), states, params, strict=True)]
        for chunk in chunks:
            chunk.initialise(start)
        for step in range(1, 5):
            grad = awkward(numel, generator).to(torch.bfloat16)
            grad[600:1200] = 0  # decays, and whole blocks of zeros at first
            for f, s, p in zip((plain, form), states, params, strict=True):
                backend.update(f, ChunkJob(grad, s, p), hyper(step))
            exp_avg, exp_avg_sq = expanded_by(backend, form, states[1], numel)
            assert same_bytes(exp_avg, chunks[0].read("exp_avg")), backend.name
            assert same_bytes(exp_avg_sq, chunks[0].read("exp_avg_sq"))
            assert same_bytes(chunks[1].read("master"), chunks[0].read("master"))
            assert torch.equal(params[0].view(torch.int16), params[1].view(torch.int16))


def test_many_threads_write_one_tail():
    """Their order decides what lies where in it, and nothing else."""
    numel, form = 256 * 90 + 7, SPLIT.on_drive
    generator = torch.Generator().manual_seed(2)
    start = torch.randn(numel, generator=generator)
    params = [start.to(torch.bfloat16) for _ in range(2)]
    states = [torch.zeros(f.chunk_bytes(numel), dtype=torch.uint8) for f in (SPLIT, form)]
    for f, s, p in zip((SPLIT, form), states, params, strict=True):
        ChunkState(f, s, numel, p).initialise(start)
    with OptimizerPool(num_threads=3, backend=extension(), task_numel=4096) as pool:
        for step in range(1, 6):
            grad = moments_of("some escapes", numel, step)[0].to(torch.bfloat16)
            extension().update(SPLIT, ChunkJob(grad, states[0], params[0]), hyper(step))
            batch = JobBatch(form, [ChunkJob(grad, states[1], params[1])])
            ticket = pool.submit("chunk", 0, batch, hyper(step), guard=step % 2 == 0)
            pool.wait(ticket, 60)
            tail = tail_of(form, states[1], numel)
            first, room = form.fixed_bytes(numel), form.tail_bytes(numel)
            assert tail.size_bytes > 1000 and tail.offset_bytes == first + step % 2 * room  # in turns
            expected = ChunkState(SPLIT, states[0], numel, params[0])
            exp_avg, exp_avg_sq = expanded_by(extension(), form, states[1], numel)
            assert same_bytes(exp_avg, expected.read("exp_avg"))
            assert same_bytes(exp_avg_sq, expected.read("exp_avg_sq"))
        before = states[1].clone()
        bad = torch.full((numel,), float("inf"), dtype=torch.bfloat16)
        ticket = pool.submit("chunk", 0, JobBatch(form, [ChunkJob(bad, states[1], params[1])]), hyper(6), guard=True)
        pool.wait(ticket, 60)
        assert torch.equal(states[1], before)  # skipped whole


def test_a_damaged_chunk_is_refused_or_read_within_its_memory():
    numel, form = 1000, SPLIT.on_drive
    state = compressed_by(extension(), form, *moments_of("anything", numel))
    at = form.regions(numel)["chunk_head"]
    exp_avg, exp_avg_sq = moments_of("normal", numel)
    job = ChunkJob(torch.zeros(numel), state, torch.zeros(numel, dtype=torch.bfloat16))
    for damage in ((form.tail_bytes(numel) + 1, 0, 0), (-1, 0, 0), (0, 2, 0), (0, 0, 1), (0, 0, 1 << 40)):
        damaged = state.clone()
        damaged[at.offset_bytes : at.offset_bytes + 24].view(torch.int64).copy_(torch.tensor(damage))
        for backend in (torch_backend(), extension()):
            with pytest.raises(ValueError, match="not a chunk of compressed states"):
                expanded_by(backend, form, damaged, numel)
            with pytest.raises(ValueError, match="not a chunk of compressed states"):
                backend.compress(form, damaged, exp_avg, exp_avg_sq)
            with pytest.raises(ValueError, match="not a chunk of compressed states"):
                backend.update(form, replace(job, state=damaged), hyper())
    # Heads of blocks are not looked at. Nothing but the chunk is touched: it ends where its memory does, and a page
    # behind it may not be.
    room = round_up(form.chunk_bytes(numel), mmap.PAGESIZE)
    memory = mmap.mmap(-1, room + mmap.PAGESIZE)
    guarded = torch.frombuffer(memory, dtype=torch.uint8)
    assert form.chunk_bytes(numel) == room
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(guarded.data_ptr() + room), mmap.PAGESIZE, 0)
    heads = form.regions(numel)["block_heads"]
    for index in (0, 1):
        for byte in (254, 200, 255):
            damaged = guarded[:room]
            damaged.copy_(state)
            damaged[: form.regions(numel)["block_heads"].offset_bytes] = 0xEE  # every code an escape
            damaged[heads.offset_bytes : heads.offset_bytes + heads.size_bytes] = byte
            damaged[at.offset_bytes : at.offset_bytes + 24].view(torch.int64).copy_(torch.tensor((0, index, 0)))
            for backend in all_variants():
                expanded_by(backend, form, damaged, numel)
                backend.update(form, replace(job, state=damaged), hyper())


def test_forms_and_sizes():
    numel = 1 << 20
    for plain, bytes_per_param in ((FP32, 11.03125), (SPLIT, 9.03125)):
        form = plain.on_drive
        assert form.plain is plain and form.on_drive is form and plain.plain is plain and form.compressed
        assert form.bytes_per_param == bytes_per_param
        assert form.fixed_bytes(numel) == pytest.approx(bytes_per_param * numel, rel=1e-3)
        assert form.stored_bytes(numel) == form.fixed_bytes(numel) + numel
        assert form.chunk_bytes(numel) == form.stored_bytes(numel) + numel
        theirs = extension().layout(form, 1000)
        assert theirs["tails"] == form.fixed_bytes(1000) and theirs["tail_bytes"] == form.tail_bytes(1000)
        assert theirs["total"] == form.chunk_bytes(1000)
        for name, region in form.regions(1000).items():
            assert theirs[name.replace("residual", "master")] == region.offset_bytes
    for packed in (SPLIT8, FP24_M8):
        assert packed.on_drive is packed and not packed.compressed
        assert packed.stored_bytes(numel) == packed.chunk_bytes(numel)


def test_what_is_not_compressed_moments_is_refused():
    form, numel = SPLIT.on_drive, 2 * BLOCK_NUMEL
    state = torch.zeros(form.chunk_bytes(numel), dtype=torch.uint8)
    for backend in (torch_backend(), extension()):
        for chosen, given_ in (
            (SPLIT, {"exp_avg": torch.zeros(numel)}),
            (form, {}),
            (form, {"exp_avg": torch.zeros(numel), "exp_avg_sq": torch.zeros(numel - 1)}),
            (form, {"exp_avg": torch.zeros(numel, dtype=torch.bfloat16)}),
        ):
            with pytest.raises(ValueError):
                backend.expand(chosen, state, **given_)
    for backend in (torch_backend(), extension()):
        with pytest.raises(ValueError, match="below zero"):
            backend.compress(form, state, torch.zeros(numel), torch.full((numel,), -1e-30))
    chunk = ChunkState(form, state, numel, torch.zeros(numel, dtype=torch.bfloat16))
    for name in ("exp_avg", "exp_avg_sq"):
        with pytest.raises(ValueError, match="compressed here"):
            chunk.read(name)
        with pytest.raises(ValueError, match="compressed here"):
            chunk.write(name, torch.zeros(numel))
