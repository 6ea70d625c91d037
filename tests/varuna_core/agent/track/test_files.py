"""Event files and gauges, read by TensorBoard and by Prometheus' own parsers."""

import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from tests.small_disk import filled
from tests.varuna_core.agent.track.readers import read_prometheus, read_tensorboard
from varuna_core.agent.track.openmetrics import Gauge, build_gauge, render_gauges, write_gauges
from varuna_core.agent.track.tensorboard import EventFile, render_scalars, render_text


def test_tensorboard_reads_scalars_and_texts(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    file = EventFile(tmp_path / "events.out.tfevents.1.here", 100.0)
    file.write(
        [
            render_scalars(101.0, 1, {"loss": 2.5, "learning_rate": 1e-4}),
            render_scalars(102.0, 1 << 40, {"loss": float("nan"), "huge": 1e300}),
            render_text(103.0, 7, "events", "restarted: größer"),
        ]
    )
    file.close()
    found = EventAccumulator(str(tmp_path)).Reload()
    first, second = found.Scalars("loss")
    assert (first.wall_time, first.step, first.value) == (101.0, 1, 2.5)
    assert second.step == 1 << 40 and math.isnan(second.value)
    assert found.Scalars("huge")[0].value == math.inf
    assert found.Scalars("learning_rate")[0].value == pytest.approx(1e-4)
    (text,) = found.Tensors("events")
    assert text.tensor_proto.string_val[0].decode() == "restarted: größer"
    assert found.SummaryMetadata("events").plugin_data.plugin_name == "text"


def test_a_full_disk_leaves_whole_records(small_disk: Path) -> None:
    file = EventFile(small_disk / "events.out.tfevents.1.here", 100.0)
    file.write([render_scalars(101.0, 1, {"loss": 2.5})])
    with filled(small_disk), pytest.raises(OSError, match="No space"):
        file.write([render_scalars(102.0, step, {"loss": 1.0}) for step in range(5000)])
    file.write([render_scalars(103.0, 2, {"loss": 2.0})])
    file.close()
    assert read_tensorboard(small_disk) == {"loss": [(1, 2.5), (2, 2.0)]}


@given(
    st.dictionaries(
        st.tuples(st.text(max_size=8), st.sampled_from(["vjob_a", "vjob_b"])),
        st.floats(),
        max_size=6,
    )
)
def test_both_of_prometheus_parsers_read_back_any_label_and_value(
    wanted: dict[tuple[str, str], float],
) -> None:
    gauges = [Gauge(name, value, (("run", run),)) for (run, name), value in wanted.items()]
    text = render_gauges(gauges)
    found = {
        (sample.labels["run"], sample.name): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert repr(dict(sorted(found.items()))) == repr(dict(sorted(wanted.items())))
    assert text.endswith("# EOF\n")


def test_gauges_have_prometheus_units_and_labels() -> None:
    labels = {"run": "gpt"}
    values = {
        "gpu/n1/3/utilization_percent": 50.0,
        "gpu/n1/3/memory_used_mb": 2.0,
        "node/n1/cpu_percent": 25.0,
        "events/restarted": 2.0,
        "step_time_s": 0.5,
        "validation/lm loss": 3.0,
    }
    gauges = [build_gauge(name, value, labels) for name, value in values.items()]
    found = read_prometheus(render_gauges(gauges))
    gpu = (("gpu", "3"), ("node", "n1"), ("run", "gpt"))
    assert found["vjob_gpu_utilization_ratio"] == {gpu: 0.5}
    assert found["vjob_gpu_memory_used_bytes"] == {gpu: 2.0 * 1024 * 1024}
    assert found["vjob_node_cpu_ratio"] == {(("node", "n1"), ("run", "gpt")): 0.25}
    assert found["vjob_events"] == {(("kind", "restarted"), ("run", "gpt")): 2.0}
    assert found["vjob_step_seconds"] == {(("run", "gpt"),): 0.5}
    assert found["vjob_validation_lm_loss"] == {(("run", "gpt"),): 3.0}


def test_node_exporter_may_read_the_file_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_gauges(tmp_path / "gpt.prom", [Gauge("vjob_step", 1.0, (("run", "gpt"),))])
    finally:
        os.umask(before)
    assert (tmp_path / "gpt.prom").stat().st_mode & 0o777 == 0o644
    assert os.listdir(tmp_path) == ["gpt.prom"]
