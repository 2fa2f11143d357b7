"""The scripts for Cloud TPU slices: what they do when Google Cloud answers, and when it does not."""

import os
import re
import subprocess
import time

import pytest

from support.stand_in_cloud import AT, FAKE_GCLOUD, HARD


def test_create_waits_until_the_slice_is_there(cloud):
    cloud.states("MISSING", "WAITING_FOR_RESOURCES", "ERROR", "PROVISIONING", "PROVISIONING", "ACTIVE")
    done = cloud.run("create", "--name=pod", "--accelerator=v4-32", "--spot")
    assert done.returncode == 0, done.stderr
    assert len(cloud.calls("create")) == 1 and "--spot" in cloud.calls("create")[0]
    told = re.findall(r"pod: (\w+), 0 min", done.stderr)
    assert told == ["WAITING_FOR_RESOURCES", "UNKNOWN", "PROVISIONING"] and "the server is tired" in done.stderr
    assert "pod is ACTIVE and costs money until launch/tpu/delete.sh --name=pod" in done.stderr


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
    assert "Google Cloud does not answer about pod" in done.stderr


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
    assert done.returncode == 1 and "w-1: the installation is missing or incomplete" in done.stderr
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
    assert "The connection is lost, but the command continues" in done.stderr
    assert (ready.fake / "w-1" / "specsamp_job" / "log").read_text().startswith("w-1: ")


SECRET = 'hf_it\'s "$secret" `x` \\ y'  # characters that a shell would interpret


def files_with(folder, text):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if text in path.read_text(errors="replace")]


def test_a_secret_reaches_every_worker_and_is_seen_nowhere_else(ready, tmp_path):
    (temporary := tmp_path / "temporary").mkdir()
    script = 'printf %s "$HF_TOKEN" >"$FAKE/$HOST.received"'
    arguments = ("run", "--name=pod", "--secret_env=HF_TOKEN,OTHER_KEY", "--", "bash", "-c", script)
    done = ready.run(*arguments, HF_TOKEN=SECRET, OTHER_KEY="other", TMPDIR=str(temporary))
    assert done.returncode == 0, done.stderr
    received = [ready.fake / f"{host}.received" for host in ("w-0", "w-1")]
    assert [path.read_text() for path in received] == [SECRET, SECRET]
    assert (ready.fake / "modes").read_text() == "600\n600\n"
    assert "hf_it" not in done.stdout + done.stderr and set(files_with(tmp_path, "hf_it")) == set(received)
    assert not list(ready.fake.rglob("specsamp_secrets*")) and not list(temporary.iterdir())


def test_a_secret_of_a_command_that_cannot_start_is_removed(ready, tmp_path):
    (temporary := tmp_path / "temporary").mkdir()
    secret = {"HF_TOKEN": SECRET, "TMPDIR": str(temporary)}
    arguments = ("run", "--name=pod", "--secret_env=HF_TOKEN", "--", "true")
    commits = [ready.fake / host / "specsamp" / "COMMIT" for host in ("w-0", "w-1")]
    for commit in commits:
        commit.rename(commit.with_suffix(".away"))
    done = ready.run(*arguments, **secret)
    assert done.returncode == 1 and "the installation is missing or incomplete" in done.stderr
    for commit in commits:
        commit.with_suffix(".away").rename(commit)
    (ready.fake / "no_copies").touch()
    done = ready.run(*arguments, **secret)
    assert done.returncode == 1 and "not all workers could start the command" in done.stderr
    assert not files_with(tmp_path, "hf_it") and not list(temporary.iterdir())


def test_what_looks_like_a_secret_in_a_command_is_neither_printed_nor_stored(ready, tmp_path):
    words = ("env", "HF_TOKEN=hf_seen", "WANDB_API_KEY=hf_seen", "bash", "-c", 'echo "${#HF_TOKEN} $1 $2"', "name")
    done = ready.run("run", "--name=pod", "--", *words, "--password=hf_seen", "--config.max_new_tokens=8")
    assert done.returncode == 0 and done.stdout == "7 --password=hf_seen --config.max_new_tokens=8\n"
    stored = (ready.fake / "w-0" / "specsamp_job" / "command").read_text()
    assert "hf_seen" not in done.stderr + stored
    for shown in ("HF_TOKEN=[hidden]", "WANDB_API_KEY=[hidden]", "--password=[hidden]", "--config.max_new_tokens=8"):
        assert shown in done.stderr


def test_run_ends_with_the_status_of_the_command(ready):
    script = 'echo "I am $HOST"; if [ $HOST = w-1 ]; then exit 3; fi'
    done = ready.run("run", "--name=pod", "--", "bash", "-c", script)
    assert done.returncode == 3 and "w-1 ended with 3" in done.stderr
    assert "w-0| I am w-0" in done.stderr and "w-1| I am w-1" in done.stderr


def test_run_ends_workers_that_hang_after_the_first(ready):
    script = 'if [ $HOST = w-0 ]; then exit 4; fi; trap "" TERM; sleep 60 & wait; wait'
    done = ready.run("run", "--name=pod", "--", "bash", "-c", script)
    assert done.returncode == 4 and "w-1 ended with 143" in done.stderr


def test_a_process_that_the_command_left_behind_is_not_waited_for(ready):
    done = ready.run("run", "--name=pod", "--", "bash", "-c", "sleep 5 & exit 0")
    assert done.returncode == 0, done.stderr


def test_after_a_restart_of_the_machine_nothing_runs(ready):
    def worker(*arguments):
        home = ready.fake / "w-0"
        return subprocess.run(
            ["bash", home / "specsamp/launch/tpu/worker.sh", *arguments],
            capture_output=True,
            text=True,
            timeout=600,
            env=ready.environment | {"HOME": str(home), "HOST": "w-0"},
        )

    assert worker("start", "before", "sleep", "60").returncode == 0
    assert "a command is running: sleep 60" in worker("start", "meanwhile", "true").stderr
    (ready.fake / "w-0" / "specsamp_job" / "boot").write_text("the one before\n")
    assert worker("finish", "before").stdout == "w-0 ended with 75\n"
    assert worker("start", "after", "true").returncode == 0
    assert worker("finish", "after").stdout == "w-0 ended with 0\n"
    assert worker("follow", "before").returncode == 75


def test_one_command_at_a_time_and_it_can_be_seen_and_stopped(ready):
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
        done = ready.run(script, "--name=pod", *arguments)
        assert done.returncode == 1 and "a command is running: bash -c echo\\ here\\ I\\ am" in done.stderr
    attached = start_run("--attach", stdout=subprocess.PIPE, text=True)
    assert attached.stdout.readline() == "here I am\n"
    assert ready.run("run", "--name=pod", "--stop").returncode == 0
    attached.communicate(timeout=600)
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
    assert done.returncode == status and f"status {status} on a slice that still exists." in done.stderr
    assert len(cloud.calls("create")) == 1 and not cloud.calls("delete")
    assert "costs money until launch/tpu/delete.sh --name=pod" in done.stderr


def test_a_slice_that_somebody_deleted_is_not_ordered_again(cloud):
    cloud.states("MISSING", "ACTIVE")
    done = keep(cloud, "bash", "-c", 'echo MISSING >"$FAKE/states"; exit 1')
    assert done.returncode == 1 and "somebody deleted pod, so it is not ordered again" in done.stderr
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
    failing = FAKE_GCLOUD.replace("MISSING WAITING_FOR_RESOURCES ACTIVE", "MISSING FAILED")
    (cloud.fake / "bin" / "gcloud").write_text(failing)
    done = keep(cloud, "true")
    assert done.returncode == 75 and "the slice was lost 3 times before it was ready" in done.stderr
    assert len(cloud.calls("create")) == 3


def test_delete_looks_for_a_node_without_a_request(cloud):
    cloud.states("MISSING")
    (cloud.fake / "node").touch()
    done = cloud.run("delete", "--name=pod")
    assert done.returncode == 0 and "pod is deleted from us-central2-b" in done.stderr
    assert not cloud.calls("queued-resources", "delete") and len(cloud.calls("tpu-vm", "delete")) == 1


def test_what_is_run_is_what_the_dry_run_showed(cloud):
    shown = cloud.dry_run("setup", "--name=pod")[0]
    cloud.states("ACTIVE")
    assert cloud.run("setup", "--name=pod").returncode == 0
    assert cloud.calls() == [command for command in shown if command[0] == "gcloud"]
