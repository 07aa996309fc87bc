"""asv with all benchmarks of a commit in one process, for a GPU whose time is dear.

    python one_process.py run -E existing --bench Forward     # as asv, otherwise
    python sweep.py HEAD --one-process -- --bench Forward

asv starts a process for every figure. On a GPU a figure then takes 1 to 2 s, with torch 7 s, most
of it imports, the device's context and torch's libraries. Here one process runs a commit's
benchmarks one behind another; after one that fails or takes too long the next has a new process.
The device is warmer than with pauses in between, so that figures taken this way belong beside such
only.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

from asv import runner, util
from asv.main import main as asv_main
from asv_runner._aux import posix_redirect_output, update_sys_path
from asv_runner.run import _run


class OneProcess(runner.Spawner):
    """Hands benchmarks to one process, where asv's own class starts one for each."""

    child: subprocess.Popen | None = None

    def run(self, name, params_str, profile_path, result_file_name, timeout, cwd):
        """Output and exit status of one benchmark."""
        child = self.child = self.child or self._start()
        request = [cwd, self.benchmark_dir, name, params_str, profile_path, result_file_name]
        print(json.dumps(request), file=child.stdin, flush=True)
        if not select.select([child.stdout], [], [], timeout)[0]:
            self.close()
            return "", util.TIMEOUT_RETCODE
        answer = child.stdout.readline()
        out, status = json.loads(answer) if answer else ("the process of the benchmarks ended", 1)
        if status:
            self.close()
        return out, status

    def _start(self):
        command = [sys.executable, __file__, "serve", self.benchmark_dir]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, **pipes)

    def close(self):
        """End the process."""
        if self.child is not None:
            self.child.kill()
            self.child.communicate()
            self.child = None


def serve(benchmark_dir: str) -> None:
    """Run what comes on stdin, line by line, and answer on stdout with what it printed."""
    paths = os.environ.get("ASV_PYTHONPATH", "")
    sys.path[:0] = filter(None, paths.split(os.pathsep))
    update_sys_path(benchmark_dir)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed between benchmarks is no answer
    gpu = importlib.import_module(f"{Path(benchmark_dir).name}.gpu")
    gpu.find_torch()  # before CuPy, which then finds the CUDA libraries that torch has loaded
    with tempfile.TemporaryDirectory() as scratch:
        printed = Path(scratch, "printed")
        for line in sys.stdin:
            status = _run_one(*json.loads(line), printed=printed)
            if gpu.find_cupy() is not None:
                gpu.release()
            print(json.dumps([printed.read_text(errors="replace"), status]), file=answers)
            answers.flush()


def _run_one(cwd: str, *arguments: str, printed: Path) -> int:
    """The exit status that asv's process would have had."""
    os.chdir(cwd)
    with posix_redirect_output(str(printed), permanent=False):
        try:
            _run(arguments)
        except Exception:
            traceback.print_exc()
            return 1
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2])
    else:
        runner.get_spawner = lambda env, folder, launch_method: OneProcess(env, folder)
        asv_main()
