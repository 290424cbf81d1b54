"""The environment of the ranks, as a pure function of what each party asks for."""

from __future__ import annotations

from collections.abc import Mapping

from taas_tasks.compute.variables import merged


def lightning_defaults(*, nnodes: int, nproc_per_node: int, emulate_gpus: bool) -> dict[str, str]:
    """Return the variables from which Lightning's ``Trainer`` takes arguments that the script does not give.

    Without them a plain ``Trainer()`` on a machine with no GPU takes one device, and every rank trains for itself.
    Source: pytorch_lightning.utilities.argparse._defaults_from_env_vars; explicit arguments win.
    """
    return {
        "PL_TRAINER_NUM_NODES": str(nnodes),
        "PL_TRAINER_DEVICES": str(nproc_per_node),
        "PL_TRAINER_ACCELERATOR": "cpu" if emulate_gpus else "gpu",
        "PL_TRAINER_STRATEGY": "ddp",
    }


def loader_environment(
    host_env: Mapping[str, str], *, request_env: Mapping[str, str], secrets: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment in which the user's loaders are opened to prepare a segment again: that of prepare.

    Without the host's GPUs, which belong to the ranks and which the machines that prepared did not have.
    """
    ours = {"PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
    return merged(merged({**host_env, **ours}, request_env), secrets)


def rank_environment(
    host_env: Mapping[str, str],
    *,
    request_env: Mapping[str, str],
    secrets: Mapping[str, str],
    nnodes: int,
    nproc_per_node: int,
    emulate_gpus: bool,
    interface: str | None,
) -> dict[str, str]:
    """Return the environment in which the fork server, and so every rank, starts.

    What the request asks for wins over our defaults; ours win over the host's. ``RANK`` and its like are set per rank
    by torch's agent.
    """
    ours = lightning_defaults(nnodes=nnodes, nproc_per_node=nproc_per_node, emulate_gpus=emulate_gpus)
    # A rank other than 0 cannot write __pycache__ into the project, and rank 0's would become artifacts.
    ours["PYTHONDONTWRITEBYTECODE"] = "1"
    # pyarrow would start a thread in the fork server, whose forks must come from a process with one thread.
    ours["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
    if nproc_per_node > 1 and "OMP_NUM_THREADS" not in host_env:
        ours["OMP_NUM_THREADS"] = "1"  # as torchrun does
    if interface is not None:
        # Names of interfaces, not addresses; torch and NCCL would else take docker0 or the first one.
        ours["GLOO_SOCKET_IFNAME"] = interface
        ours["NCCL_SOCKET_IFNAME"] = f"={interface}"
    return merged(merged({**host_env, **ours}, request_env), secrets)
