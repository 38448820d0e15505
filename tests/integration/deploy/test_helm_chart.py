"""The Helm chart renders to what Kubernetes takes and what the server means: its defaults, and every block of values in
its README. Helm's own library renders. Custom resources are held to a schema of the fields that the chart uses.
"""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import pytest
import yaml

from app.application import create_app
from app.config.setting_types import is_secret
from app.config.settings import Settings
from app.config.sources import Given, check_settings, env_name
from app.observability.metrics import Metrics
from app.serving.server import ServerPhase
from tests.integration.deploy.dockerfile import environment, last_stage, only, texts
from tests.integration.deploy.helm_release import CHART, CUSTOM, DEPLOY, NAMESPACE, RELEASE, Release

README = (CHART / "README.md").read_text()
EXAMPLES: list[dict[str, Any]] = [{}, *map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", README, re.DOTALL))]
VERSIONS = ("1.30", "1.37")  # of Kubernetes: the oldest that the chart allows, and a new one
SECRETS = {env_name(name) for name, field in Settings.model_fields.items() if is_secret(field)} | {"HF_TOKEN"}


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
    assert kinds == always | {"StatefulSet", "Ingress", "NetworkPolicy", "HorizontalPodAutoscaler"} | {
        kind for _, kind in CUSTOM
    }


def test_an_ingress_leads_to_the_service_and_needs_no_name(chart: helm_python.Chart) -> None:
    for more, named in (({}, False), ({"host": "llm.example.com", "tlsSecret": "tls"}, True)):
        resources = Release(chart, {"ingress": {"enabled": True, **more}}).resources
        [ingress] = [each for each in resources if each["kind"] == "Ingress"]
        [service] = [each for each in resources if each["kind"] == "Service"]
        [rule] = ingress["spec"]["rules"]
        assert ("host" in rule, "tls" in ingress["spec"]) == (named, named)
        [path] = rule["http"]["paths"]
        assert path["backend"]["service"]["name"] == service["metadata"]["name"]
        assert path["backend"]["service"]["port"]["name"] == service["spec"]["ports"][0]["name"]


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
        "ingress": {"enabled": True, "className": name, "host": "a.example.com", "tlsSecret": name},
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
    metrics.show(lambda: 0.0, lambda: 0.0, lambda tenant: 0, ServerPhase, lambda phase: False)
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
