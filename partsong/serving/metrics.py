"""Counts what a server does, in the form that Prometheus reads."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from partsong.serving.jobs import Job
from partsong.serving.messages import DenoiseAnswer
from partsong.serving.replica import StartTrouble

__all__ = ["Metrics", "labels_of"]

#: Most characters of a reason.
_REASON = 200
_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


class Metrics:
    """Holds the counters of one server; labels are models, strategies and users, and nothing that clients write."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        model, both = ("model",), ("model", "strategy")
        self.running = Gauge("partsong_requests_running", "Jobs that are running", model, registry=registry)
        self.waiting = Gauge("partsong_requests_waiting", "Jobs that wait for their turn", model, registry=registry)
        self.seconds = Histogram(
            "partsong_request_seconds", "From request to result", both, buckets=_SECONDS, registry=registry
        )
        self.queued = Histogram(
            "partsong_queue_seconds", "From request to its first step", model, buckets=_SECONDS, registry=registry
        )
        self.step_seconds = Histogram(
            "partsong_step_seconds", "Between two steps of a job", both, buckets=_SECONDS, registry=registry
        )
        self.steps = Counter("partsong_steps", "Denoising steps made", both, registry=registry)
        self.bytes_sent = Counter("partsong_bytes_sent", "Bytes between ranks", both, registry=registry)
        self.user_jobs = Counter(
            "partsong_user_jobs", "Jobs by who asked and how they ended", ("user", "status"), registry=registry
        )
        self.user_seconds = Counter(
            "partsong_user_seconds", "Seconds that ranks worked on jobs", ("user",), registry=registry
        )
        self.user_requests = Counter(
            "partsong_user_requests", "Requests by who sent them", ("user",), registry=registry
        )
        self.calls = Counter("partsong_denoise_calls", "Calls of a denoiser by clients", both, registry=registry)
        self.call_seconds = Counter(
            "partsong_denoise_seconds", "Seconds that ranks worked on them", both, registry=registry
        )
        self.ended = Counter("partsong_requests", "Jobs by how they ended", ("model", "status"), registry=registry)
        self.restarts = Counter("partsong_restarts", "Starts of a replica after its first", model, registry=registry)

        what = "Starts of ranks in a row that failed, and the reason of the last; only while a model cannot be started"
        self._failing = Gauge("partsong_starts_failed", what, ("model", "reason"), registry=registry)
        self.replicas = Gauge("partsong_replicas_ready", "Groups of ranks that are ready", model, registry=registry)

    def note_end(self, job: Job) -> None:
        """Counts a job that has ended."""
        self.ended.labels(job.model, job.status).inc()
        if job.user:
            self.user_jobs.labels(job.user, job.status).inc()
            self.user_seconds.labels(job.user).inc(job.seconds or 0.0)

    def note_call(self, model: str, strategy: str, answered: DenoiseAnswer) -> None:
        """Counts a client's call of a denoiser."""
        labels = model, _without_knobs(strategy)
        self.calls.labels(*labels).inc()
        self.call_seconds.labels(*labels).inc(answered.seconds)
        self.bytes_sent.labels(*labels).inc(sum(spent.bytes_sent for spent in answered.spent))

    def show_failing(self, troubles: Mapping[str, StartTrouble]) -> None:
        """Shows which models cannot be started, by their names, and no others."""
        self._failing.clear()
        for name, trouble in troubles.items():
            self._failing.labels(name, str(trouble.error)[:_REASON]).set(trouble.starts)

    def text(self) -> bytes:
        """Returns all of it as Prometheus reads it."""
        return generate_latest(self._registry)


def labels_of(job: Job) -> tuple[str, str]:
    """Returns the labels of a job's counters."""
    return job.model, _without_knobs(job.strategy)


def _without_knobs(strategy: str) -> str:
    """Returns the names of strategies alone, since clients choose their knobs freely."""
    return "+".join(part.partition(":")[0] for part in strategy.split("+"))
