"""Machine profiles: measured, nominal, missing, stale, damaged, incomplete; overrides; rates by a GPU's name."""

import dataclasses
import json
import os
import shutil
import time
from pathlib import Path

import pytest

from outcore.common.files import user_folder
from outcore.common.quantities import GIB
from outcore.machine import Drive, Gpu, LinkRates, Machine
from outcore.machine.cards import CARDS, card_by_name, load_machine, shipped_profiles
from outcore.model import preset_shape
from outcore.plan import constants as k
from outcore.plan.choose import choose
from outcore.plan.hardware import Overrides, ProfileError, hardware_of, planning_drive
from outcore.plan.inference import plan_inference, words_of
from outcore.plan.profile import MEASURED_PROFILE, RunRequest, differs, load_hardware
from tests.plan.fakes import TB, machine, server
from tests.refused import refused


def test_the_measured_profile_of_this_machine(tmp_path):
    saved = machine().save(tmp_path / "machine_profile.json")
    now = machine(links=None, ram_available_bytes=90 * GIB)
    hardware = load_hardware(measured=saved, detect=lambda: now)
    assert hardware.ram_bytes == 90 * GIB  # capacities of now
    assert (hardware.h2d_gb_per_s, hardware.drive_mixed_gb_per_s) == (25.0, 5.5)  # rates of then
    assert hardware.sources["h2d_gb_per_s"] == "measured"
    assert hardware.compute_tflops == pytest.approx(165.2 * 0.87, abs=0.1)


def test_the_profile_is_found_from_any_folder_and_a_newer_one_in_logs_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert MEASURED_PROFILE.is_absolute() and MEASURED_PROFILE.parent == user_folder()
    with pytest.raises(ProfileError, match="never measured"):
        load_hardware(detect=machine)
    MEASURED_PROFILE.parent.mkdir(parents=True)
    machine().save(MEASURED_PROFILE)
    try:
        for folder in ("a", "b/c"):
            (tmp_path / folder).mkdir(parents=True)
            monkeypatch.chdir(tmp_path / folder)
            assert load_hardware(detect=machine).sources["h2d_gb_per_s"] == "measured"
        former = tmp_path / "b/c/logs/machine_profile.json"
        former.parent.mkdir()
        machine(links=dataclasses.replace(machine().links, h2d_gb_per_s=11.0)).save(former)
        for age_s, expected in ((0, 11.0), (1e6, 25.0)):  # as before there was a place for all folders; long ago
            os.utime(former, (time.time() + 10 - age_s,) * 2)
            assert load_hardware(detect=machine).h2d_gb_per_s == expected
    finally:
        shutil.rmtree(MEASURED_PROFILE.parent)
    os.utime(former, (0, 0))
    assert load_hardware(detect=machine).h2d_gb_per_s == 11.0


def test_missing_profile(tmp_path):
    missing = tmp_path / "none.json"
    with pytest.raises(ProfileError, match=r"never measured.*gds_optimizer\.py.*--nominal.*rtx4070-laptop"):
        load_hardware(measured=missing, detect=machine)
    hardware = load_hardware(measured=missing, detect=lambda: machine(links=None), allow_nominal=True)
    assert hardware.sources["h2d_gb_per_s"] == "nominal"
    assert "never measured" in hardware.notes[0] and any("h2d_gb_per_s was not measured" in n for n in hardware.notes)
    assert hardware.h2d_gb_per_s == pytest.approx(0.8 * 31.504, abs=0.01)


def test_stale_profile(tmp_path):
    other = machine(
        cpu_name="Other CPU", ram_total_bytes=32 * GIB, is_wsl2=True, gpus=(Gpu(0, "NVIDIA H200", 139 * GIB),)
    )
    saved = other.save(tmp_path / "machine_profile.json")
    with pytest.raises(ProfileError) as caught:
        load_hardware(measured=saved, detect=machine)
    for words in ("another machine", "NVIDIA H200", "Other CPU", "32 GiB", "WSL2", "--nominal"):
        assert words in str(caught.value)
    fallback = load_hardware(measured=saved, detect=machine, allow_nominal=True)
    assert "another machine" in fallback.notes[0]
    assert differs(machine(), machine(ram_total_bytes=127 * GIB)) == []  # firmware takes a little more or less


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format_version": 99}', '{"format_version": 1, "os_family": 3}'])
def test_damaged_profile(tmp_path, text):
    saved = tmp_path / "machine_profile.json"
    saved.write_text(text)
    refused(ProfileError, "damaged", lambda: load_hardware(measured=saved, detect=machine))
    refused(ProfileError, "--machine", lambda: load_hardware(str(saved)))
    assert load_hardware(measured=saved, detect=lambda: machine(links=None), allow_nominal=True).notes


def test_unknown_machine_and_incomplete_links(tmp_path):
    refused(ProfileError, "rtx4070-laptop", lambda: load_hardware("no-such-machine"))
    partly = machine(links=LinkRates("measured", 25.0, 24.0))
    path = partly.save(tmp_path / "partly.json")
    with pytest.raises(ProfileError, match="not measured: drive_read_gb_per_s, drive_write_gb_per_s, ram_gb_per_s"):
        load_hardware(str(path))
    hardware = load_hardware(str(path), allow_nominal=True)
    assert hardware.sources["h2d_gb_per_s"] == "measured" and hardware.sources["ram_gb_per_s"] == "nominal"
    assert hardware.name == "partly"


def test_zero_or_negative_rates_are_refused(tmp_path):
    broken = machine(links=LinkRates("measured", 0.0, 24.0, None, 6.0, 5.0, None, 60.0))
    refused(ValueError, "h2d_gb_per_s is 0", lambda: load_hardware(str(broken.save(tmp_path / "broken.json"))))
    refused(ValueError, "cannot be negative", lambda: server(ram_bytes=-1))


def test_no_gpu_and_too_many_gpus():
    links = LinkRates("measured", None, None, None, 2.0, 1.0, None, 30.0, 0.2, 12.0)
    cpu = hardware_of(machine(gpus=(), links=links), "server")
    assert cpu.is_cpu and cpu.h2d_gb_per_s == cpu.d2h_gb_per_s == 10.0 and cpu.vram_bytes == cpu.ram_bytes
    assert any("planned for training on the CPU" in note for note in cpu.notes)
    with pytest.raises(ProfileError, match="Leave --num_gpus out"):
        hardware_of(machine(gpus=(), links=links), "server", Overrides(num_gpus=2))
    given = hardware_of(machine(gpus=()), "server", Overrides(vram_gib=24, tflops=50))
    assert given.vram_bytes == 24 * GIB and given.compute_tflops == 50
    refused(ProfileError, "has 1", lambda: hardware_of(machine(), "desktop", Overrides(num_gpus=4)))
    four = hardware_of(machine(), "desktop", Overrides(num_gpus=4, may_add_gpus=True))
    assert four.num_gpus == 4 and any("has 1: planned as if it had them" in note for note in four.notes)


def test_measured_compute_wins_over_the_name_and_loses_to_the_user():
    links = LinkRates("measured", 25.0, 24.0, 40.0, 6.0, 5.0, 5.5, 60.0, 150.0, 900.0)
    hardware = hardware_of(machine(links=links), "desktop")
    assert hardware.compute_tflops == pytest.approx(150 * k.MATMUL_SHARE)
    assert "measured" in hardware.sources["compute_tflops"]
    assert hardware.compute_s(150e12 * k.MATMUL_SHARE, 900e9) == pytest.approx(2.0)  # a second each
    given = hardware_of(machine(links=links), "desktop", Overrides(tflops=50))
    assert given.compute_s(50e12, 900e9) == pytest.approx(1.0)  # whoever gives a rate counts memory in
    by_name = hardware_of(machine(), "desktop")
    assert by_name.compute_s(by_name.compute_tflops * 1e12, 900e9) == pytest.approx(1.0)


def test_a_plan_without_a_gpu_has_everything_in_ram():
    links = LinkRates("measured", None, None, None, 2.0, 1.0, None, 30.0, 0.2, 12.0)
    cpu = hardware_of(machine(gpus=(), links=links), "server")
    plans = choose(preset_shape("llama-1b"), RunRequest(precision="fp32"), cpu)
    for p in (plans.plan, *plans.stages.values()):
        assert p.used_bytes("vram") == p.used_bytes("pinned") == p.tier("vram").used_bytes == 0
        least = 8 if p.zero_stage == "infinity" else 16  # parameters and gradients; states too where not on the drive
        assert p.tier("ram").used_bytes == p.used_bytes("ram") > least * 1_235_814_400
        assert sum(p.to_dict()["parts_bytes"]["ram"].values()) == p.used_bytes("ram")  # each part has one line
    flops = 6 * 1_235_814_400 * 8192
    assert plans.stages["none"].time.step_s > flops / (0.2e12 * k.MATMUL_SHARE)


def test_overrides_and_wsl2():
    hardware = hardware_of(machine(), "m", Overrides(vram_gib=8, ram_gib=20, pinned_gib=1, nvme_free_gb=500, tflops=10))
    assert (hardware.vram_bytes, hardware.ram_bytes, hardware.pinned_bytes) == (8 * GIB, 20 * GIB, GIB)
    assert hardware.nvme_free_bytes == 500e9 and hardware.sources["compute_tflops"] == "given"
    wsl = hardware_of(machine(is_wsl2=True), "m")
    assert wsl.pinned_bytes == GIB // 2 and any("WSL2" in note for note in wsl.notes)


def test_the_drive_that_is_planned_on():
    small = Drive("/fast", "nvme", "t", "/fast", "ext4", total_bytes=TB, free_bytes=TB // 10)
    big = Drive("/slow", "hdd", "t", "/slow", "ext4", total_bytes=9 * TB, free_bytes=8 * TB)
    share = Drive("/net", "network", "t", "/net", "nfs", total_bytes=99 * TB, free_bytes=99 * TB)
    assert planning_drive(machine(drives=(big, share, small))) == small
    assert planning_drive(machine(drives=(share,))) is None
    hardware = hardware_of(machine(drives=(share,)), "m")
    assert hardware.nvme_free_bytes == 0 and any("no local drive" in note for note in hardware.notes)
    nominal = hardware_of(machine(links=None, drives=(big,)), "m", allow_nominal=True)
    assert nominal.drive_read_gb_per_s == 0.2


@pytest.mark.parametrize(("name", "peak"), [
    ("NVIDIA GeForce RTX 4070 Laptop GPU", 40.1), ("NVIDIA GeForce RTX 4090", 165.2), ("NVIDIA H200", 989.0),
    ("NVIDIA H100 PCIe", 756.0), ("NVIDIA H100 80GB HBM3", 989.0), ("NVIDIA GeForce RTX 4090 Laptop GPU", 79.4),
    ("NVIDIA GeForce RTX 4080 SUPER", 104.4), ("NVIDIA GeForce RTX 3070 Ti", None), ("Some GPU", None),
])  # fmt: skip
def test_compute_rate_by_name(name, peak):
    found = card_by_name(name)
    assert (found.peak_tflops if found else None) == peak


def test_every_shipped_machine_is_complete_and_says_where_its_rates_come_from():
    assert len(shipped_profiles()) >= 30
    for name in shipped_profiles():
        hardware = load_hardware(name)
        assert (
            hardware.compute_tflops and hardware.memory_gb_per_s and any("nominal" in note for note in hardware.notes)
        )
    for card in CARDS.values():
        assert 0 < card.layers_share < 1 and card.source and (card.pcie_gen is None) == (card.kind == "unified")
    pair, single = load_machine("2x-rtx3090"), load_machine("rtx3090")
    assert len(pair.gpus) == 2 and pair.gpus[0] == single.gpus[0] and Machine.from_dict(pair.to_dict()) == pair
    refused(ProfileError, "one of: a100, gb10, ", lambda: load_hardware("rtx9999"))


def test_one_memory_for_gpu_and_cpu_is_counted_once_and_answers_copy_nothing():
    hardware = load_hardware("gb10")
    pool = load_machine("gb10").ram_available_bytes
    assert hardware.is_unified and hardware.vram_bytes + hardware.ram_bytes == pool
    assert any("share one memory" in note for note in hardware.notes)
    answers = hardware.for_answers()
    assert answers.vram_bytes + answers.ram_bytes == pool and answers.vram_bytes > 0.8 * pool
    plan = plan_inference(preset_shape("llama-8b"), answers, preset="balanced", precision="bf16")
    assert "PCIe 0 s" in "\n".join(words_of(plan)) and not load_hardware("rtx4090").is_unified
    plan_of = choose(preset_shape("llama-8b"), RunRequest(), hardware).plan
    used = {use.tier: use.used_bytes for use in plan_of.tiers}
    assert plan_of.fits and used["vram"] + used["ram"] <= pool


def test_unknown_gpu_gives_lower_bounds():
    links = LinkRates("measured", 25.0, 24.0, 40.0, 6.0, 5.0, 5.5, 60.0, device_memory_gb_per_s=300.0)
    hardware = hardware_of(machine(gpus=(Gpu(0, "Some GPU", 8 * GIB),), links=links), "m")
    assert hardware.compute_tflops is None and any("lower bounds" in note for note in hardware.notes)
    plan = choose(preset_shape("llama-3b"), RunRequest(), hardware).plan
    assert plan.time.compute_s == 0 and not plan.compute_known and plan.to_dict()["step_is_lower_bound"]


def test_every_gpu_has_a_memory_rate():
    for profile in ("rtx4070-laptop", "rtx4070-laptop-wsl2"):
        assert load_hardware(profile).nominal["device_memory_gb_per_s"] == 256.0
    by_name = hardware_of(machine(), "desktop")
    assert by_name.memory_gb_per_s == 1008.0 and "data sheet" in by_name.sources["device_memory_gb_per_s"]
    unknown = machine(gpus=(Gpu(0, "Some GPU", 8 * GIB),))
    refused(ProfileError, "no memory rate of Some GPU", lambda: hardware_of(unknown, "m"))
    for slowest in (
        hardware_of(unknown, "m", allow_nominal=True),
        hardware_of(machine(gpus=()), "server", Overrides(vram_gib=8, tflops=30)),
    ):
        assert slowest.memory_gb_per_s == 192.0 and any("slowest known card's 192" in note for note in slowest.notes)


def test_the_laptop_under_wsl2_has_half_its_ram():
    bare, under = load_hardware("rtx4070-laptop"), load_hardware("rtx4070-laptop-wsl2")
    assert under.ram_bytes == 30 * GIB < 0.55 * bare.ram_bytes and under.pinned_bytes == GIB // 2
    assert any(".wslconfig" in note for note in under.notes)


def test_mixed_rate_is_used_for_the_common_part():
    hardware = server(drive_read_gb_per_s=4.0, drive_write_gb_per_s=2.0, drive_mixed_gb_per_s=5.0)
    assert hardware.drive_s(10e9, 10e9) == pytest.approx(4.0)
    assert hardware.drive_s(14e9, 10e9) == pytest.approx(5.0)
    assert hardware.drive_s(0, 10e9) == pytest.approx(5.0)
    assert dataclasses.replace(hardware, drive_mixed_gb_per_s=None).drive_s(4e9, 2e9) == pytest.approx(2.0)


def test_a_profile_in_which_no_link_was_measured_is_refused(tmp_path):
    saved = machine(links=LinkRates("measured")).save(tmp_path / "p.json")
    refused(ProfileError, "no link of it was measured", lambda: load_hardware(str(saved)))


def test_the_hosts_rate_is_taken_where_it_was_measured(tmp_path):
    path = machine().save(tmp_path / "desktop.json")
    measured = load_hardware(str(path))
    assert (measured.host_layer_s, measured.sources["host_layer_s"]) == (0.0025, "measured")
    assert measured.host_s(4) == 0.01 and dataclasses.replace(measured, is_cpu=True).host_s(4) == 0.0
    record = json.loads(path.read_text())
    record["links"]["host_layer_s"] = 0.0
    path.write_text(json.dumps(record))
    refused(ValueError, r"host_layer_s is 0\.0, but a rate must be above 0", lambda: load_hardware(str(path)))
    del record["links"]["host_layer_s"]  # a profile from before
    path.write_text(json.dumps(record))
    older = load_hardware(str(path))
    assert older.host_layer_s == k.HOST_LAYER_S and "on a server" in older.sources["host_layer_s"]


def test_rates_of_the_optimizer_are_taken_where_they_were_measured(tmp_path):
    path = str(machine().save(tmp_path / "desktop.json"))
    measured = load_hardware(path)
    assert measured.optimizer_gparams_per_s["split8"] == 2.4
    assert "measured: fp32 1.5" in measured.sources["optimizer_gparams_per_s"] and not measured.notes
    record = json.loads(Path(path).read_text())
    del record["links"]["optimizer_gparams_per_s"]  # a profile from before
    Path(path).write_text(json.dumps(record))
    older = load_hardware(path)
    assert older.optimizer_gparams_per_s == {} and "the memory's" in older.sources["optimizer_gparams_per_s"]
    assert any("CPU optimizer was not measured" in note for note in older.notes)
    record["links"]["optimizer_gparams_per_s"] = {"fp32": "fast"}
    Path(path).write_text(json.dumps(record))
    refused(ProfileError, r"optimizer_gparams_per_s\.fp32 must be float", lambda: load_hardware(path))
    record["links"]["optimizer_gparams_per_s"] = [1.0]
    Path(path).write_text(json.dumps(record))
    refused(ProfileError, "must be an object", lambda: load_hardware(path))
    assert not any("optimizer" in note for note in load_hardware("rtx4070-laptop").notes)  # nominal anyway


def test_memory_for_tensors_by_the_size_of_the_card():
    small, large = server(vram_bytes=8 * GIB), server(vram_bytes=140 * GIB)
    assert small.tensor_bytes / GIB == pytest.approx(6.5, abs=0.01)
    assert large.gpu_context_bytes / 1e9 == pytest.approx(0.875, rel=0.01)  # measured
    assert server(vram_bytes=GIB).tensor_bytes == 1
