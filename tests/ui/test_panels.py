"""The panels as they are served: nothing from outside, every setting in the form; runs as the routes tell them."""

import json
import re
import time
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")

from starlette.testclient import TestClient

from outcore.common.files import user_folder
from outcore.config import FIELDS
from outcore.ui.api import PanelsApi, Place, table
from outcore.ui.api import runs as runs_module
from outcore.ui.api.form import COMMAND_LINE, HIDDEN, argv_of, checked, command_of, said, yaml_of
from outcore.ui.api.machine import MachineWatch
from outcore.ui.api.model import parse_metrics
from outcore.ui.api.paths import advice
from outcore.ui.api.place import write_json
from outcore.ui.api.serving import alerts_of as serving_alerts
from outcore.ui.api.serving import sample_of
from outcore.ui.api.training import Training
from outcore.ui.app import create_app
from outcore.ui.settings import UiSettings

pytestmark = pytest.mark.skipif(find_spec("gradio") is None, reason="the panels' packages are not installed")
"""Whoever collects does not import it: it takes seconds."""


@pytest.fixture
def client(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    api = PanelsApi(Place())
    with TestClient(create_app(UiSettings(), api, with_panels=False), base_url="http://127.0.0.1:7860") as client:
        yield client


@pytest.fixture
def run(tmp_path):
    """Writes a run of so many steps as training leaves it."""

    def write(name: str, steps: int = 5, **config) -> None:
        folder = tmp_path / "logs" / name
        folder.mkdir(parents=True)
        (tmp_path / "checkpoints").mkdir(exist_ok=True)
        forecast = {"step_s": 0.5, "rss_bytes": 2 << 30}
        header = {"event": "header", "run": name, "config": config, "plan": {"total_steps": 5, "forecast": forecast}}
        lines = [header] + [
            {
                "step": n, "loss": 9.0 - n, "step_s": 0.6, "phase_s": {"forward": 0.4, "stall_ranks": 0.1 * n},
                "ram_rss_bytes": 3 << 30, "lr": 1e-3,
            }
            for n in range(1, steps + 1)
        ]  # fmt: skip
        lines.append({"event": "eval", "step": steps, "eval_loss": 4.5})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    return write


@pytest.mark.more
def test_the_page_asks_nobody_else_and_tells_nobody(tmp_path, monkeypatch):
    from outcore.ui.panels.labels import label_of

    monkeypatch.chdir(tmp_path)
    with TestClient(create_app(UiSettings(), PanelsApi(Place())), base_url="http://127.0.0.1:7860") as client:
        page = client.get("/")
    assert page.status_code == 200
    policy = page.headers["content-security-policy"]
    assert "default-src 'self'" in policy and "connect-src 'self'" in policy and "http" not in policy
    loads = re.findall(r"<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=\"(https?:[^\"]+)", page.text)
    assert not [one for one in loads if 'rel="preconnect' not in one], loads
    config = json.loads(re.search(r"window\.gradio_config = (\{.*?\});</script>", page.text, re.S)[1])
    assert config["analytics_enabled"] is False
    shown = {part["props"].get("elem_id"): part["props"] for part in config["components"]}
    fields = {name: shown.get(f"field_{name}") or shown[name] for name in set(FIELDS) - HIDDEN - COMMAND_LINE}
    for name, field in fields.items():  # in words, with the flag's name beneath
        assert "_" not in field["label"] and field["label"][0].isupper() and field["info"].endswith(f" `{name}`")
        assert len(field["info"]) > len(name) + 10, "and says what it is"
    assert len({field["label"] for field in fields.values()}) == len(fields), "no two have one label"
    sizes, depths = (shown[f"field_{name}"]["choices"] for name in ("aio_block_size", "aio_queue_depth"))
    assert [value for _, value in sizes[1:]] == [512 << 10, 1 << 20, 2 << 20, 4 << 20]
    assert [value for _, value in depths[1:]] == [4, 8, 16, 32]
    drawer = {part["props"]["label"]: part["props"] for part in config["components"] if "label" in part["props"]}
    degrees = {"tensor_parallel", "pipeline_parallel", "num_layer_buffers", "nvme_path", "vram_gib"}
    assert {label_of(name) for name in degrees} <= set(drawer)
    assert [value for _, value in drawer[label_of("kv_home")]["choices"]] == ["auto", "vram", "ram", "nvme"]
    tabs = [part["props"]["label"] for part in config["components"] if part["type"] == "tabitem"]
    assert tabs == ["Start", "Train", "Runs", "Chat", "Evaluate", "Machine"]


def test_a_form_becomes_flags_and_yaml_that_training_understands():
    fields = {row["name"]: row["default"] for row in table()["data"]}
    assert said(fields) == {}
    typed = {"max_steps": "20", "learning_rate": "3e-4", "dataset": ["a.txt", "b.txt:0.3"], "packing": "on"}
    told = said(fields | typed | {"seed": 7.0, "nvme_offload_optimizer": False, "min_lr_ratio": ""})
    config = checked(told)
    assert (config.max_steps, config.learning_rate, config.seed) == (20, 3e-4, 7)
    assert config.dataset == ("a.txt", "b.txt:0.3") and not config.nvme_offload_optimizer
    assert "--dataset a.txt --dataset b.txt:0.3" in command_of(told)
    assert "dataset:\n- a.txt\n- b.txt:0.3\n" in yaml_of(told) and "max_steps: 20" in yaml_of(told)
    assert argv_of({"max_steps": -1, "seed": 2}) == ["--max_steps=-1", "--seed=2"]
    assert command_of({"max_steps": -1, "seed": 2}) == "outcore train --max_steps=-1 --seed 2"


@pytest.mark.more
def test_the_forecast_is_drawn_against_what_is_there(client):
    from outcore.ui.panels.train import banner_of, forecast_of, headline_of, space_of, stages_of

    small = client.post("/v1/estimate", json={"fields": {"preset": "tiny"}}).json()
    assert small["fits"] and "do not need infinity" in small["needs_infinity"]
    assert banner_of(small) == "" and "tokens/s" in headline_of(small)
    small["offloaded"] |= {"needed_bytes": 3 * 10**12, "free_bytes": 10**12}
    assert "Space needed, with reserve: 3.00 TB; free: 1.00 TB" in space_of(small)
    assert all(stage in stages_of(small) for stage in ("none", "zero1", "zero2", "zero3", "infinity"))
    small["plan"]["tiers"]["nvme"]["used_bytes"], small["life_steps"], small["life_days"] = 1, 2e6, 30
    assert "rating lasts 2,000,000 steps (30 days of training)" in forecast_of(small)
    assert small["command"] == "outcore train --preset tiny" and small["yaml"] == "preset: tiny\n"
    large = client.post("/v1/estimate", json={"fields": {"preset": "llama-70b"}}).json()
    assert not large["fits"] and "Does not fit this machine" in headline_of(large) and "short" in forecast_of(large)
    none = client.post("/v1/estimate", json={"fields": {"model_name_or_path": "no/such/model"}}).json()
    assert "not a folder here" in none["problem"] and "No forecast" in headline_of(none)
    on_drive = client.post("/v1/estimate", json={"fields": {"preset": "tiny", "residency": "nvme"}}).json()
    assert (
        on_drive["problem"] == ""
        and on_drive["plan"]["parts_bytes"]["nvme"]
        and "--residency nvme" in on_drive["command"]
    )
    for name, value in {"offload_params": "cpu", "nvme_offload_params": False}.items():
        refused = client.post("/v1/estimate", json={"fields": {"preset": "tiny", name: value}}).json()
        assert "No forecast" in headline_of(refused) and f"{name}: outcore plan chooses this itself" in banner_of(
            refused
        )
        assert f"--{name} {str(value).lower()}" in refused["command"], "the run's own command is shown all the same"


def test_a_step_takes_what_its_phases_take(client, run, tmp_path):
    run("one")
    file = tmp_path / "logs" / "one" / "metrics.jsonl"
    slow = file.read_text().replace(
        '4.0, "step_s": 0.6, "phase_s": {"forward": 0.4', '4.0, "step_s": 1.6, "phase_s": {"forward": 1.4'
    )
    file.write_text(slow)
    one = client.get("/v1/runs/one").json()
    assert (one["step_s"], one["phases"]["forward"]) == (pytest.approx(0.85), pytest.approx(0.65)), "but the first"


def test_runs_are_listed_drawn_compared_and_deleted(client, run, tmp_path):
    from outcore.ui.panels.runs import compared_of, graphs_of, state_of

    run("one", learning_rate=1e-3, preset="tiny")
    run("two", steps=3, learning_rate=2e-3, preset="tiny")
    rows = {row["name"]: row for row in client.get("/v1/runs").json()["data"]}
    assert rows["one"]["state"] == "finished" and rows["two"]["step"] == 3
    one, series = client.get("/v1/runs/one").json(), client.get("/v1/runs/one/series", params={"points": 2}).json()
    assert one["forecast"][0] == {"what": "step_s", "forecast": 0.5, "measured": 0.6}
    assert series["steps"] == [2, 5] and series["series"]["loss"] == [7.5, 5.0]
    assert series["phases"]["stall_ranks"] == pytest.approx([0.15, 0.4])
    assert "Of it waited for" in graphs_of(series) and "other GPUs" not in graphs_of({**series, "phases": {}})
    phases = {"forward": [0.1, 0.2], "collective_update": [0.3, 0.4], "waited_rank_2": [0.1, 0.5]}
    drawn = graphs_of({**series, "phases": phases})
    assert ">step<" in drawn and '<span class="high">' in drawn, "axes say what they are"
    assert "In collectives: update 400 ms now" in drawn and "GPU 0 waited for: GPU 2 500 ms now" in drawn
    assert drawn.count("work: forward 200 ms now") == 1  # what passes within a phase is none
    assert "alert" in state_of({**one, "state": "stopped", "job": {"message": "It ended unseen."}}, series)
    assert "alert" not in state_of({**one, "job": {"message": "It ended unseen."}}, series)  # as it should
    assert "one: finished" in state_of(one, series) and "validation" in graphs_of(
        client.get("/v1/runs/one/series").json()
    )
    found = client.get("/v1/run_comparison", params={"names": "one,two"}).json()
    assert found["settings"] == {"learning_rate": [1e-3, 2e-3]}
    assert "learning_rate" in compared_of(found, dict.fromkeys(("one", "two"), series))
    settings = client.get("/v1/runs/two/settings").json()
    assert settings["command"] == "outcore train --learning_rate 0.002 --preset tiny"
    assert client.delete("/v1/runs/one").json()["deleted"] and not (tmp_path / "logs" / "one").exists()
    assert [row["name"] for row in client.get("/v1/runs").json()["data"]] == ["two"]


def test_where_there_is_no_gpu_nobody_waits_for_pcie(client, run):
    from outcore.ui.panels.runs import graphs_of, state_of

    run("one")
    one, series = client.get("/v1/runs/one").json(), client.get("/v1/runs/one/series").json()
    one["phases"] = {"stall_pcie": 0.5}
    series["phases"] = {"stall_pcie": [0.4, 0.5, 0.4, 0.5, 0.5]}
    assert "waiting for weights 500 ms" in state_of(one, series) and "PCIe" not in state_of(one, series)
    one["last"]["gpu_mem_bytes"], series["series"]["gpu_mem_bytes"] = 1 << 30, [1 << 30] * 5
    assert "waiting for PCIe 500 ms" in state_of(one, series) and "PCIe 500 ms" in graphs_of(series)


def test_a_run_whose_process_is_not_gone_is_ending(client, run, monkeypatch):
    run("one")
    assert client.get("/v1/runs/one").json()["state"] == "finished"
    monkeypatch.setattr(Training, "_pid", lambda self, name: 1)
    assert client.get("/v1/runs/one").json()["state"] == "ending"


def test_a_run_that_ends_while_it_is_looked_at_is_shown_as_it_ended(client, run, monkeypatch):
    """Its process is asked for before its files, and before the exit code."""
    run("one")
    asked, listed = [], runs_module.list_runs

    def job(self, name):
        asked.append(name)
        return {"run": name, "state": "finished", "message": ""}

    def states(*folders):
        return [replace(state, state=state.state if asked else "running (process 1)") for state in listed(*folders)]

    with monkeypatch.context() as patched:
        patched.setattr(Training, "job", job)
        patched.setattr(runs_module, "list_runs", states)
        assert client.get("/v1/runs/one").json()["state"] == "finished"

    class Ending:
        pid, codes = 1, iter((None,))
        exit_code = property(lambda self: next(self.codes, 0))

    training = Training(Place())
    training._children["one"] = Ending()
    write_json(training._note("one"), {"settings": {}, "started_at": 0.0, "exit_code": None})
    assert training.job("one")["state"] == "finished"


def test_deleting_asks_first():
    from outcore.ui.panels.runs import RunsPanel

    asked = []
    client = SimpleNamespace(
        get=lambda *path: {"words": "finished", "size_bytes": 5 << 20}, delete=lambda *path: asked.append(path)
    )
    panel = object.__new__(RunsPanel)
    panel.client = client
    shown, question = panel._ask("one")
    assert shown["visible"] and "Delete one (finished" in question and not asked


@pytest.mark.parametrize("words", [
    "|" + "a|" * 5000 + "\n|" + "-|" * 5000 + "\n" + "|a|\n" * 2000,  # short rows are filled up: 6 s
    "|" + "a|" * 200 + "\n|" + "-|" * 200 + "\n" + "|a|\n" * 7000, "[" * 400_000, "*a " * 200_000,
], ids=["rows", "columns", "brackets", "stars"])  # fmt: skip
def test_an_answer_is_drawn_in_a_moment_whatever_stands_in_it(words):
    from outcore.ui.panels.draw import markdown

    began_s = time.thread_time()
    assert words[:20] in markdown(words).replace("<p>", "")
    assert time.thread_time() - began_s < 1
    assert "<td>2</td>" in markdown("|a|b|\n|-|-|\n|1|2|"), "ordinary tables stay"
    assert "<img" not in markdown("![seen](https://example.org/x.png)"), "a browser fetches pictures unasked"


def test_reasoning_is_folded_and_costs_are_said():
    from outcore.ui.panels.chat import costs_of, messages_of, residency_of

    times = {"tokens": 3, "tokens_per_s": 2.5, "prefill_s": 0.1, "decode_s": 0.8, "hit_rate": 0.5, "prompt_tokens": 10}
    message = {"role": "assistant", "content": "four", "reasoning": "2 + 2", "finish": "length", "timings": times}
    user, answer = messages_of([{"role": "user", "content": "2 + 2?"}, message]).split("</article>")[:2]
    assert "<details><summary>Reasoning</summary><p>2 + 2</p>" in answer and "<p>four</p>" in answer
    assert '<div class="text">2 + 2?</div>' in user
    said = costs_of(message)
    homes = {"weight_bytes": {"ram": 3 << 30, "nvme": 0}, "kv_used_share": 0.25, "kv_bytes": 1 << 30}
    assert residency_of(homes) == ["weights 3.00 GiB in RAM", "keys and values 25% of 1.00 GiB used"]
    assert residency_of(times) == []
    assert "2.5 tokens/s" in said and "50% of 10 prompt tokens" in said and "ended at max_tokens" in said


@pytest.mark.parametrize(("kind", "ram_gb", "words"), [
    ("nvme", 64, "queue depth 8 to 16"), ("ssd", 64, "block size 512 KiB, queue depth 4"), ("tmpfs", 64, ""),
    ("nvme", 8, "turn pin_memory off"),
])  # fmt: skip
def test_guidance_follows_the_drive_and_the_ram(kind, ram_gb, words):
    said = advice(kind, ram_gb * 10**9)
    assert words in said and ("pin_memory" in said) == (ram_gb < 16) and bool(said) == bool(words)


def test_what_is_drawn_is_escaped():
    from outcore.ui.panels import draw

    assert "<b>" not in draw.table(("a",), [("<b>x</b>",)]) and "&lt;b&gt;" in draw.paragraph("<b>")
    assert "<b>" not in draw.markdown("<b>x</b>") and "href" not in draw.markdown("[a](javascript:x)")
    assert [draw.number(x) for x in (1218.4, 0.12345, None)] == ["1,218", "0.123", "-"]
    assert draw.chart("empty", [1.0], {"a": [2.0]}) == ""
    drive = draw.chart("Drive", [1.0, 2.0], {"read": [0.0, 0.25], "written": [1.0, 4e-6]}, draw.rate)
    assert "read 250.00 MB/s<" in drive and "written 4.00 kB/s<" in drive and "0 B/s to 1.00 GB/s" in drive
    over = draw.tier_bar("ram", {"<i>": 3 << 30}, 3 << 30, 2 << 30)
    assert "1.00 GiB short" in over and "&lt;i&gt;" in over


def test_a_gpu_that_holds_up_the_others_is_an_alert(client, run, tmp_path):
    from outcore.ui.panels.runs import state_of

    run("two_gpus", steps=12)
    assert client.get("/v1/runs/two_gpus").json()["alerts"] == []
    path = tmp_path / "logs" / "two_gpus" / "metrics.jsonl"
    head, *steps = (json.loads(line) for line in path.read_text().splitlines())
    slow = [step | {"phase_s": {"waited_rank_1": 0.3 * step["step_s"]}} for step in steps if "step_s" in step]
    path.write_text("".join(json.dumps(line) + "\n" for line in (head, *slow)))
    shown = client.get("/v1/runs/two_gpus").json()
    assert shown["alerts"][0].startswith("GPU 1 is slow: GPU 0 waited for it through 30%")
    assert "GPU 1 is slow" in state_of(shown, client.get("/v1/runs/two_gpus/series").json())


def test_figures_of_the_engine_that_serves_become_graphs_and_alerts():
    from outcore.ui.panels.machine import serving_of

    page = (
        'vllm:num_requests_running{engine="0"} 1.0\nvllm:num_requests_waiting{engine="0"} 2.0\n'
        'vllm:generation_tokens_total{engine="0"} %d\nvllm:kv_cache_usage_perc{engine="0"} 0.99\n'
        "outcore_engine_restarts %d\noutcore_engine_up 1.0\n"
    )
    before, now = parse_metrics(page % (100, 0)), parse_metrics(page % (160, 1))
    samples = [{"time": at, **sample_of(one, before, at, 4)} for at, one in ((0.0, before), (2.0, now))]
    assert samples[1]["answer_tokens_per_s"] == 30 and samples[0]["answer_tokens_per_s"] is None
    assert samples[1]["stages_idle_share"] == 0.75 and sample_of(now, before, 2, 1)["stages_idle_share"] is None
    alerts = serving_alerts(samples)
    assert [one["name"] for one in alerts] == ["restarts", "kv_used_share"]
    stages = [{"gpus": [0, 1], "layers": 20}, {"gpus": [2, 3], "layers": None}]
    drawn = serving_of({"samples": samples, "launch": {"stages": stages}, "alerts": alerts})
    assert "Stages idle, at least: 75 % now" in drawn and "shared out evenly" in drawn
    assert "seconds before now" in drawn, "an axis says what it counts"
    assert serving_of({"samples": [], "launch": {}, "alerts": []}) == ""


def test_rows_are_shown_with_their_loss_mask(client, tmp_path):
    from outcore.ui.panels.train import rows_of

    chat = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "four"}]
    (tmp_path / "d.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    body = {"fields": {"preset": "tiny", "dataset": ["d.jsonl"]}, "rows": 1}
    found = client.post("/v1/data/preview", json=body).json()
    assert any("of 256 tokens, packed" in line for line in found["lines"])  # as the run will have them
    drawn = rows_of(found)
    marked = "".join(re.findall(r"<mark>(.*?)</mark>", drawn.partition("it.</p>")[2], re.S))
    plain = re.sub(r"<[^>]+>", "", drawn)
    assert "four" in marked and "2 + 2?" in plain and "2 + 2?" not in marked


def test_documents_of_an_evaluation_are_drawn_as_questions():
    from outcore.ui.panels.evaluate import detail_of, document_of

    one = {
        "task": "t",
        "doc_id": 4,
        "prompt": "x" * 900 + "2 +",
        "metrics": {"acc": 1.0},
        "continuations": [],
        "target": 1,
    }
    chosen = document_of(
        one | {"target": 1, "continuations": ["<b>", " 2"], "answers": [[-3.25, False], [-14.5, False]]}
    )
    assert "document 4: acc 1<" in chosen and "2 +</pre>" in chosen and "x" * 700 not in chosen
    assert re.findall(r"<td[^>]*>(.*?)</td>", chosen) == ["", "&lt;b&gt;", "-3.25", "▸", " 2", "-14.5"]
    written = document_of(one | {"target": "4", "answers": ["five"]})
    assert re.findall(r"<td[^>]*>(.*?)</td>", written) == ["4", "five"]
    several = document_of(one | {"target": "4", "answers": [["five", ""]]})  # asked for twice
    assert re.findall(r"<td[^>]*>(.*?)</td>", several) == ["4", "five", "4", ""]
    assert "log-probability -20.5" in document_of(one | {"target": "a whole file", "answers": [[-20.5]]})
    record = dict.fromkeys(("id", "status", "error", "settings", "launch", "versions"), "x") | {"scores": []}
    whole = detail_of(record, {"total": 1, "data": [one | {"answers": ["five"]}]})
    assert whole.index("document 4") < whole.index("<summary>Exact settings"), "which are for who asks"
    assert "Some of" in whole and "Some of" not in detail_of(record, {"total": 0, "data": []})


def test_an_evaluation_that_failed_says_why_without_being_chosen():
    from outcore.ui.panels.evaluate import progress_of

    failed = {"id": "eval-1", "status": "failed", "error": "there is no task <x>"}
    assert "eval-1 failed: there is no task &lt;x&gt;" in progress_of([failed, failed | {"status": "completed"}])
    assert progress_of([failed | {"status": "completed"}, failed]) == "" == progress_of([])


def test_thresholds_turn_into_alerts_and_are_kept(tmp_path, monkeypatch):
    from outcore.ui.panels.machine import alerts_of

    monkeypatch.chdir(tmp_path)
    watch = MachineWatch(Place())
    watch._samples.append({"time": 1.0, "gpu_temp_c": 80.0, "throttle": ["power"]})
    assert [one["name"] for one in watch.live()["alerts"]] == ["throttle"]
    watch.set_thresholds({"gpu_temp_c": 75})
    live = MachineWatch(Place())  # panels that start next
    live._samples.extend(watch._samples)
    assert "The GPU has 80 °C (limit 75)" in alerts_of(live.live())


def test_reports_of_setup_and_probe_are_told(client, tmp_path):
    from outcore.ui.panels.machine import probe_of, setup_of

    assert "never probed" in probe_of(client.get("/v1/machine").json()["probe"])
    (tmp_path / "logs").mkdir(exist_ok=True)
    report = {
        "verdict": "pinned", "headline": "Data goes through pinned RAM.",
        "why_not": {"gds-nvfs": ["no nvidia-fs here"]},
        "settings": {"aio": {"block_size": 1048576}, "outcore": {"why": {}}},
    }  # fmt: skip
    (tmp_path / "logs" / "gds_report.json").write_text(json.dumps(report))
    setup = {"rows": [{"part": "kvikio", "status": "ok", "found": "26.2", "fix": ""}]}
    user_folder().mkdir(parents=True)  # from anywhere; the other lies where it lay before
    (user_folder() / "setup_report.json").write_text(json.dumps(setup))
    found = client.get("/v1/machine").json()
    drawn = setup_of(found) + probe_of(found["probe"])
    assert all(
        words in drawn
        for words in ("kvikio", "pinned: Data goes", "gds-nvfs: no nvidia-fs", "aio.block_size", "1048576")
    )
