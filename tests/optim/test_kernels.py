"""The kernels: every instruction set and torch give the same bits, and they are AdamW."""

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outcore.optim import (
    FORMATS,
    FP32,
    SPLIT,
    SPLIT8,
    AdamWHyper,
    ChunkJob,
    ChunkState,
    JobBatch,
    OptimizerPool,
    StateFormat,
)
from outcore.optim.reference import adamw
from tests.optim.cases import (
    SIZES,
    all_variants,
    awkward,
    copy_of,
    extension,
    hyper,
    make_job,
    raw,
    same_bytes,
    torch_backend,
)

QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PARAM_CHOICES = (*DTYPES, None)


@st.composite
def cases(draw):
    state_format: StateFormat = draw(st.sampled_from(FORMATS))
    param_dtype = torch.bfloat16 if state_format.split_master else draw(st.sampled_from(PARAM_CHOICES))
    step = draw(st.one_of(st.integers(1, 5), st.integers(1, 10**7)))
    settings_ = {
        "lr": draw(st.floats(0, 1)),
        "beta1": draw(st.sampled_from([0.0, 0.3, 0.5, 0.9, 0.95, 0.999])),
        "beta2": draw(st.sampled_from([0.0, 0.9, 0.95, 0.999, 0.99999])),
        "eps": draw(st.sampled_from([1e-8, 1e-6, 1e-11, 1.0] if state_format.moments8 else [1e-8, 1e-16, 1.0])),
        "weight_decay": draw(st.sampled_from([0.0, 0.01, 0.1, 1.0])),
        "grad_scale": draw(st.sampled_from([1.0, 0.37, 1e-5, 2.0**-16])),
        "seed": draw(st.integers(0, 2**64 - 1)),
        "step": step,
    }
    return {
        "state_format": state_format, "param_dtype": param_dtype, "grad_dtype": draw(st.sampled_from(DTYPES)),
        "numel": draw(st.sampled_from(SIZES)), "hyper": AdamWHyper(**settings_),
        "data_seed": draw(st.integers(0, 2**32)), "non_finite": draw(st.booleans()),
        "offset": 256 * draw(st.integers(0, 2**40)),
    }  # fmt: skip


@QUICK
@given(case=cases())
def test_all_variants_and_torch_give_the_same_bits(case):
    """Two updates from awkward states with awkward gradients."""
    generator = torch.Generator().manual_seed(case["data_seed"])
    state_format, numel = case["state_format"], case["numel"]
    job = make_job(state_format, numel, generator, param_dtype=case["param_dtype"], element_offset=case["offset"])
    chunk = ChunkState(state_format, job.state, numel, job.param)
    chunk.write("master", awkward(numel, generator, non_finite=case["non_finite"]))
    chunk.write("exp_avg", awkward(numel, generator))
    chunk.write("exp_avg_sq", awkward(numel, generator, spread=6.0).abs())
    start, expected = job, job
    for backend in (torch_backend(), *all_variants()):
        job = copy_of(start)
        second = torch.Generator().manual_seed(case["data_seed"] + 1)
        for step in range(2):
            grad = awkward(numel, second, spread=6.0, non_finite=case["non_finite"]).to(case["grad_dtype"])
            now = AdamWHyper(**{**vars(case["hyper"]), "step": case["hyper"].step + step})
            backend.update(state_format, ChunkJob(grad, job.state, job.param, job.element_offset), now)
        if backend.name == "torch":
            expected = job
        else:
            assert same_bytes(job, expected), backend.name


@pytest.mark.parametrize("state_format", FORMATS, ids=lambda f: f.name)
def test_random_bit_patterns(state_format):
    """Any pattern at all in gradient, master and fp32 moments, NaN payloads included."""
    generator = torch.Generator().manual_seed(5)
    numel = 20_000

    def patterns() -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, (numel,), generator=generator).to(torch.int32).view(torch.float32)

    job = make_job(state_format, numel, generator)
    chunk = ChunkState(state_format, job.state, numel, job.param)
    chunk.write("master", patterns())
    if not state_format.moments8:
        chunk.write("exp_avg", patterns())
        chunk.write("exp_avg_sq", patterns().abs())
    grad = patterns()
    results = []
    for backend in (torch_backend(), *all_variants()):
        other = copy_of(job)
        backend.update(state_format, ChunkJob(grad, other.state, other.param), hyper())
        results.append(other)
    assert all(same_bytes(result, results[0]) for result in results)
    master = ChunkState(state_format, results[0].state, numel, results[0].param).read("master")
    param = results[0].param
    assert param is not None
    assert torch.equal(param.isnan(), master.isnan())  # a NaN master shows in the parameter
    assert master.isnan().any()


def test_half_precision_casts_are_exact_for_every_pattern():
    """Every fp16 gradient is read exactly, and fp16 parameters are the master rounded to nearest, ties to even."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    halves = halves[halves.isfinite()]
    numel = halves.numel()
    for backend in all_variants():
        state = torch.zeros(FP32.chunk_bytes(numel), dtype=torch.uint8)
        identity = AdamWHyper(lr=0.0, step=1, beta1=0.0)
        backend.update(FP32, ChunkJob(halves, state, None), identity)
        m = FP32.views(state, numel)["exp_avg"]
        assert torch.equal(m, halves.float())
    between = torch.cat([(halves.float() + halves.float().nextafter(x) * s) for x in (halves.float(),) for s in (0, 1)])
    masters = torch.cat(
        [between / 2, awkward(5000, torch.Generator().manual_seed(0)), torch.tensor([65519.9, 65520.0])]
    )
    for backend in all_variants():
        param = torch.empty(masters.numel(), dtype=torch.float16)
        state = torch.zeros(FP32.chunk_bytes(masters.numel()), dtype=torch.uint8)
        ChunkState(FP32, state, masters.numel(), param).initialise(masters)
        param.zero_()
        backend.update(FP32, ChunkJob(torch.zeros(masters.numel()), state, param), AdamWHyper(lr=0.0, step=1))
        assert torch.equal(raw(param), raw(masters.to(torch.float16)))


@pytest.mark.parametrize("state_format", [FP32, SPLIT], ids=lambda f: f.name)
def test_is_the_adamw_of_torch(state_format):
    """30 steps beside torch.optim.AdamW(foreach=False) in fp32: equal to a few units in the last place."""
    generator = torch.Generator().manual_seed(3)
    numel = 5000
    job = make_job(state_format, numel, generator, grad_dtype=torch.float32)
    chunk = ChunkState(state_format, job.state, numel, job.param)
    weight = torch.nn.Parameter(chunk.read("master"))
    theirs = torch.optim.AdamW([weight], lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False)
    backend = extension()
    for step in range(1, 31):
        grad = torch.randn(numel, generator=generator)
        weight.grad = grad * 0.5
        theirs.step()
        now = AdamWHyper(lr=3e-3, beta1=0.9, beta2=0.95, weight_decay=0.1, step=step, grad_scale=0.5)
        backend.update(state_format, ChunkJob(grad, job.state, job.param), now)
    torch.testing.assert_close(chunk.read("master"), weight.data, rtol=2e-6, atol=2e-8)
    states = theirs.state[weight]
    torch.testing.assert_close(chunk.read("exp_avg"), states["exp_avg"], rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(chunk.read("exp_avg_sq"), states["exp_avg_sq"], rtol=2e-6, atol=1e-10)


@pytest.mark.parametrize("beta1", [0.0, 0.4, 0.5, 0.9])
def test_the_formula_in_double_precision(beta1):
    """One update against the textbook formula in fp64, both branches of the interpolation."""
    generator = torch.Generator().manual_seed(1)
    w, m, g = (torch.randn(4000, generator=generator, dtype=torch.float64) for _ in range(3))
    v = torch.rand(4000, generator=generator, dtype=torch.float64)
    now = AdamWHyper(lr=0.01, beta1=beta1, beta2=0.99, eps=1e-6, weight_decay=0.2, step=7)
    m2 = beta1 * m + (1 - beta1) * g
    v2 = 0.99 * v + 0.01 * g * g
    w2 = w * (1 - 0.01 * 0.2) - 0.01 * (m2 / (1 - beta1**7)) / ((v2 / (1 - 0.99**7)).sqrt() + 1e-6)
    got = adamw(w.float(), m.float(), v.float(), g.float(), now.scalars(), 0.0, 0.0)
    for value, expected in zip(got, (w2, m2, v2, v2.sqrt())):
        torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)


def test_split_and_fp32_are_the_same_run():
    generator = torch.Generator().manual_seed(2)
    numel = 3001
    plain = make_job(FP32, numel, generator)
    split = make_job(SPLIT, numel, generator)
    states = [ChunkState(FP32, plain.state, numel, plain.param), ChunkState(SPLIT, split.state, numel, split.param)]
    ties = (torch.arange(numel) * 2**16 + 0x3F808000).to(torch.int32).view(torch.float32)
    for chunk in states:
        chunk.write("master", torch.where(torch.arange(numel) < 1000, ties, chunk.read("master") * 0 + 0.3))
    for step in range(1, 6):
        grad = torch.zeros(numel) if step == 1 else awkward(numel, generator).bfloat16()
        for state_format, job in ((FP32, plain), (SPLIT, split)):
            extension().update(state_format, ChunkJob(grad, job.state, job.param), hyper(step))
    for name in ("master", "exp_avg", "exp_avg_sq"):
        assert torch.equal(raw(states[0].read(name)), raw(states[1].read(name)))
    assert plain.param is not None
    assert split.param is not None
    assert torch.equal(raw(plain.param), raw(split.param))  # ties included: the formats are one run


@pytest.mark.parametrize("state_format", FORMATS, ids=lambda f: f.name)
def test_results_do_not_depend_on_how_the_model_is_cut(state_format):
    """One chunk of 5 blocks and a bit, or three chunks: the same states and parameters."""
    generator = torch.Generator().manual_seed(9)
    numel, cuts = 5 * 256 + 77, (0, 256, 1024, 5 * 256 + 77)
    whole = make_job(state_format, numel, generator, element_offset=512)
    master = ChunkState(state_format, whole.state, numel, whole.param).read("master")
    parts = []
    for start, stop in itertools.pairwise(cuts):
        part = make_job(state_format, stop - start, generator, element_offset=512 + start)
        ChunkState(state_format, part.state, stop - start, part.param).initialise(master[start:stop])
        parts.append(part)
    for step in range(1, 4):
        grad = torch.randn(numel, generator=generator)
        extension().update(state_format, ChunkJob(grad, whole.state, whole.param, 512), hyper(step, seed=4))
        for (start, stop), part in zip(itertools.pairwise(cuts), parts):
            piece = ChunkJob(grad[start:stop], part.state, part.param, part.element_offset)
            extension().update(state_format, piece, hyper(step, seed=4))
    for name in ("master", "exp_avg", "exp_avg_sq"):
        read = [ChunkState(state_format, part.state, part.grad.numel(), part.param).read(name) for part in parts]
        assert torch.equal(torch.cat(read), ChunkState(state_format, whole.state, numel, whole.param).read(name))


@pytest.mark.parametrize("state_format", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_do_not_depend_on_where_parameters_lie(state_format, dtype):
    """Aligned ones may be written past the caches, in whole registers; others cannot."""
    if state_format.split_master and dtype != torch.bfloat16:
        pytest.skip("a split master is one of bf16 parameters")
    job = make_job(state_format, 3000, torch.Generator().manual_seed(3), param_dtype=dtype)
    assert job.param is not None and job.param.data_ptr() % 64 == 0
    for backend in all_variants():
        expected = copy_of(job)
        backend.update(state_format, expected, hyper())
        for offset in (1, 8, 16):
            moved = copy_of(job)
            room = torch.zeros(3000 + 2 * offset, dtype=dtype)
            param = room[offset : offset + 3000]
            param.copy_(job.param)
            found = ChunkJob(job.grad, moved.state, param, job.element_offset)
            backend.update(state_format, found, hyper())
            assert same_bytes(found, expected), (backend.name, offset)
            assert not room[:offset].any() and not room[offset + 3000 :].any()


@pytest.mark.parametrize("state_format", FORMATS, ids=lambda f: f.name)
def test_parts_of_a_chunk_without_weight_decay(state_format):
    """As if each stretch were a chunk of its own, by every kernel and in whatever pieces threads take it."""
    generator, never = torch.Generator().manual_seed(7), hyper(weight_decay=0.0)
    ranges = (256, 512), (3840, 5120), (8960, 9000)
    job = make_job(state_format, 9000, generator)
    always, none = copy_of(job), copy_of(job)
    torch_backend().update(state_format, always, hyper(weight_decay=0.5))
    torch_backend().update(state_format, none, never)
    expected = {}
    for name in ("master", "exp_avg", "exp_avg_sq"):
        expected[name], without = (
            ChunkState(state_format, of.state, 9000, of.param).read(name) for of in (always, none)
        )
        for start, stop in ranges:
            expected[name][start:stop] = without[start:stop]
    for backend in (*all_variants(), torch_backend()):
        found = dataclasses.replace(copy_of(job), undecayed=ranges)
        if state_format.compressed:
            backend.update(state_format, found, hyper(weight_decay=0.5))
        else:
            with OptimizerPool(num_threads=2, backend=backend, task_numel=4096) as pool:
                batch = JobBatch(state_format, [found]).with_grads([found.grad.clone()])
                pool.wait(pool.submit("chunk", 0, batch, hyper(weight_decay=0.5)), 60)
        for name, value in expected.items():
            state = ChunkState(state_format, found.state, 9000, found.param).read(name)
            assert torch.equal(state, value), (backend.name, name)
    for wrong in (((1, 256),), ((0, 100),), ((256, 256),)):
        with pytest.raises(ValueError, match="without weight decay is not in whole blocks of 256"):
            torch_backend().update(state_format, dataclasses.replace(job, undecayed=wrong), never)


@pytest.mark.parametrize("state_format", FORMATS, ids=lambda f: f.name)
def test_chunks_without_weight_decay(state_format):
    generator = torch.Generator().manual_seed(6)
    job = make_job(state_format, 1000, generator)
    exempt, plain = copy_of(job), copy_of(job)
    for backend in (*all_variants(), torch_backend()):
        now, other = copy_of(exempt), copy_of(plain)
        backend.update(state_format, dataclasses.replace(now, undecayed=((0, 1000),)), hyper(weight_decay=0.5))
        backend.update(state_format, other, hyper(weight_decay=0.0))
        assert same_bytes(now, other)
        backend.update(state_format, other, hyper(2, weight_decay=0.5))
        backend.update(state_format, now, hyper(2, weight_decay=0.0))
        assert not same_bytes(now, other)


def test_moments_that_decay_become_zero_not_denormal():
    job = make_job(FP32, 64, torch.Generator().manual_seed(0), param_dtype=None)
    chunk = ChunkState(FP32, job.state, 64)
    chunk.write("exp_avg", torch.full((64,), 1.2e-38))
    chunk.write("exp_avg_sq", torch.full((64,), 1.2e-38))
    for _ in range(60):
        extension().update(FP32, ChunkJob(torch.zeros(64), job.state, None), AdamWHyper(lr=1e-3, step=1))
    assert torch.equal(chunk.read("exp_avg"), torch.zeros(64))
    assert torch.equal(chunk.read("exp_avg_sq"), torch.zeros(64))


def test_floating_point_mode_of_the_process_is_neither_used_nor_changed():
    """With flushing of denormals switched on, results are the same, and it is still on afterwards."""
    generator = torch.Generator().manual_seed(8)
    job = make_job(SPLIT, 1000, generator)
    grad = torch.full((1000,), 3e-20)  # its square is a denormal
    tiny = torch.full((8,), 2e-38)
    outcomes = []
    for flush in (False, True):
        if flush and not torch.set_flush_denormal(True):
            pytest.skip("this processor cannot flush denormals")
        try:
            other = copy_of(job)
            for _ in range(3):
                extension().update(
                    SPLIT, ChunkJob(grad, other.state, other.param), AdamWHyper(lr=1e-3, step=1, beta2=0.0)
                )
            total = extension().grad_sumsq_and_finite(grad, num_threads=2)
            assert bool((tiny * 0.25 == 0).all()) is flush  # the mode is what it was
        finally:
            torch.set_flush_denormal(False)
        outcomes.append((other, total))
    assert same_bytes(outcomes[0][0], outcomes[1][0])
    assert outcomes[0][1] == outcomes[1][1]


@QUICK
@given(
    numel=st.sampled_from([*SIZES, 8192, 70_001]), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**32),
    threads=st.integers(1, 5),
)  # fmt: skip
def test_sum_of_squares_is_the_same_everywhere(numel, dtype, seed, threads):
    generator = torch.Generator().manual_seed(seed)
    grad = awkward(numel, generator).to(dtype)
    grad = torch.where(grad.isfinite(), grad, 1.0)  # the largest fp32 overflows fp16
    expected = torch_backend().grad_sumsq_and_finite(grad)
    assert expected.all_finite
    for backend in all_variants():
        assert backend.grad_sumsq_and_finite(grad, threads) == expected
    exact = math.fsum(x * x for x in grad.double().tolist())
    assert math.isclose(expected.sumsq, exact, rel_tol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(("numel", "place"), [(1, 0), (4096, 4095), (4097, 4096), (20_000, 11_111)])
def test_a_number_that_is_not_finite_is_found(dtype, bad, numel, place):
    grad = torch.ones(numel, dtype=dtype)
    grad[place] = bad
    for backend in (torch_backend(), *all_variants()):
        stats = backend.grad_sumsq_and_finite(grad, 2)
        assert not stats.all_finite
        assert math.isnan(stats.sumsq)


def test_a_broken_gradient_shows_in_8_bit_moments():
    generator = torch.Generator().manual_seed(0)
    job = make_job(SPLIT8, 512, generator)
    grad = torch.randn(512, generator=generator)
    grad[300] = math.nan
    for backend in (extension(), torch_backend()):
        other = copy_of(job)
        backend.update(SPLIT8, ChunkJob(grad, other.state, other.param), hyper())
        chunk = ChunkState(SPLIT8, other.state, 512, other.param)
        assert chunk.read("exp_avg")[:256].isfinite().all()
        assert chunk.read("exp_avg")[256:].isnan().all()
        backend.update(SPLIT8, ChunkJob(torch.zeros(512), other.state, other.param), hyper(2))
        assert chunk.read("exp_avg_sq")[256:].isnan().all()
        assert chunk.read("master")[256:].isnan().all()


@pytest.mark.parametrize("numel", [1, 255, 300])
@pytest.mark.parametrize("state_format", FORMATS, ids=lambda f: f.name)
def test_what_lies_behind_a_chunk_is_neither_used_nor_written(state_format, numel):
    """Chunks end within a block; their neighbours in gradient and parameter begin right behind."""
    generator = torch.Generator().manual_seed(11)
    job = make_job(state_format, numel, generator)
    assert job.param is not None
    param = torch.cat([job.param, torch.full((256,), 7.0).bfloat16()])
    grad = torch.cat([job.grad, torch.full((256,), math.nan).bfloat16()])
    for backend in all_variants():
        alone, beside = copy_of(job), dataclasses.replace(copy_of(job), grad=grad[:numel], param=param.clone()[:numel])
        assert beside.param is not None
        behind = torch.as_strided(beside.param, (256,), (1,), numel)
        beside.state[state_format.chunk_bytes(numel) - 1] = alone.state[-1] = 0xAA
        backend.update(state_format, alone, hyper())
        backend.update(state_format, beside, hyper())
        assert same_bytes(alone, beside)
        assert torch.equal(behind, torch.full((256,), 7.0).bfloat16())
        assert alone.state[-1] == 0xAA


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 4095, 3 * 4096 + 77])
def test_gradients_added_up_have_the_bits_of_torch(dtype, numel):
    generator = torch.Generator().manual_seed(numel)
    sources = [torch.randn(numel, generator=generator).to(dtype) * 2**-k for k in range(3)]
    sources[0][-1] = math.nan if numel > 1 else 1.0
    expected = sum((source.float() for source in sources[1:]), sources[0].float()).to(dtype)
    for backend in (*all_variants(), torch_backend()):
        into = torch.empty_like(expected)
        with OptimizerPool(2, backend=backend) as pool:
            stats = pool.wait(pool.submit_add_up("sum", 0, sources, into)).stats
        assert torch.equal(into[:-1], expected[:-1]) and stats.all_finite == (numel == 1)
        assert bool(into[-1].isnan()) == bool(expected[-1].isnan())
        assert numel > 1 or stats.sumsq == float(expected) ** 2
