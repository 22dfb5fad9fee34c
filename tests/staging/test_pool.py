"""The pool without CUDA: exact leases, who holds what, waiting, closing. Pinned behaviour is in test_staging_gpu.py."""

import threading
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.common.quantities import KIB, MIB
from outcore.staging import LeaseError, PinnedGrant, PinnedPool, PinnedPoolFull
from outcore.staging.pool import pinned_grant as grants
from tests.refused import refused
from tests.waiting import until


def cpu_pool(capacity_bytes: int, **settings_: object) -> PinnedPool:
    return PinnedPool(capacity_bytes, device=torch.device("cpu"), **settings_)  # type: ignore[arg-type]


def test_leases_have_the_exact_size_aligned_starts_and_memory_that_holds_data() -> None:
    with cpu_pool(4 * MIB + 4096) as pool:
        assert pool.capacity_bytes == pool.asked_bytes == 4 * MIB + 4096
        assert not pool.is_pinned and pool.pinned_bytes == 0 and pool.notes == []
        a, b = pool.lease(100, "a"), pool.lease(3 * MIB + 1, "b")
        for lease, n_bytes in ((a, 100), (b, 3 * MIB + 1)):
            assert lease.tensor.dtype == torch.uint8 and lease.tensor.shape == (n_bytes,)
            assert lease.tensor.data_ptr() % 4096 == 0
            assert lease.n_bytes == n_bytes and not lease.is_pinned and not lease.write_combined
        assert pool.free_bytes == pool.capacity_bytes - (4096 + 3 * MIB + 4096)
        a.tensor.fill_(1)
        b.tensor.fill_(2)
        assert int(a.tensor.sum()) == 100 and int(b.tensor.max()) == 2
        a.release()
        b.release()
        assert pool.free_bytes == pool.largest_free_bytes() == pool.capacity_bytes


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 300_000)), max_size=40))
def test_leases_never_share_a_byte(steps: list[tuple[bool, int]]) -> None:
    with cpu_pool(1 * MIB) as pool:
        held = {}
        for i, (release, number) in enumerate(steps):
            if release and held:
                key = list(held)[number % len(held)]
                lease = held.pop(key)
                assert torch.all(lease.tensor == key % 251)  # nobody wrote into it meanwhile
                lease.release()
            else:
                try:
                    held[i] = pool.lease(number, str(i))
                except PinnedPoolFull:
                    assert pool.largest_free_bytes() < number
                    continue
                held[i].tensor.fill_(i % 251)
        for key, lease in held.items():
            assert torch.all(lease.tensor == key % 251)
            lease.release()
        assert pool.largest_free_bytes() == pool.capacity_bytes


def test_view_gives_dtype_and_shape_and_refuses_what_does_not_fit() -> None:
    with cpu_pool(1 * MIB) as pool, pool.lease(1000, "weights") as lease:
        view = lease.view(torch.float32, (10, 25))
        assert view.shape == (10, 25) and view.dtype == torch.float32 and view.data_ptr() == lease.tensor.data_ptr()
        assert lease.view(torch.bfloat16, (3,)).numel() == 3
        with pytest.raises(ValueError, match=r"needs 1004 bytes, the lease of 1000 B held by 'weights' has 1000"):
            lease.view(torch.float32, (251,))
    assert lease.is_released


def test_a_full_pool_names_holders_largest_extent_and_what_was_asked() -> None:
    with cpu_pool(1 * MIB) as pool:
        held = [pool.lease(256 * KIB, owner) for owner in ("up", "up", "down")]
        with pytest.raises(PinnedPoolFull) as full:
            pool.lease(300 * KIB, "late")
        text = str(full.value)
        assert "'late' 300.00 KiB (307200 bytes)" in text
        assert "256.00 KiB of 1.00 MiB are free, the largest free extent is 256.00 KiB" in text
        assert "'up' 512.00 KiB in 2, 'down' 256.00 KiB in 1" in text
        with pytest.raises(PinnedPoolFull, match="no release could make room"):
            pool.lease(2 * MIB, "giant", timeout_s=60)  # does not wait for what cannot come
        report = pool.report()
        assert "staging pool: 1.00 MiB not pinned, 256.00 KiB free" in report and "'down' 256.00 KiB" in report
        for lease in held:
            lease.release()
        assert "held by nobody" in pool.report()


def test_double_release_and_use_after_release_are_errors() -> None:
    with cpu_pool(1 * MIB) as pool:
        lease = pool.lease(10, "once")
        lease.release()
        refused(LeaseError, "second time", lease.release)
        with pytest.raises(LeaseError, match="used again"):
            _ = lease.tensor
        with pytest.raises(LeaseError):
            lease.view(torch.uint8, (1,))


def test_waiting_for_a_release_ends_with_the_memory_or_with_the_time() -> None:
    with cpu_pool(1 * MIB) as pool:
        first = pool.lease(1 * MIB, "first")
        refused(PinnedPoolFull, "after waiting", lambda: pool.lease(1, "second", timeout_s=0.05))
        got: list[str] = []

        def take(owner: str, n_bytes: int) -> None:
            lease = pool.lease(n_bytes, owner, timeout_s=30)
            got.append(owner)
            lease.release()

        threads = []
        for owner, n_bytes in (("big", 1 * MIB), ("small", 4096)):  # the small one does not overtake
            threads.append(threading.Thread(target=take, args=(owner, n_bytes)))
            threads[-1].start()
            until(lambda: len(pool._waiting) == len(threads))
        first.release()
        for thread in threads:
            thread.join(30)
        assert got == ["big", "small"]


def test_who_gives_up_waiting_lets_the_next_one_in() -> None:
    with cpu_pool(1 * MIB) as pool, pool.lease(512 * KIB, "stays"):

        def ask(n_bytes: int, timeout_s: float) -> None:
            with suppress(PinnedPoolFull):
                pool.lease(n_bytes, "asks", timeout_s=timeout_s).release()

        for number, arguments in enumerate([(1 * MIB, 0.2), (4096, 60.0)]):
            asking = threading.Thread(target=ask, args=arguments)
            asking.start()
            until(lambda n=number, this=asking: len(pool._waiting) > n or not this.is_alive())
        asking.join(20)
        assert not asking.is_alive()


def test_closing_is_refused_while_memory_is_out_and_a_closed_pool_gives_nothing() -> None:
    pool = cpu_pool(1 * MIB)
    lease = pool.lease(10, "late reader")
    refused(RuntimeError, "'late reader' 10 B in 1", pool.close)
    lease.release()
    pool.close()
    pool.close()
    refused(RuntimeError, "closed staging pool", lambda: pool.lease(10, "too late"))


def test_a_tensor_outlives_its_pool_without_pointing_at_nothing() -> None:
    pool = cpu_pool(1 * MIB)
    lease = pool.lease(4096, "x")
    stray = lease.tensor
    stray.fill_(7)
    lease.release()
    pool.close()
    del pool, lease
    assert int(stray.sum()) == 7 * 4096


def test_threads_lease_and_release_at_the_same_time() -> None:
    with cpu_pool(1 * MIB) as pool:
        wrong: list[str] = []

        def work(number: int) -> None:
            for i in range(100):
                with pool.lease(1 + (i * 7919 + number) % 200_000, str(number), timeout_s=60) as lease:
                    lease.tensor.fill_(number)
                    if not torch.all(lease.tensor == number):
                        wrong.append(f"{number} in round {i}")

        threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert wrong == [] and pool.largest_free_bytes() == pool.capacity_bytes


def test_write_combined_leases_follow_the_same_rules_without_cuda() -> None:
    with cpu_pool(1 * MIB, write_combined_bytes=512 * KIB) as pool:
        assert pool.capacity_bytes == 1 * MIB and pool.write_combined_bytes == 0
        with pool.lease(4096, "up", write_combined=True) as lease:
            assert not lease.write_combined  # plain memory, and it says so
    with cpu_pool(1 * MIB) as pool, pytest.raises(PinnedPoolFull, match="give PinnedPool a write_combined_bytes"):
        pool.lease(4096, "up", write_combined=True)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"capacity_bytes": 0}, "positive capacity_bytes"),
    ({"capacity_bytes": 4096, "write_combined_bytes": 8192}, "between 0 and that"),
    ({"capacity_bytes": 4096, "device": "meta"}, "CUDA devices or the CPU"),
])  # fmt: skip
def test_bad_arguments_fail_early(arguments: dict, message: str) -> None:
    refused(ValueError, message, lambda: PinnedPool(**{"device": "cpu", **arguments}))
    with cpu_pool(4096) as pool, pytest.raises(ValueError, match="at least one"):
        pool.lease(0, "nobody")


def test_a_small_machine_gives_less_and_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(grants, "reserve_bytes", lambda: 10 * MIB)
    monkeypatch.setattr(grants, "available_ram_bytes", lambda: 12 * MIB + 17)
    with cpu_pool(8 * MIB) as pool:
        assert pool.capacity_bytes == 2 * MIB and pool.asked_bytes == 8 * MIB
        assert len(pool.notes) == 1 and "only 2.00 MiB of RAM can be taken" in pool.notes[0]
        assert [record.message for record in caplog.records] == pool.notes
        assert pool.notes[0] in pool.report()
    monkeypatch.setattr(grants, "available_ram_bytes", lambda: 5 * MIB)
    refused(RuntimeError, "the machine gave none", lambda: cpu_pool(8 * MIB))


def test_an_earlier_grant_limits_the_pool_and_cuts_it_into_pieces() -> None:
    grant = PinnedGrant(3 * MIB, 0, 1 * MIB, ("said before",))
    with cpu_pool(8 * MIB, probe=grant) as pool:
        assert pool.capacity_bytes == 3 * MIB and pool.notes == ["said before"]
        assert pool.largest_free_bytes() == 1 * MIB
        leases = [pool.lease(1 * MIB, str(i)) for i in range(3)]
        with pytest.raises(PinnedPoolFull):
            pool.lease(1, "one more")
        for lease in leases:
            lease.release()
