"""The scripts for Cloud TPU slices: the commands that they would run, and what they do when Google Cloud answers.

Google Cloud is a script here: it notes how it was called, tells a prepared series of states, and runs what it
should run over ssh in the folders of two workers.
"""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "launch" / "tpu").glob("*.sh"))
COMMANDS = ["create", "setup", "run", "fetch", "delete", "keep_running", "gke"]

FAKE_GCLOUD = r"""#!/usr/bin/env bash
set -eu
cd "$FAKE"
printf '%s\x1f' "$(basename "$0")" "$@" >>calls
echo >>calls
[[ -e states ]] || exit 99 # nothing may be asked
command="" worker=""
for argument; do
  case "$argument" in
    --command=*) command="${argument#--command=}" ;;
    --worker=*) worker="${argument#--worker=}" ;;
  esac
done
case "$*" in
  *"queued-resources describe"*failedData*) echo "no capacity left" ;;
  *"queued-resources describe"*)
    state="$(head -n 1 states)"
    [[ $(wc -l <states) == 1 ]] || sed -i 1d states
    case "$state" in
      MISSING) echo "ERROR: (gcloud) NOT_FOUND: no such resource" >&2 && exit 1 ;;
      ERROR) echo "ERROR: the server is tired" >&2 && exit 1 ;;
      *) echo "$state" && echo "WARNING: a new version is there" >&2 ;;
    esac
    ;;
  *"queued-resources delete"*)
    if [[ -e busy ]]; then rm busy && exit 1; fi
    printf '%s\n' MISSING WAITING_FOR_RESOURCES ACTIVE >states
    rm -rf w-0 w-1 && mkdir w-0 w-1 # other machines
    ;;
  *"tpu-vm describe"*) [[ -e node ]] || { echo "ERROR: (gcloud) Resource 'pod' was not found" >&2 && exit 1; } ;;
  *"tpu-vm scp"*"pod:specsamp.tar.gz"*) for host in w-0 w-1; do cp "$OLDPWD/$5" "$host/specsamp.tar.gz"; done ;;
  *"tpu-vm ssh"*)
    if [[ $command == *follow* && -e drops ]]; then rm drops && exit 255; fi
    [[ $worker == 0 ]] && hosts=w-0 || hosts="w-0 w-1"
    [[ $command != *"worker.sh start"* ]] || hosts="$hosts $hosts" # as when the connection is lost at once
    status=0
    for host in $hosts; do
      (cd "$host" && HOME="$PWD" HOST="$host" bash -c "$command") || { [[ $status != 0 ]] || status=$?; }
    done
    exit "$status"
    ;;
esac
"""


class Cloud:
    """A checkout with the scripts, and the programs that stand for Google Cloud."""

    def __init__(self, folder):
        self.folder, self.checkout, self.fake = folder, folder / "checkout", folder / "fake"
        for path in (*SCRIPTS, ROOT / "specsamp" / "mesh" / "slices.py"):
            copy = self.checkout / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
        # Stands for the installation of packages.
        (self.checkout / "launch" / "setup.sh").write_text(
            'find_python() { echo python3; }\nprepare_venv() { mkdir -p .venv/bin && ln -sf "$(type -P true)" .venv/bin/python; '
            'echo "$1" >>.venv/installed; }\n'
        )
        (self.checkout / ".gitignore").write_text("/runs/\n")
        self.git("init", "--quiet")
        self.git("add", ".")
        self.git("commit", "--quiet", "--message=first")
        for host in ("w-0", "w-1"):
            (self.fake / host).mkdir(parents=True)
        programs = self.fake / "bin"
        programs.mkdir()
        for name in ("gcloud", "xpk", "ssh", "scp"):
            (programs / name).write_text(FAKE_GCLOUD)
            (programs / name).chmod(0o755)
        (programs / "hostname").write_text('#!/bin/sh\necho "t1v-n-0-$HOST"\n')
        (programs / "hostname").chmod(0o755)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("CLOUDSDK_", "GIT_", "SPECSAMP_"))}
        self.environment = kept | {
            "FAKE": str(self.fake), "PATH": f"{programs}:{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
            "SPECSAMP_TPU_POLL_SECONDS": "0", "SPECSAMP_TPU_PATIENCE": "1", "SPECSAMP_TPU_GRACE": "1",
        }  # fmt: skip

    def git(self, *arguments):
        identity = ("-c", "user.name=me", "-c", "user.email=me@example.com")
        done = subprocess.run(["git", *identity, *arguments], cwd=self.checkout, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def states(self, *states):
        (self.fake / "states").write_text("".join(f"{state}\n" for state in states))

    def run(self, script, *arguments, place=True, **environment):
        at = ("--project=my-project", "--zone=us-central2-b") if place else ()
        split = arguments.index("--") if "--" in arguments else len(arguments)
        return subprocess.run(
            ["bash", self.checkout / "launch" / "tpu" / f"{script}.sh", *arguments[:split], *at, *arguments[split:]],
            cwd=self.checkout, env=self.environment | environment, capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    def dry_run(self, script, *arguments):
        """The commands that are printed, as words, and the remarks between them."""
        split = arguments.index("--") if "--" in arguments else len(arguments)
        done = self.run(script, *arguments[:split], "--dry_run", *arguments[split:])
        assert done.returncode == 0, done.stderr
        assert not (self.fake / "calls").exists() and not self.git("status", "--porcelain", "--ignored"), "not dry"
        lines = done.stdout.splitlines()
        return [shlex.split(line) for line in lines if not line.startswith("# ")], [line for line in lines if line.startswith("# ")]

    def calls(self, *words):
        """How Google Cloud was called, of these only calls with all of the words."""
        path = self.fake / "calls"
        calls = [line.split("\x1f")[:-1] for line in path.read_text().splitlines()] if path.exists() else []
        return [call for call in calls if set(words) <= set(call)]


@pytest.fixture
def cloud(tmp_path):
    return Cloud(tmp_path)


@pytest.fixture
def ready(cloud):
    """A slice that is there, with the code on its workers."""
    cloud.states("ACTIVE")
    assert (done := cloud.run("setup", "--name=pod")).returncode == 0, done.stderr
    (cloud.fake / "calls").unlink()
    return cloud


AT = ["--project=my-project", "--zone=us-central2-b"]
TPUS = ["gcloud", "compute", "tpus"]
DESCRIBE = [*TPUS, "queued-resources", "describe", "pod", *AT, "--format=value(state.state)"]
SSH_FLAGS = ["--ssh-flag=-oServerAliveInterval=30", "--ssh-flag=-oConnectTimeout=30"]


def ssh(worker, command):
    return [*TPUS, "tpu-vm", "ssh", "pod", f"--worker={worker}", f"--command={command}", *SSH_FLAGS, *AT]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script):
    beside = pathlib.Path(sys.executable).with_name("shellcheck")
    shellcheck = beside if beside.exists() else shutil.which("shellcheck")
    assert shellcheck, "no shellcheck: pip install -e .[test]"
    done = subprocess.run([shellcheck, "--external-sources", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", COMMANDS)
def test_help_is_the_header(cloud, script):
    done = cloud.run(script, "--help", place=False)
    assert done.returncode == 0 and f"launch/tpu/{script}.sh" in done.stdout
    assert "--dry_run" in done.stdout and "set -euo" not in done.stdout


# What would run.


@pytest.mark.parametrize(
    "accelerator, flags, ordered, shown",
    [
        ("v4-32", [], ["--accelerator-type=v4-32", "--runtime-version=tpu-ubuntu2204-base"], "16 chips as 2x2x4, 4 host(s)"),
        ("v5e-16", ["--spot"], ["--accelerator-type=v5litepod-16", "--runtime-version=v2-alpha-tpuv5-lite", "--spot"], "16 chips as 4x4"),
        ("v5p-32", ["--reserved"], ["--accelerator-type=v5p-32", "--runtime-version=v2-alpha-tpuv5", "--reserved"], "as 2x2x4"),
        ("v6e-8", ["--spot=false"], ["--accelerator-type=v6e-8", "--runtime-version=v2-alpha-tpuv6e"], "8 chips as 2x4, 1 host(s)"),
    ],
)  # fmt: skip
def test_create_orders_the_slice(cloud, accelerator, flags, ordered, shown):
    commands, remarks = cloud.dry_run("create", "--name=pod", f"--accelerator={accelerator}", *flags)
    assert commands == [DESCRIBE, [*TPUS, "queued-resources", "create", "pod", "--node-id=pod", *ordered, *AT], DESCRIBE]
    assert shown in remarks[0]


def test_setup_copies_one_commit_to_all_workers(cloud):
    commit = cloud.git("rev-parse", "HEAD")
    archive = f"runs/code_{commit[:12]}.tar.gz"
    commands, _ = cloud.dry_run("setup", "--name=pod")
    unpack = "rm -rf specsamp.new && mkdir specsamp.new && tar -xzf specsamp.tar.gz -C specsamp.new"
    assert commands == [
        ["mkdir", "-p", "runs"],
        ["git", "archive", "--format=tar.gz", f"--output={archive}", commit],
        [*TPUS, "tpu-vm", "scp", archive, "pod:specsamp.tar.gz", "--worker=all", *AT],
        ["rm", archive],
        ssh("all", f"{unpack} && bash specsamp.new/launch/tpu/worker.sh install {commit}"),
    ]


HARD = ["python", "a b.py", "--prompt=it's \"$HOME\" `date` \\ * &", "", "'"]


def test_run_keeps_every_word_of_the_command(cloud):
    commands, remarks = cloud.dry_run("run", "--name=pod", "--", *HARD)
    job = re.fullmatch(r"--command=bash specsamp/launch/tpu/worker.sh follow (\S+)", commands[1][7])[1]
    worker = "bash specsamp/launch/tpu/worker.sh"
    assert commands[1:] == [ssh(0, f"{worker} follow {job}"), ssh("all", f"{worker} finish {job}"), ssh("all", f"{worker} last {job}")]
    assert commands[0][:7] == ssh("all", "")[:7]
    assert shlex.split(commands[0][7].removeprefix("--command=")) == [*worker.split(), "start", job, *HARD]
    assert remarks == ["# where it failed:"]
    assert cloud.dry_run("run", "--name=pod", "--stop")[0] == [ssh("all", f"{worker} stop current")]
    assert cloud.dry_run("run", "--name=pod", "--attach")[0][0] == ssh(0, f"{worker} follow current")


def test_fetch_copies_from_buckets_and_from_the_first_worker(cloud):
    commands, _ = cloud.dry_run("fetch", "--from=gs://bucket/my run/", "--to=results")
    assert commands == [["mkdir", "-p", "results/my run"], ["gcloud", "storage", "rsync", "--recursive", "gs://bucket/my run", "results/my run"]]
    commands, _ = cloud.dry_run("fetch", "--name=pod", "--from=runs/x", "--to=results")
    scp = [*TPUS, "tpu-vm", "scp", "--recurse", "--worker=0"]
    assert commands == [["mkdir", "-p", "results"], [*scp, "pod:specsamp/runs/x", "results", *AT]]
    assert cloud.dry_run("fetch", "--name=pod", "--from=~/specsamp_job", "--to=x")[0][1] == [*scp, "pod:~/specsamp_job", "x", *AT]


def test_delete_leaves_neither_request_nor_node(cloud):
    commands, _ = cloud.dry_run("delete", "--name=pod")
    assert commands == [
        DESCRIBE,
        [*TPUS, "queued-resources", "delete", "pod", "--force", "--quiet", *AT],
        [*TPUS, "tpu-vm", "describe", "pod", "--format=value(state)", *AT],
        [*TPUS, "tpu-vm", "delete", "pod", "--quiet", *AT],
    ]


def test_keep_running_is_create_setup_run_and_delete(cloud):
    one_round, _ = cloud.dry_run("keep_running", "--name=pod", "--accelerator=v4-32", "--spot", "--", *HARD)
    parts = [
        cloud.dry_run("create", "--name=pod", "--accelerator=v4-32", "--spot"), cloud.dry_run("setup", "--name=pod"),
        cloud.dry_run("run", "--name=pod", "--", *HARD), cloud.dry_run("delete", "--name=pod"),
    ]  # fmt: skip
    without_job = lambda commands: [[re.sub(r"\d{8}-\d{6}-\d+", "JOB", word) for word in command] for command in commands]
    assert without_job(one_round) == without_job(sum((commands for commands, _ in parts), []))


def test_gke_uses_xpk(cloud):
    cluster = ["--cluster=big", *AT]
    slice = ["--tpu-type=tpu7x-16", "--num-slices=1"]
    commands, remarks = cloud.dry_run("gke", "create", "--name=big", "--accelerator=tpu7x-16", "--reservation=ours")
    assert commands == [["xpk", "cluster", "create", *cluster, *slice, "--reservation=ours"]]
    assert "8 chips as 2x2x2, 2 host(s)" in remarks[0]
    assert cloud.dry_run("gke", "create", "--name=big", "--accelerator=tpu7x-16", "--spot")[0][0][-1] == "--spot"
    assert cloud.dry_run("gke", "create", "--name=big", "--accelerator=v4-8")[0][0][-1] == "--on-demand"
    assert cloud.dry_run("gke", "delete", "--name=big")[0] == [["xpk", "cluster", "delete", *cluster, "--force"]]

    commit = cloud.git("rev-parse", "HEAD")
    code = f"runs/code_{commit[:12]}"
    commands, _ = cloud.dry_run("gke", "run", "--name=big", "--accelerator=tpu7x-16", "--job=mine", "--", *HARD)
    workload = ["xpk", "workload", "create", "--workload=mine", *cluster, *slice, "--base-docker-image=python:3.12", f"--script-dir={code}"]
    assert commands[1] == ["git", "archive", "--format=tar", f"--output={code}.tar", commit]
    assert commands[3][:-1] == [*workload, f"--env=SPECSAMP_VERSION={commit}", "--max-restarts=100"]
    assert shlex.split(commands[3][-1]) == ["--command=pip", "install", "--quiet", ".[tpu]", "&&", *HARD]
    assert commands[5] == ["xpk", "workload", "list", *cluster, "--wait-for-job-completion=mine"]


# What is refused.


@pytest.mark.parametrize(
    "script, arguments, message",
    [
        ("create", ["--name=pod", "--accelerator=v4-30"], "nobody sells a TPU slice 'v4-30'; the nearest: v4-16, v4-32"),
        ("create", ["--name=pod", "--accelerator=2x2x4"], "nobody sells a TPU slice '2x2x4'; the nearest: v4-32, v5p-32"),
        ("create", ["--name=pod", "--accelerator=tpu7x-16"], "tpu7x-16 is not sold as a queued resource: use launch/tpu/gke.sh"),
        ("create", ["--name=pod"], "no --accelerator: say what to order, as in --accelerator=v4-32"),
        ("create", ["--accelerator=v4-32"], "no --name: name the slice"),
        ("create", ["--name=My_Pod", "--accelerator=v4-32"], "got 'My_Pod'"),
        ("create", ["--name=pod", "--accelerator=v4-32", "--spot", "--reserved"], "--spot and --reserved exclude each other"),
        ("create", ["--name=pod", "--accelerator=v4-32", "--spots"], "no flag --spots: there are --name= --accelerator="),
        ("create", ["--name=pod", "--accelerator=v4-32", "--spot=maybe"], "--spot is true or false; got 'maybe'"),
        ("create", ["pod"], "unexpected argument 'pod'"),
        ("run", ["--name=pod"], "no command: add it after --"),
        ("run", ["--name=pod", "--"], "no command: add it after --"),
        ("run", ["--name="], "--name needs a value"),
        ("setup", ["--name=pod", "--ref=nowhere"], "no commit 'nowhere'"),
        ("fetch", ["--from=gs://bucket/run"], "no --to"),
        ("fetch", ["--from=runs/x", "--to=y"], "no --name"),
        ("keep_running", ["--name=pod", "--accelerator=v6e-512", "--", "true"], "the nearest: v6e-256"),
        ("keep_running", ["--name=pod", "--accelerator=v6e-8", "--max_restarts=x", "--", "true"], "got 'x'"),
        ("gke", ["create", "--name=big", "--accelerator=tpu7x-17"], "the nearest: tpu7x-16, tpu7x-32"),
        ("gke", ["--name=big"], "say what to do: create, run or delete; got '--name=big'"),
    ],
)
def test_bad_input_is_refused_before_anything_is_asked(cloud, script, arguments, message):
    done = cloud.run(script, *arguments)
    assert done.returncode == 2 and message in done.stderr, (done.returncode, done.stderr)
    assert not cloud.calls()


@pytest.mark.parametrize("flag, variable", [("zone", "CLOUDSDK_COMPUTE_ZONE"), ("project", "CLOUDSDK_CORE_PROJECT")])
@pytest.mark.parametrize("script", ["create", "setup", "run", "delete", "keep_running"])
def test_where_is_never_guessed(cloud, script, flag, variable):
    places = {"CLOUDSDK_COMPUTE_ZONE": "us-central2-b", "CLOUDSDK_CORE_PROJECT": "my-project"}
    accelerator = ["--accelerator=v4-8"] if script in ("create", "keep_running") else []
    command = ["--", "true"] if script in ("run", "keep_running") else []
    arguments = ("--name=pod", "--dry_run", *accelerator, *command)
    done = cloud.run(script, *arguments, place=False, **{k: v for k, v in places.items() if k != variable})
    assert done.returncode == 2 and f"no --{flag}: " in done.stderr and variable in done.stderr
    assert cloud.run(script, *arguments, place=False, **places).returncode == 0


def test_what_is_not_installed_is_named(cloud):
    (cloud.fake / "bin" / "xpk").unlink()
    done = cloud.run("gke", "delete", "--name=big")
    assert done.returncode == 2 and "xpk is not installed: pip install xpk" in done.stderr


def test_only_what_is_committed_is_copied(cloud):
    cloud.states("ACTIVE")
    (cloud.checkout / ".gitignore").write_text("/runs/\n/more/\n")
    done = cloud.run("setup", "--name=pod")
    assert done.returncode == 2 and "not committed: .gitignore ...: commit, or add --ref=" in done.stderr
    assert not cloud.calls()
    assert cloud.run("setup", "--name=pod", "--ref=" + cloud.git("rev-parse", "HEAD")).returncode == 0


# What happens.


def test_create_waits_until_the_slice_is_there(cloud):
    cloud.states("MISSING", "WAITING_FOR_RESOURCES", "ERROR", "PROVISIONING", "PROVISIONING", "ACTIVE")
    done = cloud.run("create", "--name=pod", "--accelerator=v4-32", "--spot")
    assert done.returncode == 0, done.stderr
    assert len(cloud.calls("create")) == 1 and "--spot" in cloud.calls("create")[0]
    told = re.findall(r"pod: (\w+), 0 min", done.stderr)
    assert told == ["WAITING_FOR_RESOURCES", "UNKNOWN", "PROVISIONING"] and "the server is tired" in done.stderr
    assert "pod is ACTIVE, and costs money until launch/tpu/delete.sh --name=pod" in done.stderr


def test_create_again_orders_nothing_twice(cloud):
    cloud.states("WAITING_FOR_RESOURCES", "WAITING_FOR_RESOURCES", "ACTIVE")
    assert cloud.run("create", "--name=pod", "--accelerator=v4-32").returncode == 0
    assert not cloud.calls("create")


@pytest.mark.parametrize("state", ["FAILED", "SUSPENDED"])
def test_create_says_what_to_do_with_a_lost_slice(cloud, state):
    cloud.states("MISSING", "WAITING_FOR_RESOURCES", state)
    done = cloud.run("create", "--name=pod", "--accelerator=v4-32")
    assert done.returncode == 75 and f"pod is {state}. no capacity left" in done.stderr
    assert "launch/tpu/delete.sh --name=pod, then order again" in done.stderr


def test_create_ends_when_google_does_not_answer(cloud):
    cloud.states("ERROR")
    done = cloud.run("create", "--name=pod", "--accelerator=v4-32")
    assert done.returncode == 1 and "the server is tired" in done.stderr and not cloud.calls("create")
    assert "Google Cloud gives no answer about pod" in done.stderr


def test_setup_gives_every_worker_the_commit(ready):
    first = ready.git("rev-parse", "HEAD")
    for host in ("w-0", "w-1"):
        assert (ready.fake / host / "specsamp" / "COMMIT").read_text() == f"{first}\n"
        assert (ready.fake / host / "specsamp" / ".venv" / "installed").read_text() == ".[tpu]\n"
        (ready.fake / host / "specsamp" / "runs").mkdir()
    (ready.checkout / "launch" / "setup.sh").write_text("find_python() { return 1; }\nprepare_venv() { return 1; }\n")
    ready.git("commit", "--all", "--message=the installation fails")
    assert ready.run("setup", "--name=pod").returncode == 1
    done = ready.run("run", "--name=pod", "--", "true")
    assert done.returncode == 1 and "w-1: not set up, or only in part: launch/tpu/setup.sh" in done.stderr
    assert ready.run("setup", "--name=pod", f"--ref={first}").returncode == 0
    for host in ("w-0", "w-1"):
        assert (ready.fake / host / "specsamp" / "COMMIT").read_text() == f"{first}\n"
        assert (ready.fake / host / "specsamp" / ".venv" / "installed").read_text() == ".[tpu]\n" * 2
        assert (ready.fake / host / "specsamp" / "runs").is_dir(), "results must stay"


def test_run_shows_the_first_worker_and_survives_a_lost_connection(ready):
    (ready.fake / "drops").touch()
    script = 'echo "$HOST: $1 in $PWD of $SPECSAMP_VERSION with $(command -v python)"'
    done = ready.run("run", "--name=pod", "--", "bash", "-c", script, "name", HARD[2])
    assert done.returncode == 0, done.stderr
    home = ready.fake / "w-0" / "specsamp"
    assert done.stdout == f"w-0: {HARD[2]} in {home} of {ready.git('rev-parse', 'HEAD')} with {home}/.venv/bin/python\n"
    assert "The connection is lost, the command goes on" in done.stderr
    assert (ready.fake / "w-1" / "specsamp_job" / "log").read_text().startswith("w-1: ")


def test_run_ends_with_the_status_of_the_command(ready):
    script = 'echo "I am $HOST"; if [ $HOST = w-1 ]; then exit 3; fi'
    done = ready.run("run", "--name=pod", "--", "bash", "-c", script)
    assert done.returncode == 3 and "w-1 ended with 3" in done.stderr
    assert "w-0| I am w-0" in done.stderr and "w-1| I am w-1" in done.stderr


def test_run_ends_workers_that_hang_after_the_first(ready):
    done = ready.run("run", "--name=pod", "--", "bash", "-c", 'if [ $HOST = w-0 ]; then exit 4; fi; trap "" TERM; sleep 60 & wait; wait')
    assert done.returncode == 4 and "w-1 ended with 143" in done.stderr


def test_a_process_that_the_command_left_behind_is_not_waited_for(ready):
    done = ready.run("run", "--name=pod", "--", "bash", "-c", "sleep 5 & exit 0")
    assert done.returncode == 0, done.stderr


def test_after_a_restart_of_the_machine_nothing_runs(ready):
    def worker(*arguments):
        home = ready.fake / "w-0"
        return subprocess.run(
            ["bash", home / "specsamp/launch/tpu/worker.sh", *arguments], capture_output=True, text=True, timeout=60,
            env=ready.environment | {"HOME": str(home), "HOST": "w-0"},
        )  # fmt: skip

    assert worker("start", "before", "sleep", "5").returncode == 0
    assert "a command is running: sleep 5" in worker("start", "meanwhile", "true").stderr
    (ready.fake / "w-0" / "specsamp_job" / "boot").write_text("the one before\n")
    assert worker("finish", "before").stdout == "w-0 ended with 75\n"
    assert worker("start", "after", "true").returncode == 0
    assert worker("finish", "after").stdout == "w-0 ended with 0\n"
    assert worker("follow", "before").returncode == 75


def test_one_command_at_a_time_and_it_can_be_seen_and_stopped(ready):
    start = subprocess.Popen(
        ["bash", ready.checkout / "launch/tpu/run.sh", "--name=pod", *AT, "--", "bash", "-c", "echo here I am; sleep 60"],
        cwd=ready.checkout, env=ready.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    log = ready.fake / "w-1" / "specsamp_job" / "log"
    until = time.monotonic() + 30
    while not (log.exists() and log.read_text()) and time.monotonic() < until:
        time.sleep(0.02)
    os.killpg(start.pid, 9)  # the terminal is closed
    start.wait()
    for script, arguments in (("run", ("--", "true")), ("setup", ())):
        done = ready.run(script, "--name=pod", *arguments)
        assert done.returncode == 1 and "a command is running: bash -c echo\\ here\\ I\\ am" in done.stderr
    attached = subprocess.Popen(
        ["bash", ready.checkout / "launch/tpu/run.sh", "--name=pod", "--attach", *AT], cwd=ready.checkout,
        env=ready.environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert attached.stdout.readline() == "here I am\n"
    assert ready.run("run", "--name=pod", "--stop").returncode == 0
    attached.communicate(timeout=30)
    assert attached.returncode == 143


def test_run_says_when_the_slice_is_gone(ready):
    ready.states("SUSPENDED")
    done = ready.run("run", "--name=pod", "--", "bash", "-c", "rm -rf $HOME/specsamp_job")
    assert done.returncode == 75 and "pod is SUSPENDED" in done.stderr


TRAINING = r"""
[ "$HOST" = w-0 ] || exit 0
steps="$(cat "$FAKE/bucket" 2>/dev/null || echo 0)"
while [ "$steps" -lt 5 ]; do
  steps=$((steps + 1))
  echo "$steps" >"$FAKE/bucket"
  echo "step $steps"
  if [ "$steps" = 3 ]; then
    touch "$FAKE/busy"
    git -C "$FAKE/../checkout" -c user.name=me -c user.email=me@example.com commit --quiet --allow-empty --message=later
    printf '%s\n' ACTIVE SUSPENDING >"$FAKE/states"
    exit 1
  fi
done
"""


def keep(cloud, *command, flags=()):
    return cloud.run("keep_running", "--name=pod", "--accelerator=v4-16", "--spot", *flags, "--", *command)


def test_a_command_goes_on_when_its_slice_was_taken_away(cloud):
    """Taken after step 3; Google first says ACTIVE, and refuses to delete at once. Meanwhile somebody commits."""
    cloud.states("MISSING", "PROVISIONING", "ACTIVE")
    commit = cloud.git("rev-parse", "HEAD")
    done = keep(cloud, "bash", "-c", TRAINING, flags=["--delete_when_done"])
    assert done.returncode == 0, done.stderr
    assert re.findall(r"step \d", done.stdout) == [f"step {i}" for i in range(1, 6)]
    assert "pod is SUSPENDING: ordering it again" in done.stderr
    assert len(cloud.calls("create", "--spot")) == 2 and len(cloud.calls("queued-resources", "delete")) == 3
    assert len([call for call in cloud.calls("ssh") if any(f"install {commit}" in word for word in call)]) == 2


@pytest.mark.parametrize("status", [1, 2])
def test_a_command_that_fails_by_itself_is_not_repeated(cloud, status):
    cloud.states("MISSING", "ACTIVE")
    done = keep(cloud, "bash", "-c", f"exit {status}")
    assert done.returncode == status and f"The command failed with {status}, on a slice that is still there." in done.stderr
    assert len(cloud.calls("create")) == 1 and not cloud.calls("delete")
    assert "costs money until launch/tpu/delete.sh --name=pod" in done.stderr


def test_a_slice_that_somebody_deleted_is_not_ordered_again(cloud):
    cloud.states("MISSING", "ACTIVE")
    done = keep(cloud, "bash", "-c", 'echo MISSING >"$FAKE/states"; exit 1')
    assert done.returncode == 1 and "somebody deleted pod: it is not ordered again" in done.stderr
    assert len(cloud.calls("create")) == 1


def test_workers_that_were_restarted_are_set_up_again(cloud):
    cloud.states("MISSING", "ACTIVE")
    command = 'if [ ! -e "$FAKE/$HOST.was" ]; then touch "$FAKE/$HOST.was"; echo other >$HOME/specsamp_job/boot; kill -KILL 0; fi; echo done'
    done = keep(cloud, "bash", "-c", command)
    assert done.returncode == 0, done.stderr
    assert "pod was restarted: setting it up again" in done.stderr and done.stdout.endswith("done\n")
    assert len(cloud.calls("create")) == 1 and not cloud.calls("delete")


def test_a_slice_that_is_always_lost_is_not_ordered_for_ever(cloud):
    cloud.states("MISSING", "FAILED")
    (cloud.fake / "bin" / "gcloud").write_text(FAKE_GCLOUD.replace("MISSING WAITING_FOR_RESOURCES ACTIVE", "MISSING FAILED"))
    done = keep(cloud, "true")
    assert done.returncode == 75 and "the slice was lost 3 times before it was there" in done.stderr
    assert len(cloud.calls("create")) == 3


def test_delete_looks_for_a_node_without_a_request(cloud):
    cloud.states("MISSING")
    (cloud.fake / "node").touch()
    done = cloud.run("delete", "--name=pod")
    assert done.returncode == 0 and "pod is gone from us-central2-b" in done.stderr
    assert not cloud.calls("queued-resources", "delete") and len(cloud.calls("tpu-vm", "delete")) == 1


def test_what_is_run_is_what_the_dry_run_showed(cloud):
    shown = cloud.dry_run("setup", "--name=pod")[0]
    cloud.states("ACTIVE")
    assert cloud.run("setup", "--name=pod").returncode == 0
    assert cloud.calls() == [command for command in shown if command[0] == "gcloud"]
