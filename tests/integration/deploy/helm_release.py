"""What an installation of the Helm chart would consist of, and what Kubernetes takes of its custom resources."""

from __future__ import annotations

from typing import Any

import helm_python
import yaml

from tests.support.harness import REPOSITORY

DEPLOY = REPOSITORY / "deploy"
CHART = DEPLOY / "helm" / "headrace"
RELEASE, NAMESPACE = "demo", "llm"
Resource = dict[str, Any]


def fields(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": list(required),
        "properties": required | optional,
        "additionalProperties": False,
    }


def items(of: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": of, "minItems": 1}


TEXT, NUMBER = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 1}
LABELS = fields({"matchLabels": {"type": "object", "additionalProperties": TEXT, "minProperties": 1}})
RULE = fields({"expr": TEXT}, alert=TEXT, record=TEXT, labels={"type": "object"}, annotations={"type": "object"})
RULE["properties"]["for"] = TEXT
TRIGGER = fields(
    {
        "type": {"const": "prometheus"},
        "metricType": {"enum": ["AverageValue", "Value"]},
        "metadata": fields(dict.fromkeys(("serverAddress", "query", "threshold", "ignoreNullValues"), TEXT)),
    }
)
# Specifications of resources that Kubernetes itself does not know, by version and kind.
CUSTOM: dict[tuple[str, str], dict[str, Any]] = {
    ("monitoring.coreos.com/v1", "ServiceMonitor"): fields(
        {
            "selector": LABELS,
            "endpoints": items(
                fields(
                    {"port": TEXT, "path": TEXT, "interval": TEXT},
                    authorization=fields({"credentials": fields({"name": TEXT, "key": TEXT})}),
                    relabelings=items(fields({"targetLabel": TEXT, "replacement": TEXT})),
                )
            ),
        }
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): fields(
        {"groups": items(fields({"name": TEXT, "rules": items(RULE)}))}
    ),
    ("keda.sh/v1alpha1", "ScaledObject"): fields(
        {"scaleTargetRef": fields({"apiVersion": TEXT, "kind": TEXT, "name": TEXT}), "triggers": items(TRIGGER)},
        minReplicaCount=NUMBER,
        maxReplicaCount=NUMBER,
        advanced=fields({"horizontalPodAutoscalerConfig": fields({"behavior": {"type": "object"}})}),
    ),
    ("inference.networking.k8s.io/v1", "InferencePool"): fields(
        {
            "selector": LABELS,
            "targetPorts": items(fields({"number": NUMBER})) | {"maxItems": 8},
            "endpointPickerRef": fields(
                {"name": TEXT, "port": fields({"number": NUMBER})}, failureMode={"enum": ["FailOpen", "FailClose"]}
            ),
        }
    ),
}


class Release:
    """What an installation with these values would consist of."""

    def __init__(
        self, chart: helm_python.Chart, values: dict[str, Any], name: str = RELEASE, namespace: str = NAMESPACE
    ) -> None:
        texts = chart.render(values, name=name, namespace=namespace)
        self.values: dict[str, Any] = chart.merge_values(values)
        self.resources: list[Resource] = [
            resource
            for path, text in texts.items()
            if path.endswith(".yaml")
            for resource in yaml.safe_load_all(text)
            if resource
        ]
        self.workload = self.only(self.values["workload"])
        self.pod: dict[str, Any] = self.workload["spec"]["template"]["spec"]
        (self.container,) = self.pod["containers"]
        self.labels: dict[str, str] = self.workload["spec"]["template"]["metadata"]["labels"]
        self.environment: dict[str, Any] = {entry["name"]: entry for entry in self.container["env"]}

    def of(self, kind: str) -> list[Resource]:
        return [resource for resource in self.resources if resource["kind"] == kind]

    def only(self, kind: str) -> Resource:
        (found,) = self.of(kind)
        return found
