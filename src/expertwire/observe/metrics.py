"""Prometheus endpoints of servers and of the registry, read when scraped; docs/observe.md lists
the metrics. Needs prometheus_client, which is an extra."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..hca.wqe import syndrome_name
from ..registry.facts import snapshot
from .reports import is_number
from .status_tables import fields, number, text
from .web import WebServer

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from ..registry.registry import Registry
    from ..server.server import Server

Metrics = Iterable["Metric"]


def serve_metrics(listen: str, collect: Callable[[], Metrics]) -> WebServer:
    """Listens on HOST:PORT; `collect` is called for each scrape, in a thread of its own.

    Raises ConfigError when prometheus_client is missing, or the address cannot be listened on.
    """
    try:
        exposition = importlib.import_module("prometheus_client.exposition")
        registry_of = importlib.import_module("prometheus_client.registry").CollectorRegistry
    except ImportError:
        raise ConfigError(
            "--metrics-port needs prometheus_client: pip install 'expertwire[metrics]'"
        ) from None
    collectors = registry_of(auto_describe=False)
    collectors.register(_Collector(collect))

    def scrape(accept: str) -> tuple[str, bytes]:
        encode, kind = exposition.choose_encoder(accept)
        return kind, encode(collectors)

    return WebServer(listen, {"/metrics": scrape})


class _Collector:
    def __init__(self, collect: Callable[[], Metrics]):
        self._collect = collect

    def collect(self) -> Metrics:
        return self._collect()

    def describe(self) -> list:
        """Nothing is collected before the first scrape."""
        return []


class Family:
    """One metric; `add` takes label values in the order of `labels`."""

    def __init__(self, kind: str, name: str, words: str, labels: str = "", unit: str = ""):
        from prometheus_client.core import Metric

        self.metric = Metric(f"expertwire_{name}", words, kind, unit)
        self._name = self.metric.name + ("_total" if kind == "counter" else "")
        self._labels = labels.split()

    def add(self, value: object, *labels: object) -> None:
        if is_number(value):
            named = dict(zip(self._labels, map(str, labels), strict=True))
            self.metric.add_sample(self._name, named, float(value))

    def add_summary(self, times: Mapping[str, Any], total_ms: object, *labels: object) -> None:
        """Quantiles of the last 4096 durations, sum and count of all."""
        named = dict(zip(self._labels, map(str, labels), strict=True))
        for quantile, key in (("0.5", "p50_us"), ("0.99", "p99_us")):
            self.metric.add_sample(self.metric.name, {**named, "quantile": quantile},
                                   number(times.get(key)) / 1e6)
        self.metric.add_sample(f"{self.metric.name}_sum", named, number(total_ms) / 1e3)
        count = times.get("count", times.get("messages"))
        self.metric.add_sample(f"{self.metric.name}_count", named, number(count))


# -------------------------------------------------------------------- a server


def server_metrics(server: Server | Any) -> Iterator[Metric]:
    """Of one server, from what it counts itself."""
    who = server.lease.server_id or server.name
    stats = server.stats() if hasattr(server, "stats") else {}
    model = server.model
    yield from _gauges([
        ("server_info", "What is served.", "server model dtype", 1,
         (who, model.get("name", ""), model.get("dtype", ""))),
        ("epoch", "Version of the membership that this process knows.", "", server.lease.epoch, ()),
        ("draining", "1 while the server is asked to leave.", "server", int(server.lease.draining),
         (who,)),
        ("experts_held", "Experts of this server.", "server", len(server.shard.experts), (who,)),
        ("connected_clients", "Clients with a connection to this server.", "server",
         stats.get("clients"), (who,)),
        ("queue_depth_messages", "Messages that lay ready when the server last came back to look.",
         "server", stats.get("queue_depth"), (who,)),
    ])
    for name, words, unit, key in (
        ("rows", "Rows (tokens) of served messages.", "", "rows"),
        ("messages", "Messages answered.", "", "messages"),
        ("received_bytes", "Bytes of served requests.", "bytes", "bytes_received"),
        ("sent_bytes", "Bytes of their replies.", "bytes", "bytes_sent"),
    ):
        counter = Family("counter", name, words, "server", unit)
        counter.add(stats.get(key), who)
        yield counter.metric
    refused = Family("counter", "refused_messages", "Messages refused, by reason.", "server reason")
    for reason, count in fields(stats.get("refusals")).items():
        refused.add(count, who, reason)
    yield refused.metric
    yield _errors("errors", "server", [(who, stats)])
    yield _stages("stage_duration", "server", [(who, stats)])
    yield from _load(server, who)
    yield from _hca(server, who)


def _load(server: Any, who: str) -> Iterator[Metric]:
    load = Family("counter", "expert_rows", "Rows that an expert of a layer was asked for.",
                  "server layer expert")
    batcher = getattr(server, "batcher", None)
    if batcher is not None:
        experts, rows = batcher.rows_by_layer()
        for layer, counts in enumerate(rows.tolist()):
            for expert, count in zip(experts, counts, strict=True):
                load.add(count, who, layer, expert)
    yield load.metric


def _hca(server: Any, who: str) -> Iterator[Metric]:
    entries = Family("counter", "hca_entries", "Work-queue entries executed, by opcode.",
                     "server opcode")
    rest = [Family("counter", "hca_moved_bytes", "Bytes the HCA moved.", "server", "bytes"),
            Family("counter", "hca_doorbells", "Doorbells the HCA saw.", "server"),
            Family("counter", "hca_error_completions", "Completions with an error.", "server")]
    hca = getattr(server, "hca", None)
    if hca is not None:
        stats = hca.stats()
        for opcode, count in stats["wqes"].items():
            entries.add(count, who, opcode)
        for family, key in zip(rest, ("bytes", "doorbells", "error_cqes"), strict=True):
            family.add(stats[key], who)
    yield from (family.metric for family in (entries, *rest))


# -------------------------------------------------------------------- the registry


def registry_metrics(registry: Registry) -> Iterator[Metric]:
    """Membership, and what the clients reported. Raises WaitTimeout if the registry is stuck."""
    facts = snapshot(registry)
    servers = facts["servers"]
    yield from _gauges([
        ("epoch", "Version of the membership that this process knows.", "", facts["epoch"], ()),
        ("registry_uptime_seconds", "Since the registry listens.", "", facts["uptime_s"], ()),
        ("members", "Servers that are there, also those that leave.", "", len(servers), ()),
        ("draining_members", "Servers that are asked to leave.", "",
         sum(s["draining"] for s in servers), ()),
        ("watching_clients", "Clients that follow the membership.", "", len(facts["clients"]), ()),
    ])
    reports = Family("counter", "loss_reports", "Times that clients said a server is lost.")
    reports.add(facts["reports"])
    silence = Family("gauge", "server_silence_seconds", "Since a server was last heard.", "server")
    for server in servers:
        silence.add(server["silent_s"], server["server_id"])
    yield from (reports.metric, silence.metric)
    clients = [(text(c.get("client")), c) for c in facts["client_stats"]]
    yield from client_metrics(clients)


CLIENT_COUNTERS = (
    ("client_rows", "Rows sent and answered.", lambda c: c.get("rows")),
    ("client_retries", "Messages sent again.", lambda c: c.get("retries")),
    ("client_failovers", "Times that a server was given up for others.", lambda c: c.get("lost")),
    ("client_dropped_pairs", "(row, expert) pairs left out because nobody holds the expert.",
     lambda c: fields(c.get("dropped")).get("pairs")),
    ("client_skipped_ids", "Expert ids out of range.", lambda c: c.get("skipped_ids")),
)


def client_metrics(clients: list[tuple[str, Mapping[str, Any]]]) -> Iterator[Metric]:
    """Of (name, report) pairs."""
    for name, words, value in CLIENT_COUNTERS:
        counter = Family("counter", name, words, "client")
        for who, client in clients:
            counter.add(value(client), who)
        yield counter.metric
    depth = Family("gauge", "client_queue_depth_chunks", "Chunks in flight or waiting for a slot.",
                   "client")
    put = Family("summary", "put_latency", "Posting one batch's messages.", "client", "seconds")
    for who, client in clients:
        depth.add(client.get("queue_depth"), who)
        if times := fields(fields(client.get("stages")).get("put")):
            put.add_summary(times, times.get("total_ms"), who)
    yield from (depth.metric, put.metric)
    yield _errors("client_errors", "client", clients)
    yield _stages("client_stage_duration", "client", clients)
    yield from _pairs(clients)


def _pairs(clients: list[tuple[str, Mapping[str, Any]]]) -> Iterator[Metric]:
    moved = Family("counter", "pair_bytes", "Bytes between a client and a server.",
                   "client server direction", "bytes")
    rows = Family("counter", "pair_rows", "Rows of a client that a server answered.",
                  "client server")
    wait = Family("summary", "reply_latency", "From a message's put to its reply's flag.",
                  "client server", "seconds")
    for who, client in clients:
        for server, pair in fields(client.get("servers")).items():
            pair, server = fields(pair), text(server)
            moved.add(pair.get("bytes_sent"), who, server, "sent")
            moved.add(pair.get("bytes_received"), who, server, "received")
            rows.add(pair.get("rows"), who, server)
            wait.add_summary(pair, pair.get("wait_ms"), who, server)
    yield from (moved.metric, rows.metric, wait.metric)


def _gauges(values: Iterable[tuple[str, str, str, object, tuple]]) -> Iterator[Metric]:
    for name, words, labels, value, given in values:
        gauge = Family("gauge", name, words, labels)
        gauge.add(value, *given)
        yield gauge.metric


def _errors(name: str, label: str, reports: Iterable[tuple[str, Mapping[str, Any]]]) -> Metric:
    errors = Family("counter", name, "Error completions, by mlx5 syndrome.",
                    f"{label} syndrome error")
    for who, stats in reports:
        for syndrome, count in fields(stats.get("errors")).items():
            try:
                words = syndrome_name(int(syndrome, 16))
            except ValueError:
                continue
            errors.add(count, who, syndrome, words)
    return errors.metric


def _stages(name: str, label: str, reports: Iterable[tuple[str, Mapping[str, Any]]]) -> Metric:
    stages = Family("summary", name, "Duration of a stage.", f"{label} stage", "seconds")
    for who, stats in reports:
        for stage, times in fields(stats.get("stages")).items():
            stages.add_summary(fields(times), fields(times).get("total_ms"), who, text(stage))
    return stages.metric
