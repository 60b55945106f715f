"""``mpitrain plan``: its numbers, its tables, its refusals; in this process."""

import json

import pytest

from mpitrain.cli.main import run
from mpitrain.cli.plan import main
from mpitrain.codecs.registry import CODECS
from mpitrain.train.layouts import COMPARED

MLP = """
[model]
kind = "mlp"
hidden = [8, 8]
[data]
stations = 3
samples = 60
test_samples = 6
window = 4
placement = "shuffled"
[train]
batch_size = 12
[optim]
kind = "sgd"
[exchange]
codec = "raw"
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(MLP)
    return path


def planned(config, ranks, *overrides, measure=False):
    """Run the command; return the records of units, of layouts by (dp, pp, tp), and of what is left out."""
    output = config.parent / "new" / "plan.json"
    assert main(config, ranks, list(overrides), measure=measure, output=output) == 0
    records = json.loads(output.read_text())
    layouts = {(r["dp"], r["pp"], r["tp"]): r for r in records if "cuts" in r}
    refused = {(r["dp"], r["pp"], r["tp"]): r["refused"] for r in records if "refused" in r}
    return [r for r in records if "unit" in r], layouts, refused


def test_bytes_by_hand(config):
    """20 inputs, two hidden layers of 8, 6 classes: 294 parameters in tensors so small that they are one bucket."""
    found, layouts, refused = planned(config, 2)
    assert [(unit["name"], unit["parameters"]) for unit in found] == [("hidden.0", 168), ("hidden.1", 72), ("head", 54)]
    assert list(layouts) == [(1, 2, 1), (1, 1, 2), (2, 1, 1)]
    assert refused == {}
    data, cut, split = layouts[2, 1, 1], layouts[1, 2, 1], layouts[1, 1, 2]
    # Each half to its owner and back.
    assert data["data_raw_bytes"] == data["total_bytes"] == 2 * (4 * 294 + 2 * 16)
    assert data["data_messages"] == 2 * 2
    assert cut["cuts"] == "1"
    # Eight micro-batches of 12 samples, 8 values each, there and back.
    assert cut["pipeline_raw_bytes"] == 2 * (8 * 16 + 12 * 8 * 4)
    assert cut["pipeline_messages"] == 2 * 8
    # One sum of 8 values a sample forward; nobody needs the gradient by the input. The head and a bias are whole, and
    # their gradients are made equal by another sum.
    assert split["tensor_raw_bytes"] == 2 * (4 * 12 * 8 + 2 * 16) + 2 * (4 * (54 + 8) + 2 * 16)
    assert (data["messages_in_a_row"], split["messages_in_a_row"]) == (2, 4)
    for layout in layouts.values():
        assert {
            f"{axis}_{codec}_bytes" for axis in ("data", "pipeline", "tensor") for codec in COMPARED
        } <= layout.keys()


def test_memory_by_hand(config):
    """Parameters, gradients and momentum; input, two activations and the gradient of the loss, without the batch."""
    _, layouts, _ = planned(config, 1)
    alone = layouts[1, 1, 1]
    assert alone["memory_parameters_bytes"] == alone["memory_gradients_bytes"] == 4 * 294
    assert alone["memory_optimizer_bytes"] == 4 * 294
    assert alone["memory_activations_bytes"] == 12 * 4 * (8 + 8 + 6)
    assert alone["memory_memories_bytes"] == 0
    parts = ("parameters", "gradients", "optimizer", "memories", "activations")
    assert alone["memory_bytes"] == sum(alone[f"memory_{part}_bytes"] for part in parts)
    assert alone["total_bytes"] == alone["messages_in_a_row"] == 0
    _, layouts, _ = planned(config, 1, "optim.kind=adamw", "exchange.codec=fp16", "exchange.memory=residual")
    assert layouts[1, 1, 1]["memory_optimizer_bytes"] == 2 * 4 * 294
    assert layouts[1, 1, 1]["memory_memories_bytes"] == 2 * 4 * 294


def test_what_is_set_counts_in_the_order(config):
    """Bytes as the configuration says decide which layout comes first."""
    _, layouts, _ = planned(config, 2, "exchange.codec=int8", "parallel.codec=fp16", "parallel.gradient_codec=raw")
    cut, data = layouts[1, 2, 1], layouts[2, 1, 1]
    assert cut["pipeline_bytes"] == (cut["pipeline_fp16_bytes"] + cut["pipeline_raw_bytes"]) // 2
    assert data["data_bytes"] == data["data_int8_bytes"] < data["data_raw_bytes"]
    totals = [layout["total_bytes"] for layout in layouts.values()]
    assert totals == sorted(totals)
    _, layouts, _ = planned(config, 2, "parallel.tensor_codec=int8")
    assert layouts[1, 1, 2]["tensor_bytes"] == layouts[1, 1, 2]["tensor_int8_bytes"]


def test_native_sums_carry_raw_only(config, capsys):
    _, layouts, _ = planned(config, 2, "exchange.collective=native")
    assert layouts[2, 1, 1]["data_raw_bytes"] == 2 * 4 * 294
    assert layouts[2, 1, 1]["data_fp16_bytes"] is None
    line = next(line for line in capsys.readouterr().out.splitlines() if " data " in line)
    assert line.split()[4:6] == ["0.002", "-"]


def test_sums_through_servers(config, capsys):
    """Rows that serve are no replicas that train; grids that leave none of these are left out."""
    _, layouts, refused = planned(config, 3, "exchange.collective=server")
    assert {place: layout["servers"] for place, layout in layouts.items()} == {(2, 1, 1): 1}
    assert layouts[2, 1, 1]["data_raw_bytes"] == 4 * (4 * 294 + 16)
    assert layouts[2, 1, 1]["data_messages"] == 4
    assert layouts[2, 1, 1]["messages_in_a_row"] == 2
    assert set(refused) == {(0, 1, 3), (0, 3, 1)}
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if " data " in line)
    assert row.split()[:5] == ["2", "1", "1", "1", "data"]
    assert "left out: dp 0 pp 1 tp 3 servers 1: parallel: (dp + exchange.servers)*pp*tp = (dp + 1)*1*3" in out
    _, layouts, refused = planned(config, 4, "exchange.collective=server", "exchange.servers=2")
    assert list(layouts) == [(2, 1, 1)]
    # One bucket of 294 raw values, half to each server, who adds nothing but tells the other: 2 + 2 messages a half.
    assert layouts[2, 1, 1]["data_raw_bytes"] == 2 * 6 * (4 * 147 + 16)
    assert "but 4 ranks run" in refused[0, 1, 2]


def test_weights_on_servers(config, capsys):
    """A worker pushes its gradient and eight numbers, and gets the weights and ten; only servers have momentum."""
    served = ("exchange.when=server", "exchange.server_codec=raw")
    _, layouts, refused = planned(config, 3, *served)
    layout, vector = layouts[2, 1, 1], 16 + 4 * 294
    assert set(layouts) == {(2, 1, 1)}
    assert set(refused) == {(0, 1, 3), (0, 3, 1)}
    assert layout["data_bytes"] == layout["data_raw_bytes"] == 2 * (vector + 16 + 8 * 8) + 2 * (vector + 16 + 10 * 8)
    assert layout["data_messages"] == 2 * 2 + 2 * 2
    assert layout["messages_in_a_row"] == 2
    # The largest rank: a worker with its activations, or the server with its momentum.
    assert layout["memory_optimizer_bytes"] == 4 * 294
    assert layout["memory_activations_bytes"] == layout["memory_memories_bytes"] == 0
    assert "in a step (and what servers answer; after the last step of a round, the weights raw)" in (
        capsys.readouterr().out
    )
    # Changes of the weights follow on what each worker has: two halves for each, on both ends.
    delta = planned(config, 3, "exchange.when=server", "exchange.server_codec=fp16")[1][2, 1, 1]
    assert delta["memory_memories_bytes"] == 2 * 2 * 4 * 294
    assert delta["data_bytes"] == layout["data_bytes"] - 2 * (2 * 294 - 2)
    # One bucket has one server; the other gets numbers alone, and is told what to do: 4 + 2·2 and twice 4 numbers.
    several = planned(config, 4, *served, "exchange.servers=2")[1][2, 1, 1]
    orders = 16 + 8 * 8 + 2 * (16 + 4 * 8)
    assert several["data_bytes"] == layout["data_bytes"] + 2 * (16 + 8 * 8) + 2 * (16 + 10 * 8) + orders
    assert several["messages_in_a_row"] == 3
    every = planned(config, 4, *served, "exchange.servers=2", "exchange.mode=async")[1][2, 1, 1]
    assert every["data_bytes"] == several["data_bytes"] - orders + 2 * (16 + 6 * 8 + 16 + 4 * 8)


def test_local_steps_are_spread_over_the_round(config, capsys):
    """What replicas exchange after h steps, divided by h and rounded up; global weights are remembered."""
    every, local = (planned(config, 2, f"exchange.when={when}")[1] for when in ("sync", "local"))
    assert local[2, 1, 1]["data_bytes"] == -(-every[2, 1, 1]["data_bytes"] // 30)
    assert local[2, 1, 1]["data_messages"] == 1
    assert local[2, 1, 1]["messages_in_a_row"] == pytest.approx(2 / 30)
    assert local[1, 2, 1] == every[1, 2, 1] | {
        "memory_outer_bytes": 3 * every[1, 2, 1]["memory_parameters_bytes"],
        "memory_bytes": every[1, 2, 1]["memory_bytes"] + 3 * every[1, 2, 1]["memory_parameters_bytes"],
    }
    assert "send in a step (of what replicas exchange after 30 steps, the mean)," in capsys.readouterr().out
    _, layouts, refused = planned(config, 2, "exchange.when=local", "exchange.fragments=2")
    assert list(layouts) == [(1, 1, 2)]
    assert "exchange.fragments = 2, but what this rank holds" in refused[2, 1, 1]
    once = planned(config, 2, "exchange.when=local", "exchange.h=1")[1]
    assert once[2, 1, 1]["data_bytes"] == every[2, 1, 1]["data_bytes"]


def test_layouts_that_cannot_be_are_left_out_with_the_reason(config, capsys):
    _, layouts, refused = planned(config, 6)
    assert set(layouts) == {(6, 1, 1), (3, 2, 1), (3, 1, 2), (2, 3, 1), (1, 3, 2)}
    assert set(refused) == {(2, 1, 3), (1, 2, 3), (1, 1, 6), (1, 6, 1)}
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left out: ")]
    assert lines == [
        "left out: dp 2 pp 1 tp 3, dp 1 pp 2 tp 3: model.hidden[0] = 8 does not divide by parallel.tp = 3; "
        "set parallel.tp = 1, 2, 4 or 8",
        "left out: dp 1 pp 1 tp 6: model.hidden[0] = 8 does not divide by parallel.tp = 6; "
        "set parallel.tp = 1, 2, 4 or 8",
        "left out: dp 1 pp 6 tp 1: parallel: pp times chunks = 6 needs as many units or more, but the model has 3: "
        "0 hidden.0, 1 hidden.1, 2 head; set parallel.pp and chunks so that their product is 3 or less",
    ]
    _, _, refused = planned(config, 4, "data.placement=station")
    assert "but 4 ranks" in refused[4, 1, 1]
    _, _, refused = planned(config, 2, "parallel.sequence=true")
    assert "parallel.sequence" in refused[1, 1, 2]


def test_the_table_is_plain_text(config, capsys):
    planned(config, 4)
    out, err = capsys.readouterr()
    assert err == ""
    assert "\x1b" not in out
    lines = out.splitlines()
    assert lines[0] == "mlp of 294 parameters, 12 samples a step"
    assert next(line for line in lines if "hidden.0" in line).split()[:4] == ["0", "hidden.0", "168", "196"]
    assert "Layouts of 4 ranks, the fewest bytes first:" in lines
    row = next(index for index, line in enumerate(lines) if line.split()[:3] == ["2", "2", "1"])
    assert lines[row].split()[3:5] == ["1", "together"]
    shown = [lines[row + 1].split()[0], lines[row + 2].split()[0]]
    assert shown == ["data", "pipeline"]
    together, data, pipeline = (float(lines[row + i].split()[5 if i == 0 else 1]) for i in range(3))
    assert together == pytest.approx(data + pipeline, abs=0.0015)
    verdict = [line for line in lines if line.startswith("A model over ")]
    assert verdict == [
        "A model over 2 ranks sends 0.001 MB raw where it is cut between layers (pp), 0.002 MB where it is cut inside "
        "them (tp): 1.8 times as much."
    ]


def test_cuts_of_the_configuration(config, capsys):
    """They count for as many stages as they were made for."""
    _, layouts, _ = planned(config, 6, "parallel.pp=2", "parallel.cuts=[2]")
    assert layouts[3, 2, 1]["cuts"] == "2"
    assert layouts[2, 3, 1]["cuts"] == "1,2"
    capsys.readouterr()
    assert main(config, 2, ["parallel.pp=2", "parallel.cuts=[3]"], measure=False, output=None) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("mpitrain: parallel.cuts = [3]: 2 stages need 1 cut")


def test_measured_units(config, capsys):
    found, _, _ = planned(config, 2, measure=True)
    assert all(unit["work_s"] > 0 for unit in found)
    assert " ms " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "code", "words"),
    [
        (["parallel.tpp=2"], 2, "did you mean parallel.tp?"),
        (["data.kind=windows", "data.path=missing.npz"], 3, "missing.npz"),
    ],
)
def test_refusals(config, capsys, overrides, code, words):
    assert main(config, 2, overrides, measure=False, output=None) == code
    out, err = capsys.readouterr()
    assert out == ""
    said = [line for line in err.splitlines() if not line.startswith("mpitrain: warning: ")]
    assert len(said) == 1
    assert words in said[0]


def test_a_file_that_cannot_be_written(config, capsys):
    assert main(config, 1, [], measure=False, output=config.parent) == 2
    assert f"--json: cannot write {config.parent}" in capsys.readouterr().err


def test_under_a_launcher(config, capsys, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert main(config, 2, [], measure=False, output=None) == 5
    assert capsys.readouterr().err == "mpitrain: plan: start it without a launcher; it needs no ranks\n"


def test_from_the_command_line(config, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["mpitrain", "plan", str(config), "-n", "2", "--set", "model.dropout=0.5"])
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 0
    assert "Layouts of 2 ranks" in capsys.readouterr().out


def test_four_stages_keep_a_quarter_of_a_large_model(tmp_path):
    """Where weights and optimizer dominate, a stage of four keeps at most 0.35 of what one rank keeps."""
    path = tmp_path / "large.toml"
    path.write_text('[model]\nlayers = 8\nd_model = 256\n[train]\nbatch_size = 8\n[exchange]\ncodec = "raw"\n')
    one = planned(path, 1)[1][1, 1, 1]
    four = planned(path, 4)[1][1, 4, 1]
    assert one["memory_activations_bytes"] < 0.25 * one["memory_bytes"]
    assert four["memory_bytes"] < 0.35 * one["memory_bytes"]


def test_bytes_that_depend_on_values(config, monkeypatch, capsys):
    """Of a codec without fixed size the command says about how many."""
    monkeypatch.setattr(CODECS["fp16"], "fixed_size", False)
    _, layouts, _ = planned(config, 2)
    assert not layouts[2, 1, 1]["total_about"]
    _, layouts, _ = planned(config, 2, "exchange.codec=fp16")
    assert layouts[2, 1, 1]["total_about"]
    assert not layouts[1, 2, 1]["total_about"]
    told = capsys.readouterr().out
    half = layouts[2, 1, 1]["total_bytes"]
    assert half == 2 * (2 * 294 + 2 * 16)
    # In the heads of the columns: of all but raw, which also have tensors of fp16, and then also of what is set.
    found = [part.partition("─")[0].split().count("about") for part in told.split("Layouts of 2 ranks")[1:]]
    assert found == [len(COMPARED) - 1, len(COMPARED)]
