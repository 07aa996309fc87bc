"""The benchmarks for several commits, in the environment that is here: nothing is built.

    python sweep.py main~5..main -- --bench Forward      # a range, oldest first
    python sweep.py main HEAD --interleave 2 -- --bench Forward.track_seconds
    python sweep.py HEAD --one-process               # all figures, without a process for each

asv takes no range of commits in an existing environment, and on a GPU there is mostly one that
works. cuflash is pure Python, so a commit's package is laid out in a folder and put first on the
path. What comes after -- goes to `asv run`. With `--interleave R` the commits take turns, forth and
back, R times each way, and samples add up: a drift of the machine falls on all of them alike. Then
the first commit is compared with each later one, and the exit status is 1 if asv finds a benchmark
slower by `--factor`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


def git(*arguments: str) -> str:
    """What git says about this repository."""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def find_commits(revisions: list[str]) -> list[str]:
    """Full hashes in the order given; a range counts from its oldest commit on."""
    commits = []
    for revision in revisions:
        if ".." in revision:
            commits += git("rev-list", "--reverse", "--first-parent", revision).split()
        else:
            commits.append(git("rev-parse", "--verify", f"{revision}^{{commit}}").strip())
    return list(dict.fromkeys(commits))


def lay_out(commit: str, folder: Path) -> Path:
    """A folder that holds the package of that commit."""
    target = folder / commit
    target.mkdir()
    archive = subprocess.Popen(
        ["git", "-C", str(ROOT), "archive", commit, "cuflash"], stdout=subprocess.PIPE
    )
    subprocess.run(["tar", "-x", "-C", str(target)], stdin=archive.stdout, check=True)
    if archive.wait():
        raise SystemExit(f"{commit} holds no cuflash")
    return target


def run(asv: list[str], commit: str, folder: Path, options: list[str]) -> int:
    """The exit status of asv for one commit; 2 says that a benchmark failed."""
    command = [sys.executable, *asv, "run", "-E", f"existing:{sys.executable}"]
    command += ["--set-commit-hash", commit, *options]
    print(f"\n{commit[:10]} {git('show', '-s', '--format=%s', commit).strip()}", flush=True)
    paths = [str(folder), *filter(None, [os.environ.get("ASV_PYTHONPATH")])]
    environment = {**os.environ, "ASV_PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(command, cwd=HERE, env=environment).returncode


def compare(old: str, new: str, factor: float, machine: list[str]) -> bool:
    """Print asv's comparison; whether something is slower."""
    command = [sys.executable, "-m", "asv", "compare", "--only-changed", "-f", str(factor)]
    done = subprocess.run([*command, *machine, old, new], cwd=HERE, capture_output=True, text=True)
    print(done.stdout or "no significant difference", done.stderr, sep="\n")
    if done.returncode:
        raise SystemExit(done.returncode)
    return any(line.startswith("| + ") for line in done.stdout.splitlines())


def main() -> int:
    """Run the commits asked for, in order or in turns."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commits", nargs="+", help="revisions or ranges")
    parser.add_argument("--interleave", type=int, default=0, metavar="R")
    parser.add_argument("--factor", type=float, default=1.05, help="that counts as slower")
    parser.add_argument("--one-process", action="store_true", help="for each commit")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, after = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    commits = find_commits(options.commits)
    turns = commits
    if options.interleave:
        turns = (commits + commits[::-1]) * options.interleave
        after = ["--append-samples", *after]
    failed, asv = False, ["one_process.py"] if options.one_process else ["-m", "asv"]
    with tempfile.TemporaryDirectory() as scratch:
        folders = {commit: lay_out(commit, Path(scratch)) for commit in commits}
        for commit in turns:
            failed |= run(asv, commit, folders[commit], after) != 0
    machine = after[after.index("--machine") :][:2] if "--machine" in after else []
    slower = False
    if options.interleave:
        for commit in commits[1:]:
            slower |= compare(commits[0], commit, options.factor, machine)
    if failed:
        print("some benchmarks failed: see above")
    return 2 if failed else int(slower)


if __name__ == "__main__":
    raise SystemExit(main())
