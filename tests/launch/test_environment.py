from __future__ import annotations

from typing import Any

from taas_tasks.compute.variables import merged
from taas_tasks.launch.environment import rank_environment


def environment(host_env: dict[str, str], **given: Any) -> dict[str, str]:
    common: dict[str, Any] = {"request_env": {}, "secrets": {}, "nnodes": 2, "nproc_per_node": 8, "emulate_gpus": True}
    return rank_environment(host_env, interface="eth7", **{**common, **given})


def test_path_like_variables_keep_what_was_there() -> None:
    assert merged({"PATH": "/bin", "A": "1"}, {"PATH": "/x", "A": "2"}) == {"PATH": "/x:/bin", "A": "2"}
    assert merged({}, {"LD_LIBRARY_PATH": "/x"}) == {"LD_LIBRARY_PATH": "/x"}


def test_request_wins_over_our_defaults_and_ours_over_the_hosts() -> None:
    env = environment({"GLOO_SOCKET_IFNAME": "docker0"}, request_env={"PL_TRAINER_STRATEGY": "fsdp", "A": "b"})
    assert env["GLOO_SOCKET_IFNAME"] == "eth7"
    assert env["NCCL_SOCKET_IFNAME"] == "=eth7"
    assert env["PL_TRAINER_STRATEGY"] == "fsdp"
    assert (env["PL_TRAINER_NUM_NODES"], env["PL_TRAINER_DEVICES"]) == ("2", "8")
    assert env["A"] == "b"


def test_accelerator_is_the_cpu_only_where_gpus_are_emulated() -> None:
    assert environment({})["PL_TRAINER_ACCELERATOR"] == "cpu"
    assert environment({}, emulate_gpus=False)["PL_TRAINER_ACCELERATOR"] == "gpu"


def test_one_thread_per_rank_unless_someone_said_otherwise() -> None:
    assert environment({})["OMP_NUM_THREADS"] == "1"
    assert environment({"OMP_NUM_THREADS": "4"})["OMP_NUM_THREADS"] == "4"
    assert environment({}, request_env={"OMP_NUM_THREADS": "2"})["OMP_NUM_THREADS"] == "2"
    assert "OMP_NUM_THREADS" not in environment({}, nproc_per_node=1)


def test_secrets_reach_the_ranks() -> None:
    assert environment({}, request_env={"TOKEN": "a"}, secrets={"TOKEN": "b"})["TOKEN"] == "b"
