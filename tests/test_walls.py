"""The walls between packages: import-linter's contracts, and what really gets imported."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def modules_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


def test_contracts_of_import_linter_are_kept():
    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["torch", "airflow", "taas_tasks", "numpy", "boto3"])
def test_importing_taas_leaves_out(name):
    assert name not in modules_after("import taas")


@pytest.mark.parametrize(
    "module",
    [
        "taas_tasks.prep.inspect_program",
        "taas_tasks.prep.prepare_program",
        "taas_tasks.launch.agent_program",
        "taas_tasks.launch.rank_main",
        "taas_tasks.delivery.feeder",
        "taas_tasks.delivery.loader",
    ],
)
def test_host_programs_need_no_airflow(module):
    assert "airflow" not in modules_after(f"import {module}")


@pytest.mark.parametrize("heavy", ["torch", "numpy", "pyarrow", "boto3", "paramiko"])
def test_what_airflow_imports_leaves_out(heavy):
    statement = (
        "import taas_tasks.plan, taas_tasks.gate, taas_tasks.ledger, taas_tasks.report, taas_tasks.project, "
        "taas_tasks.artifacts, taas_tasks.store, taas_tasks.compute.jobs"
    )
    assert heavy not in modules_after(statement)
