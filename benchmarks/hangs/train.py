"""A training by gloo whose FAULT, `name:rank:step`, strikes in the first attempt."""

import os
import pdb
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

torch.set_num_threads(1)
FAULT, ODD, AT = (os.environ.get("FAULT", "") + "::").split(":")[:3]
KIND = os.environ.get("KIND", "ddp")
STEPS, PACE_S = int(os.environ["STEPS"]), 0.3
SPIN = "import time; t = time.time()\nwhile time.time() - t < 170: pass"
TRACE = """
import ctypes, os, sys, time
libc, pid = ctypes.CDLL(None, use_errno=True), int(sys.argv[1])
assert libc.ptrace(16, pid, None, None) == 0
os.waitpid(pid, 0x40000000)
time.sleep(100)
assert libc.ptrace(17, pid, None, None) == 0
"""
IS_FIRST = os.environ["VJOB_ATTEMPT"] == "0" or "AGAIN" in os.environ


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Bytes of this very interpreter's library, so that a loss depends on what was read."""

    text = Path(os.__file__).read_bytes()

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        begins = int(AT or 0) * 32 * int(os.environ["WORLD_SIZE"])
        if IS_FIRST and FAULT == "worker" and index == begins + int(ODD):
            time.sleep(10_000)
        at = index * 7 % (len(self.text) - 64)
        return torch.tensor(list(self.text[at : at + 64]), dtype=torch.float32) / 256


def strike(rank: int, module: torch.nn.Module, sample: torch.Tensor) -> None:
    """Do what is to happen in this step of the first attempt."""
    is_odd = rank == int(ODD)
    if FAULT == "sigstop" and is_odd:
        os.kill(os.getpid(), signal.SIGSTOP)
    if FAULT == "sigstop-all":
        os.kill(os.getpid(), signal.SIGSTOP)
    if FAULT == "mismatch":
        dist.barrier() if is_odd else dist.all_reduce(torch.ones(3))
    if FAULT == "broadcast":
        dist.broadcast(torch.ones(3), src=rank) if is_odd else dist.all_reduce(torch.ones(3))
    if FAULT == "barrier" and not is_odd:
        dist.barrier()
    if FAULT == "sleep" and is_odd:
        time.sleep(10_000)
    if FAULT == "pipe" and is_odd:
        os.read(os.pipe()[0], 1)
    if FAULT == "spin" and is_odd:
        while True:
            pass
    if FAULT == "group":
        group = dist.new_group(list(range(dist.get_world_size())))
        dist.all_reduce(torch.ones(1), group=group if is_odd else None)
    # Healthy ones.
    if FAULT == "continued" and is_odd:
        subprocess.Popen(["sh", "-c", f"sleep 15; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    if FAULT == "traced" and is_odd:
        subprocess.run([sys.executable, "-c", TRACE, str(os.getpid())], check=True)
    if FAULT == "prompt" and is_odd:
        ear, mouth = os.pipe()
        threading.Timer(170, os.write, (mouth, b"continue\n")).start()
        pdb.Pdb(stdin=os.fdopen(ear), stdout=sys.stdout).set_trace()
    if FAULT in ("evaluate", "evaluate-one") and (is_odd or FAULT == "evaluate"):
        until = time.monotonic() + 180
        while time.monotonic() < until:
            module(sample)
    if FAULT in ("pause", "pause-one") and (is_odd or FAULT == "pause"):
        time.sleep(80)
    if FAULT == "child" and is_odd:
        subprocess.run([sys.executable, "-c", SPIN], check=True)
    if FAULT == "write" and is_odd:
        with open("/dev/null", "wb") as sink:
            for _ in range(340):
                sink.write(b"x" * (1 << 20))
                time.sleep(0.5)


def main() -> None:
    is_odd = IS_FIRST and os.environ["RANK"] == ODD
    if FAULT == "join" and is_odd:
        time.sleep(10_000)
    dist.init_process_group("gloo")
    if FAULT == "load" and is_odd:
        os.read(os.pipe()[0], 1)
    rank = dist.get_rank()
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    path, begun = Path(os.environ["VJOB_RUN"]) / "saved.pt", 0
    if path.exists():
        saved = torch.load(path)
        module.load_state_dict(saved["model"])
        begun = saved["step"]
    model = torch.nn.parallel.DistributedDataParallel(module) if KIND == "ddp" else module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    num_workers = 1 if FAULT == "worker" else 0
    world = dist.get_world_size()
    batch = int(os.environ.get("BATCH", 32 * world))
    share = range(begun * batch + rank, 1 << 20, world)
    size = batch // world
    mine = list(share)[: size * STEPS]
    loader = torch.utils.data.DataLoader(Samples(), size, sampler=mine, num_workers=num_workers)
    samples = iter(loader)
    for step in range(begun + 1, STEPS + 1):
        sample = next(samples)
        if IS_FIRST and AT and step == int(AT) and FAULT != "worker":
            strike(rank, module, sample)
        optimizer.zero_grad()
        loss = (model(sample) - sample).pow(2).mean()
        loss.backward()
        if KIND == "loop":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        if rank == 0:
            print(f"step {step}/{STEPS} loss {loss.item():.9f}", flush=True)
        if step % 10 == 0 and rank == 0:
            torch.save({"model": module.state_dict(), "step": step}, f"{path}.part")
            os.replace(f"{path}.part", path)
        time.sleep(PACE_S)
    if rank == 0:  # the same samples however many ranks trained
        sample = torch.stack([Samples()[index] for index in range(256)])
        with torch.no_grad():
            print(f"end loss {(module(sample) - sample).pow(2).mean().item():.9f}", flush=True)
    dist.barrier()


main()
