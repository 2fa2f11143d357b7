"""The scripts for Cloud TPU slices: the commands that they would run, and what they refuse."""

import re
import shlex
import subprocess
import sys

import pytest

from support import extras
from support.stand_in_cloud import AT, DESCRIBE, HARD, ROOT, SCRIPTS, TPUS, ssh

NETWORK = ["--internal_ips", "--network=ours", "--subnetwork=part", "--service_account=me@x"]
COMMANDS = ["create", "setup", "run", "fetch", "delete", "keep_running", "gke"]


@extras.needs("shellcheck")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script):
    done = subprocess.run(
        [extras.shellcheck(), "--external-sources", script], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", COMMANDS)
def test_help_is_the_header(cloud, script):
    done = cloud.run(script, "--help", place=False)
    assert done.returncode == 0 and f"launch/tpu/{script}.sh" in done.stdout
    assert "--dry_run" in done.stdout and "set -euo" not in done.stdout


# What would run.


@pytest.mark.parametrize(
    "accelerator, flags, type, runtime, shown",
    [
        ("v4-32", [], "v4-32", "tpu-ubuntu2204-base", "16 chips as 2x2x4, 4 host(s)"),
        ("v5e-16", ["--spot"], "v5litepod-16", "v2-alpha-tpuv5-lite", "16 chips as 4x4"),
        ("v5p-32", ["--reserved"], "v5p-32", "v2-alpha-tpuv5", "as 2x2x4"),
        ("v6e-8", ["--spot=false"], "v6e-8", "v2-alpha-tpuv6e", "8 chips as 2x4, 1 host(s)"),
    ],
)
def test_create_orders_the_slice(cloud, accelerator, flags, type, runtime, shown):
    commands, remarks = cloud.dry_run("create", "--name=pod", f"--accelerator={accelerator}", *flags)
    ordered = [f"--accelerator-type={type}", f"--runtime-version={runtime}", *(f for f in flags if "=" not in f)]
    order = [*TPUS, "queued-resources", "create", "pod", "--node-id=pod", *ordered, *AT]
    assert commands == [DESCRIBE, order, DESCRIBE] and shown in remarks[0]


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


def test_run_keeps_every_word_of_the_command(cloud):
    commands, remarks = cloud.dry_run("run", "--name=pod", "--", *HARD)
    job = re.fullmatch(r"--command=bash specsamp/launch/tpu/worker.sh follow (\S+)", commands[1][7])[1]
    worker = "bash specsamp/launch/tpu/worker.sh"
    assert commands[1:] == [
        ssh(0, f"{worker} follow {job}"),
        ssh("all", f"{worker} finish {job}"),
        ssh("all", f"{worker} last {job}"),
    ]
    assert commands[0][:7] == ssh("all", "")[:7]
    assert shlex.split(commands[0][7].removeprefix("--command=")) == [*worker.split(), "start", job, *HARD]
    assert remarks == ["# if the command failed:"]
    assert cloud.dry_run("run", "--name=pod", "--stop")[0] == [ssh("all", f"{worker} stop current")]
    assert cloud.dry_run("run", "--name=pod", "--attach")[0][0] == ssh(0, f"{worker} follow current")


def test_fetch_copies_from_buckets_and_from_the_first_worker(cloud):
    commands, _ = cloud.dry_run("fetch", "--from=gs://bucket/my run/", "--to=results")
    assert commands == [
        ["mkdir", "-p", "results/my run"],
        ["gcloud", "storage", "rsync", "--recursive", "gs://bucket/my run", "results/my run"],
    ]
    commands, _ = cloud.dry_run("fetch", "--name=pod", "--from=runs/x", "--to=results")
    scp = [*TPUS, "tpu-vm", "scp", "--recurse", "--worker=0"]
    assert commands == [["mkdir", "-p", "results"], [*scp, "pod:specsamp/runs/x", "results", *AT]]
    copied = cloud.dry_run("fetch", "--name=pod", "--from=~/specsamp_job", "--to=x")[0][1]
    assert copied == [*scp, "pod:~/specsamp_job", "x", *AT]


def test_delete_leaves_neither_request_nor_node(cloud):
    commands, _ = cloud.dry_run("delete", "--name=pod")
    assert commands == [
        DESCRIBE,
        [*TPUS, "queued-resources", "delete", "pod", "--force", "--quiet", *AT],
        [*TPUS, "tpu-vm", "describe", "pod", "--format=value(state)", *AT],
        [*TPUS, "tpu-vm", "delete", "pod", "--quiet", *AT],
    ]


@pytest.mark.parametrize(
    "of_slice, connect, secret",
    [
        (("--accelerator=v4-32", "--spot"), (), ()),
        (("--accelerator=v4-8", *NETWORK), ("--tunnel_through_iap",), ("--secret_env=HF_TOKEN",)),
    ],
)
def test_keep_running_is_create_setup_run_and_delete(cloud, of_slice, connect, secret):
    cloud.environment["HF_TOKEN"] = "hf_not_to_be_seen"

    def commands(script, *arguments):
        found = cloud.dry_run(script, "--name=pod", *arguments)[0]
        return [[re.sub(r"\d{8}-\d{6}-\d+", "JOB", word) for word in command] for command in found]

    parts = [("create", *of_slice), ("setup", *connect), ("run", *connect, *secret, "--", *HARD), ("delete",)]
    whole = commands("keep_running", *of_slice, *connect, *secret, "--", *HARD)
    assert whole == [command for part in parts for command in commands(*part)]


def test_hosts_without_external_addresses(cloud):
    """Ordered in a network of one's own; reached through Identity-Aware Proxy, or from within that network."""
    order = cloud.dry_run("create", "--name=pod", "--accelerator=v4-8", *NETWORK)[0][1]
    assert order[-6:-2] == ["--internal-ips", "--network=ours", "--subnetwork=part", "--service-account=me@x"]

    for script, arguments in (("setup", ()), ("run", ("--", "true")), ("fetch", ("--from=x", "--to=y"))):

        def connections(*flags, script=script, arguments=arguments):
            commands, _ = cloud.dry_run(script, "--name=pod", *flags, *arguments)
            return [command for command in commands if "ssh" in command or "scp" in command]

        plain, internal, tunnel = connections(), connections("--internal_ips"), connections("--tunnel_through_iap")
        assert plain and len(plain) == len(internal) == len(tunnel)
        assert all("--internal-ip" not in command for command in plain)
        assert all(command[-3:] == ["--internal-ip", *AT] for command in internal)
        assert all(command[:4] == ["gcloud", "alpha", *TPUS[1:]] for command in tunnel)
        assert all(command[-3:] == ["--tunnel-through-iap", *AT] for command in tunnel)
        assert connections("--internal_ips", "--tunnel_through_iap")[0][-3] == "--tunnel-through-iap"


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
    workload = ["xpk", "workload", "create", "--workload=mine", *cluster, *slice]
    workload += ["--base-docker-image=python:3.12", f"--script-dir={code}"]
    assert commands[1] == ["git", "archive", "--format=tar", f"--output={code}.tar", commit]
    assert commands[3][:-1] == [*workload, f"--env=SPECSAMP_VERSION={commit}", "--max-restarts=100"]
    assert shlex.split(commands[3][-1]) == ["--command=pip", "install", "--quiet", ".[tpu]", "&&", *HARD]
    assert commands[5] == ["xpk", "workload", "list", *cluster, "--wait-for-job-completion=mine"]
    assert cloud.dry_run("gke", "create", "--name=big", "--accelerator=v4-8", *NETWORK)[0][0][-4:] == [
        "--on-demand",
        "--private",
        "--custom-cluster-arguments=--network=ours --subnetwork=part --service-account=me@x",
        "--custom-nodepool-arguments=--service-account=me@x",
    ]


def test_gke_hands_secrets_over_by_name(cloud):
    cloud.environment["HF_TOKEN"] = "hf_not_to_be_seen"
    arguments = ("run", "--name=big", "--accelerator=tpu7x-16", "--secret_env=HF_TOKEN")
    commands, remarks = cloud.dry_run("gke", *arguments, "--", "env", "API_KEY=abc", "true")
    code = f"runs/code_{cloud.git('rev-parse', 'HEAD')[:12]}"
    assert f"--env-file={code}.env" in commands[3] and not any(word.startswith("--env=") for word in commands[3])
    assert commands[3][-1].endswith("&& env 'API_KEY=[hidden]' true")
    assert commands[4] == ["rm", "-r", code, f"{code}.tar", f"{code}.env"]
    assert f"# {code}.env sets SPECSAMP_VERSION and names HF_TOKEN" in remarks
    assert "hf_not" not in str(commands) + str(remarks)
    cloud.states("ACTIVE")
    (cloud.fake / "bin" / "xpk").write_text(
        '#!/bin/bash\nfor x; do [[ $x != --env-file=* ]] || cat "${x#*=}" >"$FAKE/env"; done\n'
    )
    done = cloud.run("gke", *arguments, "--", "true")
    assert done.returncode == 0, done.stderr
    assert (cloud.fake / "env").read_text() == f"SPECSAMP_VERSION={cloud.git('rev-parse', 'HEAD')}\nHF_TOKEN\n"
    assert not list((cloud.checkout / "runs").iterdir())


# What is refused.


@pytest.mark.parametrize(
    "typed, message",
    [
        ("create --name=pod --accelerator=v4-30", "'v4-30'; closest matches: v4-16, v4-32"),
        (
            "create --name=pod --accelerator=tpu7x-16",
            "tpu7x-16 is not sold as a queued resource: use launch/tpu/gke.sh",
        ),
        ("create --name=pod", "--accelerator is missing"),
        ("create --accelerator=v4-32", "--name is missing"),
        ("create --name=My_Pod --accelerator=v4-32", "got 'My_Pod'"),
        ("create --name=pod --accelerator=v4-32 --spot --reserved", "--spot and --reserved exclude each other"),
        ("create --name=pod --accelerator=v4-32 --spots", "unknown flag --spots: the flags are --name= --accelerator="),
        ("create --name=pod --accelerator=v4-32 --spot=maybe", "--spot must be true or false; got 'maybe'"),
        ("create --name=pod --accelerator=v4-8 --tunnel_through_iap", "unknown flag --tunnel_through_iap"),
        ("create --name=pod --accelerator=v4-8 -- true", "'-- true'"),
        ("create pod", "unexpected argument 'pod'"),
        ("run --name=pod", "the command is missing"),
        ("run --name=pod --", "the command is missing"),
        ("run --name=", "--name needs a value"),
        ("run --name=pod --attach --stop", "--attach and --stop exclude each other"),
        ("run --name=pod --stop -- true", "--attach and --stop are about the running command"),
        ("run --name=pod --secret_env=NOT_SET -- true", "--secret_env=NOT_SET: this variable is not exported"),
        ("run --name=pod --secret_env=HF_TOKEN=x -- true", "--secret_env takes names of exported variables"),
        ("gke create --name=big --accelerator=v4-8 --ref=x", "unknown flag --ref: the flags are --name="),
        ("gke create --name=big --accelerator=tpu7x-17", "closest matches: tpu7x-16, tpu7x-32"),
        ("gke run --name=big --accelerator=v4-8 --spot -- true", "unknown flag --spot: "),
        ("gke run --name=big --max_restarts=x -- true", "--max_restarts must be a whole number; got 'x'"),
        ("gke --name=big", "the first argument must be create, run or delete; got '--name=big'"),
        ("setup --name=pod --ref=nowhere", "there is no commit 'nowhere'"),
        ("fetch --from=gs://bucket/run", "--to is missing"),
        ("fetch --from=runs/x --to=y", "--name is missing"),
        ("keep_running --name=pod --accelerator=v6e-512 -- true", "closest matches: v6e-256"),
        ("keep_running --name=pod --accelerator=v6e-8 --max_restarts=x -- true", "got 'x'"),
        ("keep_running --name=pod --accelerator=v4-8 --secret_env=NOT_SET -- true", "--secret_env=NOT_SET: "),
    ],
)
def test_bad_input_is_refused_before_anything_is_asked(cloud, typed, message):
    done = cloud.run(*typed.split())
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
    assert done.returncode == 2 and f"--{flag} is missing: " in done.stderr and variable in done.stderr
    assert cloud.run(script, *arguments, place=False, **places).returncode == 0


def test_what_is_not_installed_is_named(cloud):
    (cloud.fake / "bin" / "xpk").unlink()
    done = cloud.run("gke", "delete", "--name=big")
    assert done.returncode == 2 and "xpk is not installed: pip install xpk" in done.stderr


def test_only_what_is_committed_is_copied(cloud):
    cloud.states("ACTIVE")
    (cloud.checkout / ".gitignore").write_text("/runs/\n/more/\n")
    done = cloud.run("setup", "--name=pod")
    assert done.returncode == 2 and "uncommitted changes: .gitignore ...: commit them, or add --ref=" in done.stderr
    assert not cloud.calls()
    assert cloud.run("setup", "--name=pod", "--ref=" + cloud.git("rev-parse", "HEAD")).returncode == 0


def describe(*arguments):
    """Asks as the shell scripts do, but without any installed package."""
    script = ROOT / "launch" / "tpu" / "slices.py"
    return subprocess.run([sys.executable, "-I", "-S", script, *arguments], capture_output=True, text=True, timeout=600)


def test_a_slice_is_described_without_installed_packages():
    assert describe("v4-32", "topology").stdout == "2x2x4\n"
    assert describe("tpu7x-16", "hosts", "runtime_version").stdout == "2 none\n"
    assert "hbm_bytes: 34359738368\n" in describe("v4-32").stdout
    names = describe("--list").stdout.split()
    assert len(names) == 220 and "v6e-256" in names


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["v4-30"], "closest matches: v4-16, v4-32"),
        (["v4-32", "colour"], "no field 'colour': choose from name, "),
        ([], "no accelerator type: give one, such as v4-32, or --list"),
    ],
)
def test_a_question_about_an_unknown_slice_or_field_is_refused(arguments, message):
    done = describe(*arguments)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1
