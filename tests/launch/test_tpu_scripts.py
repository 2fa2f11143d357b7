"""The scripts for Cloud TPU slices: their commands, refusals, and reactions to Google's answers."""

import os
import re
import shlex
import subprocess
import sys
import time

import pytest

from support import extras
from support.stand_in_cloud import AT, DESCRIBE, FAKE_GCLOUD, HARD, ROOT, SCRIPTS, TPUS, ssh

NETWORK = ["--internal_ips", "--network=ours", "--subnetwork=part", "--service_account=me@x"]
COMMANDS = ["create", "setup", "run", "fetch", "delete", "keep_running", "gke"]


@extras.needs("shellcheck")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script):
    done = subprocess.run(
        [extras.shellcheck(), "--external-sources", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", COMMANDS)
def test_help_is_the_header(cloud, script):
    done = cloud.run(script, "--help", place=False)
    assert f"launch/tpu/{script}.sh" in done.stdout
    assert "--dry_run" in done.stdout and "set -euo" not in done.stdout


# The commands of dry runs.


@pytest.mark.parametrize(
    "accelerator, flags, type, runtime, shown",
    [
        ("v5e-16", ["--spot"], "v5litepod-16", "v2-alpha-tpuv5-lite", "16 chips as 4x4"),
        ("v6e-8", ["--spot=false"], "v6e-8", "v2-alpha-tpuv6e", "8 chips as 2x4, 1 host(s)"),
    ],
)
def test_create_orders_the_slice(cloud, accelerator, flags, type, runtime, shown):
    commands, remarks = cloud.dry_run(
        "create", "--name=pod", f"--accelerator={accelerator}", *flags
    )
    ordered = [
        f"--accelerator-type={type}",
        f"--runtime-version={runtime}",
        *(f for f in flags if "=" not in f),
    ]
    order = [*TPUS, "queued-resources", "create", "pod", "--node-id=pod", *ordered, *AT]
    assert commands == [DESCRIBE, order, DESCRIBE] and shown in remarks[0]


def test_run_keeps_every_word_of_the_command(cloud):
    commands, remarks = cloud.dry_run("run", "--name=pod", "--", *HARD)
    job = re.fullmatch(
        r"--command=bash specsamp/launch/tpu/worker.sh follow (\S+)", commands[1][7]
    )[1]
    worker = "bash specsamp/launch/tpu/worker.sh"
    assert commands[1:] == [
        ssh(0, f"{worker} follow {job}"),
        ssh("all", f"{worker} finish {job}"),
        ssh("all", f"{worker} last {job}"),
    ]
    assert commands[0][:7] == ssh("all", "")[:7]
    assert shlex.split(commands[0][7].removeprefix("--command=")) == [
        *worker.split(),
        "start",
        job,
        *HARD,
    ]
    assert remarks == ["# if the command failed:"]
    assert cloud.dry_run("run", "--name=pod", "--stop")[0] == [ssh("all", f"{worker} stop current")]
    assert cloud.dry_run("run", "--name=pod", "--attach")[0][0] == ssh(
        0, f"{worker} follow current"
    )


def test_keep_running_is_create_setup_run_and_delete(cloud):
    cloud.environment["HF_TOKEN"] = "hf_not_to_be_seen"
    of_slice = ("--accelerator=v4-8", *NETWORK)
    connect = ("--tunnel_through_iap",)
    secret = ("--secret_env=HF_TOKEN",)

    def commands(script, *arguments):
        found = cloud.dry_run(script, "--name=pod", *arguments)[0]
        return [[re.sub(r"\d{8}-\d{6}-\d+", "JOB", word) for word in command] for command in found]

    parts = [
        ("create", *of_slice),
        ("setup", *connect),
        ("run", *connect, *secret, "--", *HARD),
        ("delete",),
    ]
    whole = commands("keep_running", *of_slice, *connect, *secret, "--", *HARD)
    assert whole == [command for part in parts for command in commands(*part)]


def test_hosts_without_external_addresses(cloud):
    """The hosts are in the user's network, reached from within or through Identity-Aware Proxy."""
    order = cloud.dry_run("create", "--name=pod", "--accelerator=v4-8", *NETWORK)[0][1]
    assert order[-6:-2] == [
        "--internal-ips",
        "--network=ours",
        "--subnetwork=part",
        "--service-account=me@x",
    ]
    internal, tunnel = (
        cloud.dry_run("run", "--name=pod", flag, "--stop")[0][0]
        for flag in ("--internal_ips", "--tunnel_through_iap")
    )
    assert internal[-3:] == ["--internal-ip", *AT]
    assert tunnel[:4] == ["gcloud", "alpha", *TPUS[1:]]
    assert tunnel[-3:] == ["--tunnel-through-iap", *AT]


def test_gke_hands_secrets_over_by_name(cloud):
    cloud.environment["HF_TOKEN"] = "hf_not_to_be_seen"
    arguments = ("run", "--name=big", "--accelerator=tpu7x-16", "--secret_env=HF_TOKEN")
    commands, remarks = cloud.dry_run("gke", *arguments, "--", "env", "API_KEY=abc", "true")
    code = f"runs/code_{cloud.git('rev-parse', 'HEAD')[:12]}"
    assert f"--env-file={code}.env" in commands[3]
    assert not any(word.startswith("--env=") for word in commands[3])
    assert commands[3][-1].endswith("&& env 'API_KEY=[hidden]' true")
    assert commands[4] == ["rm", "-r", code, f"{code}.tar", f"{code}.env"]
    assert f"# {code}.env sets SPECSAMP_VERSION and names HF_TOKEN" in remarks
    assert "hf_not" not in str(commands) + str(remarks)
    cloud.states("ACTIVE")
    (cloud.fake / "bin" / "xpk").write_text(
        '#!/bin/bash\nfor x; do [[ $x != --env-file=* ]] || cat "${x#*=}" >"$FAKE/env"; done\n'
    )
    cloud.run("gke", *arguments, "--", "true")
    assert (
        cloud.fake / "env"
    ).read_text() == f"SPECSAMP_VERSION={cloud.git('rev-parse', 'HEAD')}\nHF_TOKEN\n"
    assert not list((cloud.checkout / "runs").iterdir())


def test_gke_starts_a_workload_for_each_replica(cloud):
    """The cluster has a slice for each replica; the commands of the workloads differ only in their
    last flag.
    """
    of_slice = ("--name=big", "--accelerator=v5p-32", "--replicas=2")
    (create,), _ = cloud.dry_run("gke", "create", *of_slice)
    assert "--num-slices=2" in create
    commands, _ = cloud.dry_run("gke", "run", *of_slice, "--job=texts", "--", *HARD)
    one, _ = cloud.dry_run("gke", "run", *of_slice[:2], "--job=texts", "--", *HARD)
    created = [command for command in commands if command[:3] == ["xpk", "workload", "create"]]
    for replica, command in enumerate(created):
        assert command[-1] == f"{one[3][-1]} --replica={replica}/2"
        assert command[4:-1] == one[3][4:-1] and "--num-slices=1" in command
    assert [command[-1] for command in commands[-2:]] == [
        f"--wait-for-job-completion=texts-{i}" for i in (0, 1)
    ]
    assert len(created) == 2 and len(commands) == len(one) + 2


def test_gke_exits_with_the_failed_replicas_status(cloud):
    cloud.states("ACTIVE")
    (cloud.fake / "bin" / "xpk").write_text(
        "#!/bin/bash\n[[ $* != *wait-for-job-completion=texts-0 ]] || exit 3\n"
    )
    done = cloud.run(
        "gke",
        "run",
        "--name=big",
        "--accelerator=v5p-32",
        "--replicas=2",
        "--job=texts",
        "--",
        "true",
        status=3,
    )
    assert "--wait-for-job-completion=texts-1" in done.stderr


# Refusals.


@pytest.mark.parametrize(
    "typed, message",
    [
        ("create --name=pod --accelerator=v4-30", "'v4-30'; closest matches: v4-16, v4-32"),
        (
            "create --name=pod --accelerator=tpu7x-16",
            "not sold as a queued resource: use launch/tpu/gke.sh",
        ),
        ("create --name=My_Pod --accelerator=v4-32", "got 'My_Pod'"),
        (
            "create --name=pod --accelerator=v4-32 --spot --reserved",
            "--spot and --reserved exclude each other",
        ),
        (
            "create --name=pod --accelerator=v4-32 --spot=maybe",
            "--spot must be true or false; got 'maybe'",
        ),
        ("run --name=pod --", "the command is missing"),
        (
            "run --name=pod --secret_env=NOT_SET -- true",
            "--secret_env=NOT_SET: this variable is not exported",
        ),
        (
            "run --name=pod --secret_env=HF_TOKEN=x -- true",
            "--secret_env takes names of exported variables",
        ),
        ("gke --name=big", "the first argument must be create, run or delete; got '--name=big'"),
        (
            "gke run --name=big --accelerator=v5p-32 --replicas=0 -- true",
            "whole number from 1 to 9999; got '0'",
        ),
        ("setup --name=pod --ref=nowhere", "there is no commit 'nowhere'"),
    ],
)
def test_bad_input_is_refused_before_any_call(cloud, typed, message):
    done = cloud.run(*typed.split(), status=2)
    assert message in done.stderr
    assert not cloud.calls()


@pytest.mark.parametrize(
    "flag, variable", [("zone", "CLOUDSDK_COMPUTE_ZONE"), ("project", "CLOUDSDK_CORE_PROJECT")]
)
def test_missing_zone_or_project_is_refused(cloud, flag, variable):
    places = {"CLOUDSDK_COMPUTE_ZONE": "us-central2-b", "CLOUDSDK_CORE_PROJECT": "my-project"}
    arguments = ("--name=pod", "--dry_run", "--accelerator=v4-8")
    done = cloud.run(
        "create",
        *arguments,
        place=False,
        **{k: v for k, v in places.items() if k != variable},
        status=2,
    )
    assert f"--{flag} is missing: " in done.stderr and variable in done.stderr
    cloud.run("create", *arguments, place=False, **places)


def test_uncommitted_changes_are_not_copied(cloud):
    cloud.states("ACTIVE")
    (cloud.checkout / ".gitignore").write_text("/runs/\n/more/\n")
    done = cloud.run("setup", "--name=pod", status=2)
    assert "uncommitted changes: .gitignore ...: commit them, or add --ref=" in done.stderr
    assert not cloud.calls()
    cloud.run("setup", "--name=pod", "--ref=" + cloud.git("rev-parse", "HEAD"))


def test_a_slice_is_described_without_installed_packages():
    def describe(*arguments):
        script = ROOT / "specsamp" / "mesh" / "slices.py"
        return subprocess.run(
            [sys.executable, "-I", "-S", script, *arguments], capture_output=True, text=True
        )

    assert describe("v4-32", "topology").stdout == "2x2x4\n"
    assert "v6e-256" in describe("--list").stdout.split()
    done = describe("v4-30")
    assert done.returncode == 2 and "closest matches: v4-16" in done.stderr
    assert done.stderr.count("\n") == 1


# Reactions to answers of Google Cloud.


def test_create_waits_until_the_slice_is_there(cloud):
    cloud.states(
        "MISSING", "WAITING_FOR_RESOURCES", "ERROR", "PROVISIONING", "PROVISIONING", "ACTIVE"
    )
    done = cloud.run("create", "--name=pod", "--accelerator=v4-32", "--spot")
    assert len(cloud.calls("create")) == 1 and "--spot" in cloud.calls("create")[0]
    told = re.findall(r"pod: (\w+), 0 min", done.stderr)
    assert told == ["WAITING_FOR_RESOURCES", "UNKNOWN", "PROVISIONING"]
    assert "the server is tired" in done.stderr
    assert "pod is ACTIVE and costs money until launch/tpu/delete.sh --name=pod" in done.stderr


def test_setup_gives_every_worker_the_commit(ready):
    first = ready.git("rev-parse", "HEAD")
    for host in ("w-0", "w-1"):
        assert (ready.fake / host / "specsamp" / "COMMIT").read_text() == f"{first}\n"
        assert (ready.fake / host / "specsamp" / ".venv" / "installed").read_text() == ".[tpu]\n"
        (ready.fake / host / "specsamp" / "runs").mkdir()
    (ready.checkout / "launch" / "setup.sh").write_text(
        "find_python() { return 1; }\nprepare_venv() { return 1; }\n"
    )
    ready.git("commit", "--all", "--message=the installation fails")
    ready.run("setup", "--name=pod", status=1)
    done = ready.run("run", "--name=pod", "--", "true", status=1)
    assert "w-1: the installation is missing or incomplete" in done.stderr
    interrupted = ready.fake / "bin" / "rm"
    interrupted.write_text('#!/bin/sh\n[ "$*" != "-rf $HOME/specsamp" ] && exec /bin/rm "$@"\n')
    interrupted.chmod(0o755)
    ready.run("setup", "--name=pod", f"--ref={first}", status=1)
    interrupted.unlink()
    ready.run("setup", "--name=pod", f"--ref={first}")
    for host in ("w-0", "w-1"):
        assert (ready.fake / host / "specsamp" / "COMMIT").read_text() == f"{first}\n"
        assert (
            ready.fake / host / "specsamp" / ".venv" / "installed"
        ).read_text() == ".[tpu]\n" * 2
        assert (ready.fake / host / "specsamp" / "runs").is_dir(), "results must stay"


def test_run_shows_worker_and_survives_disconnection(ready):
    (ready.fake / "drops").touch()
    script = 'echo "$HOST: $1 in $PWD of $SPECSAMP_VERSION with $(command -v python)"'
    done = ready.run("run", "--name=pod", "--", "bash", "-c", script, "name", HARD[2])
    home = ready.fake / "w-0" / "specsamp"
    commit = ready.git("rev-parse", "HEAD")
    expected = f"w-0: {HARD[2]} in {home} of {commit} with {home}/.venv/bin/python\n"
    assert done.stdout == expected
    assert "The connection is lost, but the command continues" in done.stderr
    assert (ready.fake / "w-1" / "specsamp_job" / "log").read_text().startswith("w-1: ")


SECRET = 'hf_it\'s "$secret" `x` \\ y'  # characters that a shell would interpret


def files_with(folder, text):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if text in path.read_text(errors="replace")]


def test_secret_reaches_workers_and_no_log(ready, tmp_path):
    (temporary := tmp_path / "temporary").mkdir()
    script = 'printf %s "$HF_TOKEN" >"$FAKE/$HOST.received"'
    arguments = ("run", "--name=pod", "--secret_env=HF_TOKEN,OTHER_KEY", "--", "bash", "-c", script)
    done = ready.run(*arguments, HF_TOKEN=SECRET, OTHER_KEY="other", TMPDIR=str(temporary))
    received = [ready.fake / f"{host}.received" for host in ("w-0", "w-1")]
    assert [path.read_text() for path in received] == [SECRET, SECRET]
    assert (ready.fake / "modes").read_text() == "600\n600\n"
    assert "hf_it" not in done.stdout + done.stderr
    assert set(files_with(tmp_path, "hf_it")) == set(received)
    assert not list(ready.fake.rglob("specsamp_secrets*")) and not list(temporary.iterdir())


def test_secret_in_a_command_is_not_stored(ready, tmp_path):
    words = (
        "env",
        "HF_TOKEN=hf_seen",
        "WANDB_API_KEY=hf_seen",
        "bash",
        "-c",
        'echo "${#HF_TOKEN} $1 $2"',
        "name",
    )
    done = ready.run(
        "run", "--name=pod", "--", *words, "--password=hf_seen", "--config.max_new_tokens=8"
    )
    assert done.stdout == "7 --password=hf_seen --config.max_new_tokens=8\n"
    stored = (ready.fake / "w-0" / "specsamp_job" / "command").read_text()
    assert "hf_seen" not in done.stderr + stored
    for shown in (
        "HF_TOKEN=[hidden]",
        "WANDB_API_KEY=[hidden]",
        "--password=[hidden]",
        "--config.max_new_tokens=8",
    ):
        assert shown in done.stderr


def test_run_ends_with_the_status_of_the_command(ready):
    script = 'echo "I am $HOST"; if [ $HOST = w-1 ]; then exit 3; fi'
    done = ready.run("run", "--name=pod", "--", "bash", "-c", script, status=3)
    assert "w-1 ended with 3" in done.stderr
    assert "w-0| I am w-0" in done.stderr and "w-1| I am w-1" in done.stderr


def test_run_ends_workers_that_hang_after_the_first(ready):
    script = 'if [ $HOST = w-0 ]; then exit 4; fi; trap "" TERM; sleep 60 & wait; wait'
    done = ready.run("run", "--name=pod", "--", "bash", "-c", script, status=4)
    assert "w-1 ended with 143" in done.stderr


def test_only_one_command_runs_and_can_stop(ready):
    def start_run(*arguments, **options):
        command = ["bash", ready.checkout / "launch/tpu/run.sh", "--name=pod", *AT, *arguments]
        here = dict(cwd=ready.checkout, env=ready.environment, stderr=subprocess.DEVNULL)
        return subprocess.Popen(command, **here, **options)

    command = ("--", "bash", "-c", "echo here I am; sleep 60")
    start = start_run(*command, stdout=subprocess.DEVNULL, start_new_session=True)
    log = ready.fake / "w-1" / "specsamp_job" / "log"
    until = time.monotonic() + 600
    while not (log.exists() and log.read_text()) and time.monotonic() < until:
        time.sleep(0.02)
    os.killpg(start.pid, 9)  # the terminal is closed
    start.wait()
    for script, arguments in (("run", ("--", "true")), ("setup", ())):
        done = ready.run(script, "--name=pod", *arguments, status=1)
        assert "a command is running: bash -c echo\\ here\\ I\\ am" in done.stderr
    attached = start_run("--attach", stdout=subprocess.PIPE, text=True)
    assert attached.stdout.readline() == "here I am\n"
    ready.run("run", "--name=pod", "--stop")
    attached.communicate(timeout=600)
    assert attached.returncode == 143


TRAINING = r"""
[ "$HOST" = w-0 ] || exit 0
steps="$(cat "$FAKE/bucket" 2>/dev/null || echo 0)"
while [ "$steps" -lt 5 ]; do
  steps=$((steps + 1))
  echo "$steps" >"$FAKE/bucket"
  echo "step $steps"
  if [ "$steps" = 3 ]; then
    touch "$FAKE/busy"
    cd "$FAKE/../checkout"
    git -c user.name=me -c user.email=me@example.com commit --quiet --allow-empty --message=later
    printf '%s\n' ACTIVE SUSPENDING >"$FAKE/states"
    exit 1
  fi
done
"""


def keep(cloud, *command, flags=(), **options):
    of_slice = "--name=pod", "--accelerator=v4-16", "--spot"
    return cloud.run("keep_running", *of_slice, *flags, "--", *command, **options)


def test_command_continues_after_losing_its_slice(cloud):
    """A slice is lost after step 3, and the next one runs the same commit, although a later commit
    exists and Google reports ACTIVE at first and refuses a deletion.
    """
    cloud.states("MISSING", "PROVISIONING", "ACTIVE")
    commit = cloud.git("rev-parse", "HEAD")
    done = keep(cloud, "bash", "-c", TRAINING, flags=["--delete_when_done"])
    assert re.findall(r"step \d", done.stdout) == [f"step {i}" for i in range(1, 6)]
    assert "pod is SUSPENDING: ordering it again" in done.stderr
    assert len(cloud.calls("create", "--spot")) == 2
    assert len(cloud.calls("queued-resources", "delete")) == 3
    assert (
        len(
            [
                call
                for call in cloud.calls("ssh")
                if any(f"install {commit}" in word for word in call)
            ]
        )
        == 2
    )


def test_failing_command_is_not_repeated(cloud):
    cloud.states("MISSING", "ACTIVE")
    done = keep(cloud, "bash", "-c", "exit 2", status=2)
    assert "status 2 on a slice that still exists." in done.stderr
    assert len(cloud.calls("create")) == 1 and not cloud.calls("delete")


def test_workers_that_were_restarted_are_set_up_again(cloud):
    cloud.states("MISSING", "ACTIVE")
    command = """
if [ ! -e "$FAKE/$HOST.was" ]; then
  touch "$FAKE/$HOST.was"
  echo other >$HOME/specsamp_job/boot
  kill -KILL 0
fi
echo done"""
    done = keep(cloud, "bash", "-c", command)
    assert "pod was restarted: setting it up again" in done.stderr
    assert done.stdout.endswith("done\n")
    assert len(cloud.calls("create")) == 1 and not cloud.calls("delete")


def test_slice_lost_repeatedly_is_given_up(cloud):
    cloud.states("MISSING", "FAILED")
    failing = FAKE_GCLOUD.replace("MISSING WAITING_FOR_RESOURCES ACTIVE", "MISSING FAILED")
    (cloud.fake / "bin" / "gcloud").write_text(failing)
    done = keep(cloud, "true", status=75)
    assert "the slice was lost 3 times before it was ready" in done.stderr
    assert len(cloud.calls("create")) == 3


def test_delete_looks_for_a_node_without_a_request(cloud):
    cloud.states("MISSING")
    (cloud.fake / "node").touch()
    done = cloud.run("delete", "--name=pod")
    assert "pod is deleted from us-central2-b" in done.stderr
    assert not cloud.calls("queued-resources", "delete")
    assert len(cloud.calls("tpu-vm", "delete")) == 1
