"""What the tests install in an API server: the resources of Monarch's operator, of JobSet and of Kueue.

They are written from the published documentation of each, and have the fields and rules that it gives; of the schema of
Pods, which the API server checks when a Pod is made, only what must be there. Of MonarchMesh the documentation shows
examples only: that ``podTemplate`` is the spec of a Pod, without metadata; ``port``, 26600 by default; ``replicas``.
"""

from __future__ import annotations

from typing import Any

from monarch_kernel.launchers.base import LaunchError
from monarch_kernel.launchers.kubernetes.api import ApiRefusedError, KubernetesApi
from monarch_kernel.launchers.kubernetes.sets import POD_SETS
from tests.conftest import wait_until

ANYTHING: dict[str, Any] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
COUNT = {"type": "integer", "format": "int32", "minimum": 0}


def objects(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties}


CONTAINERS = {"type": "array", "minItems": 1, "items": {**ANYTHING, "required": ["name"]}}
POD_SPEC = {**ANYTHING, "required": ["containers"], "properties": {"containers": CONTAINERS}}
JOB = objects(
    ["template"],
    completionMode={"type": "string", "enum": ["NonIndexed", "Indexed"]},
    completions=COUNT,
    parallelism=COUNT,
    backoffLimit=COUNT,
    template=objects(["spec"], metadata=ANYTHING, spec=POD_SPEC),
)
SPECS = {
    "MonarchMesh": objects(
        ["replicas", "podTemplate"],
        replicas=COUNT,
        port={"type": "integer", "format": "int32", "minimum": 1, "maximum": 65535, "default": 26600},
        podTemplate=POD_SPEC,
    ),
    "JobSet": objects(
        [],
        suspend={"type": "boolean"},
        network=objects([], enableDNSHostnames={"type": "boolean"}, subdomain={"type": "string"}),
        failurePolicy=objects([], maxRestarts={"type": "integer", "format": "int32", "default": 0}),
        replicatedJobs={
            "type": "array",
            "items": objects(
                ["name", "template"],
                name={"type": "string"},
                replicas={**COUNT, "default": 1},
                template=objects([], metadata=ANYTHING, spec=JOB),
            ),
        },
    ),
    "Workload": objects([], queueName={"type": "string"}),
}
CONDITIONS = {
    "type": "array",
    "items": objects(
        ["type", "status", "reason", "message", "lastTransitionTime"],
        type={"type": "string"},
        status={"type": "string", "enum": ["True", "False", "Unknown"]},
        reason={"type": "string", "minLength": 1},
        message={"type": "string"},
        lastTransitionTime={"type": "string", "format": "date-time"},
    ),
}
STATUS = {**ANYTHING, "properties": {"conditions": CONDITIONS}}
KINDS = [
    *((each.group, each.version, each.kind, each.plural) for each in POD_SETS.values()),
    ("kueue.x-k8s.io", "v1beta1", "Workload", "workloads"),
]


DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def install(api: KubernetesApi) -> None:
    """Install them, and wait until they are served."""
    for group, version, kind, plural in KINDS:
        schema = {"type": "object", "properties": {"spec": SPECS[kind], "status": STATUS}}
        served = {
            "name": version,
            "served": True,
            "storage": True,
            "schema": {"openAPIV3Schema": schema},
            "subresources": {"status": {}},
        }
        spec = {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "versions": [served],
        }
        meta: dict[str, Any] = {"name": f"{plural}.{group}"}
        if group.endswith(".k8s.io"):
            # The API server asks for a review of such groups, or for a word on why there was none.
            meta["annotations"] = {"api-approved.kubernetes.io": "unapproved, a test"}
        api.request("POST", DEFINITIONS, {"metadata": meta, "spec": spec})
    for group, version, _, plural in KINDS:
        wait_until(lambda group=group, version=version, plural=plural: _served(api, group, version, plural), plural)


def uninstall(api: KubernetesApi) -> None:
    """Remove them, and wait until they are served no more."""
    for group, _, _, plural in KINDS:
        api.request("DELETE", f"{DEFINITIONS}/{plural}.{group}")
    for group, version, _, _ in KINDS:
        wait_until(lambda group=group, version=version: _is_unknown(api, group, version), f"{group} has gone")


def _is_unknown(api: KubernetesApi, group: str, version: str) -> bool:
    try:
        api.request("GET", f"/apis/{group}/{version}")
    except ApiRefusedError as e:
        return e.status == 404
    return False


def _served(api: KubernetesApi, group: str, version: str, plural: str) -> bool:
    try:
        api.request("GET", f"/apis/{group}/{version}/namespaces/default/{plural}")
        return group in [each["name"] for each in api.request("GET", "/apis")["groups"]]
    except LaunchError:
        return False
