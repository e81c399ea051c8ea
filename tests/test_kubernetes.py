"""deploy/kubernetes: what is there is what Kubernetes accepts, and it does what the pages say."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator, ValidationError

from onceward.cli import main
from onceward.testing import SqliteLab
from onceward.testing.lab import Recorder

ROOT = Path(__file__).parents[1]
SCHEMA = json.loads((ROOT / "tests" / "data" / "kubernetes" / "cronjob-batch-v1.json").read_text("utf-8"))


@pytest.fixture
def cronjob() -> dict[str, Any]:
    text = (ROOT / "deploy" / "kubernetes" / "cleanup-cronjob.yaml").read_text("utf-8")
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def pod(cronjob: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = cronjob["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    return spec


def validate(cronjob: dict[str, Any]) -> None:
    Draft202012Validator(SCHEMA).validate(cronjob)


def test_the_cronjob_is_one_that_kubernetes_accepts(cronjob: dict[str, Any]) -> None:
    Draft202012Validator.check_schema(SCHEMA)
    validate(cronjob)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda job: job.update(apiVersion="batch/v1beta1"),
        lambda job: job.update(kind="Job"),
        lambda job: job["spec"].pop("schedule"),
        lambda job: job["spec"].update(concurencyPolicy="Forbid"),
        lambda job: job["spec"].update(backoffLimit=2),  # one level too high
        lambda job: job["spec"]["jobTemplate"]["spec"].update(activeDeadlineSeconds="1h"),
        lambda job: pod(job)["containers"][0].update(securitycontext={}),
        lambda job: pod(job)["containers"][0]["env"][0]["valueFrom"].update(secretRef={"name": "x", "key": "url"}),
        lambda job: pod(job)["containers"][0]["securityContext"].update(readOnlyRootFilesystem="yes"),
    ],
)
def test_a_wrong_one_is_found(cronjob: dict[str, Any], spoil: Callable[[Any], Any]) -> None:
    wrong = deepcopy(cronjob)
    spoil(wrong)
    assert wrong != cronjob
    with pytest.raises(ValidationError):
        validate(wrong)


def test_it_does_its_work_with_as_few_rights_as_it_can(cronjob: dict[str, Any]) -> None:
    """The schema takes any text for these, and does not ask for them."""
    (container,) = pod(cronjob)["containers"]
    assert cronjob["spec"]["concurrencyPolicy"] == "Forbid"
    assert pod(cronjob)["restartPolicy"] == "Never"
    assert pod(cronjob)["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert all("value" not in variable for variable in container["env"]), "what it is told comes from a secret"


def test_its_command_cleans_up(cronjob: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab = SqliteLab(tmp_path / "shop.db")

    async def fill() -> None:
        await lab.set_up()
        async with lab.stack:
            inbox = await lab.inbox(consumer="billing")
            for name in ("old", "young"):
                await inbox.process(lab.message(name), Recorder(lab))
        await lab.make_older("old", days=31)

    asyncio.run(fill())
    (container,) = pod(cronjob)["containers"]
    values = {variable["name"]: lab.url for variable in container["env"]}
    command = [*container["command"], *container["args"]]
    words = [re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], word) for word in command]
    assert words[0] == "onceward"
    assert main(words[1:]) == 0
    assert "1 records deleted" in capsys.readouterr().out
    assert asyncio.run(lab.query("SELECT message_id FROM onceward_records")) == [("young",)]


# --- workers ------------------------------------------------------------------------------------------------


def _deployment_schema() -> dict[str, Any]:
    """A Deployment is little more than a template of pods, which a CronJob has too."""
    whole, small = {"type": "integer"}, "io.k8s.apimachinery.pkg"

    def strict(required: list[str], **properties: Any) -> dict[str, Any]:
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    def known(name: str) -> dict[str, str]:
        assert name in SCHEMA["$defs"]
        return {"$ref": f"#/$defs/{name}"}

    number = known(f"{small}.util.intstr.IntOrString")
    rolling = strict([], maxSurge=number, maxUnavailable=number)
    spec = strict(
        ["selector", "template"],
        replicas=whole,
        minReadySeconds=whole,
        paused={"type": "boolean"},
        progressDeadlineSeconds=whole,
        revisionHistoryLimit=whole,
        selector=known(f"{small}.apis.meta.v1.LabelSelector"),
        strategy=strict([], type={"enum": ["Recreate", "RollingUpdate"]}, rollingUpdate=rolling),
        template=known("io.k8s.api.core.v1.PodTemplateSpec"),
    )
    deployment = strict(
        ["apiVersion", "kind", "metadata", "spec"],
        apiVersion={"const": "apps/v1"},
        kind={"const": "Deployment"},
        metadata=known(f"{small}.apis.meta.v1.ObjectMeta"),
        spec=spec,
    )
    return deployment | {"$schema": SCHEMA["$schema"], "$defs": SCHEMA["$defs"]}


def deployment_of(kind: str) -> dict[str, Any]:
    text = (ROOT / "deploy" / "kubernetes" / f"{kind}-deployment.yaml").read_text("utf-8")
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


@pytest.fixture(params=["worker", "consumer"])
def deployment(request: pytest.FixtureRequest) -> dict[str, Any]:
    return deployment_of(request.param)


def grace_of(deployment: dict[str, Any]) -> int:
    """As the program on its page says it."""
    kind = deployment["metadata"]["labels"]["app.kubernetes.io/component"]
    page = {"worker": "workers.md", "consumer": "brokers.md"}[kind]
    (grace,) = re.findall(r"grace=(\d+)\)", (ROOT / "docs" / page).read_text("utf-8"))
    return int(grace)


def worker_of(deployment: dict[str, Any]) -> dict[str, Any]:
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def test_the_deployment_is_one_that_kubernetes_accepts(deployment: dict[str, Any]) -> None:
    schema = _deployment_schema()
    Draft202012Validator.check_schema(schema)
    Draft202012Validator(schema).validate(deployment)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda one: one.update(apiVersion="apps/v1beta1"),
        lambda one: one["spec"].pop("selector"),
        lambda one: one["spec"].update(replica=3),
        lambda one: one["spec"].update(terminationGracePeriodSeconds=30),  # two levels too high
        lambda one: one["spec"]["strategy"].update(type="Rolling"),
        lambda one: worker_of(one)["livenessProbe"].update(periodSeconds="20s"),
        lambda one: worker_of(one)["livenessProbe"].update(httpget={}),
        lambda one: worker_of(one)["ports"][0].pop("containerPort"),
    ],
)
def test_a_wrong_deployment_is_found(deployment: dict[str, Any], spoil: Callable[[Any], Any]) -> None:
    wrong = deepcopy(deployment)
    spoil(wrong)
    assert wrong != deployment
    with pytest.raises(ValidationError):
        Draft202012Validator(_deployment_schema()).validate(wrong)


def test_a_worker_is_stopped_in_order_and_has_as_few_rights_as_it_can(deployment: dict[str, Any]) -> None:
    spec, container = deployment["spec"], worker_of(deployment)
    template = spec["template"]
    labels = template["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    assert template["spec"]["terminationGracePeriodSeconds"] > grace_of(deployment)
    assert container["command"][0] not in {"sh", "bash", "/bin/sh"}, "a shell keeps the signal for itself"
    assert "lifecycle" not in container, "nothing has to be waited for before the signal"
    probes = [container[name] for name in ("livenessProbe", "readinessProbe") if name in container]
    for probe in probes:
        assert probe["httpGet"]["port"] in {port["name"] for port in container["ports"]}
        if probe["httpGet"]["path"] != "/live":
            assert probe["timeoutSeconds"] > 5, "health() waits for the database for five"
    assert template["spec"]["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert all("value" not in variable for variable in container["env"]), "what it is told comes from a secret"


def test_a_consumer_is_not_started_again_because_its_broker_is_away() -> None:
    """Which paths ask for the database and the broker, the program in docs/brokers.md says."""
    container, page = worker_of(deployment_of("consumer")), (ROOT / "docs" / "brokers.md").read_text("utf-8")
    alive = container["livenessProbe"]["httpGet"]["path"]
    assert container["readinessProbe"]["httpGet"]["path"] != alive
    assert f'path == b"{alive}" or (await inbox.health()).ok' in page


def test_a_consumer_has_time_to_tell_its_broker_after_its_grace() -> None:
    consumer = deployment_of("consumer")
    assert consumer["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= grace_of(consumer) + 10
