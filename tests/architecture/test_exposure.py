"""Nothing that Kubernetes or Compose starts is open by default. Each rule goes through every
container of every overlay, every component and every set of Compose files, so that a new one that
breaks it fails."""

import json
import re
from typing import Any

import pytest
import yaml
from support.manifests import COMPOSED, GIVEN, RENDERED, ROOT, compose, containers, rendered
from support.manifests import workloads as workloads_of

SECRET = re.compile(r"(KEY|PASSWORD|TOKEN|SECRET|CREDENTIALS)(_\w+)?$")
IN_URL = re.compile(r"://[^/\s:@]+:[^/\s@]+@")
# Speaks plaintext in its pod's network: its policy says to whom.
PLAINTEXT_BEHIND_A_POLICY = {"treadle/collector"}
# What a client on the machine is told the address of, and what calls it there (ADR 0045).
ON_THE_MACHINES_NETWORK = {
    *("scheduler", "scheduler-standby", "predictor", "placement", "migrator", "rollout"),
    *("gateway", "console", "sidecar-0", "sidecar-1", "engine-0", "engine-1"),
}
GPU_ENGINES = "lmsysorg/sglang:"  # SGLang's own image runs as root and writes caches

every_render = pytest.mark.parametrize("name", RENDERED)
every_compose = pytest.mark.parametrize("files", COMPOSED, ids="+".join)


def environment(container: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in container.get("env", [])}


def settings(name: str, namespace: str) -> dict[str, str]:
    """Return the settings that all services of a namespace share."""
    [found] = [
        each["data"]
        for each in rendered(name)
        if each["kind"] == "ConfigMap"
        and each["metadata"]["name"] == "treadle"
        and each["metadata"]["namespace"] == namespace
    ]
    return dict(found)


@every_render
def test_no_pod_serves_others_without_certificates(name: str) -> None:
    """Each service mounts a secret of its own where TREADLE_TLS_FOLDER names it; nothing allows
    plaintext. The kubelet has no certificate, so no probe comes over the network."""
    served = set()
    for workload, template in workloads_of(name).items():
        namespace, _, _ = workload.partition("/")
        component = template["metadata"]["labels"]["app.kubernetes.io/component"]
        for container in containers(template["spec"]):
            open_to_others = [
                each
                for each in environment(container)
                if each.endswith("_LISTEN")
                and "127.0.0.1" not in environment(container)[each]["value"]
            ]
            if not open_to_others and container["name"] != "nats":
                assert workload in PLAINTEXT_BEHIND_A_POLICY or not container.get("ports"), workload
                continue
            served.add(container["name"])
            owner = "sidecar" if component == "engine" else component
            tls = {"name": "tls", "secret": {"secretName": f"tls-{owner}"}}
            assert tls in template["spec"]["volumes"], workload
            mount = {"name": "tls", "mountPath": "/tls", "readOnly": True}
            assert mount in container["volumeMounts"], workload
            probes = [each for key, each in container.items() if key.endswith("Probe")]
            assert len(probes) == 3 and all("exec" in each for each in probes), workload
            if container["name"] != "nats":
                assert {"configMapRef": {"name": "treadle"}} in container["envFrom"], workload
                assert settings(name, namespace)["TREADLE_TLS_FOLDER"] == "/tls"
    assert served >= {"scheduler", "gateway", "tools", "sidecar", "console", "nats"}
    assert "INSECURE_PLAINTEXT" not in json.dumps(rendered(name))


@every_render
def test_the_gateway_wants_a_key_that_the_operator_makes(name: str) -> None:
    [gateway] = containers(workloads_of(name)["treadle/gateway"]["spec"])
    assert environment(gateway)["TREADLE_GATEWAY_API_KEY"] == {
        "name": "TREADLE_GATEWAY_API_KEY",
        "valueFrom": {"secretKeyRef": {"name": "gateway-key", "key": "key"}},
    }


@every_render
def test_nats_knows_its_clients_and_shows_its_figures_to_its_own_pod(name: str) -> None:
    template = workloads_of(name)["treadle/nats"]
    [nats] = containers(template["spec"])
    words = " ".join(nats["args"])
    assert "--config=/config/nats.conf" in words
    assert not re.search(r"http_port|-m\b|--user|--pass", words)
    assert [each["containerPort"] for each in nats["ports"] if each["containerPort"] == 8222] == []
    [volume] = [each for each in template["spec"]["volumes"] if each["name"] == "config"]
    [written] = [
        each["data"]["nats.conf"]
        for each in rendered(name)
        if each["kind"] == "ConfigMap" and each["metadata"]["name"] == volume["configMap"]["name"]
    ]
    assert "verify_and_map: true" in written and "scheduler.treadle" in written
    assert 'http: "127.0.0.1:8222"' in written


@every_render
def test_a_policy_selects_every_pod_and_names_who_may_come(name: str) -> None:
    """Also pods that are made later: each namespace refuses what no policy of its own allows."""
    policies = [each for each in rendered(name) if each["kind"] == "NetworkPolicy"]
    for namespace in (each for each in rendered(name) if each["kind"] == "Namespace"):
        here = [
            each["spec"]
            for each in policies
            if each["metadata"]["namespace"] == namespace["metadata"]["name"]
        ]
        closed = [each for each in here if each["podSelector"] == {} and not each.get("ingress")]
        assert closed and set(closed[0]["policyTypes"]) == {"Ingress", "Egress"}, namespace
    for policy in policies:
        for rule in policy["spec"].get("ingress", []):
            assert rule["ports"], policy
            for peer in rule["from"]:
                assert peer.keys() <= {"podSelector", "namespaceSelector"}, policy
                assert peer["namespaceSelector"]["matchLabels"], "any namespace could come"
    for workload in workloads_of(name):
        assert workload.partition("/")[0] in {each["metadata"]["namespace"] for each in policies}


@every_render
def test_no_pod_has_a_part_of_its_node(name: str) -> None:
    """And what is served is served inside the cluster alone."""
    for workload, template in workloads_of(name).items():
        pod = template["spec"]
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys(), workload
        assert not [each for each in pod.get("volumes", []) if "hostPath" in each], workload
        for container in containers(pod):
            assert not container["securityContext"].get("privileged"), workload
            ports = container.get("ports", [])
            assert not [each for each in ports if "hostPort" in each], workload
    for each in rendered(name):
        if each["kind"] == "Service":
            assert each["spec"].get("type", "ClusterIP") == "ClusterIP", each["metadata"]
        assert each["kind"] not in ("Ingress", "Gateway"), each["metadata"]


@every_render
def test_every_pod_has_a_profile_of_system_calls_and_a_user_that_is_not_root(name: str) -> None:
    for workload, template in workloads_of(name).items():
        context = template["spec"]["securityContext"]
        profile = context["seccompProfile"]
        assert context["runAsNonRoot"] is True and context["runAsUser"] > 0, workload
        if profile["type"] == "Localhost":
            assert workload == "treadle-tools/tools", "the file must be on every node"
            assert profile["localhostProfile"] == "treadle-tools.json"
        else:
            assert profile == {"type": "RuntimeDefault"}, workload
        for container in containers(template["spec"]):
            security = container["securityContext"]
            assert not security.keys() & {"seccompProfile", "runAsUser", "runAsNonRoot"}, workload
            assert security["allowPrivilegeEscalation"] is False, workload
            assert security["readOnlyRootFilesystem"] is True, workload
            assert security["capabilities"] == {"drop": ["ALL"]}, workload


@every_render
def test_secrets_are_not_in_the_manifests(name: str) -> None:
    for each in rendered(name):
        assert each["kind"] != "Secret", each["metadata"]
        assert not IN_URL.search(json.dumps(each)), each["metadata"]
        if each["kind"] == "ConfigMap":
            assert not [key for key in each["data"] if SECRET.search(key)], each["metadata"]
    for workload, template in workloads_of(name).items():
        for container in containers(template["spec"]):
            plain = [key for key, each in environment(container).items() if "value" in each]
            assert not [key for key in plain if SECRET.search(key)], workload


@every_render
def test_service_accounts_may_do_few_things_in_one_namespace(name: str) -> None:
    for each in rendered(name):
        assert each["kind"] not in ("ClusterRole", "ClusterRoleBinding"), each["metadata"]
        if each["kind"] == "Role":
            words = [word for rule in each["rules"] for key in rule for word in rule[key]]
            assert "*" not in words and "secrets" not in words, each["metadata"]
    for workload, template in workloads_of(name).items():
        if template["spec"].get("automountServiceAccountToken") is not False:
            assert template["spec"]["serviceAccountName"] == "tools", workload


@every_compose
def test_every_port_of_a_container_is_open_to_this_machine_alone(files: tuple[str, ...]) -> None:
    """A container on the machine's network listens on its loopback; any other publishes its ports
    there."""
    for name, service in compose(*files)["services"].items():
        for port in service.get("ports", []):
            assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port), name
        if service.get("network_mode") == "host":
            assert name in ON_THE_MACHINES_NETWORK, "a network of its own would do"
            words = [*service.get("entrypoint", []), *service.get("command", [])]
            words += service.get("environment", {}).values()
            assert not [word for word in map(str, words) if "0.0.0.0" in word], name
            listens = [
                value
                for key, value in service.get("environment", {}).items()
                if key.endswith("_LISTEN")
            ]
            assert all(value.startswith("127.0.0.1:") for value in listens), name
            assert listens or "--host=127.0.0.1" in words, name
        else:
            assert service["networks"], name


@every_compose
def test_every_container_is_confined(files: tuple[str, ...]) -> None:
    for name, service in compose(*files)["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        options = service["security_opt"]
        assert "no-new-privileges:true" in options, name
        assert not [each for each in options if re.search(r"seccomp[:=]unconfined", each)], name
        taken = {"privileged", "pid", "ipc", "userns_mode", "devices", "cap_add"} & service.keys()
        assert not taken, name
        sources = [mount.split(":")[0] for mount in service.get("volumes", [])]
        assert not [each for each in sources if "docker.sock" in each or each == "/"], name
        if not service["image"].startswith(GPU_ENGINES):
            assert service["read_only"] is True, name
            assert runs_as(service) not in ("", "0", "root"), name


def runs_as(service: dict[str, Any]) -> str:
    """The user whom Compose or the image names; empty where it would be root."""
    if "user" in service:
        return str(service["user"]).partition(":")[0]
    build = service["build"]
    text = (ROOT / build.get("dockerfile", "Dockerfile")).read_text()
    stages = re.split(r"^FROM ", text, flags=re.MULTILINE)
    target = build.get("target")
    stage = next((each for each in stages if f" AS {target}\n" in each), stages[-1])
    users = re.findall(r"^USER (\w+)", stage, re.MULTILINE)
    return users[-1] if users else ""


@every_compose
def test_the_tools_service_is_not_on_the_network_of_the_machine(files: tuple[str, ...]) -> None:
    """The tools service reaches NATS alone, as its sandboxes run foreign code."""
    services = compose(*files)["services"]
    assert services["tools"]["networks"] == ["tools"]
    neighbours = {name for name, each in services.items() if "tools" in each.get("networks", [])}
    assert neighbours - {"collector"} == {"tools", "nats"}
    [option] = [each for each in services["tools"]["security_opt"] if "seccomp" in each]
    profile = json.loads((ROOT / option.partition(":")[2]).read_text())
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"


@pytest.mark.parametrize("file", sorted(path.name for path in ROOT.glob("*compose*.yml")))
def test_no_secret_of_compose_has_a_default(file: str) -> None:
    """Each comes from the environment: git keeps these files."""
    text = (ROOT / file).read_text()
    assert not re.search(r"\$\{\w*(PASSWORD|SECRET|TOKEN)(_\w+)?(:?-|\})", text)
    for password in re.findall(r"://\w+:([^@\n]+)@", text):
        assert password.startswith("${") and ":?" in password
    names = yaml.safe_load(text)["services"].values()
    plain = {
        key: str(value)
        for service in names
        for key, value in (service.get("environment") or {}).items()
        if SECRET.search(key)
    }
    assert all("${" in value for value in plain.values()), plain
    assert not set(GIVEN) & set(re.findall(r"^(\w+)=", (ROOT / ".env").read_text(), re.MULTILINE))


@every_compose
def test_nats_of_compose_has_a_password_that_no_argument_shows(files: tuple[str, ...]) -> None:
    services = compose(*files)["services"]
    password = GIVEN["NATS_PASSWORD"]
    for service in services.values():
        assert password not in json.dumps(service.get("command", []))
        url = service.get("environment", {}).get("TREADLE_NATS_URL")
        assert url is None or f"://treadle:{password}@" in url
    assert services["nats"]["environment"]["NATS_PASSWORD"] == f'"{password}"'
