"""What stands around the package: the files that GitHub and Docker read."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import trainer_plugins

ROOT = Path(__file__).parent.parent
GITHUB = ROOT / ".github"
# Those of compose-spec.json (github.com/compose-spec/compose-spec) that a service here may have.
SERVICE = {
    *("image", "working_dir", "volumes", "ipc", "ulimits", "environment", "entrypoint"),
    *("command", "deploy"),
}


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("name", ["bug", "oom", "plan"])
def test_an_issue_form_asks_for_versions_and_a_timeline(name: str) -> None:
    # docs.github.com, "Syntax for issue forms": what a form and an element must have
    form = read(GITHUB / "ISSUE_TEMPLATE" / f"{name}.yml")
    assert {"name", "description", "body"} <= set(form)
    asked = {each["id"]: each for each in form["body"]}
    assert len(asked) == len(form["body"])
    assert {each["type"] for each in form["body"]} <= {"textarea", "input"}
    assert all(each["attributes"]["label"] for each in form["body"])
    assert asked["versions"]["validations"]["required"]
    assert "trainer-plugins env --info" in asked["versions"]["attributes"]["description"]
    assert "_trainer_plugins/memory/rank-0.jsonl" in asked["timeline"]["attributes"]["description"]


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("ci", ".ci/run"),
        ("oldest", "scripts/check --oldest"),
        ("newest", "scripts/check --newest"),
        ("release", 'scripts/release "$GITHUB_REF_NAME"'),
    ],
)
def test_a_workflow_calls_a_script_of_the_repository(name: str, command: str) -> None:
    jobs = read(GITHUB / "workflows" / f"{name}.yml")["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    # what runs only after a failure is the report of it
    assert [step["run"] for step in steps if "run" in step and "if" not in step] == [command]
    assert os.access(ROOT / command.split()[0], os.X_OK)


def test_only_the_step_that_publishes_may_identify_itself_to_the_index() -> None:
    release = read(GITHUB / "workflows" / "release.yml")
    assert release["permissions"] == {"contents": "read"}
    build, publish = release["jobs"]["build"], release["jobs"]["publish"]
    assert "permissions" not in build
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["steps"][-1]["uses"].startswith("pypa/gh-action-pypi-publish@")
    assert publish["steps"][-1]["with"]["attestations"] is True


def test_a_tag_of_another_version_is_refused() -> None:
    script = [str(ROOT / "scripts" / "release"), "v999.0"]
    done = subprocess.run(script, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("the tag is v999.0, and trainer_plugins/__init__.py has ")


def test_the_citation_has_the_version_and_the_license() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert citation["version"] == trainer_plugins.__version__
    assert citation["license"] == "Apache-2.0"


def test_the_compose_file_runs_on_cards() -> None:
    compose = read(ROOT / "examples" / "docker-compose.yml")
    assert set(compose) == {"services", "volumes"}
    for service in compose["services"].values():
        assert set(service) <= SERVICE
        named = {volume.split(":")[0] for volume in service["volumes"]}
        assert {name for name in named if re.fullmatch(r"\w+", name)} <= set(compose["volumes"])
    train = compose["services"]["train"]
    (cards,) = train["deploy"]["resources"]["reservations"]["devices"]
    assert cards["capabilities"] == ["gpu"]
    assert train["ipc"] == "host"  # else dataloader workers die in 64 MB of /dev/shm
