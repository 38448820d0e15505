"""The Helm chart renders to what Kubernetes takes and what the server means: its defaults, and every block of values in
its README. Helm's own library renders. Custom resources are held to a schema of the fields that the chart uses.
"""

from __future__ import annotations

import json
import re
import runpy
import tomllib
from collections.abc import Iterator
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import pytest
import yaml

from app.application import create_app
from app.metrics import Metrics
from app.server_state import Phase
from app.setting_sources import Given, check_settings, env_name
from app.setting_types import is_secret
from app.settings import Settings
from tests.deploy.dockerfile import environment, last_stage, only, texts
from tests.server.harness import REPOSITORY

DEPLOY = REPOSITORY / "deploy"
CHART = DEPLOY / "helm" / "headrace"
README = (CHART / "README.md").read_text()
EXAMPLES: list[dict[str, Any]] = [{}, *map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", README, re.DOTALL))]
RELEASE, NAMESPACE = "demo", "llm"
VERSIONS = ("1.30", "1.37")  # of Kubernetes: the oldest that the chart allows, and a new one
SECRETS = {env_name(name) for name, field in Settings.model_fields.items() if is_secret(field)} | {"HF_TOKEN"}

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


@pytest.fixture(scope="module")
def chart() -> Iterator[helm_python.Chart]:
    with helm_python.Chart.load(CHART) as loaded:
        yield loaded


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


@pytest.fixture(params=EXAMPLES, ids=lambda values: "-".join(values) or "defaults")
def release(request: pytest.FixtureRequest, chart: helm_python.Chart) -> Release:
    return Release(chart, request.param)


def test_helm_finds_nothing_to_complain_of() -> None:
    found = helm_python.lint(CHART, strict=True)
    assert found["errors"] == []
    assert [message for message in found["messages"] if message["severity"] >= 2] == []


def test_kubernetes_takes_whatever_is_rendered(chart: helm_python.Chart) -> None:
    rendered = {json.dumps(resource) for values in EXAMPLES for resource in Release(chart, values).resources}
    kinds = set()
    for resource in map(json.loads, rendered):
        kinds.add(resource["kind"])
        if custom := CUSTOM.get((resource["apiVersion"], resource["kind"])):
            jsonschema.validate(resource["spec"], custom)
        else:
            for version in VERSIONS:
                kubernetes_validate.validate(resource, version, strict=True)
    always = {"Deployment", "Service", "ServiceAccount", "PodDisruptionBudget"}
    assert kinds == always | {"StatefulSet", "NetworkPolicy", "HorizontalPodAutoscaler"} | {kind for _, kind in CUSTOM}


def resources_of(chart: helm_python.Chart, name: str, **more: Any) -> str:
    """With this name wherever one is chosen."""
    secret = {"existingSecret": name, "key": name}
    values = {
        "nameOverride": name,
        "fullnameOverride": "demo",
        "serviceAccount": {"name": name},
        **dict.fromkeys(("apiKeys", "adminKeys", "tenants", "hubToken"), secret),
        "serviceMonitor": {"enabled": True, "authorization": secret},
        "prometheusRule": {"enabled": True},
        "inferencePool": {"enabled": True, "endpointPicker": {"name": name}},
        "gpu": {"runtimeClassName": name},
        "autoscaling": {"kind": "HorizontalPodAutoscaler"},
        "networkPolicy": {"enabled": True},
    }
    return json.dumps(Release(chart, values | more, name, name).resources)


@pytest.mark.parametrize("name", ["true", "no", "123", "0x1f"])
def test_names_that_look_like_something_else_stay_text(chart: helm_python.Chart, name: str) -> None:
    assert resources_of(chart, name) == resources_of(chart, "some-name").replace("some-name", name)
    for more in ({"cache": {"existingClaim": name}}, {"workload": "StatefulSet", "cache": {"storageClassName": name}}):
        assert f': "{name}"' in resources_of(chart, "some-name", **more)


def test_the_name_of_a_stateful_set_leaves_room_for_a_hash(chart: helm_python.Chart) -> None:
    for workload, most in (("StatefulSet", 52), ("Deployment", 62)):
        release = Release(chart, {"workload": workload}, "r" * 53)
        assert len(release.workload["metadata"]["name"]) == most


def test_every_resource_is_the_releases_own(release: Release) -> None:
    for resource in release.resources:
        assert resource["metadata"]["namespace"] == NAMESPACE
        assert resource["metadata"]["labels"]["app.kubernetes.io/instance"] == RELEASE
    assert len({(resource["kind"], resource["metadata"]["name"]) for resource in release.resources}) == len(
        release.resources
    )


def test_the_server_takes_the_environment(release: Release) -> None:
    """As `headrace serve` would read it: names, values, and what excludes what."""
    variables = {
        name: entry["value"]
        for name, entry in release.environment.items()
        if name.startswith("HEADRACE_") and name not in SECRETS
    }
    names = {env_name(name): name for name in Settings.model_fields}
    read = check_settings({names[variable]: Given(value, variable) for variable, value in variables.items()})
    meant = Settings(**release.values["settings"])
    for name in release.values["settings"]:
        assert getattr(read, name) == getattr(meant, name), name
    assert (read.device == "cuda") == bool(release.values["gpu"]["count"])


def test_no_secret_is_in_a_resource(release: Release) -> None:
    assert release.of("Secret") == []
    for name in SECRETS & release.environment.keys():
        assert set(release.environment[name]) == {"name", "valueFrom"}
        assert set(release.environment[name]["valueFrom"]) == {"secretKeyRef"}
    named = {name for name in ("apiKeys", "adminKeys", "hubToken") if release.values[name]["existingSecret"]}
    assert len(SECRETS & release.environment.keys()) == len(named)


def test_probes_ask_what_the_server_answers(release: Release) -> None:
    routes = {route.path for route in create_app(Settings()).routes}  # type: ignore[attr-defined]
    probes = {name: release.container[name] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    asked = {name: probe["httpGet"]["path"] for name, probe in probes.items()}
    excluded = "?exclude=queue_full" if release.values["readiness"]["exclude"] else ""
    assert asked == {"startupProbe": "/startupz", "readinessProbe": f"/readyz{excluded}", "livenessProbe": "/livez"}
    assert {*(path.partition("?")[0] for path in asked.values()), "/metrics"} <= routes
    startup = probes["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= release.values["startupTimeout"]


def test_ports_agree(release: Release) -> None:
    (port,) = release.container["ports"]
    assert release.environment["HEADRACE_PORT"]["value"] == str(port["containerPort"])
    (of_service,) = release.only("Service")["spec"]["ports"]
    targets = [of_service["targetPort"]]
    targets += [release.container[name]["httpGet"]["port"] for name in ("startupProbe", "readinessProbe")]
    for policy in release.of("NetworkPolicy"):
        targets += [entry["port"] for rule in policy["spec"]["ingress"] for entry in rule["ports"]]
    assert set(targets) == {port["name"]}
    for monitor in release.of("ServiceMonitor"):
        assert [endpoint["port"] for endpoint in monitor["spec"]["endpoints"]] == [of_service["name"]]
    for pool in release.of("InferencePool"):
        assert pool["spec"]["targetPorts"] == [{"number": port["containerPort"]}]


def test_selectors_find_the_pods(release: Release) -> None:
    selectors = [release.only("Service")["spec"]["selector"], release.workload["spec"]["selector"]["matchLabels"]]
    selectors += [budget["spec"]["selector"]["matchLabels"] for budget in release.of("PodDisruptionBudget")]
    selectors += [pool["spec"]["selector"]["matchLabels"] for pool in release.of("InferencePool")]
    selectors += [policy["spec"]["podSelector"]["matchLabels"] for policy in release.of("NetworkPolicy")]
    selectors += [monitor["spec"]["selector"]["matchLabels"] for monitor in release.of("ServiceMonitor")]
    lasting = {
        "app.kubernetes.io/name": "headrace",
        "app.kubernetes.io/instance": RELEASE,
    }  # no version: pods outlive one
    assert all(selector == lasting for selector in selectors)
    assert lasting.items() <= release.labels.items()
    assert lasting.items() <= release.only("Service")["metadata"]["labels"].items()


def test_a_drain_ends_before_the_pod_is_killed(release: Release) -> None:
    hypercorn = tomllib.loads((DEPLOY / "hypercorn.toml").read_text())
    slept = release.container["lifecycle"]["preStop"]["sleep"]["seconds"]
    drained = float(release.environment["HEADRACE_DRAIN_TIMEOUT"]["value"])
    closed = hypercorn["graceful_timeout"] + hypercorn["shutdown_timeout"]
    assert slept == release.values["preStopSleep"]
    assert release.pod["terminationGracePeriodSeconds"] > slept + drained + closed


def test_pods_may_do_no_more_than_they_need(release: Release) -> None:
    assert release.pod["automountServiceAccountToken"] is False
    assert release.only("ServiceAccount")["automountServiceAccountToken"] is False
    assert release.pod["serviceAccountName"] == release.only("ServiceAccount")["metadata"]["name"]
    assert release.pod["securityContext"]["runAsNonRoot"] is True
    assert release.pod["securityContext"]["runAsUser"] > 0
    assert release.pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert release.container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_volumes_that_are_mounted_exist(release: Release) -> None:
    volumes = [volume["name"] for volume in release.pod["volumes"]]
    volumes += [claim["metadata"]["name"] for claim in release.workload["spec"].get("volumeClaimTemplates", ())]
    mounts = {mount["name"]: mount["mountPath"] for mount in release.container["volumeMounts"]}
    assert sorted(volumes) == sorted(mounts)
    for name in ("cache_dir", "kv_cache_dir"):
        written = release.values["settings"].get(name, mounts["cache"])
        assert f"{written}/".startswith(f"{mounts['cache']}/"), "nothing else can be written to"
    if read := release.environment.get("HEADRACE_API_KEYS_FILE"):
        assert read["value"].startswith(mounts["tenants"])


@pytest.mark.parametrize("dockerfile", ["Dockerfile", "Dockerfile.cuda"])
def test_the_images_run_so(chart: helm_python.Chart, dockerfile: str) -> None:
    stages = last_stage(DEPLOY / "Dockerfile"), last_stage(DEPLOY / dockerfile)
    image = {name: value for stage in stages for name, value in environment(stage).items()}
    release = Release(chart, {})
    assert only(stages[0], "ENTRYPOINT").words + only(stages[0], "CMD").words == ["headrace", "serve"]
    user = release.pod["securityContext"]
    assert texts(stages[1], "USER")[-1] == f"{user['runAsUser']}:{user['runAsGroup']}"
    for mount in release.container["volumeMounts"]:
        assert not f"{image['HEADRACE_CACHE_DIR']}/".startswith(mount["mountPath"] + "/"), "the embedded model is there"
    hubs = {name for name, value in image.items() if value.startswith(image["HEADRACE_CACHE_DIR"] + "/")}
    assert hubs <= release.environment.keys(), "they cannot be written to where the image has them"


def test_devices_are_asked_for(release: Release) -> None:
    count = release.values["gpu"]["count"]
    resources = release.container["resources"]
    assert [resources[kind].get("nvidia.com/gpu", 0) for kind in ("requests", "limits")] == [count, count]
    assert bool(release.pod.get("tolerations")) == bool(count)


def test_scaling_goes_by_metrics_that_there_are(chart: helm_python.Chart) -> None:
    metrics = Metrics("model")
    metrics.show(lambda: 0.0, lambda: 0.0, lambda tenant: 0, Phase, lambda phase: False)
    served = set(re.findall(r"^# TYPE (\S+) gauge", metrics.render().decode(), re.MULTILINE))
    releases = [Release(chart, values) for values in EXAMPLES]
    (scaled,) = [found for release in releases for found in release.of("ScaledObject")]
    queries = " ".join(trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"])
    assert set(re.findall(r"\w+:\w+", queries)) == {"headrace:queued_seconds", "vllm:num_requests_running"} <= served
    assert f'namespace="{NAMESPACE}",service="{RELEASE}-headrace"' in queries
    (autoscaler,) = [found for release in releases for found in release.of("HorizontalPodAutoscaler")]
    asked = [metric["pods"]["metric"]["name"] for metric in autoscaler["spec"]["metrics"]]
    assert asked == re.findall(r"name: \{as: (\w+)\}", README)
    assert set(re.findall(r"seriesQuery: (\S+)", README)) <= served
    for release in releases:
        assert ("replicas" in release.workload["spec"]) == (not release.values["autoscaling"]["kind"])
        for scaler in release.of("ScaledObject") + release.of("HorizontalPodAutoscaler"):
            assert scaler["spec"]["scaleTargetRef"]["name"] == release.workload["metadata"]["name"]


def test_the_rules_are_those_that_are_shipped_for_prometheus(chart: helm_python.Chart) -> None:
    release = Release(chart, {"prometheusRule": {"enabled": True}, "serviceMonitor": {"enabled": True}})
    shipped = (DEPLOY / "prometheus" / "rules.yaml").read_text()
    assert release.only("PrometheusRule")["spec"] == yaml.safe_load(shipped), (
        "cp deploy/prometheus/rules.yaml to files/"
    )
    (endpoint,) = release.only("ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": "headrace"}]
    assert set(re.findall(r'job="(\w+)"', shipped)) == {"headrace"}


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
