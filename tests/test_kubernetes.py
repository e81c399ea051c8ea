"""deploy/kubernetes: the CronJob is one that Kubernetes accepts, and its command is one that onceward has."""

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
