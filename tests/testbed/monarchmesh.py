"""What Monarch's operator takes: the schema of a MonarchMesh, with unknown fields forbidden.

Names, types, required fields and patterns are those of the operator's definition (repository
meta-pytorch/monarch-kubernetes, commit 12fda7907daea61555a33f78cc52814b2557437c,
``operator/config/crd/bases/monarch.pytorch.org_monarchmeshes.yaml``). Of a pod it has what
wheelmount writes and what templates of users mostly have; a cluster knows more.
"""

from __future__ import annotations

from typing import Any

from jsonschema import Draft202012Validator

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "integer"}
TRUTH: Schema = {"type": "boolean"}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}

QUANTITY: Schema = {
    "anyOf": [NUMBER, TEXT],
    "pattern": r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))"
    r"(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$",
}
QUANTITIES: Schema = {"type": "object", "additionalProperties": QUANTITY}


def _fields(*required: str, **fields: Schema) -> Schema:
    return {
        "type": "object",
        "properties": fields,
        "required": list(required),
        "additionalProperties": False,
    }


def _several(each: Schema) -> Schema:
    return {"type": "array", "items": each}


VARIABLE = _fields(
    "name",
    name=TEXT,
    value=TEXT,
    valueFrom=_fields(
        fieldRef=_fields("fieldPath", apiVersion=TEXT, fieldPath=TEXT),
        secretKeyRef=_fields("key", key=TEXT, name=TEXT, optional=TRUTH),
    ),
)

CONTAINER = _fields(
    "name",
    name=TEXT,
    image=TEXT,
    imagePullPolicy=TEXT,
    command=_several(TEXT),
    args=_several(TEXT),
    env=_several(VARIABLE),
    resources=_fields(limits=QUANTITIES, requests=QUANTITIES),
    securityContext=_fields(
        allowPrivilegeEscalation=TRUTH,
        capabilities=_fields(add=_several(TEXT), drop=_several(TEXT)),
        privileged=TRUTH,
        runAsUser=NUMBER,
    ),
    volumeMounts=_several(
        _fields("mountPath", "name", mountPath=TEXT, name=TEXT, readOnly=TRUTH, subPath=TEXT)
    ),
)

VOLUME = _fields(
    "name",
    name=TEXT,
    hostPath=_fields("path", path=TEXT, type=TEXT),
    emptyDir=_fields(medium=TEXT, sizeLimit=QUANTITY),
    persistentVolumeClaim=_fields("claimName", claimName=TEXT, readOnly=TRUTH),
)

POD = _fields(
    "containers",
    automountServiceAccountToken=TRUTH,
    containers=_several(CONTAINER),
    imagePullSecrets=_several(_fields(name=TEXT)),
    nodeSelector=TEXTS,
    priorityClassName=TEXT,
    runtimeClassName=TEXT,
    schedulerName=TEXT,
    serviceAccountName=TEXT,
    terminationGracePeriodSeconds=NUMBER,
    tolerations=_several(
        _fields(effect=TEXT, key=TEXT, operator=TEXT, tolerationSeconds=NUMBER, value=TEXT)
    ),
    volumes=_several(VOLUME),
)

MESH = _fields(
    "apiVersion",
    "kind",
    "metadata",
    "spec",
    apiVersion={"const": "monarch.pytorch.org/v1alpha1"},
    kind={"const": "MonarchMesh"},
    metadata=_fields(
        "name",
        # The definition says so by a rule of its own.
        name={**TEXT, "pattern": "^[a-z][a-z0-9]*$", "maxLength": 63},
        namespace=TEXT,
        labels=TEXTS,
        annotations=TEXTS,
    ),
    spec=_fields(
        "podTemplate",
        "replicas",
        podTemplate=_fields(metadata=_fields(labels=TEXTS, annotations=TEXTS), spec=POD),
        port=NUMBER,
        replicas={**NUMBER, "minimum": 1},
    ),
)


def refusals(mesh: dict[str, Any]) -> list[str]:
    """Why the operator's definition does not allow a MonarchMesh; empty if it does."""
    errors = Draft202012Validator(MESH).iter_errors(mesh)
    return [f"{error.json_path}: {error.message}" for error in errors]
