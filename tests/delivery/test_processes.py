"""The whole chain across processes: a real S3 server, the feeder program, and ranks with a gloo group."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from taas_tasks.delivery.counters import read_passes
from taas_tasks.store import open_store
from tests.delivery.processes import (
    GLOO,
    PREAMBLE,
    ROOT,
    answers,
    feeder_process,
    said,
    start_ranks,
    stopped_at_the_end,
    wait_until,
)
from tests.delivery.support import MergedPrepared, Prepared, launch_plan, rule
from tests.support.s3_server import S3Server

pytestmark = pytest.mark.store


def pairs(found: Any) -> list[tuple[int, int]]:
    return [tuple(one) for one in found]


def test_ranks_get_the_rule_while_a_writer_commits_slowly(s3_server: S3Server, tmp_path: Path) -> None:
    config = s3_server.fresh_config()
    prepared = Prepared(open_store(config), units=150, length=100)
    other = Prepared(open_store(config), units=100, length=100, name="other").commit_all()

    def write() -> None:
        for epoch, n in prepared.segments():
            time.sleep(0.1)
            prepared.commit(epoch, n)

    code = (
        GLOO
        + """
loader = taas.loader("data")
for _ in range(2):
    say(ids(loader))
say([[a, b] for a, b in zip(ids(taas.loader("data")), ids(taas.loader("other")))])
taas.log(loss=torch.tensor(0.5), step=1)
try:
    taas.loader("nope")
except Exception as error:
    say(str(error))
"""
    )
    with feeder_process(config, launch_plan(prepared, other, nproc=2), tmp_path) as (host, feeder):
        writer = threading.Thread(target=write)
        writer.start()
        ranks = start_ranks(host, code, count=2)
        with stopped_at_the_end(ranks):
            for rank, process in enumerate(ranks):
                first, second, zipped, message = said(process)
                assert pairs(first) == rule(prepared, epoch=0, rank=rank, world_size=2)
                assert pairs(second) == rule(prepared, epoch=1, rank=rank, world_size=2)
                both = rule(prepared, epoch=0, rank=rank, world_size=2)
                assert [(tuple(a), tuple(b)) for a, b in zipped] == list(zip(both, both, strict=True))
                assert "this run has no loader 'nope'; it has: data, other" in message
        writer.join()
        (metrics,) = (host.folder / "metrics.jsonl").read_text().splitlines()  # of rank 0 alone
        assert json.loads(metrics)["loss"] == 0.5
        feeder.send_signal(signal.SIGTERM)
        assert feeder.wait(20) == 0
        assert json.loads(host.stats_path.read_text())["delivered"] == {"data": 150, "other": 100}
        assert not Path(host.socket_path).exists()
        assert not list((host.folder / "cache").iterdir())


def test_ranks_get_the_order_of_streams_that_arrive_in_any_order(s3_server: S3Server, tmp_path: Path) -> None:
    config = s3_server.fresh_config()
    prepared = MergedPrepared(open_store(config), units=150, lengths=[[30, 0, 45, 11]])
    plan = launch_plan(prepared, nproc=2, cache_bytes=40_000)  # a few parts

    def write() -> None:
        for one in prepared.shuffled(3):
            time.sleep(0.05)
            prepared.commit(*one)

    code = GLOO + "loader = taas.loader('data')\nfor _ in range(3):\n    say(ids(loader))\nsay(len(loader))\n"
    with feeder_process(config, plan, tmp_path) as (host, _):
        writer = threading.Thread(target=write)
        writer.start()
        ranks = start_ranks(host, code, count=2)
        with stopped_at_the_end(ranks):
            for rank, process in enumerate(ranks):
                *passes, length = said(process)
                for found, epoch in zip(passes, (0, 1, 0), strict=True):
                    assert pairs(found) == rule(prepared, epoch=epoch, rank=rank, world_size=2)
                assert length == 32
        writer.join()


def test_counters_are_right_after_a_rank_was_killed_and_the_others_go_on(s3_server: S3Server, tmp_path: Path) -> None:
    config = s3_server.fresh_config()
    prepared = Prepared(open_store(config), units=100, length=100).commit_all()
    code = (
        PREAMBLE
        + """
import dataclasses, time
loader = taas.loader("data")
loader._taas_delivery = dataclasses.replace(loader._taas_delivery, group_size=lambda: 2)
for step, one in enumerate(loader):
    if step == 16 and provider.rank == 0:
        say("stopped")
        time.sleep(600)
say("done")
"""
    )
    with feeder_process(config, launch_plan(prepared, nproc=2), tmp_path) as (host, _):
        ranks = start_ranks(host, code, count=2)
        with stopped_at_the_end(ranks):
            stdout = ranks[0].stdout
            assert stdout is not None and stdout.readline().strip() == '"stopped"'
            ranks[0].kill()
            assert said(ranks[1]) == ["done"]
    counted = [(one.rank, one.num_steps, one.complete) for one in read_passes(host.counters_dir)]
    assert counted == [(0, 17, False), (1, 50, True)]


def test_a_killed_feeder_gives_its_ranks_a_delivery_error(s3_server: S3Server, tmp_path: Path) -> None:
    config = s3_server.fresh_config()
    prepared = Prepared(open_store(config), units=100, length=100)
    prepared.commit(0, 0)
    code = (
        PREAMBLE
        + """
loader = iter(taas.loader("data"))
say(ids([next(loader)]))
try:
    list(loader)
except taas.errors.DeliveryError as error:
    say(str(error))
"""
    )
    with feeder_process(config, launch_plan(prepared, nproc=1), tmp_path) as (host, feeder):
        ranks = start_ranks(host, code, count=1)
        with stopped_at_the_end(ranks):
            stdout = ranks[0].stdout
            assert stdout is not None and stdout.readline().strip() == "[[0, 0]]"
            time.sleep(0.3)
            feeder.kill()
            (message,) = said(ranks[0])
            assert "has ended while this rank still needs data" in message


def test_the_feeder_ends_when_the_process_that_started_it_is_gone(s3_server: S3Server, tmp_path: Path) -> None:
    config = s3_server.fresh_config()
    prepared = Prepared(open_store(config), units=8, length=8)
    with feeder_process(config, launch_plan(prepared, nproc=1), tmp_path) as (host, feeder):
        wait_until(lambda: answers(host.socket_path))
        feeder.kill()
        feeder.wait()
        code = (
            "import subprocess, sys;"
            "p = subprocess.Popen([sys.executable, '-m', 'taas_tasks.delivery.feeder', sys.argv[1]]);"
            "print(p.pid, flush=True); sys.stdin.read()"
        )
        command = [sys.executable, "-c", code, str(host.folder / "feeder.json")]
        pipe = subprocess.PIPE
        parent = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=ROOT)
        with stopped_at_the_end([parent]):
            assert parent.stdout is not None
            orphan = Path(f"/proc/{int(parent.stdout.readline())}")
            wait_until(lambda: answers(host.socket_path))  # though the killed one has left its socket
            parent.kill()
            wait_until(lambda: not orphan.exists() or "\nState:\tZ" in (orphan / "status").read_text())


LIGHTNING = (
    PREAMBLE
    + """
import logging
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
warnings.simplefilter("ignore")
import pytorch_lightning as pl

seen, validated, states = [], [], []

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, number):
        seen.append(batch["id"].tolist())
        states.append(loader.state_dict())
        return self.layer(batch["x"]).mean()
    def validation_step(self, batch, number):
        validated.append(batch["id"].tolist())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0001)

loader, validation = taas.loader("data"), taas.loader("validation")
same = []
class Watch(pl.Callback):
    def on_train_start(self, trainer, module):
        same.append(trainer.train_dataloader is loader and trainer.val_dataloaders is validation)

quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False)
trainer = pl.Trainer(
    max_epochs=int(os.environ["EPOCHS"]), strategy="ddp", accelerator="cpu", devices=2, num_nodes=1,
    callbacks=[Watch()], enable_checkpointing=False, default_root_dir=os.environ["ROOT"], **quiet,
)
resume = os.environ.get("RESUME")
trainer.fit(Model(), loader, validation, ckpt_path=resume or None)
trainer.save_checkpoint(os.path.join(os.environ["ROOT"], "end.ckpt"))
say([seen, validated, same, [one["position"] for one in states], loader.state_dict()])
"""
)


def test_lightning_trains_on_every_element_of_its_ranks_without_splitting_again(
    s3_server: S3Server, tmp_path: Path
) -> None:
    config = s3_server.fresh_config()
    store = open_store(config)
    prepared = Prepared(store, units=50, length=20).commit_all()
    validation = Prepared(store, units=12, length=12, name="validation").commit_all()
    with feeder_process(config, launch_plan(prepared, validation, nproc=2), tmp_path) as (host, _):
        environment = {"EPOCHS": "3", "ROOT": str(tmp_path)}
        ranks = start_ranks(host, LIGHTNING, count=2, env=environment)
        with stopped_at_the_end(ranks):
            for rank, process in enumerate(ranks):
                ((seen, validated, same, positions, state),) = said(process)
                whole = [rule(prepared, epoch=epoch, rank=rank, world_size=2) for epoch in range(3)]
                assert pairs(seen) == [one for epoch in whole for one in epoch]
                once = rule(validation, epoch=0, rank=rank, world_size=2)
                # The sanity check, then each epoch but the shorter last one: Lightning keeps the first pass's length
                # for val_check_interval unless reload_dataloaders_every_n_epochs=1.
                assert pairs(validated) == once[:2] + once * 2
                assert same == [True]
                assert positions[:10] == [*range(2, 20, 2), 0]
                assert state == {"version": 1, "loader": "data", "pass": 3, "position": 0, "step": 0}
    passes = [one for one in read_passes(host.counters_dir) if one.loader == "data"]
    assert [(one.rank, one.epoch, one.num_steps, one.complete) for one in passes] == [
        (rank, epoch, steps, True) for rank in range(2) for epoch, steps in ((0, 10), (1, 10), (2, 5))
    ]
