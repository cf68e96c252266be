"""Launch scripts pass shellcheck, open with their own command, and build the command they promise.

They run with stand-ins for what a cluster has: scontrol, srun, the launchers, the package itself.
"""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from sdpo_scale.options import read_options

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT / "tests/cases"
LAUNCHERS = ("torchrun.sh", "accelerate.sh", "deepspeed.sh", "slurm.sbatch")
SCRIPTS = [*sorted((ROOT / "launch").glob("*.sh")), ROOT / "launch/slurm.sbatch", ROOT / ".ci/run"]
CONFIGS = sorted((ROOT / "launch/configs").glob("*.yaml"))
FAKES = {
    # the package is shown its arguments; any other use of Python is real
    "python": f'if [[ $1 == -m ]]; then echo "PLAN ${{*:3}}"; else exec {sys.executable} "$@"; fi',
    "nvidia-smi": 'for gpu in 0 1 2 3 4 5 6 7; do echo "GPU $gpu: fake"; done',
}
SAVES_AT_SIGTERM = 'trap "echo saved; exit 1" TERM; echo started; for ((;;)); do sleep 0.05; done'
LISTS_NODES = 'if [[ $1 == show ]]; then echo n07; echo n08; else echo "REQUEUE $*"; fi'

Launch = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment with stand-ins in front and nothing that the machine's own jobs have set."""
    add_fakes(tmp_path, **FAKES)
    (tmp_path / "config.yaml").touch()
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin"
    return {"PATH": path, "HOME": str(tmp_path), "CONFIG": str(tmp_path / "config.yaml")}


def add_fakes(folder: Path, **scripts: str) -> None:
    (folder / "bin").mkdir(exist_ok=True)
    for name, text in scripts.items():
        path = folder / "bin" / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)


@pytest.fixture
def launch(environment: dict[str, str]) -> Launch:
    def run(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(ROOT / "launch" / script), environment["CONFIG"], *arguments],
            env={**environment, **variables},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


def option(line: str, name: str) -> str:
    words = shlex.split(line)
    return words[words.index(name) + 1]


def test_there_are_scripts():
    assert {"quickstart.sh", "test.sh", "run", *LAUNCHERS} <= {script.name for script in SCRIPTS}


@pytest.mark.parametrize(
    "script", [*SCRIPTS, ROOT / "launch/common.bash"], ids=lambda path: path.name
)
def test_script_passes_shellcheck(script: Path):
    shellcheck = Path(sys.executable).with_name("shellcheck")  # beside python: pip installs it
    result = subprocess.run([shellcheck, "-x", script], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_opens_with_its_command_and_stops_at_errors(script: Path):
    lines = script.read_text("utf-8").splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert re.search(rf"(s?bash|sbatch) .*{script.relative_to(ROOT)}", lines[1])
    assert "set -euo pipefail" in lines


@pytest.mark.parametrize("script", LAUNCHERS)
def test_dry_run_prints_the_command_and_the_plan_and_starts_nothing(
    script: str, launch: Launch, tmp_path: Path
):
    starts = dict.fromkeys(("torchrun", "accelerate", "deepspeed", "srun"), "echo STARTED")
    add_fakes(tmp_path, **starts)
    done = launch(script, "--dry-run", "--beta", "0.2", SLURM_NNODES="1")
    assert done.returncode == 0, done.stderr
    command, plan = [line for line in done.stdout.splitlines() if line.strip()][-2:]
    assert option(plan, "--world-size") == "8"
    assert "--beta 0.2" in plan
    assert "--dry-run" in plan
    assert "--beta 0.2" in command
    assert "--dry-run" not in command
    assert "STARTED" not in done.stdout


@pytest.mark.parametrize("script", LAUNCHERS[:3])
def test_world_size_is_checked_and_checkpoints_are_resumed_from(script: str, launch: Launch):
    command = launch(script, "--dry-run", NPROC_PER_NODE="4").stdout.splitlines()[-2]
    assert option(command, "--world-size") == "4"
    assert option(command, "--resume_from_checkpoint") == "auto"


@pytest.mark.parametrize("script", LAUNCHERS)
def test_a_config_that_is_missing_is_refused(script: str, launch: Launch):
    done = subprocess.run(
        ["bash", str(ROOT / "launch" / script), "nowhere.yaml", "--dry-run"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "config file 'nowhere.yaml' does not exist" in done.stderr


def test_without_nvidia_smi_processes_must_be_counted_by_the_user(launch: Launch, tmp_path: Path):
    (tmp_path / "bin/nvidia-smi").unlink()
    if shutil.which("nvidia-smi", path="/usr/bin:/bin"):
        pytest.skip("this machine has one")
    done = launch("torchrun.sh", "--dry-run")
    assert done.returncode == 2
    assert "set NPROC_PER_NODE" in done.stderr
    assert launch("torchrun.sh", "--dry-run", CUDA_VISIBLE_DEVICES="1,3").returncode == 0


def test_LCH_01_nodes_meet_at_the_first_node_of_the_job(launch: Launch, tmp_path: Path):
    case = json.loads((CASES / "LCH-01/expected.json").read_text())
    add_fakes(tmp_path, scontrol=LISTS_NODES, hostname="echo 127.0.1.1", srun="exit 1")
    done = launch("slurm.sbatch", "--dry-run", SLURM_GPUS_ON_NODE="8", **case["env"])
    assert done.returncode == 0, done.stderr
    command, plan = done.stdout.splitlines()
    port = 15000 + 123456 % 15000
    for setting in ("NNODES=2", "NPROC_PER_NODE=8", "MASTER_ADDR=n07", f"MASTER_PORT={port}"):
        assert f" {setting} " in command
    assert "10.0.0.9" not in command
    assert option(plan, "--world-size") == "16"


def test_LCH_01_on_each_node_torchrun_gets_that_endpoint(launch: Launch):
    variables = {"NNODES": "2", "MASTER_ADDR": "n07", "MASTER_PORT": "18456", "JOB_ID": "123456"}
    done = launch("torchrun.sh", "--dry-run", NODE_RANK="1", NODE_ADDR="n08", **variables)
    command = done.stdout.splitlines()[0]
    assert option(command, "--rdzv-endpoint") == "n07:18456"
    assert option(command, "--nnodes") == "2"
    assert option(command, "--rdzv-id") == "123456"
    assert "is_host=0" in option(command, "--rdzv-conf")
    assert option(command, "--local-addr") == "n08"
    assert option(command, "--world-size") == "16"


def test_LCH_01_without_scontrol_the_job_stops_with_a_sentence(launch: Launch):
    case = json.loads((CASES / "LCH-01/expected.json").read_text())
    done = launch("slurm.sbatch", **case["env"])
    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot resolve the first node of n[07-08]" in done.stderr


@pytest.mark.parametrize("address", ["", "localhost", "127.0.1.1", "::1"])
def test_LCH_01_loopback_is_no_meeting_address(address: str, launch: Launch):
    done = launch("torchrun.sh", NNODES="2", NODE_RANK="0", MASTER_ADDR=address)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"MASTER_ADDR is '{address}'" in done.stderr
    done = launch(
        "torchrun.sh", NNODES="2", NODE_RANK="1", MASTER_ADDR="n07", NODE_ADDR="localhost"
    )
    assert "NODE_ADDR is 'localhost'" in done.stderr


def test_outside_of_a_job_the_batch_script_is_refused(launch: Launch):
    done = launch("slurm.sbatch")
    assert done.returncode == 2
    assert "this is not a SLURM job" in done.stderr


def test_LCH_03_deepspeed_carries_variables_and_states_the_ranks(launch: Launch):
    variables = {
        "NCCL_SOCKET_IFNAME": "ib0",
        "HF_HOME": "/data/hf",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "SDPO_RUN": "a b",
        "HF_TOKEN": "secret",
    }
    done = launch(
        "deepspeed.sh",
        "--dry-run",
        HOSTFILE=str(CASES / "LCH-03/hostfile"),
        PDSH_SSH_ARGS_APPEND="-i key",
        LAUNCHER_ARGS="--ssh_port 2222",
        CARRY="XDG_DATA_HOME",
        XDG_DATA_HOME="/data/share",
        **variables,
    )
    assert done.returncode == 0, done.stderr
    *exports, ssh, command, plan = done.stdout.splitlines()
    assert exports == [
        "export HF_HOME=/data/hf",
        "export NCCL_SOCKET_IFNAME=ib0",
        "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        r"export SDPO_RUN=a\ b",
        "export XDG_DATA_HOME=...",
    ]
    assert ssh == r"PDSH_SSH_ARGS_APPEND=-i\ key\ -o\ BatchMode=yes"
    assert option(command, "--world-size") == option(plan, "--world-size") == "12"
    assert option(command, "--ssh_port") == "2222"
    names = "HF_HOME,NCCL_SOCKET_IFNAME,PYTORCH_CUDA_ALLOC_CONF,SDPO_RUN,XDG_DATA_HOME"
    assert option(command, "--expect-variables") == names
    assert option(command, "--deepspeed").endswith("ds_configs/zero3.json")


def test_LCH_03_the_launcher_is_handed_those_variables(launch: Launch, tmp_path: Path):
    add_fakes(tmp_path, deepspeed='cat "$DS_ENV_FILE"; echo "$DS_ENV_FILE" >&2')
    hostfile = str(CASES / "LCH-03/hostfile")
    done = launch("deepspeed.sh", HOSTFILE=hostfile, HF_HOME="/data/hf", NCCL_DEBUG="WARN")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-2:] == ["HF_HOME=/data/hf", "NCCL_DEBUG=WARN"]
    assert not Path(done.stderr.strip()).exists()


@pytest.mark.parametrize(
    ("hostfile", "variables", "message"),
    [
        ("node-a slots=8\nnode-b 4\n", {}, "'node-b 4' is not of the form"),
        ("# nobody\n", {}, "names no node"),
        ("node-a slots=8\n", {"CARRY": "NOWHERE"}, "CARRY names NOWHERE"),
        ("node-a slots=8\n", {"HF_HOME": "$HOME/hf"}, "HF_HOME cannot be carried"),
    ],
)
def test_deepspeed_refuses(
    hostfile: str, variables: dict[str, str], message: str, launch: Launch, tmp_path: Path
):
    (tmp_path / "hostfile").write_text(hostfile)
    done = launch("deepspeed.sh", "--dry-run", HOSTFILE=str(tmp_path / "hostfile"), **variables)
    assert done.returncode == 2
    assert message in done.stderr


def test_LCH_04_one_node_uses_a_free_port(launch: Launch):
    assert "--standalone" in launch("torchrun.sh", "--dry-run").stdout
    assert "--main_process_port 0" in launch("accelerate.sh", "--dry-run").stdout
    ports = {option(launch("deepspeed.sh", "--dry-run").stdout, "--master_port") for _ in range(2)}
    assert "29500" not in ports


@pytest.mark.parametrize("script", ["torchrun.sh", "accelerate.sh"])
def test_LCH_04_on_several_nodes_a_used_port_is_named_with_its_owner(script: str, launch: Launch):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        variables = {"NNODES": "2", "MASTER_ADDR": "n07", "MASTER_PORT": port}
        done = launch(script, NODE_RANK="0", **variables)
    assert done.returncode == 2
    assert f"port {port} of this node is in use by process {os.getpid()}" in done.stderr


def stopped(script: str, environment: dict[str, str]) -> tuple[int, list[str]]:
    """Exit code and lines of a script that gets SIGTERM once training has started."""
    with subprocess.Popen(
        ["bash", str(ROOT / "launch" / script), environment["CONFIG"]],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().strip() for _ in range(2)]
        while lines[-1] != "started":
            lines.append(process.stdout.readline().strip())
        time.sleep(0.1)  # the fake's trap precedes its line; the script's wait follows its start
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=30)
    return process.returncode, [*lines, *rest.splitlines()]


@pytest.mark.parametrize("script", LAUNCHERS[:3])
def test_SIGTERM_reaches_the_launcher_and_ends_with_143(
    script: str, environment: dict[str, str], tmp_path: Path
):
    names = ("torchrun", "accelerate", "deepspeed")
    add_fakes(tmp_path, **dict.fromkeys(names, SAVES_AT_SIGTERM))
    code, lines = stopped(script, environment)
    assert (code, lines[-1]) == (143, "saved")


def test_a_slurm_job_that_saved_goes_back_into_the_queue(
    environment: dict[str, str], tmp_path: Path
):
    on_a_node = (
        'while [[ $1 != env ]]; do shift; done; SLURM_NODEID=0 SLURMD_NODENAME=n07 "$@" & '
        'trap "kill -TERM $!" TERM; wait $!; wait $!'
    )
    add_fakes(tmp_path, scontrol=LISTS_NODES, srun=on_a_node, torchrun=SAVES_AT_SIGTERM)
    case = json.loads((CASES / "LCH-01/expected.json").read_text())
    code, lines = stopped("slurm.sbatch", {**environment, **case["env"]})
    assert code == 143
    assert "saved" in lines
    assert lines[-1] == "REQUEUE requeue 123456"
    assert any("--rdzv-endpoint n07:18456" in line and "is_host=1" in line for line in lines)


def test_exit_codes_of_launchers_are_kept(launch: Launch, tmp_path: Path):
    add_fakes(tmp_path, torchrun="exit 7", srun="exit 9", scontrol=LISTS_NODES)
    assert launch("torchrun.sh").returncode == 7
    case = json.loads((CASES / "LCH-01/expected.json").read_text())
    done = launch("slurm.sbatch", **case["env"])
    assert done.returncode == 9
    assert "REQUEUE" not in done.stdout


def test_the_kubernetes_manifest_is_consistent():
    job = yaml.safe_load((ROOT / "launch/kubernetes-pytorchjob.yaml").read_text())
    replicas = job["spec"]["pytorchReplicaSpecs"]
    (container,) = replicas["Master"]["template"]["spec"]["containers"]
    variables = {v["name"]: v["value"] for v in container["env"]}
    assert int(variables["NNODES"]) == sum(part["replicas"] for part in replicas.values())
    assert int(variables["NPROC_PER_NODE"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert variables["MASTER_ADDR"] == f"{job['metadata']['name']}-master-0"
    grace = replicas["Worker"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > int(variables["SAVE_SECONDS"])
    files = re.findall(r"launch/\S+", container["command"][-1])
    assert all((ROOT / name).is_file() for name in files)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_example_config_is_named_and_holds_known_options(path: Path):
    table = (ROOT / "launch/README.md").read_text("utf-8")
    assert f"configs/{path.name}" in table
    options = read_options(str(path))
    assert (ROOT / options["deepspeed"]).is_file()
