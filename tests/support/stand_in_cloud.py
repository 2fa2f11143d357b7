"""Google Cloud as a script, which records its calls, reports a prepared series of states, and runs
commands of ssh in the folders of two workers.
"""

import os
import pathlib
import shlex
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "launch" / "tpu").glob("*.sh"))

AT = ["--project=my-project", "--zone=us-central2-b"]
TPUS = ["gcloud", "compute", "tpus"]
DESCRIBE = [*TPUS, "queued-resources", "describe", "pod", *AT, "--format=value(state.state)"]
SSH_FLAGS = ["--ssh-flag=-oServerAliveInterval=30", "--ssh-flag=-oConnectTimeout=30"]
# Words that a shell would spoil.
HARD = ["python", "a b.py", '--prompt=it\'s "$HOME" `date` \\ * &', "", "'"]

FAKE_GCLOUD = pathlib.Path(__file__).with_name("fake_gcloud.sh").read_text()


class Cloud:
    """A checkout with the scripts, and the programs that stand for Google Cloud."""

    def __init__(self, folder):
        self.folder = folder
        self.checkout = folder / "checkout"
        self.fake = folder / "fake"
        for path in (*SCRIPTS, *(ROOT / "specsamp/mesh").glob("slices.*")):
            copy = self.checkout / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
        # Stands for the installation of packages.
        (self.checkout / "launch" / "setup.sh").write_text(
            "find_python() { echo python3; }\nprepare_venv() { mkdir -p .venv/bin && "
            'ln -sf "$(type -P true)" .venv/bin/python; echo "$1" >>.venv/installed; }\n'
        )
        (self.checkout / ".gitignore").write_text("/runs/\n")
        self.git("init", "--quiet")
        self.git("add", ".")
        self.git("commit", "--quiet", "--message=first")
        for host in ("w-0", "w-1"):
            (self.fake / host).mkdir(parents=True)
        programs = self.fake / "bin"
        programs.mkdir()
        stand_ins = dict.fromkeys(("gcloud", "xpk", "ssh", "scp"), FAKE_GCLOUD)
        for name, content in (
            stand_ins | {"hostname": '#!/bin/sh\necho "t1v-n-0-$HOST"\n'}
        ).items():
            (programs / name).write_text(content)
            (programs / name).chmod(0o755)
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("CLOUDSDK_", "GIT_", "SPECSAMP_"))
        }
        self.environment = kept | {
            "FAKE": str(self.fake),
            "PATH": f"{programs}:{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONDONTWRITEBYTECODE": "1",  # a dry run may write no file
            "SPECSAMP_TPU_POLL_SECONDS": "0",
            "SPECSAMP_TPU_PATIENCE": "1",
            "SPECSAMP_TPU_GRACE": "1",
        }

    def git(self, *arguments):
        identity = ("-c", "user.name=me", "-c", "user.email=me@example.com")
        done = subprocess.run(
            ["git", *identity, *arguments],
            cwd=self.checkout,
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout.strip()

    def states(self, *states):
        (self.fake / "states").write_text("".join(f"{state}\n" for state in states))

    def run(self, script, *arguments, status=0, place=True, **environment):
        """Runs a script, and checks its exit status."""
        at = ("--project=my-project", "--zone=us-central2-b") if place else ()
        split = arguments.index("--") if "--" in arguments else len(arguments)
        done = subprocess.run(
            [
                "bash",
                self.checkout / "launch" / "tpu" / f"{script}.sh",
                *arguments[:split],
                *at,
                *arguments[split:],
            ],
            cwd=self.checkout,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == status, (done.returncode, done.stderr)
        return done

    def dry_run(self, script, *arguments):
        """Returns the printed commands, as words, and the remarks between them."""
        split = arguments.index("--") if "--" in arguments else len(arguments)
        done = self.run(script, *arguments[:split], "--dry_run", *arguments[split:])
        assert not (self.fake / "calls").exists() and not self.git(
            "status", "--porcelain", "--ignored"
        ), "not dry"
        lines = done.stdout.splitlines()
        return [shlex.split(line) for line in lines if not line.startswith("# ")], [
            line for line in lines if line.startswith("# ")
        ]

    def calls(self, *words):
        """Returns the calls of Google Cloud that have all of these words."""
        path = self.fake / "calls"
        calls = (
            [line.split("\x1f")[:-1] for line in path.read_text().splitlines()]
            if path.exists()
            else []
        )
        return [call for call in calls if set(words) <= set(call)]


def ssh(worker, command):
    return [
        *TPUS,
        "tpu-vm",
        "ssh",
        "pod",
        f"--worker={worker}",
        f"--command={command}",
        *SSH_FLAGS,
        *AT,
    ]
