"""Check deploy/kuberay and deploy/helm without a cluster: ``python scripts/check_kubernetes.py``.

kubectl builds the kustomization, helm lints and renders the chart with each file of its folder
``ci``. Every object is then compared with the schemas of the oldest and the newest Kubernetes that
we name; the pods of a RayCluster are compared as pods. What this machine has no tool for is named,
and not done: ``scripts/get-kubernetes-tools.sh`` brings kubectl and helm.

``KUBERNETES_CRDS`` may name a folder with definitions of custom resources (KubeRay's lie in the
folder ``crds`` of its operator's chart); objects of those kinds are then compared with them, too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / "out" / "kubernetes"
KUSTOMIZATION = ROOT / "deploy" / "kuberay"
CHART = ROOT / "deploy" / "helm" / "everstep"
VERSIONS = ("1.29.0", "1.37.0")
"""The oldest and the newest Kubernetes whose schemas the manifests are compared with."""
OTHERS = {"RayCluster": "ray.io/v1", "ServiceMonitor": "monitoring.coreos.com/v1"}
"""Kinds that Kubernetes itself does not have, and their versions."""

Manifest = dict[str, Any]


class ToolFailed(Exception):
    """kubectl or helm refused our files. The message is what it printed."""


def tool(name: str) -> Path | None:
    """Return kubectl or helm: that of ``get-kubernetes-tools.sh``, else the machine's own."""
    found = shutil.which(name, path=TOOLS) or shutil.which(name)
    return Path(found) if found else None


def output_of(name: str, *words: str) -> str:
    """Return what kubectl or helm prints. Raises ToolFailed."""
    program = tool(name)
    assert program is not None, f"no {name}: run scripts/get-kubernetes-tools.sh"
    # neither looks at a cluster, nor at what its user has configured
    own = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "KUBECONFIG": "/dev/null"}
    ended = subprocess.run([program, *words], capture_output=True, text=True, env=own, timeout=60)
    if ended.returncode != 0:
        raise ToolFailed(f"{name} {' '.join(words)}:\n{ended.stdout}{ended.stderr}".strip())
    return ended.stdout


def documents(text: str) -> list[Manifest]:
    """Return the manifests of a stream of YAML."""
    return [found for found in yaml.safe_load_all(text) if found]


def kustomized() -> list[Manifest]:
    """Return deploy/kuberay as ``kubectl apply -k`` would send it. Raises ToolFailed."""
    return documents(output_of("kubectl", "kustomize", str(KUSTOMIZATION)))


def charted(*words: str, namespace: str = "everstep") -> list[Manifest]:
    """Return the chart as ``helm install everstep`` would send it. Raises ToolFailed."""
    return documents(
        output_of("helm", "template", "everstep", str(CHART), "--namespace", namespace, *words)
    )


def values_files() -> list[Path]:
    """Return the chart's defaults, and the values of its folder ``ci``."""
    return [CHART / "values.yaml", *sorted((CHART / "ci").glob("*.yaml"))]


def faults(manifest: Manifest, versions: tuple[str, ...] = VERSIONS) -> Iterator[str]:
    """Yield what is wrong with one manifest: unknown and missing fields, wrong types."""
    import kubernetes_validate as schemas

    name = f"{manifest['kind']} {manifest['metadata']['name']}"
    if manifest["kind"] in OTHERS:
        if manifest["apiVersion"] != OTHERS[manifest["kind"]]:
            yield f"{name}: apiVersion is {manifest['apiVersion']}"
        for pod in pods_of(manifest):
            yield from (f"{name}, {fault}" for fault in faults(pod, versions))
        return
    for version in versions:
        try:
            schemas.validate(manifest, version, strict=True)
        except schemas.ValidationError as exc:
            where = ".".join(map(str, exc.path))
            yield f"{name}, Kubernetes {version}: {where}: {exc.message}"
        except schemas.SchemaNotFoundError as exc:
            yield f"{name}, Kubernetes {version}: {exc.message}"


def pods_of(manifest: Manifest) -> Iterator[Manifest]:
    """Yield the pods that KubeRay makes of a RayCluster."""
    spec = manifest["spec"]
    if manifest["kind"] != "RayCluster":
        return
    groups = [("head", spec["headGroupSpec"])]
    groups += [(group["groupName"], group) for group in spec["workerGroupSpecs"]]
    for name, group in groups:
        template = group["template"]
        metadata = {"name": name, **template.get("metadata", {})}
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def definitions(folder: Path) -> dict[tuple[str, str], Manifest]:
    """Return (kind, apiVersion) -> schema of each version of each definition in a folder."""
    found = {}
    for path in sorted(folder.glob("*.yaml")):
        for definition in documents(path.read_text()):
            spec = definition["spec"]
            for version in spec["versions"]:
                key = (spec["names"]["kind"], f"{spec['group']}/{version['name']}")
                found[key] = closed(version["schema"]["openAPIV3Schema"])
    return found


def closed(schema: Any) -> Any:
    """Return a schema that refuses unknown fields, which an API server drops without a word."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    own = {key: closed(value) for key, value in schema.items() if key != "properties"}
    if "properties" in schema:
        properties = {key: closed(value) for key, value in schema["properties"].items()}
        own["properties"] = properties
        if "x-kubernetes-preserve-unknown-fields" not in schema:
            own.setdefault("additionalProperties", False)
    return own


def custom_faults(manifest: Manifest, known: dict[tuple[str, str], Manifest]) -> Iterator[str]:
    """Yield what is wrong with a custom resource whose definition is known."""
    schema = known.get((manifest["kind"], manifest["apiVersion"]))
    if schema is None:
        return
    # an object's own type and metadata are Kubernetes's, so definitions leave them open
    properties = {**schema["properties"], "apiVersion": True, "kind": True, "metadata": True}
    for fault in jsonschema.Draft4Validator({**schema, "properties": properties}).iter_errors(
        manifest
    ):
        where = ".".join(map(str, fault.path))
        yield f"{manifest['kind']} {manifest['metadata']['name']}: {where}: {fault.message}"


def main() -> int:
    """Check everything that this machine has tools for. Return 1 for a fault."""
    try:
        import kubernetes_validate  # noqa: F401
    except ImportError:
        print("Kubernetes: not checked, kubernetes-validate is not installed (make install)")
        return 0
    not_run, checked, found = [], 0, []
    crds = os.environ.get("KUBERNETES_CRDS")
    known = definitions(Path(crds)) if crds else {}
    if not known:
        not_run.append("KubeRay's own schema: set KUBERNETES_CRDS to the crds of its chart")
    try:
        for manifests in rendered(not_run):
            for manifest in manifests:
                checked += 1
                found += [*faults(manifest), *custom_faults(manifest, known)]
    except ToolFailed as exc:
        found.append(str(exc))
    print(
        f"Kubernetes: {checked} objects against {' and '.join(VERSIONS)}",
        *(f"not run: {each}" for each in not_run),
        sep="; ",
    )
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


def rendered(not_run: list[str]) -> Iterator[list[Manifest]]:
    """Yield the manifests of the kustomization and of the chart with each of its values. Note in
    ``not_run`` what there is no tool for. Raises ToolFailed."""
    if tool("kubectl"):
        yield kustomized()
    else:
        not_run.append("kustomize: no kubectl (scripts/get-kubernetes-tools.sh)")
        listed = yaml.safe_load((KUSTOMIZATION / "kustomization.yaml").read_text())["resources"]
        for name in listed:
            yield documents((KUSTOMIZATION / name).read_text())
    if not tool("helm"):
        not_run.append("the chart: no helm (scripts/get-kubernetes-tools.sh)")
        return
    for values in values_files():
        output_of("helm", "lint", "--strict", "--quiet", str(CHART), "--values", str(values))
        yield charted("--values", str(values))


if __name__ == "__main__":
    sys.exit(main())
