"""Metrics: Prometheus exporters of router, replica and driver, on loopback, labels bounded.

Labels are profile names and endings alone: their number is that of the scenario. No prompt text,
no token ids, no request ids.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

LOOPBACK = "127.0.0.1"
SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 60.0)


class _Exporter:
    """A registry of its own (several may live in one process) and its HTTP server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._server: Any = None
        self.port: int | None = None

    def serve(self, port: int = 0, host: str = LOOPBACK) -> int:
        """Serve /metrics; port 0 takes a free one. Returns the port."""
        self._server, thread = start_http_server(port, addr=host, registry=self.registry)
        self._thread = thread
        self.port = int(self._server.server_port)
        return self.port

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(timeout=5)
            self._server = None


class RouterMetrics(_Exporter):
    """What the router and the open-loop driver see."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = Counter(
            "testbed_requests", "Requests by how they ended", ["profile", "ending"],
            registry=self.registry,
        )  # fmt: skip
        self.ttft = Histogram(
            "testbed_ttft_seconds", "Time to first token from the intended time", ["profile"],
            buckets=SECONDS, registry=self.registry,
        )  # fmt: skip
        self.dispatch_lag = Histogram(
            "testbed_dispatch_lag_seconds", "How late a request left for its replica",
            buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.25, 1.0), registry=self.registry,
        )  # fmt: skip
        self.in_flight = Gauge(
            "testbed_requests_in_flight", "Dispatched and not ended", registry=self.registry
        )
        self.advertised_wait = Gauge(
            "testbed_advertised_wait_seconds", "Mean excess delay a node advertises",
            ["profile"], registry=self.registry,
        )  # fmt: skip


class ReplicaMetrics(_Exporter):
    """What one replica sees of its engine; ``profile`` labels every figure."""

    def __init__(self, profile: str) -> None:
        super().__init__()
        self.profile = profile

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, ["profile"], registry=self.registry)

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(name, text, ["profile"], buckets=SECONDS, registry=self.registry)

        self._running = gauge("testbed_engine_running_requests", "Sequences in the batch")
        self._waiting = gauge("testbed_engine_waiting_requests", "Sequences not yet admitted")
        self._kv_usage = gauge("testbed_engine_kv_usage_ratio", "Share of KV blocks in use")
        self._pinned = gauge("testbed_engine_pinned_tokens", "Tokens of pinned prefixes")
        self._requests = Counter(
            "testbed_engine_requests", "Requests by how they ended", ["profile", "ending"],
            registry=self.registry,
        )  # fmt: skip
        self._cached = Counter(
            "testbed_engine_cached_tokens", "Prompt tokens served from cache", ["profile"],
            registry=self.registry,
        )  # fmt: skip
        self._wait = seconds(
            "testbed_engine_wait_seconds", "Excess delay: TTFT beyond the unloaded prefill"
        )
        self._ttft = seconds("testbed_engine_ttft_seconds", "Time to first token at the engine")

    def relabel(self, profile: str) -> None:
        """Export under another profile's name from now on."""
        self.profile = profile

    def load(self, running: int, waiting: int, kv_usage: float) -> None:
        self._running.labels(self.profile).set(running)
        self._waiting.labels(self.profile).set(waiting)
        self._kv_usage.labels(self.profile).set(kv_usage)

    def pinned(self, tokens: int) -> None:
        self._pinned.labels(self.profile).set(tokens)

    def served(self, ttft: float, wait: float, cached: int) -> None:
        self.ended("completed")
        self._cached.labels(self.profile).inc(cached)
        self._ttft.labels(self.profile).observe(ttft)
        self._wait.labels(self.profile).observe(wait)

    def ended(self, ending: str) -> None:
        self._requests.labels(self.profile, ending).inc()
