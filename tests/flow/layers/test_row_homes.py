"""Whole rows in RAM: their memory is used again, blocks make them up whatever their length, a lost copy is told."""

import pytest
import torch

from outcore.flow.layers import RowHomes
from outcore.staging import DownloadLane, LaneSettings, PinnedPool, UploadLane
from outcore.staging.pool import HostMemory
from tests.staging.fakes import LateStreams

CPU = torch.device("cpu")


def test_memory_is_used_again_and_makes_room_for_longer_rows():
    memory = HostMemory()
    homes = RowHomes(memory)
    first = homes.room((1, 8, 4), torch.float32)
    address = first.data_ptr()
    other = homes.room((1, 8, 4), torch.float32)
    assert other.data_ptr() != address
    del first
    assert homes.room((1, 3, 4), torch.float32).data_ptr() == address  # and nobody has it after this line
    del other
    longer = homes.room((1, 64, 4), torch.float32)
    assert longer.shape == (1, 64, 4) and memory.pageable_bytes == (8 + 64) * 4 * 4  # one of the short ones is gone


def test_near_rows_are_given_as_they_lie_and_take_no_ram():
    memory = HostMemory()
    homes = RowHomes(memory, near=True)
    rows, kept = torch.randn(2, 8, 4), homes.room((2, 8, 4), torch.float32)
    home = homes.down(rows, passes=True)
    assert homes.is_near(home[1]) and not homes.is_near(kept) and not homes.is_near(rows)
    for part, (found,) in zip(home, homes.arriving([one] for one in home), strict=True):
        assert found.data_ptr() == part.data_ptr()
    assert torch.equal(homes.up(home), rows) and homes.up(home).data_ptr() == home.data_ptr()
    address = home.data_ptr()
    del home, part, found
    assert homes.room((2, 4, 4), torch.float32, passes=True).data_ptr() == address
    assert homes.room_after(kept) is not kept and RowHomes(memory).room_after(kept) is kept
    assert memory.pageable_bytes == kept.nbytes


@pytest.mark.parametrize("near", [False, True])
@pytest.mark.parametrize("length", [1, 6, 7, 13])
def test_blocks_make_up_rows_of_any_length(length, near):
    homes, rows = RowHomes(HostMemory(), near=near), torch.randn(2, 3, length, 5)
    home = homes.room(rows.shape, rows.dtype, passes=True)
    with homes.writer(home, 6) as written:
        for start in range(0, length, 2):
            tokens = slice(start, min(start + 2, length))
            written.put(tokens, rows[..., tokens, :])
    assert torch.equal(home, rows)
    wanted = ([home[..., at : at + 6, :], home[..., at : at + 6, :]] for at in range(0, length, 6))
    found = [torch.cat(parts) for parts in homes.arriving(wanted)]
    assert torch.equal(torch.cat(found, dim=2), torch.cat([rows, rows]))
    assert torch.equal(homes.up(homes.down(rows[0])), rows[0])


def test_expected_rows_are_fetched_once_and_nobody_takes_their_home():
    with PinnedPool(1 << 20, device=CPU, probe=False) as pool:
        up = UploadLane(pool, None, CPU, LaneSettings(1 << 16, 2))
        down = DownloadLane(pool, None, CPU, LaneSettings(1 << 16, 2))
        with up, down:
            homes = RowHomes(HostMemory(pool), (up, down))
            rows = torch.randn(1, 12, 4)
            home = homes.down(rows)
            homes.expect(home, 8)
            found = [torch.cat(parts) for parts in homes.arriving([home[:, :8], home[:, :8]] for _ in range(2))]
            assert up.moved_bytes == 4 * found[0][:1].nbytes  # one of the four was expected
            assert all(torch.equal(one, torch.cat([rows[:, :8]] * 2)) for one in found)
            homes.expect(home, 4)
            address = home.data_ptr()
            del home
            others = [homes.down(rows) for _ in range(3)]
            assert address not in [one.data_ptr() for one in others]
            for one in others:  # the last two are kept
                homes.expect(one, 4)
            assert homes.room(rows.shape, rows.dtype).data_ptr() == address


def test_a_lost_copy_is_told_before_the_rows_are_used():
    streams = LateStreams()
    with PinnedPool(1 << 20, device=CPU, probe=False) as pool:
        up = UploadLane(pool, None, CPU, LaneSettings(1 << 16, 2))
        down = DownloadLane(pool, None, CPU, LaneSettings(1 << 16, 2), streams=streams)
        with up, down:
            homes = RowHomes(HostMemory(pool), (up, down))
            streams.fail_next = OSError("the link is gone")
            with pytest.raises(OSError, match="the link is gone"):
                homes.down(torch.ones(1, 4, 4))
            rows = torch.randn(1, 4, 4)
            assert torch.equal(homes.up(homes.down(rows)), rows)
