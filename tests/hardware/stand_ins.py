"""Stand-ins for the tools and drivers of GPUs: they answer as the real ones do, from files.

The forms of the texts are those of the real tools; the numbers are ours. A stand-in reads its files
at each call, so a scene changes while a run goes on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

H100 = "NVIDIA H100 80GB HBM3"
SMI = r"""#!/bin/sh
d="$(dirname "$0")/../smi"
[ -e "$d/hang" ] && exec sleep 600
case "$*" in *--id=*) end=/dev/null; own=1;; *) end="$d/end"; own=;; esac
code=$(cat "$d/code" 2>/dev/null || echo 0)
[ -n "$own" ] && code=0
if [ -e "$d/all" ] && [ -z "$own" ]; then cat "$d/all"; exit "$code"; fi
pick='
NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i
  split(ids, some, ","); for (i in some) chosen[some[i]] = 1
  n = split(want, w, ",")
  for (i = 1; i <= n; i++) if (!(w[i] in at)) {
    printf "Field \"%s\" is not a valid field to query.\n\n", w[i]; exit 2 }
  next }
ids == "" || ($1 in chosen) {
  line = ""; for (i = 1; i <= n; i++) line = line (i > 1 ? ", " : "") $(at[w[i]]); print line }
'
ids=; for word in "$@"; do case "$word" in
  --id=*) ids="${word#*=}";;
  --query-gpu=*) want="${word#*=}";;
esac; done
case "$*" in
  *--query-gpu=*) awk -F'|' -v want="$want" -v ids="$ids" "$pick" "$d/gpus" || exit 2;;
  *--query-compute-apps=*)
    [ -e "$d/apps" ] && while read uuid rank; do
      echo "$uuid, $(cat "$d/../../pid.$rank")"; done < "$d/apps"; end=/dev/null;;
  "-L") cat "$d/list";;
  "-q -x") sed -e "s/PID0/$(cat "$d/../../pid.2" 2>/dev/null)/" \
    -e "s/PID1/$(cat "$d/../../pid.3" 2>/dev/null)/" "$d/xml";;
  "nvlink -s") cat "$d/links";;
  "nvlink -e") cat "$d/link_errors";;
  *) exit 3;;
esac
cat "$end" 2>/dev/null
exit "$code"
"""
COLUMNS = {
    "index": "0",
    "name": H100,
    "temperature.gpu": "55",
    "utilization.gpu": "97",
    "memory.used": "70210",
    "memory.total": "81559",
    "power.draw": "612.20",
    "uuid": "",
    "ecc.errors.uncorrected.volatile.total": "0",
    "clocks_event_reasons.active": "0x0000000000000000",
    "clocks_throttle_reasons.active": "0x0000000000000000",
}
BUSES = (0x19, 0x3B, 0x4C, 0x5D, 0x9B, 0xBB, 0xCB, 0xDB)


def make_uuid(index: int) -> str:
    return f"GPU-{index:08x}-1d2c-4b3a-9e8f-0123456789ab"


def make_bus(index: int) -> str:
    return f"{BUSES[index % 8] + index // 8:02x}"


def make_smi(
    count: int = 2,
    changes: Mapping[int, Mapping[str, str]] | None = None,
    *,
    every: Mapping[str, str] | None = None,
    older: bool = False,
    states: Mapping[int, str] | None = None,
    links: Mapping[int, Sequence[str]] | None = None,
    link_errors: Mapping[int, int] | None = None,
    apps: Mapping[int, int] | None = None,
    gone: Sequence[int] = (),
    **files: str | None,
) -> dict[str, str | None]:
    """Files of an nvidia-smi that sees so many GPUs; `changes` are columns by GPU, `states` more
    elements of the XML, `apps` the rank on each GPU, `files` texts that replace its own."""
    rows = [
        {**COLUMNS, "index": str(index), "uuid": make_uuid(index), **(every or {}),
         **(changes or {}).get(index, {})}
        for index in range(count)
    ]  # fmt: skip
    names = [name for name in COLUMNS if not (older and name.startswith("clocks_event"))]
    table = [names, *([row[name] for name in names] for row in rows)]
    here = [row for row in rows if int(row["index"]) not in gone]
    heads = {
        int(row["index"]): f"GPU {row['index']}: {row['name']} (UUID: {row['uuid']})"
        for row in here
    }
    all_links = links if links is not None else {index: ["26.562 GB/s"] * 18 for index in heads}
    found: dict[str, str | None] = {
        "gpus": "\n".join("|".join(row) for row in table if int_or(row[0]) not in gone),
        "list": "\n".join(heads.values()),
        "xml": render_xml(here, states or {}),
        "links": "\n".join(
            "\n".join([head, *(
                f"\t Link {at}: {word}" for at, word in enumerate(all_links.get(index, ()))
            )])
            for index, head in heads.items()
        ),
        "link_errors": "\n".join(
            f"{head}\n\t Link 0: Replay Errors: {(link_errors or {}).get(index, 0)}\n"
            "\t Link 0: Recovery Errors: 0\n\t Link 0: CRC Errors: 0"
            for index, head in heads.items()
        ),
        "apps": "\n".join(
            f"{make_uuid(index)} {rank}" for index, rank in (apps or {}).items()
        ),
        **files,
    }  # fmt: skip
    return {f"smi/{name}": text for name, text in found.items()}


def int_or(word: str) -> int:
    return int(word) if word.isdecimal() else -1


def render_xml(rows: Sequence[Mapping[str, str]], states: Mapping[int, str]) -> str:
    """The elements that matter of `nvidia-smi -q -x`."""
    gpus = [
        f'  <gpu id="00000000:{make_bus(int(row["index"])).upper()}:00.0">\n'
        f"    <product_name>{row['name']}</product_name>\n    <uuid>{row['uuid']}</uuid>\n"
        + states.get(int(row["index"]), ROWS.format(pending="No", failure="No"))
        + "\n  </gpu>"
        for row in rows
    ]
    head = '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n'
    return f"{head}<nvidia_smi_log>\n" + "\n".join(gpus) + "\n</nvidia_smi_log>\n"


ROWS = """    <remapped_rows>
      <remapped_row_corr>0</remapped_row_corr>
      <remapped_row_unc>1</remapped_row_unc>
      <remapped_row_pending>{pending}</remapped_row_pending>
      <remapped_row_failure>{failure}</remapped_row_failure>
    </remapped_rows>"""


def make_slices(sizes: Sequence[tuple[int, int, int]], pids: Sequence[tuple[str, int]]) -> str:
    """XML of a GPU in slices: `sizes` are the GPU instance, MiB in use and in all, `pids` processes
    with their GPU instance."""
    parts = "".join(
        f"<mig_device><index>{at}</index><gpu_instance_id>{instance}</gpu_instance_id>"
        "<compute_instance_id>0</compute_instance_id><fb_memory_usage>"
        f"<total>{total} MiB</total><reserved>0 MiB</reserved><used>{used} MiB</used>"
        "</fb_memory_usage></mig_device>\n"
        for at, (instance, used, total) in enumerate(sizes)
    )
    running = "".join(
        f"<process_info><gpu_instance_id>{instance}</gpu_instance_id>"
        f"<compute_instance_id>0</compute_instance_id><pid>{pid}</pid></process_info>\n"
        for pid, instance in pids
    )
    return (
        "<mig_mode><current_mig>Enabled</current_mig><pending_mig>Enabled</pending_mig></mig_mode>"
        f"\n<mig_devices>\n{parts}</mig_devices>\n<processes>{running}</processes>"
    )


def list_slices(index: int, name: str, profiles: Sequence[tuple[str, str]]) -> str:
    """Lines of `nvidia-smi -L` for a GPU in slices."""
    lines = [f"GPU {index}: {name} (UUID: {make_uuid(index)})"]
    lines += [
        f"  MIG {profile}     Device  {at}: (UUID: {uuid})"
        for at, (profile, uuid) in enumerate(profiles)
    ]
    return "\n".join(lines)


PYNVML = '''
"""Answers as nvidia-ml-py does, from state.json beside it."""
import json, pathlib
from types import SimpleNamespace

class NVMLError(Exception):
    pass

_file = pathlib.Path(__file__).with_name("state.json")
_taken = 0

def _read():
    return json.loads(_file.read_text())

def _ask(device, name, default=None):
    gpu = _read()["gpus"][device]
    value = gpu.get(name, default)
    if gpu.get("lost"):
        raise NVMLError("GPU is lost")
    if value is None:
        raise NVMLError("Not Supported")
    return value

def nvmlInit():
    if said := _read().get("init"):
        raise NVMLError(said)

def nvmlDeviceGetCount():
    return len(_read()["gpus"])

def nvmlDeviceGetHandleByIndex(index):
    return index

nvmlDeviceGetIndex = nvmlDeviceGetHandleByIndex
def nvmlDeviceGetName(d): return _ask(d, "name")
def nvmlDeviceGetTemperature(d, sensor): return _ask(d, "temperature", 50)
def nvmlDeviceGetUtilizationRates(d): return SimpleNamespace(gpu=_ask(d, "load", 96))
def nvmlDeviceGetPowerUsage(d): return _ask(d, "power", 600000)
def nvmlDeviceGetUUID(d): return _ask(d, "uuid")
def nvmlDeviceGetTotalEccErrors(d, kind, counter): return _ask(d, "ecc", 0)
def nvmlDeviceGetCurrentClocksEventReasons(d): return _ask(d, "reasons", 0)
def nvmlDeviceGetComputeRunningProcesses(d): return []
def nvmlDeviceGetPciInfo(d): return SimpleNamespace(busId=_ask(d, "bus"))
def nvmlDeviceGetRemappedRows(d): return _ask(d, "rows", [0, 0, 0, 0])
def nvmlDeviceGetMigMode(d): return _ask(d, "mig")
def nvmlDeviceGetNvLinkState(d, link):
    links = _ask(d, "links", [])
    if link >= len(links):
        raise NVMLError("Invalid Argument")
    return links[link]

def nvmlDeviceGetNvLinkErrorCounter(d, link, counter):
    return _ask(d, "link_errors", 0)

def nvmlDeviceGetMemoryInfo(d):
    used, total = _ask(d, "memory", [60000, 81559])
    return SimpleNamespace(used=used * 2**20, total=total * 2**20)

def nvmlEventSetCreate(): return 1
def nvmlDeviceRegisterEvents(d, types, events): pass

def nvmlEventSetWait_v2(events, timeout):
    global _taken
    waiting = _read().get("xids", [])
    if _taken >= len(waiting):
        raise NVMLError("Timeout")
    _taken += 1
    device, code = waiting[_taken - 1]
    return SimpleNamespace(device=device, eventType=8, eventData=code)
'''


def make_nvml(
    count: int = 2, changes: Mapping[int, Any] | None = None, **more: Any
) -> dict[str, str | None]:
    """Files of a pynvml that sees so many GPUs."""
    gpus = [
        {
            "name": H100,
            "uuid": make_uuid(index),
            "bus": f"00000000:{make_bus(index).upper()}:00.0",
            "links": [1] * 18,
            **(changes or {}).get(index, {}),
        }
        for index in range(count)
    ]
    listed = "\n".join(f"GPU {index}: {H100} (UUID: {make_uuid(index)})" for index in range(count))
    state = json.dumps({"gpus": gpus, **more})
    return {"py/pynvml.py": PYNVML, "py/state.json": state, "smi/list": listed}


KFD, AMDGPU = "sys/class/kfd/kfd/topology/nodes", "sys/bus/pci/drivers/amdgpu"
GAUGES = {
    "gpu_busy_percent": "97",
    "mem_info_vram_total": str(192 * 2**30),
    "mem_info_vram_used": str(150 * 2**30),
    "product_name": "AMD Instinct MI300X OAM",
    "ras/umc_err_count": "ue: 0\nce: 3",
    "hwmon/hwmon5/temp2_label": "junction",
    "hwmon/hwmon5/temp2_input": "61000",
    "hwmon/hwmon5/power1_input": "612000000",
}


def make_amd(
    count: int = 2, changes: Mapping[int, Mapping[str, str | None]] | None = None, parts: int = 1
) -> dict[str, str | None]:
    """Files of the amdgpu driver; `parts` is the number of partitions of each GPU."""
    found: dict[str, str | None] = {f"{KFD}/0/gpu_id": "0", f"{KFD}/0/properties": "simd_count 0"}
    for index in range(count * parts):
        gpu, function = divmod(index, parts)
        bus = int(make_bus(gpu), 16)
        folder = f"{AMDGPU}/0000:{bus:02x}:00.0"
        found[f"{KFD}/{index + 1}/gpu_id"] = str(51000 + index)
        found[f"{KFD}/{index + 1}/properties"] = (
            f"gfx_target_version 90402\ndomain 0\nlocation_id {bus << 8 | function}"
        )
        found[f"{folder}/vendor"] = "0x1002"
        gauges = {**GAUGES, **(changes or {}).get(gpu, {})}
        found.update((f"{folder}/{name}", text) for name, text in gauges.items())
    return found


XPU_SMI = """#!/bin/sh
d="$(dirname "$0")/../xpu"
[ -e "$d/all" ] && { cat "$d/all"; exit 1; }
case "$1" in discovery) cat "$d/devices";; dump) cat "$d/metrics";; *) exit 2;; esac
"""
XPU_HEAD = (
    "Timestamp, DeviceId, GPU Utilization (%), GPU Power (W), GPU Core Temperature (Celsius "
    "Degree), GPU Memory Used (MiB), GPU Memory Errors Uncorrectable"
)


def make_xpu(
    count: int = 2, rows: Mapping[int, str] | None = None, **files: str
) -> dict[str, str | None]:
    """Files of an xpu-smi; a row that is empty is left out."""
    listed = ["Device ID,Device Name,Memory Physical Size"]
    listed += [
        f'{index},"Intel(R) Data Center GPU Max 1550","131072.00 MiB"' for index in range(count)
    ]
    lines = [XPU_HEAD]
    for index in range(count):
        row = (rows or {}).get(index, "88.20, 455.61, 51.00, 60211.00,    0")
        lines += [f"06:14:46.000,    {index}, {row}"] if row else []
    texts = {"devices": "\n".join(listed), "metrics": "\n".join(lines), **files}
    return {f"xpu/{name}": text for name, text in texts.items()}


IB = "sys/class/infiniband/mlx5_{at}"


def make_ports(
    count: int = 4, changes: Mapping[int, Mapping[str, str]] | None = None
) -> dict[str, str | None]:
    """Files of InfiniBand ports of one make."""
    found: dict[str, str | None] = {}
    for at in range(count):
        device = IB.format(at=at)
        found[f"{device}/hca_type"], found[f"{device}/board_id"] = "MT4129", "MT_0000000838"
        texts = {
            "state": "4: ACTIVE",
            "phys_state": "5: LinkUp",
            "rate": "400 Gb/sec (4X NDR)",
            "link_layer": "InfiniBand",
            "counters/symbol_error": "0",
            "counters/link_downed": "1",
            "counters/port_rcv_errors": "12",
            "hw_counters/local_ack_timeout_err": "4",
            "hw_counters/out_of_sequence": "900",
            **(changes or {}).get(at, {}),
        }
        found.update((f"{device}/ports/1/{name}", text) for name, text in texts.items())
    return found


def make_ethernet(**changes: str) -> dict[str, str | None]:
    """Files of an Ethernet device."""
    texts = {
        "operstate": "up",
        "speed": "25000",
        "carrier_changes": "2",
        "device/vendor": "0x15b3",
        "statistics/rx_errors": "5",
        "statistics/rx_crc_errors": "5",
        **changes,
    }
    return {f"sys/class/net/ens1/{name}": text for name, text in texts.items()}


def make_memory(**counts: str) -> dict[str, str | None]:
    """Files of a memory controller."""
    texts = {"ue_count": "0", "ce_count": "7", **counts}
    return {f"sys/devices/system/edac/mc/mc0/{name}": text for name, text in texts.items()}


def write_files(folder: Path, files: Mapping[str, str | None]) -> None:
    """Write files, each at once as a whole; None removes one."""
    for name, text in files.items():
        path = folder / name
        if text is None:
            path.unlink(missing_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.part")
        part.write_text(text if not text or text.endswith("\n") else f"{text}\n")
        os.replace(part, path)


def install(folder: Path, files: Mapping[str, str | None]) -> None:
    """Put the stand-ins whose files are among these on a node."""
    write_files(folder, files)
    (folder / "bin").mkdir(exist_ok=True)
    for kind, name, text in (("smi", "nvidia-smi", SMI), ("xpu", "xpu-smi", XPU_SMI)):
        if (folder / kind).exists():
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)
