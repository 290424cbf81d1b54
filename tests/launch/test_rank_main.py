"""What a user's script finds in a rank, and what it may not do there; real agents and ranks."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import cloudpickle

from taas_tasks.layout import RunKeys, payload_key
from taas_tasks.verdict import diagnose, launch_error
from tests.launch.conftest import MakeGang

HABITAT = """
    import atexit, ctypes, json, logging, multiprocessing, os, subprocess, sys, threading, time
    import numpy as np
    from torch.utils.data import DataLoader, Dataset
    import beside

    class Squares(Dataset):
        def __len__(self): return 4
        def __getitem__(self, index): return index * index, os.getpid()

    def main():
        rank = int(os.environ["RANK"])
        lambdas = DataLoader([1, 2, 3], num_workers=1, collate_fn=lambda items: items)  # cannot be pickled
        seen = {
            "rank": rank,
            "env": [os.environ["FLAG"], os.environ["THE_SECRET"], os.environ["PATH"].startswith("/mine:/")],
            "cwd": os.getcwd() == os.path.dirname(os.path.abspath(__file__)),
            "path": sys.path[0] == os.getcwd(),
            "beside": beside.value,
            "from_pythonpath": __import__("shared_code").value,
            "forked": [item for batch in lambdas for item in batch],
            "random": float(np.random.rand()),
            "name": multiprocessing.current_process().name,
            "parent": multiprocessing.parent_process() is None,
            "omp": os.environ["OMP_NUM_THREADS"],
        }
        for method in ("spawn", "forkserver"):
            batches = list(DataLoader(Squares(), num_workers=1, multiprocessing_context=method))
            seen[method] = [int(value) for value, _ in batches]
            seen[f"{method} elsewhere"] = int(batches[0][1]) != os.getpid()
        print("SEEN", json.dumps(seen))
        subprocess.run(["sh", "-c", "echo from a child; echo to stderr >&2"])
        ctypes.CDLL(None).printf(b"from C without end of line")
        threading.Thread(target=lambda: (time.sleep(0.5), print("\\nthread ended"))).start()
        atexit.register(print, "exit handler")
        if rank == 0:
            time.sleep(6)  # the others have long ended
            open("late.txt", "w").write("late")
            print("rank 0 ended late")

    if __name__ == "__main__":
        main()
"""


def test_script_finds_what_it_would_find_under_torchrun(make_gang: MakeGang, tmp_path: Any) -> None:
    (tmp_path / "shared_code.py").write_text("value = 'shared'")
    env = {"FLAG": "a b'c\"$(d)\né", "PATH": "/mine", "PYTHONPATH": str(tmp_path)}
    gang = make_gang(HABITAT, files={"beside.py": "value = 5"}, nproc=2, env=env)
    result = gang.wait()
    assert result.ok, gang.all_output()
    lines = gang.out().splitlines()
    seen = [json.loads(line.split("SEEN ")[1]) for line in lines if "SEEN " in line]
    assert len(seen) == 2
    for found in seen:
        assert found["env"] == [env["FLAG"], "s3cret", True]
        assert (found["cwd"], found["path"], found["beside"], found["from_pythonpath"]) == (True, True, 5, "shared")
        assert found["forked"] == [1, 2, 3]
        assert found["spawn"] == found["forkserver"] == [0, 1, 4, 9]
        assert found["spawn elsewhere"] and found["forkserver elsewhere"]
        assert (found["name"], found["parent"], found["omp"]) == ("MainProcess", True, "1")
    assert seen[0]["random"] != seen[1]["random"]
    for rank in (0, 1):
        for text in ("from a child", "to stderr", "thread ended", "exit handler"):
            assert f"[host-0 r{rank}] {text}" in lines, gang.out()
        assert any(line.startswith(f"[host-0 r{rank}] ") and "from C without end" in line for line in lines)
        log = gang.store.get(RunKeys(gang.run).rank_log(1, rank)).decode()
        assert "exit handler" in log and "[host-0" not in log
    assert "rank 0 ended late" in gang.out()
    assert (gang.project() / "late.txt").read_text() == "late"
    assert gang.processes() == []


WRITES = """
    import ctypes, os, subprocess, sys, time, torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, Dataset

    class Writer(Dataset):
        def __len__(self): return 1
        def __getitem__(self, index):
            return attempt(lambda: open("by-loader-worker", "w"))

    def attempt(call):
        try:
            result = call()
        except OSError:
            return "refused"
        return "refused" if result == -1 else "done"

    def main():
        libc = ctypes.CDLL(None)
        dist.init_process_group("nccl", init_method="env://")
        rank = dist.get_rank()
        if rank == 0:
            torch.save({"step": 7}, "ckpt.pt")
        dist.barrier()
        assert torch.load("ckpt.pt")["step"] == 7
        tries = {
            "python": lambda: open(f"python-{rank}", "w").close(),
            "c": lambda: os.close(fd) if (fd := libc.creat(f"c-{rank}".encode(), 0o644)) != -1 else -1,
            "shell": lambda: -1 if subprocess.run(["sh", "-c", f"echo > shell-{rank}"]).returncode else 0,
            "rename": lambda: os.rename("ckpt.pt", "ckpt.pt"),
            "link": lambda: os.link("train.py", f"link-{rank}"),
            "mkdir": lambda: os.mkdir(f"folder-{rank}"),
            "truncate": lambda: os.truncate("other.txt", 1),
            "unlink": lambda: os.unlink(f"mine-{rank}.txt"),
        }
        results = {name: attempt(call) for name, call in tries.items()}
        for method in ("fork", "forkserver"):
            loader = DataLoader(Writer(), num_workers=1, multiprocessing_context=method, collate_fn=list)
            results[method] = next(iter(loader))[0]
        for folder in ("/tmp", "/dev/shm", os.environ.get("TMPDIR", "/var/tmp")):
            path = f"{folder}/taas-test-{os.getpid()}"
            open(path, "w").close()
            os.unlink(path)
        print("RESULTS", sorted(set(results.values())), results)
        dist.barrier()
        if rank == 1 and len(sys.argv) > 1:
            torch.save({}, "mine.pt")

    if __name__ == "__main__":
        main()
"""
FILES = {"other.txt": "text", "mine-0.txt": "", "mine-1.txt": ""}


def test_only_rank_0_can_write_the_project_and_the_log_says_what_to_do(make_gang: MakeGang) -> None:
    gang = make_gang(WRITES, files=FILES, nproc=2, plan={"args": ["and fail"]})
    result = gang.wait()
    lines = gang.out().splitlines()
    assert any("r0] RESULTS ['done']" in line for line in lines), gang.all_output()
    assert any("r1] RESULTS ['refused']" in line for line in lines), gang.all_output()
    written = {path.name for path in gang.project().iterdir()}
    assert {"python-0", "c-0", "shell-0", "link-0", "folder-0", "by-loader-worker"} <= written
    assert not [name for name in written if "1" in name and name != "mine-1.txt"]
    assert "[taas] rank 1 may not write 'python-1': only rank 0 writes the project folder" in gang.out()
    error = launch_error(result)
    assert error is not None
    assert error.fields["rank"] == 1
    assert "only rank 0 writes the project folder" in error.message
    assert "__pycache__" not in written


def test_scratch_gives_private_copies_and_lists_what_was_not_kept(make_gang: MakeGang) -> None:
    script = """
        import os
        rank = os.environ["RANK"]
        print(open("other.txt").read())
        open("same-name.txt", "w").write(rank)
        open("other.txt", "a").write(rank)
    """
    gang = make_gang(script, files=FILES, nproc=3, plan={"other_ranks": "scratch"})
    result = gang.wait()
    assert result.ok, gang.all_output()
    assert (gang.project() / "same-name.txt").read_text() == "0"
    assert (gang.project() / "other.txt").read_text() == "text0"
    assert gang.out().count("] text\n") == 3
    expected = [f"rank {rank}: {name}" for rank in (1, 2) for name in ("other.txt", "same-name.txt")]
    assert result.nodes[0].other_rank_writes == expected


def test_captured_cell_trains_with_its_namespace(make_gang: MakeGang) -> None:
    source = (
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('nccl', init_method='env://')\n"
        "total = torch.ones(1) * factor\n"
        "dist.all_reduce(total)\n"
        "print('total', int(total), helper())\n"
        "assert dist.get_rank() == 0, 'the second rank fails here'\n"
    )
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("def helper(): return int(total) + 1\n", names)
    namespace = {"factor": 4, "helper": names["helper"]}
    data = cloudpickle.dumps({"format": 1, "source": source, "namespace": namespace, "loaders": []})
    sha256 = hashlib.sha256(data).hexdigest()
    key = payload_key("demo", sha256)
    plan = {"script": None, "cell_payload": key, "cell_sha256": sha256}
    gang = make_gang("", nproc=2, before=lambda made: made.store.put(key, data), plan=plan)
    verdict = diagnose(gang.wait().nodes)
    assert "[host-0 r0] total 8 9" in gang.out(), gang.all_output()
    assert verdict is not None
    assert verdict.rank == 1
    assert "assert dist.get_rank() == 0, 'the second rank fails here'" in str(verdict.traceback_tail)


LIGHTNING = """
    import os, torch
    from torch.utils.data import DataLoader
    import pytorch_lightning as pl

    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)
        def training_step(self, batch, index):
            return self.layer(batch).sum()
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)
        def on_fit_start(self):
            t = self.trainer
            print(f"world={t.world_size} rank={t.global_rank} nodes={t.num_nodes} {type(t.strategy).__name__}")

    trainer = pl.Trainer(max_epochs=1)
    trainer.fit(Model(), DataLoader(torch.randn(32, 4), batch_size=2))
    print(f"steps={trainer.global_step}")
"""


def test_plain_lightning_trainer_trains_across_all_ranks(make_gang: MakeGang) -> None:
    gang = make_gang(LIGHTNING, nnodes=2, nproc=2)
    result = gang.wait()
    assert result.ok, gang.all_output()
    for rank in range(4):
        out = gang.out(rank // 2)
        assert f"[host-{rank // 2} r{rank}] world=4 rank={rank} nodes=2 DDPStrategy" in out, gang.all_output()
        assert f"[host-{rank // 2} r{rank}] steps=4" in out
    assert list(gang.project(0).rglob("*.ckpt"))
    assert not list(gang.project(1).rglob("*.ckpt"))
    assert "may not write" not in gang.out(0) + gang.out(1)


def test_missing_script_and_unmet_preflight_are_one_sentence(make_gang: MakeGang) -> None:
    gang = make_gang("", nproc=1, plan={"script": "none.py"})
    unfit = make_gang("", nnodes=2, nproc=1, plan={"emulate_gpus": False})
    error = launch_error(gang.wait())
    assert error is not None
    assert "the project has no file 'none.py'" in error.message
    assert "Traceback" not in error.message.splitlines()[0]
    refused = launch_error(unfit.wait())
    assert refused is not None
    assert type(refused).__name__ == "PreflightFailed"
    findings = refused.fields["findings"]
    assert sorted(findings) == ["host-0 (node 0)", "host-1 (node 1)"]
