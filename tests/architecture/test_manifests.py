"""Compose, Kubernetes, the Dockerfile and docs/faults.md name what exists: a renamed setting,
extra, folder or test must not wait for a reader to find it."""

import ast
import importlib
import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.manifests import (
    COMPONENTS,
    DOTENV,
    OVERLAYS,
    ROOT,
    TOOLS,
    compose,
    containers,
    render,
    rendered,
    workloads,
)
from treadle_cli.certs import nats_config
from treadle_runtime.config import Settings, prefix_of
from treadle_runtime.server import ALIVE
from treadle_sidecar.engine.process import EngineSpec, engine_command

COMPONENT = "app.kubernetes.io/component"  # the label by which policies select pods
SERVICES = (
    "predictor",
    "scheduler",
    "placement",
    "migrator",
    "tools",
    "rollout",
    "gateway",
    "console",
    "sidecar",
)


def settings_of(service: str) -> type[Settings]:
    module = importlib.import_module(f"treadle_{service}.config")
    [found] = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Settings) and value.service == service
    ]
    return found


def variables_in_compose() -> set[str]:
    document = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return {
        name for service in document["services"].values() for name in service.get("environment", {})
    }


def variables_in_kubernetes() -> set[str]:
    return set(_environment([each for overlay in OVERLAYS for each in rendered(overlay)]))


def _environment(node: Any) -> list[str]:
    if isinstance(node, list):
        return [name for item in node for name in _environment(item)]
    if not isinstance(node, dict):
        return []
    here = [item["name"] for item in node.get("env", [])]
    if node.get("kind") == "ConfigMap":
        here += list(node["data"])
    return here + [name for value in node.values() for name in _environment(value)]


@pytest.mark.parametrize("variables", [variables_in_compose, variables_in_kubernetes])
def test_every_treadle_variable_in_a_manifest_is_a_setting(variables: Any) -> None:
    known = {f"TREADLE_{field.upper()}" for field in Settings.model_fields}
    for service in SERVICES:
        cls = settings_of(service)
        known |= {f"{prefix_of(cls)}{field.upper()}" for field in cls.model_fields}
    named = {name for name in variables() if name.startswith("TREADLE_")}
    assert len(named) > len(SERVICES)
    assert named <= known, f"no such setting: {sorted(named - known)}"


def written_tests() -> set[tuple[str, str]]:
    """File and name of every function there."""
    return {
        (path.name, node.name)
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_every_test_that_the_page_of_faults_names_exists() -> None:
    pages = "".join((ROOT / "docs" / name).read_text() for name in ("faults.md", "console.md"))
    named = set(re.findall(r"(test_\w+\.py)::(\w+)", pages))
    assert named
    assert named <= written_tests(), f"no such test: {sorted(named - written_tests())}"


def test_every_test_that_the_page_of_security_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+(?:\.py)?)`", (ROOT / "docs" / "security.md").read_text()))
    written = {name for pair in written_tests() for name in pair}
    assert named
    assert named <= written, f"no such test: {sorted(named - written)}"


@pytest.mark.parametrize("service", SERVICES)
def test_compose_and_kubernetes_give_every_service_an_address_of_its_own(service: str) -> None:
    variable = f"TREADLE_{service.upper()}_LISTEN"
    assert variable in variables_in_compose()
    assert variable in variables_in_kubernetes()


def test_the_dockerfile_copies_the_folder_of_every_package_and_installs_an_extra_for_every_service() -> (
    None
):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(SERVICES) <= set(project["project"]["optional-dependencies"])
    copied = {
        word
        for line in (ROOT / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for word in line.split()[1:-1]
    }
    folders = project["tool"]["setuptools"]["packages"]["find"]["where"]
    assert {Path(folder).parts[0] for folder in folders} <= copied


def test_no_probe_ends_an_engine_that_loads_weights() -> None:
    """SGLang answers /health and /server_info by its scheduler process, which is silent while
    weights are loaded; and /health takes more than the second that Kubernetes gives a probe by
    default."""
    engines = [
        compose(file)["services"]["engine-0"] for file in ("compose.cpu.yml", "compose.gpu.yml")
    ]
    [pod, gpu] = [
        yaml.safe_load((ROOT / "k8s" / file).read_text())["spec"]["template"]["spec"][
            "initContainers"
        ][0]
        for file in ("base/engine/engine.yaml", "components/gpu/gpu/gpu.yaml")
    ]
    for command in (
        *(each["healthcheck"]["test"] for each in engines),
        pod["livenessProbe"]["exec"]["command"],
    ):
        assert command[-1].endswith("/model_info")
    assert "livenessProbe" not in gpu, "it is the pod's"
    for probe in (pod["startupProbe"], gpu["startupProbe"]):
        assert probe["exec"]["command"][-1].endswith("/health")
        assert probe["timeoutSeconds"] > 20, "SGLang's own limit"


def test_a_scheduler_that_stands_by_is_not_restarted_and_is_found_by_its_name() -> None:
    """Health under "" is NOT_SERVING there."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    for name in ("scheduler", "scheduler-standby"):
        assert services[name]["healthcheck"]["test"][-1] == ALIVE
    document = compose("docker-compose.yml")["services"]
    both = [
        document[name]["environment"]["TREADLE_SCHEDULER_LISTEN"]
        for name in ("scheduler", "scheduler-standby")
    ]
    assert len(set(both)) == 2
    for name in ("sidecar-0", "sidecar-1", "migrator"):
        variable = f"TREADLE_{name.partition('-')[0].upper()}_SCHEDULER"
        assert document[name]["environment"][variable].split(",") == both
    [pod] = containers(workloads("dev")["treadle/scheduler"]["spec"])
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert pod[probe]["exec"]["command"][-1] == ALIVE
    _, service, _ = yaml.safe_load_all((ROOT / "k8s/base/scheduler/scheduler.yaml").read_text())
    assert service["spec"]["clusterIP"] == "None", "a name that stands for all pods"


KV_FOLDER = "/hicache"
SENDS = {"TREADLE_OTLP_ENDPOINT": f"http://127.0.0.1:{DOTENV['OTLP_PORT']}"}


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Path in the container to what is mounted there."""
    return {mount.split(":")[1]: mount.split(":")[0] for mount in service["volumes"]}


def value_of(flag: str, arguments: list[str]) -> str:
    [value] = [each.partition("=")[2] for each in arguments if each.startswith(f"{flag}=")]
    return value


@pytest.mark.parametrize("engines", ["compose.cpu.yml", "compose.gpu.yml"])
def test_compose_shows_the_sidecar_the_folder_and_the_port_of_its_engine(engines: str) -> None:
    """Otherwise a move is planned as one through storage, and prefills."""
    document = compose("docker-compose.yml", engines)
    for index in (0, 1):
        engine, sidecar = (
            document["services"][f"{name}-{index}"] for name in ("engine", "sidecar")
        )
        folder = sidecar["environment"]["TREADLE_SIDECAR_KV_STORAGE_DIR"]
        url = sidecar["environment"]["TREADLE_SIDECAR_ENGINE_URL"]
        assert url == f"http://127.0.0.1:{value_of('--port', engine['command'])}"
        if "--cpu" in engine["command"]:
            assert value_of("--hicache-dir", engine["command"]) == folder
        else:
            assert engine["environment"]["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] == folder
        assert mounts(engine)[folder] == mounts(sidecar)[folder] == "hicache"


def test_compose_starts_gpu_engines_with_the_storage_flags_of_treadle_up() -> None:
    limit_gb = float(DOTENV["KV_LIMIT_GB"])
    spec = EngineSpec(
        "e",
        30000,
        False,
        "m",
        Path("python"),
        hicache_dir=Path(KV_FOLDER),
        hicache_limit_gb=limit_gb,
    )
    argv, env = engine_command(spec, {})
    words = list(argv[argv.index("--page-size") :])
    expected = {
        flag: value
        for flag, value in zip(words, [*words[1:], ""], strict=True)
        if flag.startswith("--")
    }
    engine = compose("docker-compose.yml", "compose.gpu.yml")["services"]["engine-0"]
    given = engine["entrypoint"][engine["entrypoint"].index("--page-size=16") :]
    parsed = {each.partition("=")[0]: each.partition("=")[2] for each in given}
    options = "--hicache-storage-backend-extra-config"
    assert json.loads(parsed.pop(options)) == json.loads(expected.pop(options))
    assert parsed == {
        flag: "" if value.startswith("--") else value for flag, value in expected.items()
    }
    assert engine["environment"]["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] == KV_FOLDER
    assert env["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] == KV_FOLDER
    module = mounts(engine)[engine["environment"]["PYTHONPATH"]]
    assert (ROOT / module).samefile(env["PYTHONPATH"])


@pytest.mark.parametrize("engines", ["compose.cpu.yml", "compose.gpu.yml"])
def test_each_port_of_compose_has_one_listener(engines: str) -> None:
    services = compose("docker-compose.yml", engines)["services"].values()
    listens = [
        each
        for service in services
        for key, each in service.get("environment", {}).items()
        if "_LISTEN" in key
    ]
    assert len(listens) == len(set(listens)) == 13


def test_all_of_compose_send_telemetry_to_the_collector() -> None:
    """Services on the machine's network reach NATS by its published port, the tools service by its
    name."""
    mesh, watched = (
        compose("docker-compose.yml", "compose.cpu.yml"),
        compose("compose.observability.yml")["services"],
    )
    senders = mesh["services"].keys() - {"nats"}
    added = {name: each for name, each in watched.items() if name not in senders}
    assert set(added) == {"collector", "prometheus", "tempo", "grafana"}
    inside = {"TREADLE_OTLP_ENDPOINT": "http://collector:4317"}
    for name in senders:
        assert watched[name]["environment"] == (inside if name == "tools" else SENDS), name
    assert added["collector"]["ports"] == [f"127.0.0.1:{DOTENV['OTLP_PORT']}:4317"]
    assert set(added["collector"]["networks"]) == {"telemetry", "tools"}
    for name, each in added.items():
        assert all(
            (ROOT / source).exists() for source in mounts(each).values() if source.startswith("./")
        ), name
        assert "telemetry" in each["networks"], name
    collector = yaml.safe_load((ROOT / "observability/collector.yml").read_text())
    [scraped] = yaml.safe_load((ROOT / "observability/prometheus.yml").read_text())[
        "scrape_configs"
    ]
    port = collector["exporters"]["prometheus"]["endpoint"].partition(":")[2]
    assert scraped["static_configs"][0]["targets"] == [f"collector:{port}"]
    assert scraped["honor_labels"], "job and instance are those of the services"


def test_nobody_changes_what_grafana_shows() -> None:
    """Grafana's first admin would have a password that everybody knows."""
    given = compose("compose.observability.yml")["services"]["grafana"]["environment"]
    assert given["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert given["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert given["GF_AUTH_BASIC_ENABLED"] == "false"
    assert given["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"


def test_the_place_for_kv_is_larger_than_the_limit_and_every_engine_may_write_there() -> None:
    options = compose("docker-compose.yml")["volumes"]["hicache"]["driver_opts"]["o"].split(",")
    size = next(option.removeprefix("size=") for option in options if option.startswith("size="))
    assert int(size.removesuffix("g")) * 2**30 > float(DOTENV["KV_LIMIT_GB"]) * 1.1e9
    assert "mode=0777" in options, (
        "docker gives a volume to root, and the engine's image has another user"
    )

    claim, *_ = yaml.safe_load_all((ROOT / "k8s/base/engines/engines.yaml").read_text())
    claimed = claim["spec"]["resources"]["requests"]["storage"]
    pod = yaml.safe_load((ROOT / "k8s/base/engine/engine.yaml").read_text())["spec"]["template"][
        "spec"
    ]
    [engine], [sidecar] = pod["initContainers"], pod["containers"]
    assert (
        int(claimed.removesuffix("Gi")) * 2**30
        > float(value_of("--hicache-limit-gb", engine["args"])) * 1.1e9
    )
    folder = next(
        each["value"] for each in sidecar["env"] if each["name"] == "TREADLE_SIDECAR_KV_STORAGE_DIR"
    )
    assert value_of("--hicache-dir", engine["args"]) == folder
    for container in (engine, sidecar):
        assert {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}[
            folder
        ] == "hicache"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_are_restricted_but_that_of_bubblewrap(overlay: str) -> None:
    """And their namespaces refuse others: Kubernetes' own standard `restricted`."""
    levels = {
        each["metadata"]["name"]: each["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
        for each in rendered(overlay)
        if each["kind"] == "Namespace"
    }
    freer = {name for name, level in levels.items() if level != "restricted"}
    assert freer == (set() if overlay == "tools-pods" else {"treadle-tools"})
    for name, template in workloads(overlay).items():
        assert template["spec"]["priorityClassName"].startswith("treadle-"), name
        profile = template["spec"]["securityContext"]["seccompProfile"]["type"]
        assert (profile == "RuntimeDefault") == (name.partition("/")[0] not in freer), name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_engine_starts_before_its_sidecar_and_ends_after_it(overlay: str) -> None:
    engines = [
        template["spec"]
        for name, template in workloads(overlay).items()
        if name.startswith("treadle/engine")
    ]
    assert engines
    for pod in engines:
        [engine], [sidecar] = pod["initContainers"], pod["containers"]
        assert (engine["name"], engine["restartPolicy"], sidecar["name"]) == (
            "engine",
            "Always",
            "sidecar",
        )


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_port_of_the_mesh_is_open_to_who_calls_it_and_to_nobody_else(overlay: str) -> None:
    """Policies select pods by the labels that they have, and name the ports on which these
    listen."""
    policies = [each["spec"] for each in rendered(overlay) if each["kind"] == "NetworkPolicy"]
    rules = [
        (policy["podSelector"].get("matchLabels", {}).get(COMPONENT), rule)
        for policy in policies
        for rule in policy.get("ingress", [])
    ]
    components = set()
    for template in workloads(overlay).values():
        component = template["metadata"]["labels"][COMPONENT]
        components.add(component)
        opened = {port["port"] for to, rule in rules if to == component for port in rule["ports"]}
        listens = {
            port["containerPort"] for port in template["spec"]["containers"][0].get("ports", [])
        }
        assert opened == listens, component
    named = {
        peer["podSelector"]["matchLabels"][COMPONENT]
        for _, rule in rules
        for peer in rule["from"]
        if "podSelector" in peer
    }
    assert named | {to for to, _ in rules} <= components


def test_the_nats_server_of_a_pod_lets_services_reach_what_the_rules_say() -> None:
    written = (ROOT / "k8s/base/nats/nats.conf").read_text()
    assert written == nats_config(Path("/tls"), in_pod=True), "write it again: treadle_cli.certs"


@pytest.mark.parametrize("component", COMPONENTS)
def test_every_component_goes_with_the_base(component: str, tmp_path: Path) -> None:
    """Also those that no overlay has: rendered, and valid by Kubernetes' schemas."""
    (tmp_path / "rendered.yaml").write_text(render(f"base+{component}"))
    subprocess.run(
        [TOOLS / "kubernetes-validate", "--strict", "--quiet", tmp_path / "rendered.yaml"],
        check=True,
    )


def test_engines_grow_by_a_metric_that_is_there() -> None:
    scaler = yaml.safe_load((ROOT / "k8s/components/autoscaling/engines.yaml").read_text())
    [metric] = scaler["spec"]["metrics"]
    assert f"`{metric['external']['metric']['name']}`" in (ROOT / "docs/metrics.md").read_text()
