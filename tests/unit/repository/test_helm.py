"""The chart: with its default values it is what deploy/kuberay is, and it refuses wrong values.

The tests that need helm or kubectl say so where the machine has none:
``scripts/get-kubernetes-tools.sh`` brings both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml

from everstep.options.serve import VARIABLES
from scripts.check_kubernetes import (
    CHART,
    ToolFailed,
    charted,
    kustomized,
    tool,
    values_files,
)

needs_helm = pytest.mark.skipif(
    tool("helm") is None, reason="no helm: scripts/get-kubernetes-tools.sh brings one"
)
needs_kubectl = pytest.mark.skipif(
    tool("kubectl") is None, reason="no kubectl: scripts/get-kubernetes-tools.sh brings one"
)
ONLY_IN_CHART = {("Job", "everstep-migrate")}
ONLY_IN_KUSTOMIZATION = {("Namespace", "everstep")}
Objects = dict[tuple[str, str], dict[str, Any]]


def by_name(manifests: list[dict[str, Any]]) -> Objects:
    return {(each["kind"], each["metadata"]["name"]): each for each in manifests}


def compared(value: Any) -> Any:
    """A manifest without what says nothing: the chart's own labels, defaults, the order of lists of
    things that have names."""
    if isinstance(value, list):
        found = [compared(each) for each in value]
        have_names = all(isinstance(each, dict) for each in value)
        return (
            sorted(found, key=lambda each: json.dumps(each, sort_keys=True))
            if have_names
            else found
        )
    if not isinstance(value, dict):
        return str(value) if isinstance(value, (int, float)) else value
    left_out = {"imagePullPolicy", "helm.sh/resource-policy"}
    found = {key: compared(each) for key, each in value.items() if key not in left_out}
    if "name" in found and ("labels" in found or "annotations" in found):
        found.pop("labels", None)
    if found.get("annotations") == {}:
        del found["annotations"]
    found.pop("namespace", None)
    return found


@needs_helm
@needs_kubectl
def test_the_chart_is_what_the_kustomization_is() -> None:
    chart, kustomization = by_name(charted()), by_name(kustomized())
    assert chart.keys() - kustomization.keys() == ONLY_IN_CHART
    assert kustomization.keys() - chart.keys() == ONLY_IN_KUSTOMIZATION
    for key in chart.keys() & kustomization.keys():
        assert compared(chart[key]) == compared(kustomization[key]), key


def containers(manifests: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for each in manifests:
        if each["kind"] in ("Deployment", "Job"):
            yield from each["spec"]["template"]["spec"]["containers"]


@needs_helm
@pytest.mark.parametrize("values", values_files(), ids=lambda path: path.stem)
def test_the_service_knows_every_variable_that_the_chart_sets(values: Any) -> None:
    for container in containers(charted("--values", str(values))):
        names = {each["name"] for each in container["env"]}
        ours = {name for name in names if name.startswith("EVERSTEP_")}
        assert ours <= VARIABLES
        assert container["securityContext"]["runAsNonRoot"] and container["resources"]["limits"]
        mounted = {mount["mountPath"] for mount in container.get("volumeMounts", ())}
        for each in container["env"]:
            path = each.get("value", "")
            if path.startswith("/run/secrets/"):
                assert path.rpartition("/")[0] in mounted, each


@needs_helm
@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--set", "service.replcas=3"), "replcas"),
        (("--set", "service.replicas=0"), "replicas"),
        (("--set-string", "service.settings.EVERSTEP_DRILS x=1"), "settings"),
        (("--set", "oidc.issuer=https://login.example.org"), "clientId"),
        (("--set", "oidc.issuer=http://login.example.org"), "issuer"),
        (("--set", "storage.uri=gs://b"), "uri"),
        (("--set", "ray.workerGroups[0].minReplicas=many"), "minReplicas"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(words: tuple[str, ...], named: str) -> None:
    with pytest.raises(ToolFailed, match=named):
        charted(*words)


def test_every_value_has_a_schema_and_the_defaults_agree_with_it() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.validate(values, schema)

    def known(schema: dict[str, Any], values: dict[str, Any], at: str = "") -> None:
        for name, value in values.items():
            own = schema.get("properties", {}).get(name)
            if isinstance(schema.get("additionalProperties"), dict):
                continue
            assert own is not None, f"{at}{name}"
            if isinstance(value, dict):
                known(own, value, f"{at}{name}.")

    known(schema, values)
