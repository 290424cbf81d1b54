"""Stands for the program that prepares a segment again; what it does is told by the environment: ``DOES``."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    path = Path(sys.argv[1])
    given = json.loads(path.read_text())
    does = os.environ["DOES"]
    with Path(os.environ["SEEN"]).open("a") as seen:
        mode = stat.S_IMODE(path.stat().st_mode)
        seen.write(json.dumps({"pid": os.getpid(), "mode": mode, "given": given}) + "\n")
    if does == "hang":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        Path(os.environ["SEEN"] + ".child").write_text(str(child.pid))
        time.sleep(60)
    if does == "die":
        os._exit(7)
    time.sleep(0.1)
    told = {"ok": True, "result": {}}
    if does.startswith("raise "):
        told = {"ok": False, "error": {"type": does.split()[1], "message": "what went wrong", "fields": {}}}
    path.with_name("outcome.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
