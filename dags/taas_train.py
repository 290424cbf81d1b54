"""The DAG of one training run: wiring only. What the tasks do is in ``taas_tasks.airflow``."""

from __future__ import annotations

from airflow.sdk import DAG

from taas_tasks.airflow.form import form_params
from taas_tasks.airflow.gate_sensor import GateSensor
from taas_tasks.airflow.operators import (
    InspectOperator,
    PlanOperator,
    PrepareOperator,
    ReleaseOperator,
    ReportOperator,
    TrainOperator,
    UploadOperator,
    ValidateOperator,
)
from taas_tasks.airflow.task_defaults import TASK_DEFAULTS

DOC = """
One training request, from its JSON to the files that rank 0 wrote.

`validate` checks the request and pins the project. `inspect` looks at each loader on a cheap machine, `plan` says what
will run where and what it costs, `prepare` turns the loaders into shards on cheap machines while `gate` waits for
enough of them, `train` runs the script on the GPU machines, `upload` publishes what rank 0 wrote. `release` stops what
still lives and frees the machines, `report` accounts for every element, second and unit of price; both always run.

Without `cpus` and `units` nothing is prepared: `inspect`, `prepare` and `gate` are skipped, training starts at once.
"""

with DAG(
    dag_id="taas_train",
    dag_display_name="Train",
    description="Prepare the data on cheap machines, train on GPU machines as it arrives",
    doc_md=DOC,
    schedule=None,
    catchup=False,
    max_active_runs=64,
    params=form_params(),
    default_args=TASK_DEFAULTS,
    tags=["taas"],
) as dag:
    validate = ValidateOperator(task_id="validate")
    inspect = InspectOperator.partial(task_id="inspect", map_index_template="{{ task.loader }}").expand(
        loader=validate.output
    )
    plan = PlanOperator(task_id="plan", trigger_rule="none_failed", skips=["prepare", "gate"])
    prepare = PrepareOperator.partial(
        task_id="prepare",
        map_index_template="{{ task.loader }} on machine {{ task.machine + 1 }} of {{ task.machines }}",
    ).expand_kwargs(plan.output)
    gate = GateSensor(task_id="gate")
    train = TrainOperator(task_id="train", trigger_rule="none_failed")
    upload = UploadOperator(task_id="upload")
    release = ReleaseOperator(task_id="release").as_teardown()
    report = ReportOperator(task_id="report").as_teardown(on_failure_fail_dagrun=True)

    inspect >> plan >> gate >> train >> upload
    [prepare, upload] >> release >> report
