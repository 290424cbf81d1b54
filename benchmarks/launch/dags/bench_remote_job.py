"""The provider's SSHRemoteJobOperator as one would use it for torchrun: one task per host, its defaults."""

from __future__ import annotations

from airflow.providers.ssh.operators.ssh_remote_job import SSHRemoteJobOperator
from airflow.sdk import DAG

for num_hosts in (1, 2, 4):
    with DAG(dag_id=f"bench_remote_job_{num_hosts}", schedule=None, catchup=False) as dag:
        for node in range(num_hosts):
            SSHRemoteJobOperator(
                task_id=f"node_{node}",
                ssh_conn_id=f"{{{{ dag_run.conf['nodes'][{node}]['connection'] }}}}",
                command=f"{{{{ dag_run.conf['nodes'][{node}]['command'] }}}}",
                retries=0,
            )
    globals()[dag.dag_id] = dag
