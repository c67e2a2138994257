"""The files around the code: workflows, hooks and packaging say what the repository does."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TEMPLATES = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))


def read_yaml(file: Path) -> Any:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def targets_of_run() -> list[str]:
    return re.findall(r"^make ([a-z-]+)$", (ROOT / ".ci/run").read_text(), re.MULTILINE)


class TestWorkflows:
    def test_the_workflow_runs_the_targets_of_ci_run(self) -> None:
        jobs = read_yaml(ROOT / ".github/workflows/ci.yml")["jobs"]
        assert jobs["linux"]["strategy"]["matrix"]["target"] == targets_of_run()

    def test_make_has_every_target(self) -> None:
        makefile = (ROOT / "Makefile").read_text()
        assert targets_of_run()
        for target in targets_of_run():
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target

    @pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda file: file.name)
    def test_every_action_is_pinned(self, workflow: Path) -> None:
        """By its commit, which nobody can move, with the version beside it."""
        uses = re.findall(r"uses: (.*)", workflow.read_text())
        assert uses
        for action in uses:
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v[\d.]+", action), action

    @pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda file: file.name)
    def test_a_workflow_may_only_read_unless_a_job_says_more(self, workflow: Path) -> None:
        assert read_yaml(workflow)["permissions"] == {"contents": "read"}

    def test_wheels_are_built_for_each_platform(self) -> None:
        release = read_yaml(ROOT / ".github/workflows/release.yml")["jobs"]
        built = {row["name"] for row in release["wheels"]["strategy"]["matrix"]["include"]}
        assert built == {"manylinux-x86_64", "manylinux-aarch64", "macos-arm64"}
        settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
        assert ".ci/check_wheel.py" in settings["test-command"]
        assert (ROOT / ".ci/check_wheel.py").exists()


class TestHooks:
    def test_hooks_run_what_make_lint_runs(self) -> None:
        lint = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
        tools = set(re.findall(r"\$\(BIN\)/([\w-]+)", lint))
        hooks = read_yaml(ROOT / ".pre-commit-config.yaml")["repos"][0]["hooks"]
        assert tools <= {hook["entry"].split()[0] for hook in hooks}


class TestTemplates:
    def test_there_is_one_for_each_kind(self) -> None:
        assert {file.stem for file in TEMPLATES} == {"bug", "config", "feature", "measurement"}

    @pytest.mark.parametrize("template", TEMPLATES, ids=lambda file: file.name)
    def test_every_field_can_be_told_apart(self, template: Path) -> None:
        fields = [field.get("id") for field in read_yaml(template).get("body", [])]
        named = [name for name in fields if name is not None]
        assert len(named) == len(set(named))
