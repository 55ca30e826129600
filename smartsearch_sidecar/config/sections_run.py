"""``[run]``, ``[server]``, ``[ledger]`` and ``[cluster]``: the process and where it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from smartsearch_sidecar import errors
from smartsearch_sidecar.config.keys import Section, key, seconds, whole
from smartsearch_sidecar.config.profiles import preset
from smartsearch_sidecar.config.values import Capability, FilePath, Host, Name, NatsServers


class Run(Section):
    """The run this process serves."""

    directory: FilePath | None = key(
        None, "Where the ledger of this run is written; it must not exist yet. Also `--run-dir`."
    )
    nodes: int = whole(
        1, 1, 4096, "trainer nodes", "How many sidecars this run has; above 1 each knows a part."
    )
    previous: FilePath | None = key(
        None, "The run directory this run goes on from: the claim names its head and last receipt."
    )
    on_unclean_restart: Literal["latch", "report"] = key(
        preset("run.on_unclean_restart"),
        "After a crash: close the latch, or only report it, where enforced provenance finds the "
        "rollouts that met the outage.",
    )

    def needed_directory(self) -> Path:
        """``directory``, or a ``ConfigError`` that says how to name it."""
        if self.directory is None:
            raise errors.CONFIG_INVALID(
                "run.directory is not set: name it there or with --run-dir."
            )
        return self.directory


class Server(Section):
    """Where it listens and who may speak to it."""

    host: Host = key(
        "127.0.0.1", "The address to listen on. The protocol is plain HTTP: loopback only."
    )
    port: int = whole(8765, 0, 65535, "", "The port; 0 takes any free one.")
    allow_remote: bool = key(
        False, "Allows a `host` that is not loopback: capabilities then cross a network in clear."
    )
    execute_capability: Capability | None = key(
        None, "The secret of `sandbox_url`; made at start when absent."
    )
    execute_capability_file: FilePath | None = key(None, "A file that holds it, instead.")
    internal_capability: Capability | None = key(
        None, "The secret of `internal_url`; made at start when absent, never the same one."
    )
    internal_capability_file: FilePath | None = key(None, "A file that holds it, instead.")
    probe_host: Host | None = key(
        None, "The address of a second listener that has `/livez` and `/readyz` alone."
    )
    probe_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Its port; 0 takes any free one. Both or none.",
    )
    body_seconds: float = seconds(
        10, 3600, "A request body must be there within this; a stalled one holds a connection."
    )
    idle_seconds: float = seconds(
        75, 86400, "An idle connection is closed after this; above the clients' own pool time."
    )
    connections_max: int = whole(
        4096, 1, 65536, "connections", "Open at once; each costs a descriptor and 10 KB."
    )


class Ledger(Section):
    """How the journal is written."""

    segment_mib: int = whole(
        256, 1, 4096, "MiB", "A journal file of this size is followed by another."
    )
    sync: bool = key(
        True, "Syncs before it answers. Off only for measurements: a power cut then loses answers."
    )


class Cluster(Section):
    """One verdict over many nodes, by NATS JetStream. Needs `run.nodes` of 2 or more."""

    nats_url: NatsServers = Field(description="The NATS servers; a secret, as it may hold one.")
    run_id: Name = Field(description="The run's name, the same on every node.")
    node: Name = Field(description="This node's name, different on every node.")
    lease_block: int = whole(
        256,
        1,
        1_000_000,
        "searches",
        "Allowance leased at once: larger is less traffic, more lost.",
    )
    lost_seconds: float = seconds(
        15, 3600, "A node, or NATS, unheard of for this long ends the run."
    )
