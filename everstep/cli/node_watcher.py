"""The command `node-watcher`: Kubernetes's notices as cordons and drains."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from everstep.cli.options import UrlOption
from everstep.cli.terminal import command, terminal
from everstep.errors import UsageError


@command
def node_watcher(
    namespace: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Namespace of Ray's pods; by default this pod's own."),
    ] = None,
    selector: Annotated[
        str, typer.Option(metavar="LABELS", help="Labels of Ray's pods, as kubectl -l takes them.")
    ] = "ray.io/is-ray-node=yes",
    leaving_taint: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="Key of a further taint that says that a node is about to go; KEY* names all "
            "that begin so. May be repeated.",
        ),
    ] = None,
    api: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Kubernetes's API; by default as this pod has it."),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Token for --api, read anew each time.")
    ] = None,
    ca_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Certificate of the authority of --api.")
    ] = None,
    url: UrlOption = None,
) -> None:
    """Cordon and drain Ray's nodes as Kubernetes announces of its own: cordons, taints, evictions,
    spot notices. Runs until it is stopped."""
    from everstep.kubernetes.api import ACCOUNT, Access, KubernetesApi
    from everstep.kubernetes.notices import LEAVING
    from everstep.kubernetes.watcher import NodeWatcher

    access = Access(api.rstrip("/"), token_file, ca_file) if api else Access.of_pod()
    watcher = NodeWatcher(
        terminal().client(),
        KubernetesApi(access),
        namespace or _own_namespace(ACCOUNT / "namespace"),
        selector,
        keys=(*LEAVING, *(leaving_taint or ())),
        say=terminal().line,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: watcher.stop())
    terminal().line("watching Kubernetes's nodes")
    watcher.run()


def _own_namespace(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError as exc:
        raise UsageError("this is no pod of Kubernetes; give --namespace NAME") from exc
