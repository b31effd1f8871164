"""What a service was asked to be, by its arguments and its environment."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from service.settings import (
    DEFAULT_CPUS_PER_NODE,
    DEFAULT_HOST,
    DEFAULT_NODES,
    DEFAULT_PORT,
    Settings,
    cluster_env,
    cordon_settings,
    database_url,
    existing_ray_token,
    home_directory,
    metrics_token,
    notify_rule,
    pip_rule,
    request_limits,
    scrub_settings,
    storage_roots,
    tls_settings,
)

OFF = ("", "0", "false", "no", "off")
"""Values of a variable that leave what it names off."""


def settings_of(argv: Sequence[str] | None) -> Settings:
    """Settings from arguments and environment. Raises SettingsError; argparse exits with code 2."""
    parser = argparse.ArgumentParser(
        prog="everstep serve",
        description="Run the Everstep service, by default with a Ray cluster of its own on this "
        "machine. "
        "EVERSTEP_HOME (default ~/.everstep) is where it keeps its database, storage and tokens.",
    )
    parser.add_argument(
        "--host", default=DEFAULT_HOST, help="address to listen on (default %(default)s)"
    )
    parser.add_argument(
        "--port",
        type=int,
        default=DEFAULT_PORT,
        help="port to listen on, 0 for a free one (default %(default)s)",
    )
    parser.add_argument(
        "--nodes",
        type=int,
        default=DEFAULT_NODES,
        help="worker nodes of the own cluster (default %(default)s)",
    )
    parser.add_argument(
        "--cpus-per-node",
        type=int,
        default=DEFAULT_CPUS_PER_NODE,
        help="CPUs that each node offers (default %(default)s)",
    )
    parser.add_argument(
        "--cluster-env",
        metavar="NAME",
        action="append",
        help="variable of this environment that the own cluster inherits, and the code of every "
        "run can read; NAME* for all that "
        "begin so; repeat it for several (or EVERSTEP_CLUSTER_ENV, separated by commas). By "
        "default the service's secrets and "
        "cloud credentials stay out",
    )
    parser.add_argument(
        "--drills",
        action="store_true",
        help="allow failure drills through the API (or EVERSTEP_DRILLS=1)",
    )
    parser.add_argument(
        "--ray-address",
        metavar="URL",
        help="use an existing Ray cluster: the URL of its dashboard, for example "
        "http://head:8265. Its token is taken from "
        "RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token",
    )
    parser.add_argument(
        "--database",
        metavar="URL",
        default="",
        help="postgresql+psycopg://… or sqlite:///… (or EVERSTEP_DATABASE, which no list of "
        "processes shows, or a file with it, "
        "EVERSTEP_DATABASE_FILE; default: SQLite in EVERSTEP_HOME)",
    )
    parser.add_argument(
        "--storage",
        metavar="URI",
        default="",
        help="directory or s3://… for runs; all nodes reach it (default: in EVERSTEP_HOME)",
    )
    parser.add_argument(
        "--storage-root",
        metavar="URI",
        action="append",
        help="directory or s3://bucket/prefix below which storage and the data of runs have to "
        "lie; repeat it for several "
        "(or EVERSTEP_STORAGE_ROOTS, separated by commas; default: anywhere)",
    )
    args = parser.parse_args(argv)
    cordon_runs, cordon_failures, cordon_window_s = cordon_settings()
    scrub_mb_per_s, scrub_interval_s = scrub_settings()
    rate_per_s, max_upload_bytes, max_code_bytes = request_limits()
    tls_cert, tls_key = tls_settings()
    return Settings(
        home=home_directory(),
        host=args.host,
        port=args.port,
        database_url=args.database or database_url(),
        storage_uri=args.storage,
        storage_roots=tuple(args.storage_root or storage_roots()),
        ray_address=args.ray_address,
        ray_token=existing_ray_token() if args.ray_address else None,
        nodes=args.nodes,
        cpus_per_node=args.cpus_per_node,
        cluster_env=tuple(args.cluster_env or cluster_env()),
        public_url=os.environ.get("EVERSTEP_PUBLIC_URL", "").strip(),
        drills=args.drills or os.environ.get("EVERSTEP_DRILLS", "").strip().lower() not in OFF,
        pip_rule=pip_rule(),
        cordon_runs=cordon_runs,
        cordon_failures=cordon_failures,
        cordon_window_s=cordon_window_s,
        scrub_mb_per_s=scrub_mb_per_s,
        scrub_interval_s=scrub_interval_s,
        rate_per_s=rate_per_s,
        max_upload_bytes=max_upload_bytes,
        max_code_bytes=max_code_bytes,
        metrics_token=metrics_token(),
        tls_cert=tls_cert,
        tls_key=tls_key,
        notify=notify_rule(),
    )
