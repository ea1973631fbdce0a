"""The pod of a recipe, as the API takes it: Kubernetes' `restricted` security standard, and a little more.

What a pod cannot be told: a limit on processes (the kubelet has one for all, `podPidsLimit`), and to have no network (a
NetworkPolicy does it, by the label `treadle.tools/network`, where the cluster's network carries it out).
"""

import re
from typing import Any

from treadle_tools.containers.recipe import USER, Recipe

OWNER, TOOL, NETWORK = "treadle.tools/owner", "treadle.tools/tool", "treadle.tools/network"
NO_NETWORK = "none"
CONTAINER = "worker"
# What the cluster's scheduler counts for a container that mostly waits; the service itself decides who runs when.
REQUESTED_CPU = "50m"


def pod_of(recipe: Recipe, *, name: str, owner: str, runtime_class: str) -> dict[str, Any]:
    """A Pod object."""
    memory = str(recipe.memory_bytes)
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 0,
        "hostname": "sandbox",
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": CONTAINER,
                "image": recipe.image,
                "command": list(recipe.argv),
                "env": [{"name": name, "value": value} for name, value in recipe.variables.items()],
                "workingDir": "/tmp",
                "stdin": True,
                "stdinOnce": False,  # the input stays open for the service's next life
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
                "resources": {
                    "requests": {"cpu": REQUESTED_CPU, "memory": memory},
                    "limits": {"cpu": str(recipe.cpu_cores), "memory": memory},
                },
                "resizePolicy": [{"resourceName": "cpu", "restartPolicy": "NotRequired"}],
                "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
            }
        ],
        # In memory its size is the kernel's to hold; on disk the kubelet would look every few minutes, and evict.
        "volumes": [{"name": "tmp", "emptyDir": {"medium": "Memory", "sizeLimit": str(recipe.work_bytes)}}],
    }
    if runtime_class:
        spec["runtimeClassName"] = runtime_class
    labels = {
        "app.kubernetes.io/part-of": "treadle",
        "app.kubernetes.io/component": "tools-sandbox",
        OWNER: label(owner),
        TOOL: label(recipe.tool),
        NETWORK: label(recipe.network) if recipe.network else NO_NETWORK,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}


def resized(cpu_cores: int) -> dict[str, Any]:
    """The patch of a pod's resize subresource. What is requested stays: no scheduler need be asked."""
    return {"spec": {"containers": [{"name": CONTAINER, "resources": {"limits": {"cpu": str(cpu_cores)}}}]}}


def label(text: str) -> str:
    """A label's value may hold letters, digits, '-', '_', '.', and begin and end with the first two."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text)[:63].strip("-_.")
