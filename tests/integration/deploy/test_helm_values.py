"""Which values the Helm chart takes: wrong ones are refused by name."""

from __future__ import annotations

import json
import runpy
from typing import Any

import helm_python
import pytest

from tests.integration.deploy.helm_release import CHART, DEPLOY, NAMESPACE, RELEASE, Release


def test_the_schema_has_the_settings_as_they_are() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    written = runpy.run_path(str(DEPLOY / "helm" / "settings_schema.py"))["written"]
    assert written(schema) == schema, "python deploy/helm/settings_schema.py"
    assert {"api_keys", "admin_keys", "api_keys_file", "port"}.isdisjoint(
        schema["properties"]["settings"]["properties"]
    )


@pytest.mark.parametrize("drain", [0, 0.5, 45.5])
def test_the_grace_period_follows_the_drain(chart: helm_python.Chart, drain: float) -> None:
    release = Release(chart, {"settings": {"drain_timeout": drain}, "preStopSleep": 0})
    assert 15 <= release.pod["terminationGracePeriodSeconds"] - drain < 16
    assert "lifecycle" not in release.container


def test_as_a_part_of_another_chart_it_gets_global_values(chart: helm_python.Chart) -> None:
    assert Release(chart, {"global": {"imageRegistry": "registry.example.com"}}).only("Deployment")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"replicaCount": 2}, ["replicaCount"]),
        ({"replicas": "two"}, ["replicas", "integer"]),
        ({"workload": "DaemonSet"}, ["workload", "StatefulSet"]),
        ({"settings": {"max_num_seq": 8}}, ["settings", "max_num_seq"]),
        ({"settings": {"max_num_seqs": 0}}, ["settings", "max_num_seqs"]),
        ({"settings": {"dtype": "int3"}}, ["settings", "dtype", "bfloat16"]),
        ({"settings": {"api_keys": "a-secret-key"}}, ["settings.api_keys", "apiKeys.existingSecret"]),
        ({"settings": {"port": 8001}}, ["settings.port", "the chart's own port"]),
        ({"settings": {"reuse_port": True}}, ["settings.reuse_port"]),
        ({"podLabels": {"app.kubernetes.io/instance": "b"}}, ["podLabels", "app.kubernetes.io/instance"]),
        ({"settings": {"drain_timeout": None}}, ["settings", "drain_timeout"]),
        ({"extraEnv": [{"name": "LEVEL", "value": 1}]}, ["extraEnv", "value", "string"]),
        ({"fullnameOverride": "1e3"}, ["1e3", "Service", "fullnameOverride"]),
        ({"fullnameOverride": "headrace.v2"}, ["headrace.v2", "Service"]),
        ({"extraEnv": [{"name": "HEADRACE_API_KEYS", "value": "a-secret-key"}]}, ["extraEnv", "name"]),
        ({"apiKeys": {"value": "a-secret-key"}}, ["apiKeys", "value"]),
        ({"port": 80}, ["port", "1,024"]),
        ({"port": None}, ["missing", "port"]),
        ({"cache": {"size": None}}, ["cache", "missing", "size"]),
        ({"readiness": {"exclude": "engine"}}, ["readiness", "exclude", "queue_full"]),
        ({"gpu": {"count": -1}}, ["gpu", "count"]),
        ({"gpu": {"count": 2}}, ["gpu.count", "data_parallel_size"]),
        ({"workload": "StatefulSet", "cache": {"existingClaim": "shared"}}, ["cache", "existingClaim"]),
        ({"cache": {"size": "20 GB"}}, ["cache", "size"]),
        ({"cache": {"size": "20ki"}}, ["cache", "size"]),
        ({"podDisruptionBudget": {"maxUnavailable": "half"}}, ["podDisruptionBudget", "maxUnavailable"]),
        ({"autoscaling": {"kind": "KEDA"}}, ["autoscaling", "ScaledObject"]),
        ({"autoscaling": {"minReplicas": 5}}, ["minReplicas", "maxReplicas"]),
        ({"inferencePool": {"enabled": True}}, ["inferencePool", "endpointPicker", "name"]),
        (
            {"prometheusRule": {"enabled": True}, "settings": {"metrics_prefix": "vllm_"}},
            ["metrics_prefix", "prometheusRule"],
        ),
        ({"ingress": {"tlsSecret": "tls"}}, ["ingress", "host"]),
        ({"ingress": {"host": "https://a.example.com"}}, ["ingress", "host"]),
        (
            {"ingress": {"enabled": True, "host": "a.example.com"}, "settings": {"allowed_hosts": "b.example.com"}},
            ["allowed_hosts", "a.example.com"],
        ),
        ({"apiKeys": {"existingSecret": "keys", "key": ""}}, ["apiKeys", "key"]),
        (
            {"apiKeys": {"existingSecret": "keys"}, "serviceMonitor": {"enabled": True}},
            ["serviceMonitor.authorization"],
        ),
    ],
    ids=lambda given: None if isinstance(given, list) else json.dumps(given),
)
def test_wrong_values_are_refused_by_name(chart: helm_python.Chart, values: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(helm_python.HelmError) as refused:
        chart.render(values, name=RELEASE, namespace=NAMESPACE)
    message = str(refused.value)
    assert [word for word in said if word not in message] == [], message
    assert "a-secret-key" not in message
