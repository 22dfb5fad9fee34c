"""Metrics that Prometheus reads at /metrics: latencies, queue, batch, pages, prefix hits, guesses, links."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from outcore.flow.experts import ExpertCounts
from outcore.infer import Answer, InferenceEngine
from outcore.infer.opening import OpenedModel, against_plan
from outcore.infer.schedule import Work, rows_of

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class RequestMetrics:
    """Metrics of requests that every server has, whichever engine answers them. One registry a server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.queued = self._histogram("request_queue_seconds", "From arrival until a prompt begins")
        self.first_token = self._histogram("time_to_first_token_seconds", "From arrival to the first token")
        self.between = self._histogram("time_between_tokens_seconds", "Mean time between the tokens of an answer")
        self.total = self._histogram("request_seconds", "From arrival to the end of an answer")
        self.finished = self._counter("answers", "Answers, by how they ended", ("reason",))
        self.refused = self._counter("refused_requests", "Requests that were turned down", ("status",))
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts")
        self.answer_tokens = self._counter("answer_tokens", "Tokens of answers")
        self.cached_tokens = self._counter("cached_prompt_tokens", "Tokens of prompts that were computed before")

    def _histogram(self, name: str, words: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        return Histogram(f"outcore_{name}", words, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, words: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"outcore_{name}", words, labels, registry=self.registry)

    def gauge(self, name: str, words: str, read: Callable[[], float]) -> None:
        """A number that is read when somebody asks for the page."""
        Gauge(f"outcore_{name}", words, registry=self.registry).set_function(read)

    def refuse(self, status: int) -> None:
        """Count a request that was turned down."""
        self.refused.labels(str(status)).inc()

    def written(self, tokens: int, first_token_s: float, total_s: float) -> None:
        """Note the tokens of an answer, and when they came."""
        self.total.observe(total_s)
        if tokens:
            self.first_token.observe(first_token_s)
        if tokens > 1:
            self.between.observe(max(0.0, total_s - first_token_s) / (tokens - 1))
        self.answer_tokens.inc(tokens)

    def page(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self.registry)


class ServeMetrics(RequestMetrics):
    """With what our own engine tells: passes, pages, weights, links; gauges are read off it when asked."""

    def __init__(self, opened: OpenedModel) -> None:
        super().__init__()
        self._opened, engine = opened, opened.engine
        self.against_plan = against_plan(opened)
        self.pass_time = self._histogram("pass_seconds", "One pass over all layers")
        sizes = (1, 2, 4, 8, 16, 32, 64, 256, 1024, 4096, 16384)
        self.pass_rows = self._histogram("pass_tokens", "Tokens of a pass", sizes)
        self.stalls = self._counter(
            "stall_seconds", "Time in which the device waited for weights, by what they waited for", ("reason",)
        )
        self.drafted = self._counter("draft_tokens", "Tokens that were guessed")
        self.accepted = self._counter("accepted_draft_tokens", "Guessed tokens that were right")
        self._expert_bytes = 0, 0
        """(bytes of experts read so far, in the last pass)."""
        self._gauges(engine)
        engine.observers.append(self.passed)

    def _gauges(self, engine: InferenceEngine) -> None:
        gauge, placement, scheduler = self.gauge, self._opened.placement, engine.scheduler
        cache = scheduler.cache
        gauge("running_answers", "Answers being written", lambda: engine.num_running)
        gauge("waiting_answers", "Answers that wait for room", lambda: engine.num_waiting)
        gauge("preempted_answers", "Answers that lost their pages and began again", lambda: scheduler.num_preempted)
        pages = Gauge(
            "outcore_kv_pages", "Pages of keys and values", ("group", "home", "state"), registry=self.registry
        )
        for group, ledger in enumerate(cache.ledgers):
            window = cache.windows[group]
            name = "all" if window is None else f"window {window}"
            pages.labels(name, placement.kv_home, "free").set_function(lambda ledger=ledger: ledger.num_free)
            pages.labels(name, placement.kv_home, "used").set_function(
                lambda ledger=ledger: ledger.num_pages - ledger.num_free
            )
        gauge("kv_bytes", "Bytes of keys and values", lambda: cache.size_bytes)
        gauge("prefix_pages", "Pages kept for prompts that begin alike", lambda: len(cache.index or ()))
        gauge("kept_prefix_pages", "Such pages on the drive", lambda: 0 if cache.kept is None else len(cache.kept))
        drives = [lane for name, lane in self._opened.lanes.items() if name != "upload"]
        experts = self._opened.experts
        counts = ExpertCounts() if experts is None else experts.counts
        if drives:
            under_way = "Reads of weights under way"
            gauge("drive_queue_depth", under_way, lambda: sum(lane.clock.io_under_way for lane in drives))
            so_far = "Bytes of weights read from the drives so far"
            gauge("drive_bytes", so_far, lambda: sum(lane.moved_bytes for lane in drives) + counts.for_cpu_bytes)
        if experts is not None:
            gauge("experts_asked", "Experts that tokens chose so far, each once a layer and pass", lambda: counts.asked)
            gauge("expert_hits", "Those that were on the device", lambda: counts.hits)
            gauge("expert_hit_rate", "Share of them that were on the device", lambda: counts.hit_rate or 0.0)
            gauge(
                "expert_read_bytes",
                "Bytes of the others, read so far",
                lambda: counts.read_bytes + counts.for_cpu_bytes,
            )
        weights = Gauge(
            "outcore_weight_bytes", "Bytes of weights, by where they live", ("home",), registry=self.registry
        )
        for home in ("vram", "ram", "nvme"):
            weights.labels(home).set(placement.bytes_at(home))
        gauge(
            "travelling_bytes", "Bytes of weights that cross the link in each pass", lambda: placement.travelling_bytes
        )
        gauge("link_bytes_per_second", "Bytes that crossed the link in the last pass, per second", self._link_rate)
        told = self.against_plan
        if told.plan is not None:
            gauge("forecast_pass_seconds", "What the plan says of the last pass", lambda: told.last_forecast_s)
            gauge("measured_over_forecast", "Seconds of all passes over what the plan says of them", self._ratio)

    def _ratio(self) -> float:
        told = self.against_plan
        return told.measured_s / told.forecast_s if told.forecast_s else float("nan")

    def _link_rate(self) -> float:
        seconds = self._opened.engine.counts.last_pass_s
        crossed_bytes = self._opened.placement.travelling_bytes + self._expert_bytes[1]
        return crossed_bytes / seconds if seconds else 0.0

    def passed(self, works: Sequence[Work], seconds: float) -> None:
        """Note the pass that has just run."""
        self.pass_time.observe(seconds)
        self.pass_rows.observe(rows_of(works))
        if (experts := self._opened.experts) is not None:
            so_far = experts.counts.read_bytes
            self._expert_bytes = so_far, so_far - self._expert_bytes[0]
        for name, waited_s in self._opened.waited_s().items():
            self.stalls.labels(name).inc(waited_s)

    def answered(self, answer: Answer, prompt_tokens: int) -> None:
        """Note an answer that has ended."""
        times = answer.timings
        self.finished.labels(answer.finish).inc()
        self.queued.observe(times.queued_s)
        self.written(len(answer.tokens), times.first_token_s, times.total_s)
        self.drafted.inc(times.drafted)
        self.accepted.inc(times.accepted)
        if answer.choice == 0:
            self.prompt_tokens.inc(prompt_tokens)
            self.cached_tokens.inc(times.cached_tokens)
